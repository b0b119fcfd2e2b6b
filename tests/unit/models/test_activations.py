"""How large a micro-batch may be where the recipe leaves it to rlkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlkit.models.activations import token_limit
from rlkit.recipe import FSDP2, Fabric, Lora, Model, Train

MIB = 2**20


def saved(folder: Path, hidden: int, inner: int, layers: int) -> Model:
    AutoConfig.for_model(
        "qwen2", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    ).save_pretrained(folder)  # fmt: skip
    return Model(str(folder))


def limit(model: Model, accelerator: Any = "cpu", precision: Any = "32-true", **train: Any) -> int:
    return token_limit(Train(steps=1, **train), model, Fabric(accelerator=accelerator, precision=precision))


def test_what_is_given_counts(tmp_path: Path) -> None:
    assert limit(saved(tmp_path, 64, 128, 2), max_tokens_per_micro_batch=77) == 77


def test_a_small_model_gets_what_the_device_computes_fast(tmp_path: Path) -> None:
    model = saved(tmp_path, 64, 128, 2)
    assert limit(model) == 1280
    assert limit(model, "gpu") == 16384


def test_ranks_that_share_tokens_have_more_together(tmp_path: Path) -> None:
    model = saved(tmp_path, 64, 128, 2)
    fabric = Fabric(accelerator="cpu", strategy=FSDP2(sequence_parallel=4))
    assert token_limit(Train(steps=1), model, fabric) == 4 * 1280
    assert token_limit(Train(steps=1, max_tokens_per_micro_batch=77), model, fabric) == 77


def test_a_large_model_gets_what_a_share_of_the_memory_holds(tmp_path: Path) -> None:
    """A token leaves 33 * 1024 + 16 * 4096 bytes a layer: 20 layers, 1,986,560 bytes; 1 GiB holds 540."""
    model = saved(tmp_path, 1024, 4096, 20)
    assert limit(model) == 540
    assert (
        limit(model, offload_activations=True) == limit(model, checkpoint_activations=True) == 1280
    )  # one layer's 99,328 bytes: 10,810
    assert limit(saved(tmp_path / "larger", 4096, 16384, 40)) == 512


@pytest.mark.parametrize(("precision", "each"), [("32-true", 99_328), ("bf16-mixed", 64_512)])
def test_a_gpus_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, each: int) -> None:
    model = saved(tmp_path, 1024, 4096, 20)
    assert limit(model, "gpu", precision) == min(16384, int(0.3 * 80 * 2**30 / (each * 20)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), {"total_memory": 8 * 2**30}))
    assert limit(model, "auto", precision) == int(0.3 * 8 * 2**30 / (each * 20))
    assert limit(model, "cpu", precision) == max(512, int(2**30 / (each * 20)))


def test_adapters_leave_less(tmp_path: Path) -> None:
    model = saved(tmp_path, 1024, 4096, 20)
    model.lora = Lora()
    assert limit(model) == int(2**30 / ((26 * 1024 + 16 * 4096) * 20))


def test_dora_leaves_two_outputs_of_each_layer_besides(tmp_path: Path) -> None:
    """Of 4 bytes each: q, o and down have 1024 outputs, k and v 1024, gate and up 4096."""
    model = saved(tmp_path, 1024, 4096, 8)
    model.lora = Lora(use_dora=True)
    assert limit(model) == int(2**30 / ((26 * 1024 + 16 * 4096 + 8 * (5 * 1024 + 2 * 4096)) * 8))
