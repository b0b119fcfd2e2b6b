"""The policy's weights as a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rlkit.distributed.fsdp2 import full_tensor
from rlkit.models.lora import (
    adapter_config,
    adapter_tensors,
    adapters_by_weight,
    base_model,
    has_lora,
    merged_weight,
    plain_name,
)
from rlkit.models.vision import reads_pictures
from rlkit.ops.quantization import PARTS, QuantizedLinear
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.model import AdapterLayer, CausalLM


class PolicyWeights:
    """All tensors of saved models under their Hugging Face names, in buckets of bounded size, adapters merged or not.

    Weights in 4 bits are dequantized one by one: engines hold the values with which the trainer computes.

    `specs` has the shape and type of each tensor by name before the first bucket is read. Peak extra memory is one
    bucket plus its largest merged or gathered tensor. All ranks of a sharded policy must read the buckets together.

    Args:
        policy: The model, with or without adapters.
        bucket_bytes: A bucket ends with the tensor that reaches this size.
    """

    def __init__(self, policy: CausalLM, bucket_bytes: int = 1024**3) -> None:
        self.bucket_bytes = bucket_bytes
        self._policy = policy

    @cached_property
    def _sources(self) -> dict[str, tuple[AdapterLayer | None, Tensor | QuantizedLinear]]:
        """Each weight with its adapter, if it has one, by name; an engine that reads the policy needs none."""
        base = base_model(self._policy)
        adapters = adapters_by_weight(base)
        named = {n: x for n, x in base.named_parameters() if "lora_" not in n and n.rpartition(".")[2] not in PARTS}
        weights: dict[str, Tensor | QuantizedLinear] = {**named}
        weights |= {f"{name}.weight": x for name, x in base.named_modules() if isinstance(x, QuantizedLinear)}
        weights |= saved_buffers(base)
        plain = {plain_name(name): weight for name, weight in weights.items()}  # tied ones once, under their first name
        return {name: (adapters.get(name), weight) for name, weight in plain.items()}

    @property
    def buffer_names(self) -> set[str]:
        """Names of the buffers, in whose own types the trainer computes."""
        base = base_model(self._policy)
        return {n for name, x in saved_buffers(base).items() for n in as_saved(base, plain_name(name), x.to("meta"))}

    @cached_property
    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of each tensor, by name."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (_, source) in self._sources.items():
            empty = torch.empty(source.shape, dtype=source.dtype, device="meta")
            saved = as_saved(base_model(self._policy), name, empty)
            shapes |= {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
        return shapes

    @torch.no_grad()
    def buckets(self, merged: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield detached tensors with adapters `merged` or left out; tensors that are not merged share memory."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, (adapter, x) in self._sources.items():  # agreed: parameters are the same on every rank
            tensor = x.dequantize(full_tensor) if isinstance(x, QuantizedLinear) else full_tensor(x.detach())
            if adapter is not None and merged:
                tensor = merged_weight(adapter, tensor, gather=full_tensor).to(tensor.dtype)
            saved = as_saved(base_model(self._policy), name, tensor)
            bucket += [(name, tensor.contiguous()) for name, tensor in saved.items()]
            size += tensor.numel() * tensor.element_size()
            if size >= self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    @torch.no_grad()
    def adapter(self) -> tuple[JsonObject, list[tuple[str, Tensor]]] | None:
        """Return the adapters' configuration and full tensors, named as peft saves them; None if there are none."""
        if not has_lora(self._policy):  # agreed: parameters are the same on every rank
            return None
        # agreed: as above
        return adapter_config(self._policy), [(n, full_tensor(x.detach())) for n, x in adapter_tensors(self._policy)]


def as_saved(model: CausalLM, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor as saved models have it, which servers read: renamed, and experts one by one.

    One that saved models join with others stays as it is.
    """
    saved: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    is_renamed = all(x is tensor for x in saved.values()) or (len(saved) == 1 and reads_pictures(model.config))
    return saved if is_renamed or tensor.dim() == 3 else {name: tensor}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that saved models have, such as the biases of routers, by name."""
    saved_names = model.state_dict().keys()  # agreed: no tensor is gathered
    return {name: buffer for name, buffer in model.named_buffers() if name in saved_names}


def trainable(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's trainable parameters by their names in checkpoints."""
    return {f"{prefix}.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def full_state_dict(module: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return a module's full state on the CPU, on the ranks that `keep` it; all ranks must call this.

    Tied weights are returned once, under their first name.
    """
    tied = dict(module.named_parameters(remove_duplicate=False)).keys() - dict(module.named_parameters()).keys()
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():  # agreed: parameters are the same on every rank
        gathered = None if name in tied else full_tensor(tensor.detach())
        if keep and gathered is not None:
            state[name] = gathered.cpu()
    return state
