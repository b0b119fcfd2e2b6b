"""Which tokens continue a text that has a structure, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.base.errors import EngineError, RecipeError, RolloutError
from rlkit.types import Structure

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class StructureMatcher:
    """The state of one text: which tokens may follow those that were sampled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allow(self, mask: Tensor) -> None:
        """Write the bits of the tokens that may follow into a row [words] i32.

        Raises:
            RolloutError: The structure needs more memory or time than llguidance grants a text.
        """
        from llguidance.torch import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, mask[None])
        self._check()

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text.

        Raises:
            RolloutError: They are not those of a text with this structure.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RolloutError(f"rollout.sampling.structure cannot be followed: {self._matcher.get_error()}")


class StructureCompiler:
    """Makes matchers for the texts of a run's tokenizer, a fast one; each structure is compiled once.

    A text whose structure is complete ends with any of the run's stop ids.
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
        return StructureMatcher(self._compiled[key].deep_copy())

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        tokenizer = self._runtime.tokenizer
        try:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(tokenizer, eos_token=sorted(self._runtime.stop_ids))
            matcher = LLMatcher(self._vocabulary, grammar_of(structure))
        except (ValueError, RuntimeError) as error:
            name = type(tokenizer).__name__
            raise EngineError(f"rollout.sampling.structure cannot be followed with {name}: {error}") from error
        if matcher.is_error():
            raise EngineError(f"rollout.sampling.structure is invalid: {_line(matcher.get_error())}")
        return matcher


def grammar_of(structure: Structure) -> str:
    """Return a structure as llguidance's grammar."""
    from llguidance import LLMatcher

    if structure.regex is not None:
        return str(LLMatcher.grammar_from_regex(structure.regex))
    form: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # that of `json.dumps`
    return str(LLMatcher.grammar_from_json_schema(json.dumps(structure.json_schema), defaults=form))


def check_structure(structure: Structure) -> None:
    """Check a structure without a tokenizer.

    Raises:
        RecipeError: llguidance is not installed, or cannot follow the structure.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RecipeError(
            "llguidance, which follows it, is not installed; pip install 'rlkit-fabric[structure]'"
        ) from error
    problem = LLMatcher.validate_grammar(grammar_of(structure))
    if problem:
        raise RecipeError(f"llguidance cannot follow it: {_line(problem)}")


def _line(text: str) -> str:
    return " ".join(text.split())


def empty_masks(rows: int, vocabulary: int) -> Tensor:
    """Return masks [rows,words] i32, a bit for each token, that allow none."""
    return torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32)


def exclude(logits: Tensor, masks: Tensor, rows: Tensor) -> Tensor:
    """Return logits [N,V], those of the excluded tokens minus infinity in some rows.

    Args:
        logits: [N,V].
        masks: [n,words] i32 with a bit for each token that may be sampled.
        rows: [n] i64: which rows of the logits they are for.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.to(logits.device)[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))
