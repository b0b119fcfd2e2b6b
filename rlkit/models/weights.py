"""The policy's weights as a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkit.models.lora import base_model


class PolicyWeights:
    """All parameters under their Hugging Face names, adapters merged on the fly, in buckets of bounded size.

    `specs` has every name with its shape and type, known before the first bucket. Peak extra memory is one bucket
    and its largest merged tensor.

    Args:
        policy: The model, with or without adapters.
        bucket_bytes: A bucket ends with the tensor that reaches this.
    """

    def __init__(self, policy: Any, bucket_bytes: int = 256 * 1024 * 1024) -> None:
        self.bucket_bytes = bucket_bytes
        base = base_model(policy)
        adapters = {f"{name}.weight": part for name, part in base.named_modules() if hasattr(part, "get_delta_weight")}
        self._sources: dict[str, tuple[Any, Tensor]] = {}
        for name, parameter in base.named_parameters():  # tied weights come once, under their first name
            if "lora_" not in name:
                plain = name.replace(".base_layer.", ".")
                self._sources[plain] = (adapters.get(plain), parameter)
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(parameter.shape), parameter.dtype) for name, (_, parameter) in self._sources.items()
        }

    @torch.no_grad()
    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Give the tensors, detached; those without adapters share the policy's memory."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, (adapter, parameter) in self._sources.items():
            tensor = parameter.detach()
            if adapter is not None:
                tensor = tensor + sum(adapter.get_delta_weight(active) for active in adapter.active_adapters)
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
            if size >= self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
