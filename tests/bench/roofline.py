"""Kernels counted and timed by a roofline, while code runs under `Meter`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.flow.virtual_gpu import where

FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "lift_fresh",
    "detach",
    "_unsafe_view",
)
GATHERS = ("index", "index_select", "embedding", "gather")
SCATTERS = ("index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_", "_index_put_impl_")
SEVERAL = {"nonzero": 3, "sort": 6, "topk": 4, "cumsum": 2, "index_put_": 2, "embedding_dense_backward": 5}
"""Kernels of an operator that needs more than one."""
FOREACH_TENSORS = 48
"""Tensors of one kernel of a `foreach` or fused operator."""


@dataclass
class Costs:
    """Work of a device.

    Args:
        launches: Kernels launched one by one.
        replays: Graphs launched.
        kernels: All kernels.
        flops: Operations of products.
        bytes: Read and written by kernels.
        syncs: How often the host waited for the device.
        allocations: Results that took new memory.
        device: Seconds in which the device was busy.
        host: Seconds in which the host launched.
        seconds: Seconds passed.
    """

    launches: int = 0
    replays: int = 0
    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    syncs: int = 0
    allocations: int = 0
    device: float = 0.0
    host: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """Return the sum of this and a multiple of other costs."""
        return Costs(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Rates:
    """A device's speed, in seconds, bytes and operations.

    Args:
        bandwidth: Bytes a second.
        half: Operations a second of products of 16 bits.
        full: The same in float32, without TF32.
        launch: Host's seconds for a kernel.
        kernel: The least seconds of a kernel.
        replay: Host's seconds for a graph.
        record: Host's seconds for a kernel that is recorded, its part of the graph's set-up included.
        sync: Seconds from the end of a kernel until the host goes on.
        link: Bytes a second between host and device, of pageable memory.
    """

    bandwidth: float
    half: float
    full: float
    launch: float
    kernel: float = 0.0
    replay: float = 0.0
    record: float = 0.0
    sync: float = 0.0
    link: float = 1e10
    kinds: dict[str, float] = field(default_factory=dict)
    """Operations a second of operators that are slower than other products."""

    def of(self, name: str, half: bool) -> float:
        """Return the operations a second of an operator."""
        return self.kinds.get(name, self.half if half else self.full)


H100 = Rates(3.0e12, 798e12, 50e12, 4e-6, 1.5e-6, 10e-6, 10e-6, 10e-6, kinds={"attention": 350e12})


@dataclass
class Clock:
    """Times of a host that launches kernels and of a device that runs them in order.

    Args:
        rates: The device's.
    """

    rates: Rates
    total: Costs = field(default_factory=Costs)
    ready: float = 0.0
    """When the device has run all its kernels; `total.seconds` is the host's time."""
    tape: Costs | None = None
    """Takes what is recorded into a graph."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waited, by the function of rlkit."""
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The device's seconds in kernels that were launched one by one, by the function of rlkit."""

    def kernel(self, flops: float, moved: float, count: int = 1, rate: float = 1.0) -> None:
        """Launch kernels that read and write `moved` bytes."""
        busy = max(flops / rate, moved / self.rates.bandwidth, self.rates.kernel * count)
        self.add(Costs(kernels=count, flops=flops, bytes=moved, device=busy))

    def add(self, work: Costs) -> None:
        """Launch kernels, one by one."""
        into = self.total if self.tape is None else self.tape
        for name in ("kernels", "flops", "bytes", "device"):
            setattr(into, name, getattr(into, name) + getattr(work, name))
        if self.tape is None:
            self.spent[where()] += work.device
            self.total.launches += work.kernels
            self._pass(self.rates.launch * work.kernels, work.device)
        else:
            self._pass(self.rates.record * work.kernels, 0.0)

    def replay(self, tape: Costs) -> None:
        """Launch a graph."""
        for name in ("kernels", "flops", "bytes", "device"):
            setattr(self.total, name, getattr(self.total, name) + getattr(tape, name))
        self.total.replays += 1
        self._pass(self.rates.replay, tape.device)

    def sync(self, moved: float = 0.0) -> None:
        """Let the host wait for the device, and copy bytes between them."""
        self.total.syncs += 1
        self.waits[where()] += 1
        self.total.seconds = max(self.total.seconds, self.ready) + self.rates.sync + moved / self.rates.link

    def _pass(self, host: float, device: float) -> None:
        self.total.host += host
        self.total.seconds += host
        self.ready = max(self.ready, self.total.seconds) + device


class Meter(TorchDispatchMode):
    """Counts the operators of tensors that `on_device` accepts."""

    def __init__(self, clock: Clock, on_device: Callable[[Tensor], bool] = lambda x: True) -> None:
        super().__init__()
        self.clock = clock
        self.on_device = on_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            inputs = tensors((args, kwargs))
            output = self.run(func, args, kwargs)
            if any(map(self.on_device, inputs or tensors(output))):
                self.count(func, args, kwargs, output)
                output = self.finish(output, inputs)
            return output

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator returns."""
        return func(*args, **kwargs)

    def finish(self, output: Any, inputs: list[Tensor]) -> Any:
        """Return the output of an operator on the device."""
        return output

    def count(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count an operator."""
        name, clock = func.overloadpacket.__name__, self.clock
        returns = func._schema.returns
        if name == "_local_scalar_dense":
            return clock.sync()
        outputs = tensors(output)
        before = set(map(storage, tensors((args, kwargs))))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        is_view = is_view and all(storage(x) in before for x in outputs)  # `to` and `reshape` may copy
        if not is_view and not any(r.alias_info is not None and r.alias_info.is_write for r in returns):
            clock.total.allocations += len(outputs)
        if is_view or name in FREE or not any(x.numel() for x in outputs + tensors(args)):
            return None
        flops = flops_of(func, args, kwargs, output)
        inputs = tensors((args, kwargs))
        masked = name in {"index", "index_put_"} and any(x.dtype == torch.bool for x in tensors(args[1]))
        count = SEVERAL["nonzero" if masked else name] if masked or name in SEVERAL else 1
        if name.startswith(("_foreach", "_fused_adam")):
            count = -(-len(args[0]) // FOREACH_TENSORS)
        half = flops > 0 and min(x.element_size() for x in inputs if x.is_floating_point()) == 2
        clock.kernel(flops, moved_bytes(name, inputs, outputs), count, self.clock.rates.of(name, half))
        return clock.sync() if masked or name == "nonzero" else None


def flops_of(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Return the operations of a product or an attention; 0 for other operators."""
    name = func.overloadpacket.__name__
    if name in {"_linear_pointwise", "linear"}:  # oneDNN's, and that of inference mode
        return 2.0 * output.numel() * args[0].shape[-1]
    if name == "addmm_":
        return 2.0 * args[1].numel() * args[2].shape[-1]
    if "scaled_dot_product" in name:
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        causal = kwargs.get("is_causal", any(x is True for x in args))
        return (10.0 if backward else 4.0) * query.numel() * key.shape[2] / (2 if causal else 1)
    counter = flop_registry.get(func.overloadpacket)
    return float(counter(*args, **kwargs, out_val=output)) if counter is not None else 0.0


def moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Return the bytes that an operator reads and writes; a result that it writes in place is among its inputs."""
    if name in GATHERS:
        return sum(map(size, inputs[1:])) + 2.0 * sum(map(size, outputs))
    if name in SCATTERS:
        return sum(map(size, inputs[1:])) + float(size(inputs[-1]))
    if name in {"copy_", "fill_", "zero_"}:
        return float(sum(map(size, inputs[:2])))
    return float(sum(map(size, inputs)) + sum(map(size, outputs)))


def size(x: Tensor) -> int:
    """Return the bytes of a tensor's elements; those that are repeated count once."""
    repeated = 1
    for length, stride in zip(x.shape, x.stride(), strict=True) if x.layout is torch.strided else ():
        repeated *= length if stride == 0 and length else 1
    return x.numel() * x.element_size() // repeated


def storage(x: Tensor) -> int:
    """Return the identity of a tensor's memory; a packed tensor of oneDNN shares its own with no other."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [x for child in children for x in tensors(child)]


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree with a function of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: mapped(function, child) for name, child in tree.items()}
    return type(tree)(mapped(function, child) for child in tree) if type(tree) in {list, tuple} else tree
