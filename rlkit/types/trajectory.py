"""Finished conversations and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.types.media import Media
from rlkit.types.prompt import JsonObject, Message, Prompt
from rlkit.types.sampling import StopReason

if TYPE_CHECKING:
    from torch import Tensor


class Turn(NamedTuple):
    """A span `tokens[start:end]` of a trajectory, and its author.

    Args:
        role: `assistant` for the policy; `user` for the prompt, users and environments; `tool` for tools.
        start: Index of the first token.
        end: Index after the last token.
    """

    role: str
    start: int
    end: int


class Fork(NamedTuple):
    """Where a sample of an agent's rollout leaves an earlier one, which has the tokens before.

    Args:
        sample: Index of the earlier one in `Trajectory.samples`.
        tokens: Number of tokens that both have; its turns among them are trained on in earlier samples alone.
    """

    sample: int
    tokens: int


@dataclass
class AgentSpan:
    """A sample's part of an agent's session; that of another conversation is empty.

    Args:
        result: Of the rollout: its `folder`, exit `status` and `output`.
        branches: Further samples of the rollout, trained on with its advantage, or their role's.
        role: Name of the sample's role; empty without roles.
        speaker: Number of the role's conversation in the session, from 1; 0 without roles.
        fork: Where a branch leaves an earlier sample, which trains on their common turns; None if they share none.
        positions: For each turn under the mask, its index among all turns of the session, from 0.
    """

    result: JsonObject = field(default_factory=dict)
    branches: list[Trajectory] = field(default_factory=list)
    role: str = ""
    speaker: int = 0
    fork: Fork | None = None
    positions: list[int] = field(default_factory=list)


@dataclass
class Score:
    """The reward of a trajectory, or the reason why it failed.

    Args:
        reward: A finite number, credited to the last token that the policy chose; None without an `error` if the reward
            has no opinion: the sample is then left out of its group, and counted.
        components: Metrics by name, logged as means `reward/<name>` (`accuracy` under its own name) and read by
            estimators such as `GDPO`. They are not added to the reward.
        turn_rewards: Additional rewards, one for each turn of the policy, credited to the turn's last token.
        error: Why the reward failed. The prompt's group is then left out of the step, and counted.
        ungradable: Whether the reward is low because the text broke its grader; counted.
        answer: Final answer in the text, by which the samples of a prompt vote in `maj@k`: equal answers have one form.
            Empty if the text has none, None if the reward does not look for it.
        feedback: What is wrong with the text, such as an error, for `teacher.attempts`; None for nothing.
        token_rewards: Additional rewards, one for each token that the policy chose.
        fields: Values of fields that the reward declares, by name; those by token are of all tokens of the
            conversation, or of those that the policy chose. In a scored trajectory they are tensors.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    error: str | None = None
    ungradable: bool = False
    answer: str | None = None
    feedback: str | None = None
    token_rewards: list[float] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def abstains(self) -> bool:
        """Whether the reward has no opinion on the completion."""
        return self.reward is None and self.error is None


@dataclass
class Trajectory:
    """A finished conversation as one flat sequence of tokens with a mask.

    Lists over tokens have the same length t. Tokens are the engine's own: nothing is tokenised again.

    Args:
        prompt: The prompt.
        group: Number of the prompt in the step, shared by its samples.
        tokens: [t] Ids of the complete conversation.
        mask: [t] True if the policy chose the token; training reads these tokens only.
        logps: [t] The engine's log-prob of each chosen token, 0.0 elsewhere.
        versions: [t] Version of the weights that sampled each chosen token, -1 elsewhere.
        stop: Why the conversation ended.
        turns: Spans of the turns, in order and without gaps.
        text: The policy's last turn as text, without special tokens: what most rewards grade.
        messages: The complete conversation as chat messages; `prompt` and `text` by default.
        media: The pictures that placeholders among the tokens stand for; None without pictures.
        score: The reward's score; None before it is scored.
        error: Why the conversation failed; it is then neither scored nor trained on.
        turn_rewards: Rewards of tools, a user or an environment, one for each turn of the policy, added to the score.
        counts: Events for the metrics `conversation/*`, such as tool calls.
        metrics: Numbers of tools, a user or an environment, by the names of their metrics, such as `tool/NAME/METRIC`.
        credit: Tensors of the step for the run folder, such as `advantages` by token.
        span: The sample's part of an agent's session.
        candidates: [t] Ids from which each chosen token was sampled, empty elsewhere. No lists at all if sampling does
            not truncate.
        opened_thinking: What the prompt has begun the last turn's thinking with, such as `<think>`; empty if nothing.
        fields: Fields that were filled before the score, by name: [t,...] by token, [turns of the policy,...] by turn.
    """

    prompt: Prompt
    group: int
    tokens: list[int]
    mask: list[bool]
    logps: list[float]
    versions: list[int]
    stop: StopReason
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    media: Media | None = None
    score: Score | None = None
    error: str | None = None
    turn_rewards: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    credit: JsonObject = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    span: AgentSpan = field(default_factory=AgentSpan)
    candidates: list[Sequence[int]] = field(default_factory=list)
    opened_thinking: str = ""
    fields: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages:
            self.messages = [*self.prompt.messages, {"role": "assistant", "content": self.text}]

    @property
    def samples(self) -> list[Trajectory]:
        """The trajectory and its branches, in the trajectory's group."""
        for branch in self.span.branches:
            branch.group = self.group
        return [self, *self.span.branches]

    @property
    def agent(self) -> JsonObject:
        """The `folder`, exit `status` and `output` of an agent's rollout; empty elsewhere."""
        return self.span.result

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy chose."""
        return sum(self.mask)

    @property
    def reward(self) -> float | None:
        """The total reward: of the score and of all turns; None without a score."""
        score = self.score
        if score is None or score.reward is None:
            return None
        return score.reward + sum(score.turn_rewards or ()) + sum(self.turn_rewards) + sum(score.token_rewards or ())
