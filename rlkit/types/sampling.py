"""What an engine is asked, and what it answers: requests, and completions that are one turn of the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from rlkit.base.errors import RecipeError
from rlkit.base.names import StopText
from rlkit.base.ranges import NonNegativeInt, PositiveInt, PositiveShare, Share, Temperature
from rlkit.types.media import Media
from rlkit.types.prompt import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.fields import Filled


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
