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
        function: Has no side effects and no graph breaks, and is not differentiated. Its first argument is a tensor
            [N,...]; it is compiled for any N.
        min_elements: The elements of a large tensor.
    """

    def __init__(self, function: Callable[P, T], min_elements: int = MIN_ELEMENTS) -> None:
        self.function = function
        self.min_elements = min_elements
        self._compiled: Callable[P, T] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not _has_large(args, self.min_elements):
            return self.function(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function as one that is compiled, at the first call."""
        try:
            _allow_variants()
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


def _allow_variants() -> None:
    """Let the calling thread compile a function for `VARIANTS` sets of arguments: torch has a limit for each thread."""
    if torch._dynamo.config.recompile_limit < VARIANTS:  # noqa: PLR1730 (an assignment costs more)
        torch._dynamo.config.recompile_limit = VARIANTS


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
    scaled = logits.float() / temperature
    highest = scaled.amax(-1, keepdim=True)
    shifted = scaled - highest
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    log_total = total.log()
    statistics = [
        shifted.gather(-1, targets[:, None]) - log_total,
        highest + log_total,
        log_total - (shifted * weights).sum(-1, keepdim=True) / total if reads.entropy else log_total,
        weights.square().sum(-1, keepdim=True) / total.square() if reads.squares else log_total,
        shifted.mean(-1, keepdim=True) - log_total if reads.mean else log_total,
    ]
    return [x.squeeze(-1) for x in statistics], (weights / total).to(logits.dtype) if probs else None


@Fused
def softmax_grads(
    logits: Tensor, targets: Tensor, temperature: float, saved: tuple[Tensor, Tensor], grads: StatisticGrads
) -> Tensor:
    """Return the gradient [n,V] of a loss by scaled logits, in their type.

    Args:
        logits: [n,V].
        targets: [n] i64.
        temperature: Divides the logits.
        saved: [n] log-sum-exps of the scaled logits, and [n] entropies, which are read only with their gradient.
        grads: The loss's gradients by the statistics, but for `top`.
    """
    lse, entropy = saved
    logps = logits.float() / temperature - lse[:, None]
    scale = direct = torch.zeros_like(lse)[:, None]
    if grads.mean is not None:
        direct = grads.mean[:, None] / logits.shape[-1]
        scale = grads.mean[:, None]
    if grads.logps is not None:
        is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        direct = torch.where(is_target, grads.logps[:, None] + direct, direct)
        scale = scale + grads.logps[:, None]
    if grads.entropy is not None:
        scale = scale + grads.entropy[:, None] * (logps + entropy[:, None])
    return (direct - scale * logps.exp()).to(logits.dtype)
