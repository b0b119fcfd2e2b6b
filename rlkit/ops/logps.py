"""Log-probs and entropies of tokens from hidden states; logits [N,V] are kept only within a memory bound."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rlkit.ops.attention import autocasted
from rlkit.ops.autograd import Context
from rlkit.ops.fusion import StatisticGrads, softmax_grads_, softmax_statistics
from rlkit.ops.products import ROWS, float32_product, outpaces_mkl, product
from rlkit.types import Reads

CHUNK_BYTES, GPU_CHUNK_BYTES = 2**28, 2**30
"""Logits in memory at once that are not kept: on a CPU and small GPUs, and on large GPUs; each takes some kernels."""

KEPT_SHARE = 8
"""A GPU keeps logits for the backward pass, instead of computing them again, in a part of its memory: one of so many.
"""

MAX_ELEMENTS = 2**31 - 1
"""Logits of a kernel at most: it indexes them in 32 bits."""

BLOCK_BYTES = 2 * 1024**2
"""Float32 logits that fit a CPU's cache: the size of the blocks of element-wise passes."""

WEIGHT_ROWS = 16384
"""Rows of a weight whose gradient is converted to float32 at once on a CPU; all rows on a GPU."""

MIN_PROB = torch.finfo(torch.float32).tiny
"""Smaller probabilities are clamped to this: their logarithm is finite and has no gradient."""

LOGPS = Reads(entropy=False)
DEFAULT_READS = Reads()
ALL = Reads(squares=True, mean=True)


class OutputLayer(NamedTuple):
    """A model's last layer and the temperature: `softmax((hidden @ weight.T + bias) / temperature)`.

    Args:
        weight: [V,H].
        bias: [V] or None.
        temperature: Divides the logits.
        softcap: The bound of these scores, softcap * tanh(score / softcap); None for none.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None


class TokenStatistics(NamedTuple):
    """Statistics of N tokens, each [N] f32; None if not read. See `Reads`.

    Args:
        logps: Log-probs of the targets.
        entropy: Entropies.
        squares: Sums of squared probabilities.
        mean: Means of the log-probs over the vocabulary.
        ids: [N,K] i64, the most likely tokens, or the requested ones.
        top: [N,K+1] f32, their log-probs, then the log of the total probability of the remaining vocabulary.
    """

    logps: Tensor
    entropy: Tensor | None = None
    squares: Tensor | None = None
    mean: Tensor | None = None
    ids: Tensor | None = None
    top: Tensor | None = None


def chunk_bytes(gpu_bytes: int | None) -> int:
    """Return the bytes of logits in memory at once on a GPU of so much memory, unless kept; on a CPU for None."""
    return max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, (gpu_bytes or 0) // 64))


def kept_bytes(gpu_bytes: int | None) -> int:
    """Return the most bytes of logits that are kept for the backward pass on a GPU; on a CPU for None."""
    return max(CHUNK_BYTES, (gpu_bytes or 0) // KEPT_SHARE)


def token_logps(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    *,
    reads: Reads = ALL,
    ids: Tensor | None = None,
    memory: int | None = None,
) -> TokenStatistics:
    """Return log-probs and entropies of the distributions that a layer computes from hidden states.

    Logits that exceed `memory` and have no soft cap are computed in chunks, and recomputed in the backward pass; it
    overwrites those that are kept, and a second one recomputes them. If the layer needs no gradient, the gradient of
    the targets' log-probs by `hidden` is computed in the forward pass instead.

    Args:
        hidden: [N,H]; the product runs in its type (or autocast's), the softmax in float32.
        layer: The model's last layer.
        targets: [N] i64.
        reads: Statistics to compute besides log-probs.
        ids: [N,K] i64, distinct tokens whose log-probs are `top`; None for the most likely ones. See `Reads.split`.
        memory: Maximum bytes of logits in memory; None for `chunk_bytes` and `kept_bytes` of the device.

    Returns:
        The statistics; all but the sums of squares and the ids are differentiable.
    """
    weight, bias, temperature, softcap = layer
    gpu_bytes = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else None
    chunk, most_kept = (chunk_bytes(gpu_bytes), kept_bytes(gpu_bytes)) if memory is None else (memory, memory)
    hidden = autocasted(hidden)
    if softcap is not None:
        scores = linear(hidden, weight, bias).float() / (temperature * softcap)
        return logits_logps(scores.tanh() * softcap, targets, reads=reads, ids=ids)
    count = len(targets)
    if hidden.device.type == "cpu" and count > ROWS and (hidden.element_size() == 2 or outpaces_mkl()):
        padding = (0, -count % ROWS)
        hidden, targets = pad(hidden, (0, 0, *padding)), pad(targets, padding)
        ids = None if ids is None else pad(ids, (0, 0, *padding))
    limits = chunk, most_kept if torch.is_grad_enabled() else 0
    statistics = _TokenLogps.apply(hidden, weight, bias, targets, temperature, reads, limits, ids)  # type: ignore[no-untyped-call]
    return TokenStatistics._make(None if x is None else x[:count] for x in statistics)


class _LogpsContext(Context, Protocol):
    temperature: float
    chunks: list[slice]
    fused: bool
    buffers: list[Tensor]  # [n,V] of each chunk: probabilities, or logits if passes are fused; no hook moves them


class _TokenLogps(torch.autograd.Function):
    """With p = softmax(z): d logp_t/dz_j = [j=t] - p_j, dH/dz_j = -p_j (log p_j + H), d mean/dz_j = 1/V - p_j.

    With r the total probability of the tokens outside a set S: d log r/dz_j = [j not in S] p_j / r - p_j.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: _LogpsContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        reads: Reads,
        limits: tuple[int, int],
        ids: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3]) and ids is None
        ctx.temperature, ctx.fused, ctx.buffers = temperature, _fuses(hidden, reads, ids), []
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        columns = [hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(5)]
        logp_grad = torch.empty_like(hidden) if frozen else None  # [N,H], of the targets' log-probs by `hidden`
        chunk, most_kept = limits
        row_bytes = len(weight) * (hidden.element_size() if ctx.fused else 4)
        keeps = not frozen and len(targets) * row_bytes <= (most_kept if ctx.fused else chunk)
        ctx.chunks = _slices(len(targets), row_bytes, row_bytes * (MAX_ELEMENTS // len(weight)) if keeps else chunk)
        tops: list[tuple[Tensor, Tensor]] = []
        for part in ctx.chunks:
            logits = product(hidden[part], weight, bias)
            if ctx.fused:
                statistics, probs = softmax_statistics(logits, targets[part], temperature, reads, frozen)
                top = targets.new_empty(len(logits), 0), logits.new_empty(0)
            else:
                part_ids = None if ids is None else ids[part]
                statistics, logits, top = _statistics_(logits, targets[part], temperature, reads, part_ids)
                probs = logits
            tops.append(top)
            for column, statistic in zip(columns, statistics, strict=True):
                column[part] = statistic
            if logp_grad is not None and probs is not None:
                logp_grad[part] = weight[targets[part]] - product(probs.to(weight.dtype), weight.T)
            if keeps:
                ctx.buffers.append(logits)
            del logits, probs
        logps, lse, entropy, squares, mean = columns
        top_ids, top_logps = (torch.cat(column) for column in zip(*tops, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, logp_grad, top_ids)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares, top_ids)
        outputs = (logps, entropy, squares, mean, top_ids, top_logps)
        are_read = (True, reads.entropy, reads.squares, reads.mean, *2 * [top_ids.shape[-1] > 0])
        return tuple(x if is_read else None for x, is_read in zip(outputs, are_read, strict=True))

    @staticmethod
    def backward(ctx: _LogpsContext, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, logp_grad, top_ids = ctx.saved_tensors
        buffers, ctx.buffers = ctx.buffers, []
        logps, by_entropy, _, mean, _, top = (None if g is None else g / ctx.temperature for g in output_grads)
        grads = StatisticGrads(logps, by_entropy, mean, top)
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(x, dtype=None if x is hidden else torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        if logp_grad is not None and grads.logps is not None:
            d_hidden += logp_grad * grads.logps[:, None].to(logp_grad.dtype)
            grads = grads._replace(logps=None)
        for i, part in enumerate(ctx.chunks if any(g is not None for g in grads) else ()):
            logits, part_grads = buffers[i] if buffers else product(hidden[part], weight, bias), grads.select(part)
            if ctx.fused:
                softmax_grads_(logits, targets[part], ctx.temperature, (lse[part], entropy[part]), part_grads)
            else:
                logits = logits if buffers else _probs_(logits, ctx.temperature, lse[part])
                _logit_grads_(logits, targets[part], entropy[part], top_ids[part], part_grads)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
            d_logits = logits.to(hidden.dtype)
            del logits
            if d_hidden is not None:
                d_hidden[part].add_(product(d_logits, weight.T))
            if d_weight is not None:
                _add_outer_(d_weight, d_logits, hidden[part])
            del d_logits
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _fuses(hidden: Tensor, reads: Reads, ids: Tensor | None) -> bool:
    """Whether passes over logits are compiled: on a GPU, unless log-probs of several tokens are read."""
    return hidden.is_cuda and ids is None and reads.split is None and not reads.top


def _scaled_(logits: Tensor, temperature: float) -> Tensor:
    """Return logits in float32, divided by the temperature; logits in float32 are overwritten."""
    logits = logits.float()
    return logits if temperature == 1 else logits.div_(temperature)


def _probs_(logits: Tensor, temperature: float, lse: Tensor) -> Tensor:
    """Return probabilities [n,V] in float32; logits in float32 are overwritten."""
    logits = _scaled_(logits, temperature)
    for rows in _blocks(logits):
        logits[rows].sub_(lse[rows, None]).exp_()
    return logits


def _statistics_(
    logits: Tensor, targets: Tensor, temperature: float, reads: Reads, ids: Tensor | None
) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Compute the results of `_softmax_`, probabilities [n,V], and token ids [n,K] with their log-probs [n,K+1]."""
    probs = _scaled_(logits, temperature)
    top_ids = _top_ids(probs, reads, ids)
    top = probs.gather(-1, top_ids)
    statistics = _softmax_(probs, targets, reads)
    top -= statistics[1][:, None]
    tail_logps = _tail_probs(probs, top_ids).clamp(min=MIN_PROB).log()
    return statistics, probs, (top_ids, torch.cat((top, tail_logps), -1))


def _softmax_(logits: Tensor, targets: Tensor, reads: Reads) -> list[Tensor]:
    """Turn logits [n,V] into probabilities, in place.

    Returns:
        Log-probs of the targets, log-sum-exps of the logits, entropies, sums of squares, and means of log-probs; each
            [n]. Statistics that are not read hold arbitrary numbers.
    """
    blocks: list[list[Tensor]] = []
    parts = _blocks(logits)
    scratch = torch.empty_like(logits[parts[0]]) if reads.entropy or reads.squares else logits
    for rows in parts:
        block = logits[rows]
        buffer = scratch[: len(block)]  # one for all blocks: what they return would lie between their own
        highest = block.amax(-1, keepdim=True)
        block.sub_(highest)
        target_logits = block.gather(-1, targets[rows, None])
        shifted = buffer.copy_(block) if reads.entropy else None
        mean = block.mean(-1, keepdim=True) if reads.mean else 0.0
        total = block.exp_().sum(-1, keepdim=True)
        block.div_(total)
        log_total = total.log()
        statistics = [target_logits - log_total, highest + log_total]
        statistics.append(log_total - shifted.mul_(block).sum(-1, keepdim=True) if shifted is not None else log_total)
        statistics.append(torch.square(block, out=buffer).sum(-1, keepdim=True) if reads.squares else log_total)
        statistics.append(mean - log_total)
        blocks.append([x.squeeze(-1) for x in statistics])
    return [torch.cat(column) for column in zip(*blocks, strict=True)]


def _top_ids(logits: Tensor, reads: Reads, ids: Tensor | None) -> Tensor:
    """Return the ids [n,K] of the tokens to read: the requested ones, or the most likely ones of logits [n,V]."""
    if reads.split is not None:
        shared, others = reads.split
        first = _top_among(logits, shared, reads.top) if ids is None else ids
        return torch.cat((first, _top_among(logits, others, reads.top)), -1)
    if ids is not None:
        return ids
    candidates = logits[:, : reads.columns]
    return candidates.topk(min(reads.top, candidates.shape[-1]), -1).indices


def _top_among(logits: Tensor, columns: Tensor, count: int) -> Tensor:
    """Return the ids of the most likely tokens [n,K] of some columns [C] i64, the most likely first."""
    return columns[logits[:, columns].topk(min(count, len(columns)), -1).indices]


def _tail_probs(probs: Tensor, ids: Tensor) -> Tensor:
    """Return the total probability [n,1] of all tokens but `ids` [n,K], as a sum: 1 - p would lose small values."""
    tail = torch.ones(len(probs), 1, device=probs.device)
    for rows in _blocks(probs) if ids.shape[-1] else ():
        block, block_ids = probs[rows], ids[rows]
        saved = block.gather(-1, block_ids)
        tail[rows] = block.scatter_(-1, block_ids, 0.0).sum(-1, keepdim=True)
        block.scatter_(-1, block_ids, saved)
    return tail


def _logit_grads_(probs: Tensor, targets: Tensor, entropy: Tensor, top_ids: Tensor, grads: StatisticGrads) -> None:
    """Turn probabilities [n,V] into the gradient of a loss by the logits, in place.

    Args:
        probs: [n,V].
        targets: [n] i64.
        entropy: [n].
        top_ids: [n,K] i64, the tokens of `grads.top`.
        grads: The loss's gradients by the statistics.
    """
    tail = _tail_probs(probs, top_ids)
    for rows in _blocks(probs):
        block = probs[rows]
        ids = top_ids[rows]
        g = grads.select(rows)
        scale = torch.zeros_like(entropy[rows]) if g.logps is None else g.logps
        if g.mean is not None:
            scale = scale + g.mean
        entropy_part = None
        if g.entropy is not None:
            entropy_part = torch.special.entr(block).mul_(g.entropy[:, None])
            scale = scale + g.entropy * entropy[rows]
        if g.top is None:
            block.mul_(-scale[:, None])
        else:
            unclamped = tail[rows] > MIN_PROB  # a clamped tail has no gradient
            tail_grad = g.top[:, -1:] * unclamped
            top_probs = block.gather(-1, ids)
            scale = scale[:, None] + g.top[:, :-1].sum(-1, keepdim=True) + tail_grad
            block.mul_(tail_grad / tail[rows].clamp(min=MIN_PROB) - scale)
            block.scatter_(-1, ids, torch.addcmul(g.top[:, :-1], top_probs, scale, value=-1))
        if entropy_part is not None:
            block.add_(entropy_part)
        if g.logps is not None:
            block.scatter_add_(-1, targets[rows, None], g.logps[:, None])
        if g.mean is not None:
            block.add_(g.mean[:, None], alpha=1 / block.shape[-1])


def _add_outer_(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add `d_logits.T @ hidden` to a float32 tensor [V,H]; on a CPU without a temporary of its size."""
    if d_logits.dtype == total.dtype:
        total.addmm_(d_logits.T, hidden)
    elif hidden.device.type != "cpu":
        total.add_(float32_product(d_logits.T, hidden))
    else:
        for columns in _slices(len(total), 1, WEIGHT_ROWS):
            total[columns].add_(d_logits[:, columns].T @ hidden)  # `+=` would copy the sum onto itself


def _slices(rows: int, row_bytes: int, memory: int) -> list[slice]:
    size = max(1, memory // row_bytes)
    size -= size % ROWS if size > ROWS else 0
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def _blocks(logits: Tensor) -> list[slice]:
    """Return the slices of logits in float32 that fit a CPU's cache; all of them on other devices."""
    rows, vocabulary = logits.shape
    return _slices(rows, 4 * vocabulary, BLOCK_BYTES if logits.device.type == "cpu" else logits.nbytes)


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
    top_ids = _top_ids(all_logps, reads, ids)
    top = None
    if top_ids.shape[-1]:
        tail = all_logps.exp().scatter(-1, top_ids, 0.0).sum(-1, keepdim=True).clamp(min=MIN_PROB).log()
        top = torch.cat((all_logps.gather(-1, top_ids), tail), -1)
    return TokenStatistics(
        all_logps.gather(-1, targets[:, None]).squeeze(-1),
        -(all_logps.exp() * all_logps).sum(-1) if reads.entropy else None,
        all_logps.detach().exp().square().sum(-1) if reads.squares else None,
        all_logps.mean(-1) if reads.mean else None,
        None if top is None else top_ids,
        top,
    )
