"""A GPU that computes nothing: rlkit's own code runs on it, and each kernel is counted and timed by a roofline.

Tensors on "cuda" that hold floats are on `meta`: they have a shape and no numbers. Integers and masks are real, so that
rows, lengths and refills are those of a real run. What would come from floats is fixed: a read float is 0, a sampled
token 0, and floats are finite and at most equal to what they are compared with.

Not modelled: Python's own time beyond `Rates.launch`, the allocator, fragmentation, kernels slower than the roofline
(attention and small products usually are), and whatever overlaps on several streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils._python_dispatch import _disable_current_modes

from rlkit.ops.fusion import Fused
from tests.bench.roofline import H100, Clock, Costs, Meter, Rates, mapped, size, tensors
from tests.flow.virtual_gpu import Functions, VirtualGpu

aten = torch.ops.aten
READS = ("item", "__float__", "__bool__", "__int__", "__index__")
HALF = (
    functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, torch.bmm,
    torch.addmm, torch.baddbmm, functional.scaled_dot_product_attention,
)  # fmt: skip
"""Functions whose inputs autocast converts."""


class GhostGpu(VirtualGpu):
    """Holds floats without numbers, and real integers.

    Args:
        rates: The speed of the GPU.
        half: Whether autocast is enabled, to bfloat16.
        memory: The bytes of the GPU.
    """

    def __init__(self, rates: Rates = H100, half: bool = True, memory: int = 80 * 2**30) -> None:
        super().__init__()
        self.memory = memory
        self.clock = Clock(rates)
        self.half = half
        self.casting = False
        """Whether the innermost context of autocast is enabled."""

    def has(self, tensor: Tensor) -> bool:
        return is_ghost(tensor) or hasattr(tensor, "_on_gpu")

    def take(self, tensor: Tensor) -> Tensor:
        if is_ghost(tensor):
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.to("meta")
        tensor._on_gpu = True  # type: ignore[attr-defined]
        return tensor

    def moved(self, tensor: Tensor, to_gpu: bool) -> Tensor:
        if self.has(tensor) == to_gpu:
            return tensor
        self.clock.sync(size(tensor))
        if to_gpu:
            return self.take(tensor.clone())
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if is_ghost(tensor) else tensor.clone()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Let products be in bfloat16, as `Runtime.autocast` does."""
        with self.cast(self.half):
            yield

    @contextmanager
    def cast(self, enabled: bool) -> Iterator[None]:
        before, self.casting = self.casting, enabled
        try:
            yield
        finally:
            self.casting = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run code as on this GPU, in this thread."""
        options = {"is_autocast_enabled": lambda *_: self.casting, "get_autocast_dtype": lambda *_: torch.bfloat16}
        autocast = lambda *_, enabled=True, **__: self.cast(enabled and self.half)  # noqa: E731
        compiled = lambda *args, **options: fused(self.clock, *args, **options)  # noqa: E731
        attend = lambda *args, **_: Attention.apply(self.clock, *args[:5])  # noqa: E731
        with ExitStack() as stack:
            for name, value in {**options, "autocast": autocast}.items():
                stack.enter_context(patch.object(torch, name, value))
            properties = lambda _: SimpleNamespace(total_memory=self.memory)  # noqa: E731
            stack.enter_context(patch.object(torch.cuda, "get_device_properties", properties))
            stack.enter_context(patch.object(varlen, "varlen_attn", attend))
            stack.enter_context(patch.object(Fused, "compiled", compiled))
            stack.enter_context(patch("rlkit.ops.fusion.on_gpu", is_ghost))  # also in a backward pass
            stack.enter_context(patch("rlkit.ops.ragged._supports_gqa", lambda kernel: True))
            stack.enter_context(patch("torch.nn.utils.clip_grad._device_has_foreach_support", lambda *_: True))
            stack.enter_context(GhostFunctions(self))
            stack.enter_context(GhostMeter(self))
            yield


def record(clock: Clock, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return what `rlkit_engine_torch.recording.Graph` is: a function that launches recorded kernels."""
    tape = clock.tape = Costs()
    output = run()
    clock.tape = None

    def replay() -> Tensor:
        clock.replay(tape)
        return output

    return replay


def fused(clock: Clock, function: Fused[..., Any], *args: Any, **options: Any) -> Any:
    """Run a compiled function as one kernel that reads its inputs, and writes its outputs.

    It reads them twice for probabilities, and for sums in blocks, which are those of weights beside a row's maximum.
    """
    counted = clock.__dict__
    clock.__dict__ = vars(Clock(clock.rates))
    output = function.function(*args, **options)
    clock.__dict__ = counted
    name = function.function.__name__
    reads = 1 + (name == "block_sums" or (name == "softmax_statistics" and args[-1]))
    clock.kernel(0, reads * sum(map(size, tensors(args))) + sum(map(size, tensors(output))))
    return output


def is_ghost(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


class GhostMeter(Meter):
    """Runs operators on `meta` where they have inputs without numbers, and counts them."""

    def __init__(self, gpu: GhostGpu) -> None:
        super().__init__(gpu.clock, gpu.has)
        self.gpu = gpu

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(map(is_ghost, tensors((args, kwargs)))):
            return func(*args, **kwargs)
        if func.overloadpacket is aten.index:
            args = (args[0], [i for mask in args[1] for i in indices_of(mask)])
        name = func.overloadpacket.__name__
        output = func(*mapped(to_meta, args), **mapped(to_meta, kwargs))

        def real(x: Tensor) -> Tensor:
            if x.is_floating_point() or x.is_complex():
                return x
            return torch.full(x.shape, name == "le", dtype=x.dtype)

        in_place = name.endswith("_") and isinstance(args[0], Tensor) and not is_ghost(args[0])
        return args[0] if in_place else mapped(real, output)

    def finish(self, output: Any, inputs: list[Tensor]) -> Any:
        before = {x.untyped_storage()._cdata for x in inputs}

        def take(x: Tensor) -> Tensor:
            return self.gpu.take(x) if x.untyped_storage()._cdata not in before or not x.is_meta else x

        return mapped(take, output)


def to_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def indices_of(mask: Tensor | None) -> list[Tensor | None]:
    """Return an index, or those of a mask's elements."""
    return list(mask.nonzero().unbind(-1)) if mask is not None and mask.dtype == torch.bool else [mask]


class GhostFunctions(Functions):
    """Answers what is asked of tensors without numbers."""

    gpu: GhostGpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, clock, name = dict(kwargs or {}), self.gpu.clock, getattr(func, "__name__", "")
        ghost = bool(args) and isinstance(args[0], Tensor) and is_ghost(args[0])
        if func is torch.allclose:
            return True
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if ghost and (name in READS or name in {"tolist", "numpy"}):
            clock.sync(size(args[0]))
            return getattr(torch.zeros(args[0].shape), name)()
        if ghost and name == "isfinite":
            clock.kernel(0, size(args[0]), 3)
            return self.gpu.take(torch.ones(args[0].shape, dtype=torch.bool))
        if func is torch.Tensor.tolist and self.gpu.has(args[0]):
            clock.sync(size(args[0]))
        if self.gpu.casting and func in HALF:
            args = [x.bfloat16() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
        if func is functional.scaled_dot_product_attention and ghost:
            return Attention.apply(clock, *args[:3], None, None)
        if func is torch.bmm and kwargs.pop("out_dtype", None) is not None:
            product = torch.bmm(*args)
            return torch.empty(product.shape, device="meta")
        if str(kwargs.get("device")).startswith("cuda") and func not in {torch.Tensor.to, torch.empty}:
            output = super().__torch_function__(func, types, args, kwargs)
            if func in {torch.tensor, torch.as_tensor}:
                clock.sync(size(output))
            else:
                clock.kernel(0, size(output))
            return output
        return super().__torch_function__(func, types, args, kwargs)

    def _is_there(self, target: object) -> bool:
        return super()._is_there(target) or (isinstance(target, torch.device) and target.type == "meta")


class Attention(torch.autograd.Function):
    """Flash attention: one kernel that reads queries, keys and values, and one that returns their gradients.

    Half of the scores count, as if all were causal.
    """

    @staticmethod
    def forward(ctx: Any, clock: Clock, query: Tensor, key: Tensor, value: Tensor, *starts: Tensor | None) -> Tensor:
        moved = 2 * size(query) + size(key) + size(value)
        if starts[0] is None:  # [B,heads,Q,D]
            pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2
        else:  # [N,heads,D]; each query attends to all keys of its segment, or to those before it
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                queries, keys = (x.diff().double() for x in starts if x is not None)
                pairs = query.shape[1] * float((queries * (keys - queries / 2)).sum())
        rate = clock.rates.of("attention", True) if query.dtype == torch.bfloat16 else clock.rates.full
        ctx.clock, ctx.work = clock, (4 * pairs * query.shape[-1], moved, rate)
        ctx.save_for_backward(query, key, value)
        clock.kernel(ctx.work[0], moved, rate=rate)
        return torch.empty(query.shape, dtype=query.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        flops, moved, rate = ctx.work
        ctx.clock.kernel(2.5 * flops, 2 * moved, rate=rate)
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors), None, None
