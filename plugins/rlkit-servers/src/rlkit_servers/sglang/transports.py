"""SGLang's endpoints for weights, one class for each transport."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

from rlkit.base.errors import EngineError
from rlkit_servers.api import ServerApi
from rlkit_servers.http import Fault
from rlkit_servers.sglang.changes import LOADER
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.transports import (
    Adapter,
    Bucket,
    ChangesTransport,
    DiskTransport,
    GroupTransport,
    Joining,
    TensorTransport,
    flatten,
    serialize,
)

SGLANG_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang's settings of NCCL for process groups; NCCL reads them once, when a process makes its first group."""


async def _adapt(api: ServerApi, path: str, body: Mapping[str, object]) -> None:
    """Load adapters in place of those with the same name; a server without any refuses to unload them."""
    deadline = DEADLINES[UpdateStep.ADAPT]
    try:
        await api.client.post("/unload_lora_adapter", {"lora_name": api.adapter}, deadline)
    except Fault as fault:
        if fault.status is None:
            raise
    await api.client.post(path, {"lora_name": api.adapter, **body}, deadline)


class SGLangTensors(TensorTransport):
    """Weights in shared memory, or by CUDA IPC: only handles travel over HTTP."""

    async def load(self, api: ServerApi, parcel: Bucket) -> None:
        handles = [serialize(parcel) for _ in range(api.tensor_parallel)]
        body = {"serialized_named_tensors": handles, "flush_cache": False}
        await api.client.post("/update_weights_from_tensor", body, DEADLINES[UpdateStep.LOAD])

    async def adapt(self, api: ServerApi, adapter: Adapter) -> None:
        config, tensors = adapter
        flat = dict(flatten(tensors))
        handles = [serialize(flat) for _ in range(api.tensor_parallel)]
        body = {"config_dict": config, "serialized_named_tensors": handles}
        await _adapt(api, "/load_lora_adapter_from_tensors", body)


class SGLangDisk(DiskTransport):
    """Weights in a folder that servers read."""

    async def finish(self, api: ServerApi) -> None:
        body = {"model_path": str(self.folder), "load_format": "auto", "flush_cache": False}
        await api.client.post("/update_weights_from_disk", body, DEADLINES[UpdateStep.END])

    async def adapt(self, api: ServerApi, adapter: Adapter) -> None:
        await _adapt(api, "/load_lora_adapter", {"lora_path": self.write_adapter(adapter)})


class SGLangGroup(GroupTransport):
    """Weights over a process group of the trainer and all servers."""

    async def join(self, api: ServerApi, joining: Joining) -> None:
        body = {
            "master_address": joining.host, "master_port": joining.port, "rank_offset": joining.first_rank,
            "world_size": joining.world, "group_name": joining.name, "backend": self.backend,
        }  # fmt: skip
        await api.client.post("/init_weights_update_group", body, DEADLINES[UpdateStep.BEGIN])

    async def load(self, api: ServerApi, parcel: Bucket) -> None:
        body = {
            "names": [name for name, _ in parcel],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in parcel],
            "shapes": [list(tensor.shape) for _, tensor in parcel],
            "group_name": self.name,
            "flush_cache": False,
        }
        await api.client.post("/update_weights_from_distributed", body, DEADLINES[UpdateStep.LOAD])


class SGLangChanges(ChangesTransport):
    """Weights, or their changes, in the bodies of HTTP calls; SGLang unpickles tensors alone."""

    async def open(self, targets: Sequence[ServerApi]) -> None:
        for api in targets:
            info = await api.client.get("/server_info", 30.0)
            if LOADER not in (info.get("custom_weight_loader") or ()):
                raise EngineError(f"{api.client.url} takes no changes; start it with --custom-weight-loader {LOADER}")

    def pack(self, bucket: Bucket) -> bytes:
        return pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in bucket])

    async def load(self, api: ServerApi, parcel: str) -> None:
        body = {
            "serialized_named_tensors": [parcel] * api.tensor_parallel, "load_format": LOADER, "flush_cache": False,
        }  # fmt: skip
        await api.client.post("/update_weights_from_tensor", body, DEADLINES[UpdateStep.LOAD])
