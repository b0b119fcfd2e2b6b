"""Saved states of adapters, which never change: folders that are written beside and then renamed.

Tensors have the names of peft, so that a state fits any service of the same base, and peft loads it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlkit.base.errors import show
from rlkit.models.load import load_policy
from rlkit.models.lora import adapter_tensors, add_lora, merge_adapters
from rlkit.models.save import save_policy
from rlkit.models.source import base_name
from rlkit.recipe import Lora
from rlkit_tinker.bank import Adapter, AdapterBank
from rlkit_tinker.routing import LoraPair, Pairs
from rlkit_tinker.types import RequestFailedError

if TYPE_CHECKING:
    from rlkit_tinker.service import Service

NAME = re.compile(r"(?!.*\.partial$)[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
"""The name of a model or of a state, which becomes a folder."""

WEIGHTS, OPTIMIZER, STATE = "adapter_model.safetensors", "optimizer.safetensors", "state.json"
GRADIENT = "grad"
"""The suffix of the names of retained gradients, beside those of the optimizer's state."""


def folder_of(root: Path, path: str) -> Path:
    """Return the folder of a path `tinker://MODEL/weights/NAME`, or `.../sampler_weights/NAME`.

    Raises:
        RequestFailedError: It is no such path.
    """
    scheme, *parts = path.replace("://", "/", 1).split("/") if isinstance(path, str) else [""]
    names_are_plain = len(parts) == 3 and all(NAME.fullmatch(part) for part in parts)
    if scheme != "tinker" or not names_are_plain or parts[1] not in ("weights", "sampler_weights"):
        raise RequestFailedError(
            f"the path of a state is {show(path)}, expected tinker://MODEL/weights/NAME, where names have letters, "
            "digits and '_.:-'"
        )
    return root.joinpath(*parts)


def write_folder(folder: Path, write: Callable[[Path], None], overwrite: bool = False) -> None:
    """Write a folder beside its path, and rename it into place.

    Raises:
        RequestFailedError: It is there already, or cannot be written.
    """
    if os.path.lexists(folder) and not overwrite:
        raise RequestFailedError(f"{folder} is there already; choose another name, or set overwrite=True")
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RequestFailedError(f"{folder} cannot be written: {error}") from error


def named_weights(pairs: Pairs) -> dict[str, Tensor]:
    """Return the matrices of an adapter by the names of peft."""
    return {
        f"base_model.model.{layer}.lora_{letter}.weight": weight
        for layer, pair in pairs.items()
        for letter, weight in (("A", pair.down), ("B", pair.up))
    }


def save_adapter(pairs: Pairs, bank: AdapterBank, base: str, folder: Path) -> None:
    """Write the files that peft reads."""
    rank = len(next(iter(pairs.values())).down)
    targets = targets_of(pairs, bank)
    config = LoraConfig(
        r=rank, lora_alpha=bank.alpha, target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=base
    )
    config.save_pretrained(folder)
    save_file({name: weight.detach().contiguous() for name, weight in named_weights(pairs).items()}, folder / WEIGHTS)


def save_state(adapter: Adapter, bank: AdapterBank, base: str, folder: Path) -> None:
    """Write an adapter with its optimizer and the gradients that wait for a step."""
    save_adapter(adapter.pairs, bank, base, folder)
    tensors = {}
    for name, weight in named_weights(adapter.pairs).items():
        moments = adapter.optimizer.state.get(weight, {})
        retained = {} if weight.grad is None else {GRADIENT: weight.grad}
        tensors |= {f"{name}.{key}": x.contiguous() for key, x in {**moments, **retained}.items()}
    save_file(tensors, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps({"failure": adapter.failure}), encoding="utf-8")


def load_weights(pairs: Pairs, folder: Path) -> dict[str, Tensor]:
    """Return the saved matrices that fit those of an adapter, by the names of peft.

    Raises:
        RequestFailedError: The state cannot be read, or is of another adapter.
    """
    saved, own = _read(folder / WEIGHTS), named_weights(pairs)
    for name in sorted(own.keys() | saved.keys()):
        actual, expected = (list(x[name].shape) if name in x else "none" for x in (saved, own))
        if actual != expected:
            raise RequestFailedError(
                f"the state does not fit this client: {name} is {actual} there, expected {expected}; create the client "
                "with the rank, train_mlp, train_attn and train_unembed of the one that saved it"
            )
        if not saved[name].isfinite().all():
            raise RequestFailedError(f"the state has numbers in {name} that are not finite; load an earlier one")
    return saved


@torch.no_grad()
def load_state(adapter: Adapter, bank: AdapterBank, folder: Path, optimizer: bool) -> None:
    """Load the weights of an adapter; its moments and retained gradients too, or else it has none.

    Raises:
        RequestFailedError: The state cannot be read, or is of another adapter; then nothing has changed.
    """
    saved = load_weights(adapter.pairs, folder)
    _check_alpha(folder, bank)
    tensors = _read(folder / OPTIMIZER) if optimizer else {}
    failure = _read_json(folder / STATE).get("failure") if optimizer else None
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        expected = [] if kind == "step" else list(saved[name].shape) if name in saved else None
        if kind not in {"step", "exp_avg", "exp_avg_sq", GRADIENT} or list(tensor.shape) != expected:
            raise RequestFailedError(f"{folder / OPTIMIZER} has {key} of shape {list(tensor.shape)}; it is damaged")
        states.setdefault(name, {})[kind] = tensor
    adapter.drop_gradients()
    adapter.optimizer.state.clear()
    for name, weight in named_weights(adapter.pairs).items():
        weight.copy_(saved[name])
        state = states.get(name, {})
        weight.grad = state[GRADIENT].to(weight.device) if GRADIENT in state else None
        moments = {kind: x if kind == "step" else x.to(weight.device) for kind, x in state.items() if kind != GRADIENT}
        if moments:
            adapter.optimizer.state[weight] = moments
    adapter.failure = None if failure is None else str(failure)


@torch.no_grad()
def read_pairs(folder: Path, bank: AdapterBank) -> dict[str, LoraPair]:
    """Return the matrices of a saved state.

    Raises:
        RequestFailedError: It cannot be read, or is of another base.
    """
    saved = _read(folder / WEIGHTS)
    ranks = {len(weight) for name, weight in saved.items() if ".lora_A." in name}
    layers = {layer for layer in bank.layers if f"base_model.model.{layer}.lora_A.weight" in saved}
    if len(ranks) != 1 or not layers:
        raise RequestFailedError(f"{folder} has no adapter for this base; name a state of a client of this base")
    pairs = bank.empty_pairs(layers, ranks.pop())
    _check_alpha(folder, bank)
    weights = load_weights(pairs, folder)
    for name, weight in named_weights(pairs).items():
        weight.copy_(weights[name])
    return pairs


def export(service: Service, pairs: Pairs, folder: Path, merged: bool) -> None:
    """Write an adapter as peft loads it, or the base with the adapter merged, as a folder of Hugging Face."""
    policy = load_policy(service.model, frozen=True)
    head = policy.get_output_embeddings()
    if merged and service.bank.head in pairs:  # tied embeddings are not adapted
        policy.config.get_text_config().tie_word_embeddings = policy.config.tie_word_embeddings = False
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    rank = len(next(iter(pairs.values())).down)
    lora = Lora(rank, service.bank.alpha, targets_of(pairs, service.bank))
    with warnings.catch_warnings():  # the head is untied before it is merged
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        adapted = add_lora(policy, lora, base=base_name(service.model.path))
    own = dict(adapter_tensors(adapted))
    with torch.no_grad():
        for name, weight in named_weights(pairs).items():
            own.pop(name).copy_(weight)
    assert not own
    save_policy(merge_adapters(adapted) if merged else adapted, service.tokenizer, folder)


def targets_of(pairs: Pairs, bank: AdapterBank) -> list[str]:
    """Return the names of adapted layers: within their blocks, as servers read them, unless other layers have these."""
    suffixes = {name.rpartition(".")[2] for name in pairs}
    plain_suffixes = {name.rpartition(".")[2] for name in bank.layers if name not in pairs}
    return sorted(pairs if suffixes & plain_suffixes else suffixes)


def _check_alpha(folder: Path, bank: AdapterBank) -> None:
    alpha = _read_json(folder / "adapter_config.json").get("lora_alpha")
    if alpha != bank.alpha:
        raise RequestFailedError(
            f"the state has lora_alpha {show(alpha)}, this service {bank.alpha:g}; set alpha to it"
        )


def _read(file: Path) -> dict[str, Tensor]:
    if not os.path.isfile(file):
        raise RequestFailedError(
            f"no state is saved at {file.parent}: {file.name} is missing; name one of `save_state`"
        )
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RequestFailedError(f"{file} cannot be read: {error}") from error
    return tensors


def _read_json(file: Path) -> dict[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestFailedError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RequestFailedError(f"{file} holds {show(values)}, expected a JSON object")
    return values
