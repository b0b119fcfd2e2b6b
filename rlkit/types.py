"""The data that flows through a step: read this file first.

Legend: P prompts, G samples of a prompt, B = P*G trajectories on this rank, T tokens, V vocabulary.
Before `collate` everything is a ragged Python object; after it, a tensor `x[b,t]` speaks of `tokens[b,t]`, so that
`logps[b,t] = log p(tokens[b,t] | tokens[b,:t])` and nobody shifts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare

if TYPE_CHECKING:
    from torch import Tensor

Message = dict[str, Any]
"""A chat message: `role`, `content` (text or typed parts) and whatever else the chat template reads."""


class StopReason(StrEnum):
    """Why a completion or a conversation ended."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    TOOL_CALLS = "tool_calls"
    CONTEXT = "context"
    ERROR = "error"


@dataclass
class Prompt:
    """One row of a task: what the policy sees, and what the reward needs to judge the answer."""

    id: str
    messages: list[Message]
    answer: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: Divides the logits; 0 chooses the most likely token.
        max_tokens: The response budget of one turn, in tokens.
        top_p: Keep the smallest set of tokens with this probability mass (validation only).
        top_k: Keep the k most likely tokens; 0 keeps all (validation only).
        stop_ids: Token ids that end a turn, besides the model's own end tokens.
    """

    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 256
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    stop_ids: tuple[NonNegativeInt, ...] = ()

    def within(self, tokens: int) -> Sampling:
        """Give the same with another budget."""
        return replace(self, max_tokens=tokens)

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled, so that log-probs are not those of the full softmax."""
        return self.top_p < 1 or self.top_k > 0


class SampleKey(NamedTuple):
    """Names one sample of a run; all its random numbers derive from this and the token's position."""

    seed: int
    step: int
    prompt: str
    sample: int
    attempt: int = 0

    def hash(self) -> int:
        """Give a signed 64-bit hash of the key, the same on every machine."""
        text = "\x1f".join(map(str, self))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Request:
    """What an engine is asked for: token ids in, how to continue them, and whose sample it is.

    `session` is the same for all turns of a conversation; `deadline` is in seconds from the call.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    key: SampleKey
    session: str
    media: Any = None
    deadline: float | None = None


@dataclass
class Completion:
    """What an engine answers: the sampled token ids with their log-probs and the weights' version of each."""

    tokens: list[int]
    logps: list[float]
    versions: list[int]
    stop: StopReason


class Turn(NamedTuple):
    """A span `tokens[start:end]` of a trajectory and the role that wrote it."""

    role: str
    start: int
    end: int


@dataclass
class Score:
    """A reward, or the reason why there is none (`reward` is None and `error` says why)."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    error: str | None = None


@dataclass
class Trajectory:
    """A finished conversation as one flat run of tokens with a mask.

    `mask[t]` is True where the policy chose the token; `logps[t]` is the engine's log-prob there and 0.0 elsewhere;
    `versions[t]` is the version of the weights that sampled it (-1 elsewhere). `group` is shared by the samples of
    one prompt.
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
    media: Any = None
    score: Score | None = None
    error: str | None = None
    turn_rewards: list[float] = field(default_factory=list)
    """What tools, a user or an environment gave for each of the policy's turns, besides the score."""
    counts: dict[str, int] = field(default_factory=dict)
    """What happened on the way, for the metrics: tool calls, errors of tools …"""
    credit: dict[str, Any] = field(default_factory=dict)
    """What the estimator made of it, token by token: `advantages`, and what it read besides rewards."""

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


@dataclass
class Batch:
    """Trajectories as right-padded tensors. B may be 0 on a rank.

    `token_rewards` is the COMPLETE signal, the terminal reward included, which sits on the last token that the
    policy chose; `rewards` is its row sum before any KL.

    Raises:
        ValueError: A field has the wrong shape; the message names it.
    """

    tokens: Tensor  # [B,T] i64
    attention: Tensor  # [B,T] bool
    mask: Tensor  # [B,T] bool
    rollout_logps: Tensor  # [B,T] f32
    group: Tensor  # [B] i64
    versions: Tensor  # [B,T] i64
    token_rewards: Tensor  # [B,T] f32
    rewards: Tensor  # [B] f32
    parts: Tensor  # [B,K] f32
    part_names: tuple[str, ...] = ()
    trainer_logps: Tensor | None = None  # [B,T] f32, of the trainer before it learns from this batch
    old_logps: Tensor | None = None  # [B,T] f32, what ratios compare with
    ref_logps: Tensor | None = None  # [B,T] f32
    values: Tensor | None = None  # [B,T] f32
    advantages: Tensor | None = None  # [B,T] f32
    returns: Tensor | None = None  # [B,T] f32
    correction_weights: Tensor | None = None  # [B,T] f32
    accepted: Tensor | None = None  # [B,T] bool, False where a token is rejected
    sum_pi_squared: Tensor | None = None  # [B,T] f32
    selected: Tensor | None = None  # [B,T] bool
    greedy_rewards: Tensor | None = None  # [B] f32
    position_ids: Tensor | None = None  # [B,T] i64
    media: Any = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Compare every field's shape with `tokens`."""
        rows, width = self.tokens.shape
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(("group", "rewards", "greedy_rewards"), (rows,))
        expected["parts"] = (rows, len(self.part_names))
        for name, value in self.tensors().items():
            shape = expected.get(name, (rows, width))
            if tuple(value.shape) != shape:
                raise ValueError(f"Batch.{name} has shape {tuple(value.shape)}, expected {shape}")

    def tensors(self) -> dict[str, Tensor]:
        """Give the fields that are set and are tensors, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("part_names", "media")}
        return {name: value for name, value in values.items() if value is not None}

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def outcomes(self) -> Tensor:
        """Give each trajectory's whole reward [B], KL in the reward included."""
        return self.token_rewards.sum(-1)

    def rows(self, index: Tensor) -> Batch:
        """Give the chosen rows, cut to the longest of them."""
        width = int(self.attention[index].sum(-1).max()) if len(index) else 0
        chosen = {name: value[index] for name, value in self.tensors().items()}
        cut = {name: value[:, :width] for name, value in chosen.items() if value.dim() == 2 and name != "parts"}
        return Batch(**{**chosen, **cut}, part_names=self.part_names)

    def to(self, device: Any) -> Batch:
        """Give the same batch on another device."""
        moved = {name: value.to(device) for name, value in self.tensors().items()}
        return Batch(**moved, part_names=self.part_names, media=self.media)


class PolicyOutput(NamedTuple):
    """What the actor's forward gives and a loss reads; both are 0 outside the mask."""

    logps: Tensor  # [B,T] f32
    entropy: Tensor | None  # [B,T] f32
    sum_pi_squared: Tensor | None = None  # [B,T] f32, without a gradient


class LossOutput(NamedTuple):
    """A loss before aggregation, and figures to log (means over the mask)."""

    per_token: Tensor  # [B,T] f32
    metrics: dict[str, Tensor]
