"""The data that flows through a step, in its order: read this file first.

    Prompt -> Request -> Completion -> Trajectory -> Score -> RolloutBatch -> Batch -> TrainBatch -> LossOutput

A task makes prompts. The engine answers requests with completions: turns of the policy. A trajectory is a complete
conversation, scored by the reward. Batches hold the trajectories of a step as tensors (`rlkit.batch`).

Legend: P prompts, G samples of a prompt, B = P*G trajectories on this rank, T tokens, V vocabulary. Before `collate`,
data are ragged Python objects. After it, a tensor `x[b,t]` describes `tokens[b,t]`: nothing is shifted, and
`logps[b,t] = log p(tokens[b,t] | tokens[b,:t])`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.base.errors import RecipeError
from rlkit.base.names import StopText, source_name
from rlkit.base.ranges import NonNegativeInt, PositiveInt, PositiveShare, Share, Temperature
from rlkit.batch import Batch, LossOutput, PolicyOutput, Reads, RolloutBatch, TrainBatch
from rlkit.media import Media

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.fields import Filled

__all__ = [
    "AgentSpan", "Batch", "Completion", "Fork", "LossOutput", "Message", "PolicyOutput", "Prompt", "Reads",
    "RecordedAnswer", "Request", "RolloutBatch", "SampleKey", "Sampling", "Score", "StopReason", "Structure",
    "TrainBatch", "Trajectory", "Turn",
]  # fmt: skip

JsonObject = dict[str, Any]
"""A JSON object: values are None, booleans, numbers, texts, lists and objects."""
Tools = Sequence[str | JsonObject]
"""Tools of a conversation: names of the recipe's, or schemas `{"type": "function", "function": {"name": ...}}`."""
Row = Mapping[str, Any]
"""A row of a data set, by column."""
Message = JsonObject
"""A chat message: `role`, `content` and other keys that the chat template reads.

The content is a text, or a list of typed parts: `{"type": "text", "text": str}` and, for models that read pictures,
`{"type": "image", "image": rlkit.interfaces.picture.Picture}`.
"""


class StopReason(StrEnum):
    """Why a completion or a conversation ended; an INTERRUPTED completion continues with other weights."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    TOOL_CALLS = "tool_calls"
    CONTEXT = "context"
    ERROR = "error"
    INTERRUPTED = "interrupted"

    @property
    def truncated(self) -> bool:
        """Whether a limit cut off the text: that of a completion, or the model's context."""
        return self in (StopReason.LENGTH, StopReason.CONTEXT)


@dataclass
class RecordedAnswer:
    """A recorded completion of a prompt, on which `rollout.engine: Recorded` trains.

    Args:
        messages: The messages after the prompt. The first and the last are turns of the policy (`assistant`); turns of
            tools and users may be between them. A turn with the key `trained` that is False is context.
        reward: The reward; it ranks the recorded completions of a prompt.
        turn_rewards: Additional rewards, one for each turn of the policy; empty for none.
    """

    messages: list[Message]
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)


@dataclass
class Prompt:
    """A prompt: what the policy reads, and what the reward needs to grade completions.

    Args:
        id: Name in logs and error messages. Random numbers derive from it, so it must not change between runs.
        messages: Chat messages that the template renders, with at least `role` and `content`.
        answer: The reference answer, if there is one; the policy never sees it.
        meta: The other columns of the row: `data_source` for `Router`, `tools` for the arguments of tools, and what a
            reward, an interaction or an environment reads.
        tools: Names of the recipe's tools, or schemas that the template shows instead; None for all of the recipe's.
        source: Name in `validation.tasks`, by which validation shows metrics apart; None for `data_source`.
        recorded: Recorded completions, the best first. Without messages before them they are plain texts.
        normalised: What the task normalised in the row's messages and tools, for `rlkit data show`.
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    meta: Row = field(default_factory=dict)
    tools: list[str | JsonObject] | None = None
    source: str | None = None
    recorded: list[RecordedAnswer] = field(default_factory=list)
    normalised: list[str] = field(default_factory=list)

    @property
    def tool_names(self) -> list[str] | None:
        """The names of the tools; None for all of the recipe's."""
        tools = self.tools
        return None if tools is None else [t if isinstance(t, str) else t["function"]["name"] for t in tools]

    @property
    def source_name(self) -> str:
        """The `source`, or else the `data_source` of the meta data, as metrics name it; empty without either."""
        return source_name(str(self.source or self.meta.get("data_source") or ""))


@dataclass(frozen=True)
class Structure:
    """What each turn of the policy matches from its first to its last character: set one of the options.

    Args:
        json_schema: A JSON schema; the text is JSON as `json.dumps` writes it, on one line.
        regex: A regular expression, without look-around and references back.
    """

    json_schema: JsonObject | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.regex is None):
            given = f"json_schema={self.json_schema!r} and regex={self.regex!r}"
            raise RecipeError(f"a structure has {given}, expected one of them")


@dataclass(frozen=True)
class Sampling:
    """How the engine samples tokens.

    Args:
        temperature: Divides the logits; 0 chooses the most likely token.
        max_tokens: Most tokens of one turn.
        top_p: Keep the smallest set of tokens with this probability mass; in training it needs `top_k` too.
        top_k: Keep the k most likely tokens; 0 keeps all. At most 1024 in training.
        min_p: Keep tokens with at least this share of the highest probability; 0 keeps all. In training it needs
            `top_k` too.
        stop_ids: Token ids that end a turn, in addition to the model's own.
        stop: Texts that end a turn with the token that completes one of them, whatever tokens they are in. The text
            stays in the turn.
        structure: What a turn matches: other tokens are never sampled. In training it needs `top_k` too. A turn that
            `max_tokens` cut off is a beginning of such a text.
    """

    temperature: Temperature = 1.0
    max_tokens: PositiveInt = 256
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    stop_ids: tuple[NonNegativeInt, ...] = ()
    stop: tuple[StopText, ...] = ()
    structure: Structure | None = None

    def within(self, tokens: int) -> Sampling:
        """Return the same options with another limit of tokens."""
        return replace(self, max_tokens=tokens)

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.structure is not None

    def most_likely(self) -> Sampling:
        """Return the same options, but choose the most likely token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


class SampleKey(NamedTuple):
    """Identifies one sample of a run: its random numbers derive from this key and the token's index alone.

    Args:
        seed: Seed of the run.
        step: Number of the step, from 1; 0 in validation and before the first step.
        prompt: Number of the group and id of the prompt.
        sample: Index of the sample in its group, from 0.
        attempt: Number of prompts that the filter dropped from this index of the step before.
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
    """A request to an engine to continue token ids.

    Args:
        tokens: Ids of the complete conversation so far.
        sampling: How to sample; `max_tokens` is the limit of this turn.
        key: The key from which random numbers derive.
        session: The same for all turns of a conversation, so that an engine can reuse its cache or its server.
        media: The pictures that placeholders among the tokens stand for; None without pictures.
        deadline: Seconds from the call; None for no deadline.
        resumable: Whether the completion may be INTERRUPTED; the caller then requests the missing tokens.
        resumed: Number of the last tokens that come from interrupted requests for the same completion.
        continues: Whether requests for later turns may follow, for which an engine may keep keys and values.
        routes_from: The first token whose routes are not known yet, of an engine that returns routes; None for none.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    key: SampleKey
    session: str
    media: Media | None = None
    deadline: float | None = None
    resumable: bool = False
    resumed: int = 0
    continues: bool = False
    routes_from: int | None = None


@dataclass
class Completion:
    """A sampled turn of the policy: n tokens, 1 <= n <= `sampling.max_tokens`.

    Args:
        tokens: Sampled ids, including the stop id if there is one.
        logps: Log-prob of each token under softmax(logits / temperature), over its candidates where there are any.
        versions: Version of the weights that sampled each token: that of the last sync.
        stop: STOP if the last token is a stop id or completes a stop text, LENGTH at `max_tokens`, CONTEXT at the end
            of the context.
        candidates: For each token, the ids that `top_k`, `top_p` and `min_p` left to sample from, the token among them.
            Empty unless the request has `top_k`.
        fields: Values of all fields that the engine declares, by name: of the n tokens, or of these and of any number
            of the request's tokens right before them.
        filled: The checked values of `fields`, in the order in which they were filled, which replace them.
    """

    tokens: list[int]
    logps: list[float]
    versions: list[int]
    stop: StopReason
    candidates: list[Sequence[int]] = field(default_factory=list)
    fields: Mapping[str, object] = field(default_factory=dict)
    filled: list[Filled] = field(default_factory=list)

    def followed_by(self, other: Completion) -> Completion:
        """Return the tokens of both, which end as the other ends."""
        lists = (self.tokens + other.tokens, self.logps + other.logps, self.versions + other.versions)
        filled = self.filled + [values.after(len(self.tokens)) for values in other.filled]
        return Completion(*lists, other.stop, self.candidates + other.candidates, filled=filled)

    def first(self, count: int) -> Completion:
        """Return the first tokens, as if a stop text had ended them."""
        lists = (self.tokens[:count], self.logps[:count], self.versions[:count])
        filled = [values.until(count) for values in self.filled]
        return Completion(*lists, StopReason.STOP, self.candidates[:count], filled=filled)


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
