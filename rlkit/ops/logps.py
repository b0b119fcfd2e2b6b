"""Log-probs and entropies of tokens from hidden states: logits [N,V] are kept only where they fit a bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlkit.types import Reads

CHUNK_BYTES = 256 * 1024**2
"""Float32 logits that are in memory at once."""

BLOCK_BYTES = 2 * 1024**2
"""Float32 logits that a CPU's cache holds: element-wise passes go over this many at a time."""

WEIGHT_ROWS = 16384
"""Rows of a weight whose gradient is converted to float32 at once."""


LEAST = torch.finfo(torch.float32).tiny
"""A smaller probability counts as this one: its logarithm is finite, without a gradient."""

LOGPS, USUAL, ALL = Reads(entropy=False), Reads(), Reads(squares=True, mean=True)


class TokenStatistics(NamedTuple):
    """Statistics of N tokens, each [N] f32; those that are not read are None. See `Reads`.

    Args:
        logps: Log-probs of the targets.
        entropy: Entropies.
        squares: Sums of squared probabilities.
        mean: Means of the log-probs of all tokens.
        ids: [N,K] i64, the most likely tokens, or others that were chosen.
        top: [N,K+1] f32, their log-probs, and that of all others together.
    """

    logps: Tensor
    entropy: Tensor | None = None
    squares: Tensor | None = None
    mean: Tensor | None = None
    ids: Tensor | None = None
    top: Tensor | None = None


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    reads: Reads = ALL,
    ids: Tensor | None = None,
    memory: int = CHUNK_BYTES,
) -> TokenStatistics:
    """Return log-probs and entropies of `softmax((hidden @ weight.T + bias) / temperature)`.

    Where the logits exceed `memory`, they are computed in chunks, and again in the backward pass. If neither weight nor
    bias needs a gradient, how log-probs of targets depend on `hidden` is computed in the forward pass instead.

    Args:
        hidden: [N,H]; the product runs in its type (or autocast's), the softmax in float32.
        weight: [V,H].
        bias: [V] or None.
        targets: [N] i64.
        temperature: Divides the logits.
        reads: What is computed besides log-probs.
        ids: [N,K] i64, tokens whose log-probs are `top`, in place of the most likely ones; different ones in a row.
        memory: Bytes of logits that are kept.

    Returns:
        All but the sums of squares and the ids are differentiable.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    found = _TokenLogps.apply(hidden, weight, bias, targets, temperature, reads, memory, ids)  # type: ignore[no-untyped-call]
    return TokenStatistics(*found)


class _Gradient(NamedTuple):
    """The gradient of what is minimised by the statistics of n tokens; None for those that it does not depend on."""

    logps: Tensor | None
    entropy: Tensor | None
    mean: Tensor | None
    top: Tensor | None

    def of(self, rows: slice) -> _Gradient:
        return _Gradient(*(None if g is None else g[rows] for g in self))


class _TokenLogps(torch.autograd.Function):
    """With p = softmax(z): d logp_t/dz_j = [j=t] - p_j, dH/dz_j = -p_j (log p_j + H), d mean/dz_j = 1/V - p_j.

    With r the probability of all tokens outside of S: d log r/dz_j = [j not in S] p_j / r - p_j.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        reads: Reads,
        memory: int,
        ids: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3]) and ids is None
        logps, log_total, *others = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(5))
        entropy, squares, mean = others
        slope = torch.empty_like(hidden) if frozen else None
        probs, parts = None, _slices(len(targets), weight.shape[0], memory)
        tops: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            probs = _logits(hidden[part], weight, bias, temperature)
            chosen = _chosen(probs, reads, None if ids is None else ids[part])
            picked = probs.gather(-1, chosen)
            statistics = _softmax_(probs, targets[part], reads)
            picked -= statistics[1][:, None]
            tops.append((chosen, torch.cat((picked, _others(probs, chosen).clamp(min=LEAST).log()), -1)))
            for column, x in zip((logps, log_total, entropy, squares, mean), statistics, strict=True):
                column[part] = x
            if slope is not None:
                slope[part] = weight[targets[part]] - probs.to(weight.dtype) @ weight
        kept = probs if len(parts) == 1 and not frozen else None
        chosen, top = (torch.cat(column) for column in zip(*tops, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy, slope, kept, chosen)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.memory = temperature, memory
        ctx.mark_non_differentiable(squares, chosen)
        read = (reads.entropy, reads.squares, reads.mean, chosen.shape[-1], chosen.shape[-1])
        return logps, *(x if wanted else None for x, wanted in zip((*others, chosen, top), read, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropy, slope, kept, chosen = ctx.saved_tensors
        logps, by_entropy, _, mean, _, top = (None if g is None else g / ctx.temperature for g in grads)
        by = _Gradient(logps, by_entropy, mean, top)
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(x, dtype=None if x is hidden else torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        if slope is not None and by.logps is not None:
            d_hidden += slope * by.logps[:, None].to(slope.dtype)
            by = by._replace(logps=None)
        memory = ctx.memory if kept is None else ctx.memory // 4
        nothing = all(g is None for g in by)
        for part in () if nothing else _slices(len(targets), weight.shape[0], memory):
            probs = (
                _probs(hidden[part], weight, bias, ctx.temperature, log_total[part])
                if kept is None
                else kept[part].clone()
            )
            _differentiate_(probs, targets[part], entropy[part], chosen[part], by.of(part))
            d_logits = probs.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] += d_logits @ weight
            if d_weight is not None:
                _add_outer_(d_weight, d_logits, hidden[part])
            if d_bias is not None:
                d_bias += probs.sum(0)
        d_weight, d_bias = (None if d is None else d.to(x.dtype) for d, x in ((d_weight, weight), (d_bias, bias)))
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden, weight, bias).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, log_total: Tensor) -> Tensor:
    """Compute probabilities [n,V] again."""
    logits = _logits(hidden, weight, bias, temperature)
    for rows in _blocks(logits):
        logits[rows].sub_(log_total[rows, None]).exp_()
    return logits


def _softmax_(logits: Tensor, targets: Tensor, reads: Reads) -> list[Tensor]:
    """Turn logits [n,V] into probabilities, in place.

    Returns:
        Log-probs of the targets, log(sum(exp(logits))), entropies, sums of squares, and means of log-probs; each [n].
            In place of those that are not read there is another number.
    """
    found: list[list[Tensor]] = []
    for rows in _blocks(logits):
        block = logits[rows]
        highest = block.amax(-1, keepdim=True)
        block.sub_(highest)
        chosen = block.gather(-1, targets[rows, None])
        shifted = block.clone() if reads.entropy else None
        mean = block.mean(-1, keepdim=True) if reads.mean else 0.0
        total = block.exp_().sum(-1, keepdim=True)
        block.div_(total)
        log_total = total.log()
        statistics = [chosen - log_total, highest + log_total]
        statistics.append(log_total - shifted.mul_(block).sum(-1, keepdim=True) if shifted is not None else log_total)
        statistics.append(block.square().sum(-1, keepdim=True) if reads.squares else log_total)
        statistics.append(mean - log_total)
        found.append([x.squeeze(-1) for x in statistics])
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _chosen(logits: Tensor, reads: Reads, ids: Tensor | None) -> Tensor:
    """Return the ids [n,K] of tokens that are read: those that were given, or the most likely ones of logits [n,V]."""
    known = logits[:, : reads.columns]
    return known.topk(min(reads.top, known.shape[-1]), -1).indices if ids is None else ids


def _others(probs: Tensor, chosen: Tensor) -> Tensor:
    """Return the probability [n,1] of all other tokens than the chosen ones [n,K], added up and not taken off 1."""
    found = torch.ones(len(probs), 1, device=probs.device)
    for rows in _blocks(probs) if chosen.shape[-1] else ():
        block, ids = probs[rows], chosen[rows]
        kept = block.gather(-1, ids)
        found[rows] = block.scatter_(-1, ids, 0.0).sum(-1, keepdim=True)
        block.scatter_(-1, ids, kept)
    return found


def _differentiate_(probs: Tensor, targets: Tensor, entropy: Tensor, chosen: Tensor, by: _Gradient) -> None:
    """Turn probabilities [n,V] into the gradient of logits, in place, from that of the statistics.

    Args:
        probs: [n,V].
        targets: [n] i64.
        entropy: [n].
        chosen: [n,K] i64, the tokens of `by.top`.
        by: The gradient.
    """
    rest = _others(probs, chosen)
    for rows in _blocks(probs):
        block, ids, g = probs[rows], chosen[rows], by.of(rows)
        scale = torch.zeros_like(entropy[rows]) if g.logps is None else g.logps
        if g.mean is not None:
            scale = scale + g.mean
        of_entropy = None
        if g.entropy is not None:
            of_entropy = torch.special.entr(block).mul_(g.entropy[:, None])
            scale = scale + g.entropy * entropy[rows]
        if g.top is None:
            block.mul_(-scale[:, None])
        else:
            known = rest[rows] > LEAST  # else its logarithm is a constant
            by_rest, kept = g.top[:, -1:] * known, block.gather(-1, ids)
            scale = scale[:, None] + g.top[:, :-1].sum(-1, keepdim=True) + by_rest
            block.mul_(by_rest / rest[rows].clamp(min=LEAST) - scale)
            block.scatter_(-1, ids, torch.addcmul(g.top[:, :-1], kept, scale, value=-1))
        if of_entropy is not None:
            block.add_(of_entropy)
        if g.logps is not None:
            block.scatter_add_(-1, targets[rows, None], g.logps[:, None])
        if g.mean is not None:
            block.add_(g.mean[:, None], alpha=1 / block.shape[-1])


def _add_outer_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` to a float32 tensor [V,H], without a temporary of its size."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
        return
    for start in range(0, len(total), WEIGHT_ROWS):
        columns = slice(start, start + WEIGHT_ROWS)
        total[columns] += (left[:, columns].T @ right).float()


def _slices(rows: int, vocabulary: int, memory: int) -> list[slice]:
    size = max(1, memory // (4 * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def _blocks(logits: Tensor) -> list[slice]:
    rows, vocabulary = logits.shape
    return _slices(rows, vocabulary, BLOCK_BYTES if logits.device.type == "cpu" else logits.nbytes)


def logits_logps(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    reads: Reads = ALL,
    ids: Tensor | None = None,
) -> TokenStatistics:
    """Return the same as `token_logps` from materialised logits [N,V]."""
    all_logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen, top = _chosen(all_logps, reads, ids), None
    if chosen.shape[-1]:
        rest = all_logps.exp().scatter(-1, chosen, 0.0).sum(-1, keepdim=True).clamp(min=LEAST).log()
        top = torch.cat((all_logps.gather(-1, chosen), rest), -1)
    return TokenStatistics(
        all_logps.gather(-1, targets[:, None]).squeeze(-1),
        -(all_logps.exp() * all_logps).sum(-1) if reads.entropy else None,
        all_logps.detach().exp().square().sum(-1) if reads.squares else None,
        all_logps.mean(-1) if reads.mean else None,
        None if top is None else chosen,
        top,
    )
