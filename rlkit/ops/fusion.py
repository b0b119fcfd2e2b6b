"""Functions whose element-wise passes a GPU runs as one kernel, compiled by `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from rlkit.types import Reads

P = ParamSpec("P")
T = TypeVar("T")


VARIANTS = 64
"""The number of times that a function may be compiled, for other types, ranks and options; 8 by default."""

MIN_ELEMENTS = 2**20
"""The least elements of a tensor that are worth the seconds of a compilation: those of tiny models are not."""


class Fused(Generic[P, T]):
    """A function that is compiled when it is first called with a large tensor on a GPU.

    Otherwise, and if it cannot be compiled, as without Triton, which a warning says once, it runs operator by operator.

    Args:
        function: Has no graph breaks, no side effects but on a tensor that it overwrites and returns, and is not
            differentiated. Its first argument is a tensor [N,...]; it is compiled for any N.
        min_elements: The elements of a large tensor.
    """

    def __init__(self, function: Callable[P, T], min_elements: int = MIN_ELEMENTS) -> None:
        self.function = function
        self.min_elements = min_elements
        self._compiled: Callable[P, T] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        run = self.compiled if _has_large(args, self.min_elements) else self.function
        return run(*args, **kwargs)

    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function as one that is compiled, at the first call."""
        try:
            if torch._dynamo.config.recompile_limit < VARIANTS:  # noqa: PLR1730 (an assignment costs more)
                torch._dynamo.config.recompile_limit = VARIANTS  # torch has a limit for each thread
            plain = _detached(args)
            if self._compiled is None:
                self._compiled = _compiled(self.function)
                for x in plain:
                    if isinstance(x, Tensor) and x.shape[0] == plain[0].shape[0]:
                        torch._dynamo.maybe_mark_dynamic(x, 0)
            return self._compiled(*plain, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch's compilers have no common error
            problem = str(error).partition("\n")[0]
            warnings.warn(
                f"{self.function.__name__} runs operator by operator, which is slower: torch.compile failed with "
                f"{type(error).__name__}: {problem}; install triton and a C compiler",
                stacklevel=2,
            )
            self._compiled = self.function
            return self.function(*args, **kwargs)


def _detached(x: Any) -> Any:
    """Return a tensor, or those of a tuple, without a gradient and a base, for which functions would be recompiled."""
    if isinstance(x, tuple):
        return getattr(type(x), "_make", tuple)(map(_detached, x))
    return x.detach() if isinstance(x, Tensor) else x


def _has_large(x: object, elements: int) -> bool:
    if isinstance(x, tuple):
        return any([_has_large(item, elements) for item in x])  # noqa: C419 (a generator costs twice as much)
    return isinstance(x, Tensor) and on_gpu(x) and x.numel() >= elements


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU, for which functions are compiled."""
    return x.is_cuda


def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    import torch._dynamo

    if torch._dynamo.config.disable:  # by TORCH_COMPILE_DISABLE
        return function
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")  # a note for authors of compilers
    return torch.compile(function, fullgraph=True)


class StatisticGrads(NamedTuple):
    """The gradients of a loss by the statistics of n tokens; None for a statistic that it does not depend on."""

    logps: Tensor | None  # [n] f32
    entropy: Tensor | None  # [n] f32
    mean: Tensor | None  # [n] f32
    top: Tensor | None  # [n,K+1] f32

    def select(self, rows: slice) -> StatisticGrads:
        return StatisticGrads(*(None if grad is None else grad[rows] for grad in self))


@Fused
def softmax_statistics(
    logits: Tensor, targets: Tensor, temperature: float, reads: Reads, probs: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Return statistics of `softmax(logits / temperature)` for logits [n,V] of any type.

    Returns:
        Log-probs of the targets, log-sum-exps of the scaled logits, entropies, sums of squares, and means of log-probs,
            each [n] f32, arbitrary if not read; and the probabilities [n,V] in the logits' type if `probs`.
    """
    parts = next(n for n in (128, 64, 32, 16, 8, 4, 2, 1) if logits.shape[1] % n == 0)  # a cache holds a part of a row
    scaled = (logits.float() / temperature).view(len(logits), parts, logits.shape[1] // parts)
    peaks = scaled.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # [n,parts,1], finite
    shifted = scaled - peaks
    weights = shifted.exp()
    highest = peaks.amax(1)
    lower, sums = peaks.squeeze(-1) - highest, weights.sum(-1)
    shares = lower.exp()  # of the parts, [n,parts]
    total = (sums * shares).sum(-1, keepdim=True)
    lse = highest + total.log()
    products = (shifted * weights).sum(-1) * shares + lower * (sums * shares)
    statistics = [
        logits.gather(-1, targets[:, None]).float() / temperature - highest - total.log(),
        lse,
        total.log() - products.sum(-1, keepdim=True) / total if reads.entropy else lse,
        (weights.square().sum(-1) * shares.square()).sum(-1, keepdim=True) / total.square() if reads.squares else lse,
        (shifted.mean(-1) + lower).mean(-1, keepdim=True) - total.log() if reads.mean else lse,
    ]
    all_probs = (logits.float() / temperature - lse).exp().to(logits.dtype) if probs else None
    return [x.squeeze(-1) for x in statistics], all_probs


@Fused
def softmax_grads_(
    logits: Tensor, targets: Tensor, temperature: float, saved: tuple[Tensor, Tensor], grads: StatisticGrads
) -> Tensor:
    """Overwrite logits with the gradient [n,V] of a loss by them after they were scaled; return them.

    Args:
        logits: [n,V].
        targets: [n] i64.
        temperature: Divides the logits.
        saved: [n] log-sum-exps of the scaled logits, and [n] entropies, which are read only with their gradient.
        grads: The loss's gradients by the statistics, but for `top`.
    """
    lse, entropy = saved
    logps = logits.float() / temperature - lse[:, None]
    by_logps, by_mean = (torch.zeros_like(lse[:, None]) if g is None else g[:, None] for g in (grads.logps, grads.mean))
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    direct = is_target * by_logps + by_mean / logits.shape[-1]
    scale = by_logps + by_mean
    if grads.entropy is not None:
        scale = scale + grads.entropy[:, None] * (logps + entropy[:, None])
    return logits.copy_(direct - scale * logps.exp())
