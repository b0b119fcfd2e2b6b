"""A conversation as a state machine: pure, and the same for a question and an answer as for a game of many turns.

    PENDING -> RUNNING -> TOOL_CALLING | INTERACTING -> RUNNING -> ... -> COMPLETED | FAILED

What the policy samples and what it reads become one flat run of tokens with a mask; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rlkit.interfaces.fields import Filled
from rlkit.types import Completion, Media, MediaSegment, Message, Prompt, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor


class Phase(StrEnum):
    """Where a conversation is."""

    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.RUNNING, Phase.FAILED}),
    Phase.RUNNING: frozenset({Phase.TOOL_CALLING, Phase.INTERACTING, Phase.COMPLETED, Phase.FAILED}),
    Phase.TOOL_CALLING: frozenset({Phase.RUNNING, Phase.COMPLETED, Phase.FAILED}),
    Phase.INTERACTING: frozenset({Phase.RUNNING, Phase.COMPLETED, Phase.FAILED}),
    Phase.COMPLETED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""Where a conversation may go from each phase."""


@dataclass(frozen=True)
class Limits:
    """What ends a conversation: turns of each side, the policy's tokens in all, its tool calls, the model's context.

    `reply` ends none: it is the number of tokens above which a reply to the policy loses its middle.
    """

    turns: int = 1
    tokens: int | None = None
    tool_calls: int | None = None
    context: int = 1 << 30
    reply: int | None = None
    user_turns: int | None = None


@dataclass
class Conversation:
    """One sample of a prompt on its way.

    Raises:
        ValueError: A step was taken that the phase does not allow.
    """

    prompt: Prompt
    group: int
    limits: Limits = Limits()
    phase: Phase = Phase.PENDING
    stop: StopReason = StopReason.ERROR
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[Sequence[int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    media: list[MediaSegment] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    filled: list[Filled] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def begin(self, tokens: Sequence[int], media: MediaSegment | None = None) -> None:
        """Append the rendered prompt, with its pictures."""
        self._require(Phase.PENDING)
        self._go(Phase.RUNNING)
        self._observe("user", tokens, media)
        if len(tokens) >= self.limits.context:
            self.fail("the prompt leaves no room in the context for an answer")

    def budget(self, turn: int) -> int:
        """Return the number of tokens that the policy may sample now, at most `turn`."""
        limits = [turn, self.limits.context - len(self.tokens)]
        if self.limits.tokens is not None:
            limits.append(self.limits.tokens - sum(self.mask))
        return max(0, min(limits))

    def sampled(self, answer: Completion) -> None:
        """Append a turn of the policy; one that did not end by itself ends the conversation."""
        self._require(Phase.RUNNING)
        if self.turns[-1].role == "assistant":
            raise ValueError(
                "the conversation is running and the last turn is the policy's, expected another participant's"
            )
        if not answer.tokens and answer.stop is StopReason.CONTEXT and self.rewards:
            self.complete(StopReason.CONTEXT)
            return
        if not answer.tokens:
            self.fail("the engine returned no tokens")
            return
        start = len(self.tokens)
        self.tokens += answer.tokens
        self.mask += [True] * len(answer.tokens)
        self.logps += answer.logps
        self.versions += answer.versions
        if answer.candidates:
            self.candidates += [()] * (start - len(self.candidates))
            self.candidates += answer.candidates
        self.filled += [values.after(start) for values in answer.filled]
        self.turns.append(Turn("assistant", start, len(self.tokens)))
        self.rewards.append(0.0)
        if answer.stop is not StopReason.STOP:
            self.complete(answer.stop)

    def call_tools(self, calls: int) -> None:
        """Allow tool calls, unless there are more than the limit."""
        self._require(Phase.RUNNING)
        total = self.counts.get("tool_calls", 0) + calls
        if self.limits.tool_calls is not None and total > self.limits.tool_calls:
            self.complete(StopReason.TOOL_CALLS)
            return
        self._go(Phase.TOOL_CALLING)
        self.counts["tool_calls"] = total

    def interact(self) -> None:
        """Wait for the user or the environment."""
        self._go(Phase.INTERACTING)

    def reward(self, value: float) -> None:
        """Add to the reward of the policy's last turn."""
        if self.rewards:
            self.rewards[-1] += value

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Fill fields of the policy's last turn, or of the row."""
        if self.rewards:
            self.filled.append(Filled(values, len(self.tokens), len(self.rewards)))

    def observed(self, role: str, tokens: Sequence[int], media: MediaSegment | None = None) -> None:
        """Append what the policy reads next, unless turns, tokens or the context are used up."""
        self._require(Phase.TOOL_CALLING, Phase.INTERACTING)
        user_turns = sum(turn.role not in ("assistant", "tool") for turn in self.turns[1:])  # the prompt comes first
        if len(self.rewards) >= self.limits.turns or (role != "tool" and user_turns == self.limits.user_turns):
            self.complete(StopReason.TURNS)
            return
        if len(self.tokens) + len(tokens) >= self.limits.context:
            self.complete(StopReason.CONTEXT)
            return
        self._go(Phase.RUNNING)
        self._observe(role, tokens, media)
        if self.budget(1) == 0:
            self.complete(StopReason.LENGTH)

    def complete(self, stop: StopReason) -> None:
        """End well."""
        self._go(Phase.COMPLETED)
        self.stop = stop

    def fail(self, error: str) -> None:
        """End because of an error that is not the policy's; nothing is trained on it."""
        self._go(Phase.FAILED)
        self.stop, self.error = StopReason.ERROR, error

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return not LEGAL[self.phase]

    def count(self, what: str) -> None:
        """Count something for the metrics."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def trajectory(self, text: str, messages: Sequence[Message] = ()) -> Trajectory:
        """Return the trajectory; `text` is the policy's last turn, `messages` are all turns."""
        missing = [()] * (len(self.tokens) - len(self.candidates))
        return Trajectory(
            prompt=self.prompt,
            group=self.group,
            tokens=self.tokens,
            mask=self.mask,
            logps=self.logps,
            versions=self.versions,
            stop=self.stop,
            turns=self.turns,
            text=text,
            error=self.error,
            turn_rewards=self.rewards,
            counts=self.counts,
            metrics=self.metrics,
            messages=list(messages),
            media=Media.of(self.media),
            candidates=[*self.candidates, *missing] if any(self.candidates) else [],
        )

    def _require(self, *phases: Phase) -> None:
        if self.phase not in phases:
            raise ValueError(f"the conversation is {self.phase}, expected {' or '.join(phases)}")

    def _go(self, phase: Phase) -> None:
        if phase not in LEGAL[self.phase]:
            raise ValueError(f"a conversation that is {self.phase} cannot become {phase}")
        self.phase = phase

    def _observe(self, role: str, tokens: Sequence[int], media: MediaSegment | None) -> None:
        start, new = len(self.tokens), len(tokens)
        if media is not None:
            self.media.append(media.after(start))
        self.tokens += tokens
        self.mask += [False] * new
        self.logps += [0.0] * new
        self.versions += [-1] * new
        self.turns.append(Turn(role, start, start + new))
