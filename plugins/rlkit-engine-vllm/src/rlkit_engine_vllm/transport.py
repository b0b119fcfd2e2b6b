"""How weights reach vLLM: safetensors files in a folder, in shared memory or on disk, or changes over HTTP."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from rlkit_servers.api import ServerApi
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.transports import SHARED_MEMORY, Adapter, Bucket, ChangesTransport, DiskTransport, save

from rlkit.models.weights import PolicyWeights

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

INDEX = "model.safetensors.index.json"


class FolderTransport(DiskTransport):
    """Writes all weights to a folder, from which servers read them at the end of an update.

    vLLM fuses tensors, for example those of queries, keys and values, and takes a fused one whole. So the folder keeps
    every tensor until its successor is written, and one tensor that is resent by itself arrives with the others.
    """

    brackets = True

    def __init__(self, policy: CausalLM, folder: str | None = None) -> None:
        super().__init__(policy, folder)
        self._files: dict[str, str] = {}
        self._written = 0

    async def open(self, targets: Sequence[ServerApi]) -> None:
        pass

    def prepare(self, bucket: Bucket) -> None:
        self._written += 1
        file = f"{self._written:06d}.safetensors"
        save(bucket, self.folder / file)
        self._files |= {name: file for name, _ in bucket}
        index = {"metadata": {}, "weight_map": self._files}
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        current = set(self._files.values())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in current:
                path.unlink()

    async def finish(self, api: ServerApi) -> None:
        body = {"update_info": {"folder": str(self.folder)}}
        await api.client.post("/update_weights", body, DEADLINES[UpdateStep.END])

    async def adapt(self, api: ServerApi, adapter: Adapter) -> None:
        body = {"lora_name": api.adapter, "lora_path": self.write_adapter(adapter), "load_inplace": True}
        await api.client.post("/v1/load_lora_adapter", body, DEADLINES[UpdateStep.ADAPT])


class VllmChanges(ChangesTransport):
    """Weights, or their changes, in the bodies of HTTP calls, as safetensors."""

    def pack(self, bucket: Bucket) -> bytes:
        return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in bucket})

    async def load(self, api: ServerApi, parcel: str) -> None:
        await api.client.post("/update_weights", {"update_info": {"bucket": parcel}}, DEADLINES[UpdateStep.LOAD])


def shared_memory(policy: CausalLM, dtype: torch.dtype) -> str | None:
    """Return the folder of shared memory; None if the weights do not fit there."""
    size = dtype.itemsize * sum(math.prod(shape) for shape, _ in PolicyWeights(policy).specs.values())
    fits = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    return str(SHARED_MEMORY) if fits else None
