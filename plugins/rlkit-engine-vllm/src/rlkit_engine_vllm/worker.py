"""What runs in vLLM's worker processes: weights from safetensors files, and log-probs of the full softmax.

vLLM imports this module for `--worker-extension-cls rlkit_engine_vllm.worker.WeightReading`; that registers the weight
transfer backend `rlkit`, which `--weight-transfer-config '{"backend": "rlkit"}'` chooses.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rlkit_servers.changes import CheckpointReceiver
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

INDEX = "model.safetensors.index.json"
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy in vLLM, which then computes log-probs at temperature 1."""


class WeightReading:
    """Marks servers whose workers can read weights for rlkit; vLLM adds it to its worker class."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing: weights need no handshake."""


@dataclass
class SafetensorsUpdate(WeightTransferUpdateInfo):
    """A folder with all weights, or a bucket of weights or changes.

    Args:
        folder: It holds safetensors files and their index, named as in a checkpoint.
        bucket: Safetensors in base64, for a `CheckpointReceiver`.
    """

    folder: str = ""
    bucket: str = ""


class SafetensorsTransfer(WeightTransferEngine[NoInit, SafetensorsUpdate]):
    """Reads all weights of a folder, or of buckets, each worker its own shard; nothing is unpickled.

    vLLM fuses tensors and takes a fused one whole, so changes are applied to a copy of the checkpoint, from which all
    weights are loaded at the end of an update. A refused bucket leaves the model as it is.

    Raises:
        ValueError: vLLM's second model runner is active, whose log-probs under top-p are not those of the full softmax,
            and routes, which need it, are not returned.
    """

    init_info_cls = NoInit
    update_info_cls = SafetensorsUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.use_v2_model_runner and not vllm_config.aux_output_config.enabled:
            raise ValueError("rlkit needs vLLM's first model runner: start the server with VLLM_USE_V2_MODEL_RUNNER=0")
        self._receiver = CheckpointReceiver()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._receiver.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SafetensorsUpdate) -> None:
        if update_info.folder:
            self._load(read_folder(Path(update_info.folder)))
        elif self._receiver.receive(safetensors.torch.load(base64.b64decode(update_info.bucket))) is None:
            self._load(self._receiver.copies.items())

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.device.type == "cpu":
            forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights)
        finally:  # also after an error, which would otherwise leave layers without storage
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_heads(self.model)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let experts be packed as at the first load: beside an existing kernel, vLLM's reload leaves them unpacked."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_heads(model: torch.nn.Module) -> None:
    """Pack the weights of output layers again: vLLM's reload forgets the packed copy of a tied one."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a folder's index names."""
    files: dict[str, list[str]] = {}
    for name, file in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        with safe_open(folder / file, framework="pt") as tensors:
            for name in names:
                yield name, tensors.get_tensor(name)


def report_full_softmax() -> None:
    """Have vLLM report log-probs of softmax(logits / temperature), also of tokens that top-k, top-p or min-p selected.

    vLLM's own are those of the remaining tokens alone, which a trainer cannot reproduce. Needs `processed_logprobs`.
    Beside top-k, top-p is made a mass of the full softmax too, as in TorchEngine; vLLM's is of what top-k leaves.
    """
    sample = Sampler.sample

    def sample_and_report(
        self: Sampler, logits: Tensor, sampling_metadata: Any, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        logps = _full_logps(logits, sampling_metadata)
        if logps is not None and sampling_metadata.top_k is not None and sampling_metadata.top_p is not None:
            selected = apply_top_k_top_p(logps.clone(), None, sampling_metadata.top_p)
            logits = logits.masked_fill(selected.isneginf(), -torch.inf)
            sampling_metadata = replace(sampling_metadata, top_p=None)
        sampled, reported = sample(self, logits, sampling_metadata, *args, **options)
        return sampled, reported if reported is None or logps is None else logps

    Sampler.sample = sample_and_report  # type: ignore[method-assign]


def _full_logps(logits: Tensor, sampling_metadata: Any) -> Tensor | None:
    """Return the log-probs [B,V] of the full softmax; None if no request of the batch truncates it."""
    processors = sampling_metadata.logitsprocs.argmax_invariant
    truncates = sampling_metadata.top_k is not None or sampling_metadata.top_p is not None
    truncates |= any(getattr(processor, "min_p_count", 0) for processor in processors)
    if not truncates or sampling_metadata.temperature is None:
        return None
    temperature = sampling_metadata.temperature
    temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return (logits / temperature[:, None]).log_softmax(-1, dtype=torch.float32)


WeightTransferEngineFactory.register_engine("rlkit", SafetensorsTransfer)
report_full_softmax()
