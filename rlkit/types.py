"""The data that flows through a step: read this file first.

Legend: P prompts, G samples of a prompt, B = P*G trajectories on this rank, T tokens, V vocabulary.
Before `collate` everything is a ragged Python object; after it, a tensor `x[b,t]` is about `tokens[b,t]`, so that
`logps[b,t] = log p(tokens[b,t] | tokens[b,:t])` and nothing is shifted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.batch import Batch, RolloutBatch, TrainBatch
from rlkit.names import source_name
from rlkit.ranges import NonNegativeInt, PositiveInt, PositiveShare, Share, Temperature

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Batch",
    "Completion",
    "LossOutput",
    "Message",
    "PolicyOutput",
    "Prompt",
    "Reads",
    "RecordedAnswer",
    "Request",
    "RolloutBatch",
    "SampleKey",
    "Sampling",
    "Score",
    "StopReason",
    "TrainBatch",
    "Trajectory",
    "Turn",
]

JsonObject = dict[str, Any]
"""A JSON object: values are None, booleans, numbers, texts, lists and objects."""
Row = Mapping[str, Any]
"""A row of a data set, by column."""
Message = JsonObject
"""A chat message: `role`, `content` (text or typed parts) and whatever else the chat template reads."""


class StopReason(StrEnum):
    """Why a completion or a conversation ended; INTERRUPTED is a completion that goes on with other weights."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    TOOL_CALLS = "tool_calls"
    CONTEXT = "context"
    ERROR = "error"
    INTERRUPTED = "interrupted"


@dataclass
class RecordedAnswer:
    """An answer to a prompt that the data set has: what `rollout.engine: Recorded` trains on.

    Args:
        messages: What follows the prompt: turns of the policy (`assistant`), the last one too, and between them those
            of tools and users.
        reward: How good it is, compared with the prompt's other answers.
        turn_rewards: Rewards besides, one for each turn of the policy; empty for none.
    """

    messages: list[Message]
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)


@dataclass
class Prompt:
    """One row of a task: what the policy sees, and what the reward needs to grade the answer.

    Args:
        id: Names the row in logs and error messages; random numbers derive from it, so it must not change between runs.
        messages: The chat messages that the template renders, with at least `role` and `content`.
        answer: The reference answer, where there is one; the policy never sees it.
        meta: Everything else of the row: `data_source` for `Router`, `tools` for the arguments of tools, and whatever
            a reward, an interaction or an environment reads.
        tools: The names of the tools that its conversations have, of those in the recipe; None for all.
        source: Where it is from, by which validation shows metrics apart: its name in `validation.tasks`; None for
            `data_source`.
        recorded: Answers that the data set has, the best first. Without messages before them they are plain texts.
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    meta: Row = field(default_factory=dict)
    tools: list[str] | None = None
    source: str | None = None
    recorded: list[RecordedAnswer] = field(default_factory=list)

    @property
    def source_name(self) -> str:
        """The `source`, or else the `data_source` of the meta data, as metrics name it; empty without either."""
        return source_name(str(self.source or self.meta.get("data_source") or ""))


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: Divides the logits; 0 chooses the most likely token.
        max_tokens: The response budget of one turn, in tokens.
        top_p: Keep the smallest set of tokens with this probability mass (validation only).
        top_k: Keep the k most likely tokens; 0 keeps all (validation only).
        min_p: Keep tokens at least this share of the most likely one's probability; 0 keeps all (validation only).
        stop_ids: Token ids that end a turn, besides the model's own end tokens.
    """

    temperature: Temperature = 1.0
    max_tokens: PositiveInt = 256
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    stop_ids: tuple[NonNegativeInt, ...] = ()

    def within(self, tokens: int) -> Sampling:
        """Return the same with another budget."""
        return replace(self, max_tokens=tokens)

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled, so that log-probs are not those of the full softmax."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class SampleKey(NamedTuple):
    """Names one sample of a run; all its random numbers derive from this and the token's position.

    Args:
        seed: The run's.
        step: The step, from 1; 0 in validation and before the first step.
        prompt: The group's number and the prompt's id.
        sample: The number of the sample in its group, from 0.
        attempt: How many prompts had this place in the step before and were dropped by the filter.
    """

    seed: int
    step: int
    prompt: str
    sample: int
    attempt: int = 0

    def hash(self) -> int:
        """Return a signed 64-bit hash of the key, the same on every machine."""
        text = "\x1f".join(map(str, self))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Request:
    """A request to an engine: token ids, how to continue them, and whose sample it is.

    Args:
        tokens: The whole conversation so far, as ids.
        sampling: How to continue; `max_tokens` is what this turn may have.
        key: What random numbers derive from.
        session: The same for all turns of a conversation, so that an engine may keep its cache or its server.
        media: Reserved for images; None.
        deadline: Seconds from the call; None for none.
        resumable: Whether the answer may be INTERRUPTED: the caller then requests what is missing.
        resumed: How many of the last tokens come from requests for the same answer that were interrupted.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    key: SampleKey
    session: str
    media: object = None
    deadline: float | None = None
    resumable: bool = False
    resumed: int = 0


@dataclass
class Completion:
    """What an engine answers: n sampled tokens, 1 <= n <= `sampling.max_tokens`.

    Args:
        tokens: The ids, the stop id included where there is one.
        logps: The log-prob of each, under softmax(logits / temperature).
        versions: The version of the weights that sampled each: that of the last sync.
        stop: STOP where the last token is a stop id, LENGTH where the budget ended it, CONTEXT where the context did.
    """

    tokens: list[int]
    logps: list[float]
    versions: list[int]
    stop: StopReason


class Turn(NamedTuple):
    """A span `tokens[start:end]` of a trajectory and who wrote it.

    Args:
        role: `assistant` for the policy; `user` for the prompt and for users and environments; `tool`.
        start: The first token's place.
        end: The place after the last token.
    """

    role: str
    start: int
    end: int


@dataclass
class Score:
    """A reward, or the reason why there is none.

    Args:
        reward: A finite number, which counts at the trajectory's last chosen token; None if the reward failed.
        components: Metrics by name, logged as means `reward/<name>` (`accuracy` under its own name) and read by
            estimators such as `GDPO`. They add nothing to the reward.
        turn_rewards: Rewards besides, one for each turn of the policy, each at the last token of its turn.
        error: Why the reward is None; the prompt's group is then left out of the step, and counted.
        ungradable: Whether the reward is low because the text broke its grader; counted.
        answer: The final answer that was found in the text, by which samples of a prompt vote in `maj@k`, equal ones in
            one form; empty where none was found, None if the reward looks for none.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    error: str | None = None
    ungradable: bool = False
    answer: str | None = None


@dataclass
class Trajectory:
    """A finished conversation as one flat run of tokens with a mask.

    All lists over tokens have one length t; nothing is ever tokenised again, so they are what the engine had.

    Args:
        prompt: The row that it began with.
        group: The number of its prompt in the step, shared by that prompt's samples.
        tokens: [t] The ids of the whole conversation.
        mask: [t] True where the policy chose the token; only there is anything learned.
        logps: [t] The engine's log-prob of each chosen token, 0.0 elsewhere.
        versions: [t] The version of the weights that sampled each chosen token, -1 elsewhere.
        stop: Why it ended.
        turns: Its spans, in order and without gaps.
        text: The policy's last turn as text, without special tokens: what most rewards grade.
        messages: The whole conversation as chat messages, the prompt's first; made of `prompt` and `text` if not given.
        media: Reserved for images; None.
        score: From the reward; None before it is scored.
        error: Why the conversation failed; it is then neither scored nor trained on.
        turn_rewards: Rewards of tools, a user or an environment besides the score, one for each of the policy's turns.
        counts: What happened on the way, for the metrics `conversation/*`: tool calls, errors of tools …
        credit: What the estimator made of it, for the run folder: `advantages` by token, and what it read besides.
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
    media: object = None
    score: Score | None = None
    error: str | None = None
    turn_rewards: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    credit: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.messages:
            self.messages = [*self.prompt.messages, {"role": "assistant", "content": self.text}]

    @property
    def response_length(self) -> int:
        """How many tokens the policy chose."""
        return sum(self.mask)

    @property
    def reward(self) -> float | None:
        """The whole reward: the score's, and that of each turn; None if the score failed."""
        if self.score is None or self.score.reward is None:
            return None
        return self.score.reward + sum(self.score.turn_rewards or ()) + sum(self.turn_rewards)


class Reads(NamedTuple):
    """Which statistics of each token's distribution are read besides its log-prob: others are not computed.

    Args:
        entropy: The entropy.
        squares: The sum of squared probabilities.
        mean: The mean of the log-probs of all tokens of the vocabulary.
        top: How many of the most likely tokens: their ids and log-probs.
        columns: These are among the first so many of the vocabulary; None for all.
    """

    entropy: bool = True
    squares: bool = False
    mean: bool = False
    top: int = 0
    columns: int | None = None


class PolicyOutput(NamedTuple):
    """What the actor's forward returns and a loss reads; all are 0 outside the mask.

    Args:
        logps: [B,T] f32, of the tokens under the current policy, with a gradient.
        entropy: [B,T] f32, of the distribution at each token.
        sum_pi_squared: [B,T] f32, the sum of its squared probabilities, without a gradient.
        scores: [B,T] f32, of a reward model (`model.head: score`), whose log-probs are 0: the score of the conversation
            up to and including the token, with a gradient.
        mean_logps: [B,T] f32, the mean of the log-probs of all tokens of the vocabulary, with a gradient.
        top_ids: [B,T,K] i64, chosen tokens: the most likely ones, or those that a teacher finds most likely.
        top_logps: [B,T,K+1] f32, their log-probs, and last that of all others together, with a gradient.
    """

    logps: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None
    scores: Tensor | None = None
    mean_logps: Tensor | None = None
    top_ids: Tensor | None = None
    top_logps: Tensor | None = None


class LossOutput(NamedTuple):
    """A policy loss before aggregation: the loop weighs tokens, adds entropy and KL terms, and divides once.

    Args:
        per_token: [B,T] f32, the loss of each token, finite also outside the mask, where it does not count.
        metrics: Tensors of one number each, without a gradient, usually means over the mask. The run logs
            `policy/<name>`: the mean over all micro-batches, optimizer steps and ranks of a step, in which each counts
            by its number of chosen tokens, or of rows for a `SequenceLoss`.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]
