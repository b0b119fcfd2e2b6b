"""The trial of adapters before the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from rlkit.base.errors import RecipeError
from rlkit.models.lora import adapters_by_weight, add_lora, base_model
from rlkit.recipe import Lora, Model
from rlkit.run.preflight import adapter_check
from rlkit.run.preflight.adapter_check import check_adapters, reach
from rlkit.testing import save_random_model
from tests.unit.models.test_experts import EXPERTS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE of three layers, the first of which is dense."""
    folder = tmp_path_factory.mktemp("mixture")
    changes = {"num_hidden_layers": 3, "mlp_only_layers": [0], "vocab_size": 512}
    return str(save_random_model(folder, "qwen3_moe", **EXPERTS["qwen3_moe"], **changes))


def test_a_model_without_adapters_is_not_tried() -> None:
    assert not list(check_adapters(Model("tiny")))


def test_weights_that_no_adapter_reaches_are_named() -> None:
    """Of 20 weights in matrices, 12 have an adapter; vectors do not count."""
    model: Any = nn.Sequential()
    model.config = SimpleNamespace(model_type="custom", tie_word_embeddings=False, get=lambda *_: None)
    model.layers = nn.ModuleList([nn.Linear(4, 3)])
    model.head = nn.Linear(4, 2)
    adapted = add_lora(model, Lora(1, targets=["layers.0"]), task=None)  # type: ignore[arg-type]
    assert reach(adapted) == "adapters reach 60% of the weights in matrices; not: head (40.0%)"


def test_experts_of_a_shallow_copy_are_tried(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers have both kinds; a copy has these two alone, narrow ones, and enough experts to choose among."""
    monkeypatch.setattr(adapter_check, "SMALL", 0)
    monkeypatch.setattr(adapter_check, "NARROW", 16)
    tried: list[Any] = []
    require = adapter_check._Trial.require
    monkeypatch.setattr(
        adapter_check._Trial, "require", lambda trial: (tried.append(trial.base.config), require(trial))
    )
    [line] = check_adapters(Model(mixture, lora=Lora(2)))
    assert "experts" not in line  # they have adapters
    [config] = tried
    sizes = (config.num_hidden_layers, config.intermediate_size, config.num_experts, config.vocab_size)
    assert sizes == (2, 16, 4, 16)


def test_lists_by_layer_are_cut() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config: Any = AutoConfig.for_model("gpt_oss", num_hidden_layers=6, layer_types=kinds * 3)
    copies = list(adapter_check._copies(config, ["a", "a", "a", "b", "b", "b"]))  # layers 0 and 3 have all kinds
    assert [copy.layer_types for copy in copies] == [kinds, kinds * 2, kinds * 2]
    assert [copy.num_hidden_layers for copy in copies] == [2, 4, 4]
    assert [copy.intermediate_size for copy in copies] == [64, 64, config.intermediate_size]
    assert config.num_hidden_layers == 6


def test_a_copy_that_is_too_large_or_does_not_run_is_not_tried(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_check, "SMALL", 0)
    monkeypatch.setattr(adapter_check, "LARGEST_COPY", 1000)
    assert list(check_adapters(Model(mixture, lora=Lora(2))))[1].startswith("adapters: not tried before the run, since")


def test_adapters_of_a_shared_head_are_refused_by_name(tmp_path: Path) -> None:
    """Merged into the head, they change the embeddings as well."""
    base = str(save_random_model(tmp_path, tie_word_embeddings=True))
    with pytest.raises(RecipeError) as caught:
        list(check_adapters(Model(base, lora=Lora(2, targets=["q_proj", "lm_head"]))))
    assert "merging them changes logits by" in str(caught.value)
    assert str(caught.value).endswith("leave out of model.lora.targets: lm_head")


def test_experts_that_would_not_be_merged_are_refused_by_name(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge = adapter_check.merge_adapters

    @torch.no_grad()
    def merge_modules(policy: Any) -> Any:
        for name, layer in adapters_by_weight(base_model(policy)).items():
            if name.endswith("experts.down_proj"):
                layer.lora_B["default"].weight.zero_()
        return merge(policy)

    monkeypatch.setattr(adapter_check, "merge_adapters", merge_modules)
    with pytest.raises(RecipeError, match=r"merging them changes logits by .*targets: experts\.down_proj$"):
        list(check_adapters(Model(mixture, lora=Lora(2, targets=["q_proj", "experts.down_proj"]))))


def test_what_peft_does_not_support_is_refused(mixture: str) -> None:
    with pytest.raises(RecipeError, match=r"does not work with use_dora=True"):
        list(check_adapters(Model(mixture, lora=Lora(2, use_dora=True))))


def test_a_reward_model_is_tried(tmp_path: Path) -> None:
    base = str(save_random_model(tmp_path))
    [line] = check_adapters(Model(base, head="score", lora=Lora(2)))
    assert line.startswith("adapters reach ")
