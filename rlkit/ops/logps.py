"""Log-probs and entropies of tokens from hidden states, in chunks: the full [N,V] logits are never materialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_ELEMENTS = 64 * 1024 * 1024
"""Logits per chunk: 256 MiB of float32."""


def token_logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies of `softmax(hidden @ weight.T + bias) / temperature)`.

    The backward pass recomputes the logits, chunk by chunk.

    Args:
        hidden: [N,H]; the product runs in its type (or autocast's), the softmax in float32.
        weight: [V,H].
        bias: [V] or None.
        targets: [N] i64.
        temperature: Divides the logits.

    Returns:
        log-probs [N] f32 and entropies [N] f32, both differentiable, and sums of squared probabilities [N] f32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    result: tuple[Tensor, Tensor, Tensor] = _TokenLogps.apply(hidden, weight, bias, targets, temperature)  # type: ignore[no-untyped-call]
    return result


class _TokenLogps(torch.autograd.Function):
    """With p = softmax(z): d logp_t/dz_j = [j=t] - p_j and dH/dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        logps, entropy, squares = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for part in _chunks(len(targets), weight.shape[0]):
            all_logps = _log_softmax(hidden[part], weight, bias, temperature)
            logps[part] = all_logps.gather(-1, targets[part, None]).squeeze(-1)
            probs = all_logps.exp()
            entropy[part] = -(probs * all_logps).sum(-1)
            squares[part] = probs.square_().sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(squares)
        return logps, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        grad_logps, grad_entropy = grads[:2]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for part in _chunks(len(targets), weight.shape[0]):
            all_logps = _log_softmax(hidden[part], weight, bias, ctx.temperature)
            probs = all_logps.exp()
            d_logits = probs * (all_logps + entropy[part, None]) * -grad_entropy[part, None]
            d_logits -= probs * grad_logps[part, None]
            d_logits.scatter_add_(-1, targets[part, None], grad_logps[part, None])
            d_logits = (d_logits / ctx.temperature).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight += (d_logits.T @ hidden[part]).float()
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden, weight, bias).float()
    return torch.log_softmax(logits / temperature, dim=-1)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, min(1024, CHUNK_ELEMENTS // max(1, vocabulary)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def logits_logps(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `token_logps` from materialised logits [N,V]."""
    all_logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    probs = all_logps.exp()
    logps = all_logps.gather(-1, targets[:, None]).squeeze(-1)
    return logps, -(probs * all_logps).sum(-1), probs.detach().square().sum(-1)
