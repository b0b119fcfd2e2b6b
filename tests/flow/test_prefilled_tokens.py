"""Prefilled tokens of runs grow with what is new: no turn, fork or role runs its history again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl
from tests.flow.test_agents import agent_file, python_agent

pytestmark = pytest.mark.slow

SHORT = (
    "--train.steps=1", "--train.prompts_per_step=2", "--train.schedule=Constant", "--train.warmup_steps=0",
    "--validation=null", "--save.every=0", "--log.rollouts.limit=null",
)  # fmt: skip

FORKS = '''
import asyncio

async def run(client, task):
    """Answer each of {turns} questions twice at once, and go on from the first answer."""
    messages = list(task.prompt.messages)
    for turn in range({turns}):
        answer, _ = await asyncio.gather(client.chat(messages), client.chat(messages))
        messages += [answer, {{"role": "user", "content": f"{{turn}} + 1 = ?"}}]
    return answer["content"]
'''


def prefilled(out: Path, *options: str) -> tuple[float, int, int]:
    """Run a step; return the tokens that were prefilled, what was new in all turns, and all their histories."""
    assert main(["fit", *SHORT, *options, f"--out={out}"]) == 0
    [metrics] = read_jsonl(out / "metrics.jsonl")
    assert metrics["rollout/failed"] == 0
    rollouts = read_jsonl(out / "rollouts" / "step-00001.jsonl.gz")
    counts = [tokens_of([row, *row.get("branches", ())]) for row in rollouts]
    return metrics["engine/prefilled_tokens"], sum(new for new, _ in counts), sum(past for _, past in counts)


def tokens_of(samples: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many tokens of a rollout are new to the engine, and how many its turns' histories have.

    A history is new but for its sampled tokens, of which the last of a turn was not run when it was sampled. What
    samples have in common is counted once.
    """
    prefixes, sampled, turns, histories = set(), 0, 0, 0
    for sample in samples:
        tokens, mask = sample["tokens"], sample["mask"]
        prefixes |= {tuple(tokens[: i + 1]) for i in range(len(tokens))}
        sampled += sum(mask)
        starts = [i for i, (before, now) in enumerate(zip([0, *mask], mask, strict=False)) if now > before]
        turns += len(starts)
        histories += sum(starts)
    return len(prefixes) - sampled + turns, histories


@pytest.mark.parametrize("turns", [2, 8])
def test_forks_of_an_agent_prefill_only_what_is_new(tmp_path: Path, turns: int) -> None:
    agent = python_agent(agent_file(tmp_path, FORKS.format(turns=turns)))
    count, new, histories = prefilled(tmp_path / "run", "--recipe=quickstart", agent, "--rollout.group_size=2")
    assert count <= new
    assert histories > turns * new / 2  # what would be run without kept keys and values


def test_turns_with_tools_prefill_only_what_is_new(tmp_path: Path) -> None:
    count, new, histories = prefilled(tmp_path / "run", "--recipe=quick_tool", "--train.prompts_per_step=8")
    assert count <= new < histories


def test_games_prefill_each_prompt_once(tmp_path: Path) -> None:
    """Two players of one turn: their histories are their prompts."""
    count, _, prompts = prefilled(tmp_path / "run", "--recipe=quick_selfplay", "--train.prompts_per_step=8")
    assert count <= prompts
