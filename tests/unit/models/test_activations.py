"""How large a micro-batch may be where the recipe leaves it to rlkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlkit.engines import SGLangEngine, TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.losses import ClipLoss
from rlkit.models.activations import token_limit
from rlkit.recipe import FSDP2, Critic, Fabric, Lora, Model, Recipe, Rollout, Teacher, Train

MIB = 2**20


def saved(folder: Path, hidden: int, inner: int, layers: int, kind: str = "qwen2") -> Model:
    AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    ).save_pretrained(folder)  # fmt: skip
    return Model(str(folder))


def recipe_of(model: Model, fabric: Fabric, engine: RolloutEngine | None = None, **train: Any) -> Recipe:
    rollout = Rollout(engine or TorchEngine(), 2)
    return Recipe(model, [{"prompt": "?"}], rollout, ClipLoss(), Train(1, **train), fabric=fabric)


def limit(model: Model, accelerator: Any = "cpu", precision: Any = "32-true", **train: Any) -> int:
    return token_limit(recipe_of(model, Fabric(accelerator=accelerator, precision=precision), **train))


def test_what_is_given_counts(tmp_path: Path) -> None:
    assert limit(saved(tmp_path, 64, 128, 2), max_tokens_per_micro_batch=77) == 77


def test_a_small_model_gets_what_the_device_computes_fast(tmp_path: Path) -> None:
    model = saved(tmp_path, 64, 128, 2)
    assert limit(model) == 1280
    assert limit(model, "gpu") == 65536


def test_ranks_that_share_tokens_have_more_together(tmp_path: Path) -> None:
    model = saved(tmp_path, 64, 128, 2)
    fabric = Fabric(accelerator="cpu", strategy=FSDP2(sequence_parallel=4))
    assert token_limit(recipe_of(model, fabric)) == 4 * 1280
    assert token_limit(recipe_of(model, fabric, max_tokens_per_micro_batch=77)) == 77


def test_a_large_model_gets_what_a_share_of_the_memory_holds(tmp_path: Path) -> None:
    """A token leaves 33 * 1024 + 16 * 4096 bytes a layer: 20 layers, 1,986,560 bytes; 1 GiB holds 540."""
    model = saved(tmp_path, 1024, 4096, 20)
    assert limit(model) == 540
    assert (
        limit(model, offload_activations=True) == limit(model, checkpoint_activations=True) == 1280
    )  # one layer's 99,328 bytes: 10,810
    assert limit(saved(tmp_path / "larger", 4096, 16384, 40)) == 512


@pytest.mark.parametrize(("precision", "each", "logit"), [("32-true", 99_328, 4), ("bf16-mixed", 64_512, 2)])
def test_a_gpus_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, each: int, logit: int
) -> None:
    """A token leaves its 64 logits, too, but those of adapters, which a GPU computes again, as a CPU does."""
    model = saved(tmp_path, 1024, 4096, 20, "qwen2_moe")
    token_bytes = each * 20 + 64 * logit
    assert limit(model, "gpu", precision) == min(16384, int(0.3 * 80 * 2**30 / token_bytes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), {"total_memory": 8 * 2**30}))
    assert limit(model, "auto", precision) == int(0.3 * 8 * 2**30 / token_bytes)
    assert limit(model, "cpu", precision) == max(512, int(2**30 / (each * 20)))


def test_the_memory_of_a_large_gpu_counts_for_a_small_model(tmp_path: Path) -> None:
    """In bf16-mixed a token takes 20 * (31 * 1024 + 8 * 4096) + 2 * 64 = 1,290,368 bytes, a weight at most 32.

    A layer has 4 * 1024^2 weights of attention with 3 * 1024 biases, 3 * 1024 * 4096 of its MLP, 2 * 1024 of its norms;
    besides there are 2 * 64 * 1024 of tokens and 1024 of the last norm. 0.6 of 80 GiB less 10.7 GB holds 31,614.
    """
    model, fabric = saved(tmp_path, 1024, 4096, 20), Fabric(accelerator="gpu", precision="bf16-mixed")
    weights = 20 * (4 * 1024**2 + 3 * 1024 * 4096 + 5 * 1024) + 129 * 1024
    recipe = recipe_of(model, fabric)
    assert token_limit(recipe) == int((0.6 * 80 * 2**30 - 32 * weights) / 1_290_368) == 31614
    assert token_limit(recipe, 140 * 2**30) == 61571
    assert token_limit(recipe, 24 * 2**30) == int(0.3 * 24 * 2**30 / 1_290_368) == 5991


@pytest.mark.parametrize("other", ["engine", "critic", "teacher", "checkpoint_activations", "offload_activations"])
def test_other_parts_on_the_gpu_keep_the_share_of_its_memory(tmp_path: Path, other: str) -> None:
    model, fabric = saved(tmp_path, 1024, 4096, 20), Fabric(accelerator="gpu", precision="bf16-mixed")
    part = {"engine": SGLangEngine(), "critic": Critic(), "teacher": Teacher("other")}.get(other)
    train = {other: True} if part is None else {}
    recipe = recipe_of(model, fabric, part if isinstance(part, RolloutEngine) else None, **train)
    if part is not None and other != "engine":
        setattr(recipe, other, part)
    assert token_limit(recipe) == 16384


def test_adapters_leave_less(tmp_path: Path) -> None:
    model = saved(tmp_path, 1024, 4096, 20)
    model.lora = Lora()
    assert limit(model) == int(2**30 / ((26 * 1024 + 16 * 4096) * 20))


def test_dora_leaves_two_outputs_of_each_layer_besides(tmp_path: Path) -> None:
    """Of 4 bytes each: q, o and down have 1024 outputs, k and v 1024, gate and up 4096."""
    model = saved(tmp_path, 1024, 4096, 8)
    model.lora = Lora(use_dora=True)
    assert limit(model) == int(2**30 / ((26 * 1024 + 16 * 4096 + 8 * (5 * 1024 + 2 * 4096)) * 8))
