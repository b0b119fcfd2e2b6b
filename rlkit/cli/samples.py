"""Completions as lines of text, for people who watch a run."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.base.errors import shorten
from rlkit.base.text import counted
from rlkit.interfaces.content import described
from rlkit.types import Trajectory

PROMPT_CHARS, COMPLETION_CHARS, MOST_LINES = 200, 600, 8
"""Characters of a prompt's end and of a completion that are shown, and lines of each."""


def sample_text(trajectory: Trajectory) -> str:
    """Return the end of a prompt, the completion and its reward.

    Each line of a policy's text follows a bar, so that none looks like a message of rlkit's own.
    """
    last = trajectory.prompt.messages[-1] if trajectory.prompt.messages else {}
    asked = str(described(last.get("content")) or "")
    prompt = f"…{asked[-PROMPT_CHARS:]}" if len(asked) > PROMPT_CHARS else asked
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    tokens = counted(trajectory.response_length, "token")
    return "\n".join([
        *_labelled("prompt", prompt.splitlines()[-MOST_LINES:]),
        *_labelled("completion", _ends(shorten(trajectory.text, COMPLETION_CHARS).splitlines())),
        f"  {reward}, {tokens}, ended by {trajectory.stop.value}",
    ])  # fmt: skip


def _ends(lines: list[str]) -> list[str]:
    """Return lines without their middle, if there are many."""
    half = MOST_LINES // 2
    return lines if len(lines) <= MOST_LINES else [*lines[:half], "…", *lines[-half:]]


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"  {label if number == 0 else '':<10} | {line}" for number, line in enumerate(lines or [""])]


def differing_prompts(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return the first sample with a reward of each of the first prompts."""
    by_group: dict[int, Trajectory] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            by_group.setdefault(trajectory.group, trajectory)
    return list(by_group.values())[:count]
