"""A GPU that is none: `python -m tests.flow.virtual_gpu REPORT fit OPTIONS…` runs rlkit's command as if on one.

Tensors made on or moved to "cuda" are on the CPU and are remembered as a GPU's. REPORT, a JSON file, says which
operators mix them with others, where the host reads them, and which threads use them without having chosen a device.
Kernels that only a GPU has are stood in for by slow ones, and a recorded decode step is the step itself.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rlkit_engine_torch
import torch
from lightning.fabric import Fabric
from rlkit_engine_torch.graphs import GraphDecoder
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlkit
from rlkit.run.preflight import memory
from tests.unit.engines.recordings import record
from tests.unit.ops.test_ragged import attend_to_each

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SOURCES = tuple(str(Path(str(package.__file__)).parent) for package in (rlkit, rlkit_engine_torch))
DEVICE, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
READS = (torch.Tensor.tolist, torch.Tensor.numpy)
MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
TRANSFERS = ("copy_", "_to_copy", "aten.index.", "aten.index_put")
"""Operators that take tensors of both devices; an index may be the host's."""


class VirtualGpu:
    """Which tensors are on the GPU, and what is done with them."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # held, so that their addresses are not used again
        self.mixed: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.threads: Counter[str] = Counter()
        self.steps = 0
        self.chosen: set[int] = {threading.get_ident()}

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return tensor.untyped_storage()._cdata in self._storages

    def take(self, tensor: Tensor) -> Tensor:
        """Put a tensor's memory on the GPU; return the tensor."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def give(self, tensor: Tensor) -> Tensor:
        """Take a tensor's memory, which nothing shares, off the GPU; return the tensor."""
        self._storages.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def moved(self, tensor: Tensor, to_gpu: bool) -> Tensor:
        """Return the tensor, or a copy if it is on the other device."""
        if self.has(tensor) == to_gpu:
            return tensor
        copy = tensor.clone()
        return self.take(copy) if to_gpu else self.give(copy)

    def report(self, status: object) -> dict[str, object]:
        """Return what was seen."""
        names = {name: dict(getattr(self, name)) for name in ("mixed", "reads", "threads")}
        return {"status": status, "steps": self.steps, **names}


class Operators(TorchDispatchMode):
    """Follows tensors through operators."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on = [x for x in inputs if self.gpu.has(x)]
        name, held = str(func), {x.untyped_storage()._cdata for x in inputs}
        output = func(*args, **(kwargs or {}))
        if not inputs and where().startswith("ops/fusion.py"):  # made on the device of its inputs, in a backward pass
            return self.gpu.take(output)
        if not on:
            return output
        if threading.get_ident() not in self.gpu.chosen:
            self.gpu.threads[f"{threading.current_thread().name} {where()}"] += 1
        if any(x.dim() and not self.gpu.has(x) for x in inputs) and not any(part in name for part in TRANSFERS):
            self.gpu.mixed[f"{name} {where()}"] += 1
        if "_local_scalar_dense" in name or "nonzero" in name:
            self.gpu.reads[where()] += 1
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in held:
                self.gpu.take(x)
        return output


class Functions(TorchFunctionMode):
    """Answers what is asked of a tensor's device, and makes and moves tensors."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func in (DEVICE, IS_CUDA) and self.gpu.has(args[0]):
            return CUDA if func == DEVICE else True
        if func in READS and self.gpu.has(args[0]):
            self.gpu.reads[where()] += 1
        if func in MOVES:
            return self._move(func, args, kwargs)
        if func is torch.bmm and kwargs.pop("out_dtype", None) is not None:
            return torch.bmm(*(x.float() for x in args))
        if not is_cuda(kwargs.get("device")):
            output = func(*args, **kwargs)
            made = getattr(func, "__name__", "").startswith("new_") or getattr(func, "__name__", "").endswith("_like")
            return self.gpu.take(output) if made and "device" not in kwargs and self.gpu.has(args[0]) else output
        return self.gpu.take(func(*args, **{**kwargs, "device": CPU}))

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        targets = [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, torch.device | str | Tensor)]
        if not self.gpu.has(args[0]) and func is torch.Tensor.to and not any(self._is_there(x) for x in targets):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        kwargs.pop("device", None)
        to_gpu = self.gpu.has(args[0])
        if func is not torch.Tensor.to:
            to_gpu = func is torch.Tensor.cuda
        elif targets:
            to_gpu = self._is_there(targets[0])
        if self.gpu.has(args[0]) and not to_gpu:
            self.gpu.reads[where()] += 1
        kinds = [x for x in args[1:] if not isinstance(x, torch.device | str)]
        converted = args[0].to(*kinds, **kwargs) if func is torch.Tensor.to and (kinds or kwargs) else args[0]
        return self.gpu.moved(converted, to_gpu)

    def _is_there(self, target: object) -> bool:
        return self.gpu.has(target) if isinstance(target, Tensor) else is_cuda(target)


def is_cuda(device: object) -> bool:
    return str(device).startswith("cuda")


def where() -> str:
    """Return the innermost line of rlkit that is running."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_code.co_name}"


def install_torch(gpu: VirtualGpu) -> None:
    """Let torch believe that there is a GPU."""
    autocast, enabled, kind = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
            super().__init__("cpu", *args, **options)

    cuda: Any = torch.cuda
    torch.autocast = Autocast  # type: ignore[misc]
    torch.is_autocast_enabled = lambda device=None: enabled("cpu")  # type: ignore[assignment]
    torch.get_autocast_dtype = lambda device: kind("cpu")
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    cuda.set_device = lambda device: gpu.chosen.add(threading.get_ident())
    cuda.synchronize = cuda.empty_cache = cuda.ipc_collect = lambda *_: None
    cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=80 * 2**30)
    cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"

    def kernel(query: Tensor, key: Tensor, value: Tensor, *spans: Any, **options: Any) -> Tensor:
        assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
        assert all(gpu.has(x) for x in (query, key, value, *spans[:2]))
        assert query.shape[-1] % 8 == 0
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        return attend_to_each(query.float(), key.float(), value.float(), *spans, **options).bfloat16()

    kernel.__signature__ = inspect.signature(attend_to_each)  # type: ignore[attr-defined]
    varlen.varlen_attn = kernel  # type: ignore[assignment]
    to = nn.Module.to

    def module_to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device = args[0] if args else options.get("device")
        if is_cuda(device):
            return self._apply(lambda x: gpu.moved(x, True))  # type: ignore[no-untyped-call]
        return to(self, *args, **options)

    nn.Module.to = module_to  # type: ignore[method-assign, assignment]


def install_rlkit(gpu: VirtualGpu) -> None:
    """Place a run's modules on the GPU, and let its threads, decode steps and memory be those of one."""
    set_up, run, step = Fabric.setup_module, threading.Thread.run, GraphDecoder.step

    def setup_module(self: Fabric, module: nn.Module, *args: Any, **options: Any) -> Any:
        module.to(CUDA)
        return set_up(self, module, *args, **{**options, "move_to_device": False})

    def in_modes(self: threading.Thread) -> None:
        with Functions(gpu), Operators(gpu):
            run(self)

    def counted(self: GraphDecoder, tokens: Tensor) -> Tensor:
        gpu.steps += 1
        return step(self, tokens)

    Fabric.device = property(lambda self: CUDA)  # type: ignore[assignment]
    Fabric.setup_module = setup_module  # type: ignore[method-assign]
    Fabric.to_device = lambda self, x: x  # type: ignore[method-assign, assignment]
    threading.Thread.run = in_modes  # type: ignore[method-assign]
    GraphDecoder.step = counted  # type: ignore[method-assign]
    GraphDecoder.__init__.__defaults__ = (*GraphDecoder.__init__.__defaults__[:-1], record)  # type: ignore[misc, index]
    memory.metrics = lambda device: {"memory/share": 0.0}


def main(argv: list[str]) -> int:
    """Run the command and write the report; return the command's exit status."""
    from rlkit.cli.main import main as command

    gpu = VirtualGpu()
    install_torch(gpu)
    install_rlkit(gpu)
    with Functions(gpu), Operators(gpu):
        status = command(argv[1:])
    Path(argv[0]).write_text(json.dumps(gpu.report(status)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
