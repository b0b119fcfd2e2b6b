"""Offloading of saved activations to host memory, from the forward pass to the backward pass."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 2**20
"""Smaller tensors stay on the device."""

RECENT = 4
"""Tensors that are compared with the next one: layers such as query, key and value save the same input."""


class _OnHost(NamedTuple):
    copy: Tensor


class ActivationOffload:
    """Moves what autograd saves in a module's passes to host memory, and back when the backward pass reads it.

    Weights are never moved, nor copies of them in autocast's type. Copies are enqueued on the device's stream, into
    page-locked memory, so that the host does not wait for them. Under recomputation, the inputs of blocks are moved.

    Args:
        module: The module, not sharded yet.
        device: Whose tensors are moved.
        tensor_parallel: Ranks that share the module's matrices.
    """

    def __init__(self, module: nn.Module, device: torch.device, tensor_parallel: int = 1) -> None:
        self.device = device
        self.moved_bytes = 0
        """Bytes that were moved to the host so far."""
        self._weights: set[tuple[int, int]] = set()
        for parameter in module.parameters():
            if parameter.ndim == 2:
                rows, columns = parameter.shape
                divided = ((rows // tensor_parallel, columns), (rows, columns // tensor_parallel))
                self._weights |= {(rows, columns), *divided}
        self._recent: deque[tuple[Tensor, _OnHost]] = deque(maxlen=RECENT)
        self._hooks: saved_tensors_hooks | None = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def _end(self, *_: object) -> None:
        self._recent.clear()
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = None

    def _pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if tensor.device != self.device or tensor.nbytes < MIN_BYTES or self._is_weight(tensor):
            return tensor
        for recent, on_host in self._recent:
            if _are_same(recent, tensor):
                return on_host
        pinned = self.device.type == "cuda"
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor, non_blocking=pinned)
        self.moved_bytes += tensor.nbytes
        self._recent.append((tensor, _OnHost(copy)))
        return self._recent[-1][1]

    def _unpack(self, saved: Tensor | _OnHost) -> Tensor:
        return saved.copy.to(self.device, non_blocking=True) if isinstance(saved, _OnHost) else saved

    def _is_weight(self, tensor: Tensor) -> bool:
        """Check whether a tensor has the shape of a weight: linear layers save theirs transposed, unlike activations.

        Storages cannot be compared: sharded weights and those in autocast's type have others in each pass.
        """
        if tensor.ndim != 2:
            return False
        saved = tensor.t() if tensor.stride(0) == 1 else tensor
        return tuple(saved.shape) in self._weights


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Check whether two live tensors are the same values in the same memory."""
    return (
        first.data_ptr() == second.data_ptr()
        and first._version == second._version
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
    )
