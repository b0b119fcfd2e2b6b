"""Whether a decoder computes what a model does: its logits are compared with those of plain forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.models.attention import LAYERS, layer_types
from rlkit.models.packing import masked_attention
from rlkit_engine_torch.decoder import AnyDecoder, Decoder
from rlkit_engine_torch.prefixes import Prefix

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

MAX_GAPS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The largest accepted distance of a probe's logits from a plain forward's, in standard deviations, by dtype.

A wrong mask yields 0.24 or more in tiny random models of five architectures.
"""

NO_LIMIT = (0.0, inf)
"""The `time_step_limit` of a state-space layer that clamps nothing. Nemotron-H's is a gap too small for a probe."""


def why_not(model: CausalLM, make: Callable[[CausalLM], AnyDecoder] = Decoder) -> str | None:
    """Explain why a decoder does not support a model: unknown layers, or a probe differs from a plain forward pass.

    Differences are measured relative to the spread of the logits, since half-precision weights round at every layer.
    """
    unknown = set(layer_types(model.config.get_text_config())) - LAYERS
    if unknown:
        return f"it has layers of type {', '.join(sorted(unknown))}"
    return _problem(model, lambda: _step(make(model)))


def why_not_continued(model: CausalLM, decoder: AnyDecoder) -> str | None:
    """Explain why a decoder, which supports a model, cannot run what comes after kept keys, values and states."""
    limits = [tuple(getattr(module, "time_step_limit", None) or NO_LIMIT) for module in model.modules()]
    if set(limits) != {NO_LIMIT}:
        return "its decode steps do not clamp time steps as its passes over several tokens do"
    problem = _problem(model, lambda: _continue(decoder))
    decoder.release()
    return problem


def _problem(model: CausalLM, decode: Callable[[], tuple[Tensor, list[list[int]]]]) -> str | None:
    """Explain how far a probe's logits are from plain ones, or why it failed; None if they are near enough."""
    try:
        with masked_attention(model):
            decoded, rows = decode()
            plain = _plain(model, rows)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"a probe failed with {type(error).__name__}: {error}"
    gap = float((decoded.float() - plain).square().mean().sqrt())
    spread = max(float(plain.std()), 1e-6)
    limit = MAX_GAPS.get(next(model.parameters()).dtype, 1e-3)
    if gap <= limit * spread:
        return None
    return f"a probe's logits are {gap / spread:.2g} of their spread away, expected at most {limit:g}"


def _step(decoder: AnyDecoder) -> tuple[Tensor, list[list[int]]]:
    """Return the logits [2,V] of the second decode step of two rows of different lengths, and the rows."""
    prompts, tokens = [[3, 5, 4, 6, 7], [5, 3]], torch.tensor([[4, 6], [7, 8]], device=decoder.device)
    decoder.admit(prompts, [1, 1])
    decoder.step(tokens[0])
    logits = decoder.step(tokens[1])
    return logits, [[*prompt, *column] for prompt, column in zip(prompts, tokens.T.tolist(), strict=True)]


def _continue(decoder: AnyDecoder) -> tuple[Tensor, list[list[int]]]:
    """Return the logits [2,V] of two prompts that continue rows of different lengths, and the prompts."""
    _, turns = _step(decoder)
    prefixes = [
        Prefix(len(turn), [decoder.keys_values(row, 0, len(turn))], decoder.states(row))
        for row, turn in enumerate(turns)
    ]
    rows = [[*turns[0], 4], [*turns[1], 6, 3, 7]]
    return decoder.admit(rows, [1, 1], (), (), prefixes), rows


@torch.inference_mode()
def _plain(model: CausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the last logits [R,V] f32 of plain forward passes over rows."""
    device = next(model.parameters()).device
    return torch.stack([model(input_ids=torch.tensor([row], device=device)).logits[0, -1] for row in rows]).float()
