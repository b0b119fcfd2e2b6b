"""Which tokens continue a text that has a structure, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.base.errors import EngineError, RolloutError
from rlkit.interfaces.engine import grammar_of, one_line
from rlkit.types import Structure

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class StructureMatcher:
    """The state of one text: which tokens may follow those that were sampled.

    Args:
        matcher: llguidance's.
        vocabulary: The number of ids of the tokenizer.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.failure: RolloutError | None = None
        """Why the text cannot go on: it has other tokens, or needs more memory or time than llguidance grants."""
        self._matcher = matcher

    def allow(self, masks: Tensor, index: int) -> None:
        """Write the bits of the tokens that may follow into a row of masks [n,words] i32; of all after a failure."""
        from llguidance.torch import fill_next_token_bitmask

        if self.failure is None:
            fill_next_token_bitmask(self._matcher, masks, index)
            self._note_failure()
        if self.failure is not None:
            masks[index] = -1

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if self.failure is None and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))
            self._note_failure()

    def _note_failure(self) -> None:
        if self._matcher.is_error():
            problem = one_line(self._matcher.get_error())
            self.failure = RolloutError(f"rollout.sampling.structure cannot be followed: {problem}")


class StructureCompiler:
    """Makes matchers for the texts of a run's tokenizer, a fast one; each structure is compiled once.

    A text whose structure is complete ends with any of the run's stop ids, or the tokenizer's own if there are none.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._vocabulary: Any = None
        self._compiled: dict[str, Any] = {}

    def matcher(self, structure: Structure) -> StructureMatcher:
        """Return a matcher at the beginning of a text.

        Raises:
            EngineError: The structure is invalid, or the tokenizer is not supported.
        """
        key = json.dumps([structure.json_schema, structure.regex])
        if key not in self._compiled:
            self._compiled[key] = self._compile(structure)
        return StructureMatcher(self._compiled[key].deep_copy(), self._vocabulary.vocab_size)

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        tokenizer = self._runtime.tokenizer
        try:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(tokenizer, eos_token=sorted(self._runtime.stop_ids) or None)
            matcher = LLMatcher(self._vocabulary, grammar_of(structure))
        except (ValueError, RuntimeError) as error:
            name = type(tokenizer).__name__
            raise EngineError(f"rollout.sampling.structure cannot be followed with {name}: {error}") from error
        if matcher.is_error():
            raise EngineError(f"rollout.sampling.structure is invalid: {one_line(matcher.get_error())}")
        return matcher


def exclude(logits: Tensor, matchers: Mapping[int, StructureMatcher]) -> Tensor:
    """Return logits [N,V], minus infinity for the tokens that may not follow.

    Those include ids that the tokenizer lacks, by which the vocabularies of many models are padded.

    Args:
        logits: [N,V].
        matchers: By the rows of the logits that have one, all of one tokenizer.
    """
    vocabulary = next(iter(matchers.values())).vocabulary
    masks = torch.zeros(len(matchers), -(-vocabulary // 32), dtype=torch.int32)  # a bit for each id of the tokenizer
    for index, matcher in enumerate(matchers.values()):
        matcher.allow(masks, index)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.to(logits.device)[:, :, None] >> bits) & 1).flatten(1).bool()
    allowed = pad(allowed, (0, logits.shape[-1] - allowed.shape[1]))  # negative if the logits have fewer columns
    rows = torch.tensor(list(matchers), device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))
