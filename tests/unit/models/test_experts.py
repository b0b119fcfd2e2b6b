"""Adapters of experts, which are parameters of three dimensions, and of layers that only some architectures have."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from rlkit_servers.sglang.launch import Launch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from rlkit.base.errors import EngineError, RecipeError
from rlkit.engines import SGLangServer
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.models.lora import adapters_by_weight, adapters_off, add_lora, base_model, merge_adapters, merged_weight
from rlkit.models.save import save_policy
from rlkit.models.source import ADAPTER, locate
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Lora, Model
from rlkit.testing import random_model, save_random_model
from tests.unit.models.test_lora import logits, trained

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
TARGETS: dict[str, str | list[str]] = {
    "qwen3_moe": "all-linear",
    "gpt_oss": ["q_proj", "experts.gate_up_proj", "experts.down_proj"],  # weights [E,I,O]
}


class Experts(nn.Module):
    """Two experts with a weight each."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        weights = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        self.weights = nn.Parameter(weights.mT.contiguous() if is_transposed else weights)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_merged_experts_by_hand(is_transposed: bool) -> None:
    """W_e + 2 B_e A_e: [1, 2] + 2 * 5 * [1, 0] = [11, 2], and [3, 4] + 2 * 7 * [0, 1] = [3, 18]."""
    model: Any = nn.Sequential()
    model.config = SimpleNamespace(model_type="custom", tie_word_embeddings=False, get=lambda *_: None)
    model.experts = Experts(is_transposed)
    model.get_output_embeddings = lambda: None
    add_lora(model, Lora(1, 2.0, ["experts.weights"]), task=None)  # type: ignore[arg-type]
    layer = model.experts
    layer.lora_A["default"].weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[5.0, 7.0]])
    merged = merged_weight(layer, layer.get_base_layer().weights)
    assert (merged.mT if is_transposed else merged).tolist() == [[[11.0, 2.0]], [[3.0, 18.0]]]


@pytest.mark.parametrize("kind", EXPERTS)
def test_merged_experts_are_pefts(kind: str) -> None:
    policy = trained(add_lora(random_model(kind, **EXPERTS[kind]), Lora(2, 8, TARGETS[kind])))
    expected = logits(policy)
    with adapters_off(policy):
        assert (logits(policy) - expected).abs().max() > 0.1
    peft: Any = deepcopy(policy)
    merged_by_peft = dict(peft.merge_and_unload().named_parameters())
    weights = PolicyWeights(policy)
    streamed = {name: x for bucket in weights.buckets() for name, x in bucket}
    merged = merge_adapters(policy)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter.detach(), merged_by_peft[name].detach(), atol=1e-6, rtol=1e-5)
    as_saved = revert_weight_conversion(merged, {name: p.detach() for name, p in merged.named_parameters()})
    assert weights.specs.keys() == streamed.keys() == as_saved.keys()  # experts one by one, as servers read them
    for name, tensor in as_saved.items():
        assert torch.equal(streamed[name], tensor)
        assert weights.specs[name] == (tuple(tensor.shape), tensor.dtype)


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_saved_adapter_of_experts_is_read_and_trained_further(kind: str, tmp_path: Path) -> None:
    """peft gives joined matrices of experts, here gate and up, twice the rank, and says so in patterns."""
    base = str(save_random_model(tmp_path / "base", kind, **EXPERTS[kind]))
    lora = Lora(2, 8, TARGETS[kind])
    policy = trained(load_policy(Model(base, lora=lora)))
    expected, place = logits(policy), str(tmp_path / "adapter")
    save_policy(policy, load_tokenizer(Model(base)), Path(place))
    torch.testing.assert_close(logits(PeftModel.from_pretrained(load_policy(Model(base)), place)), expected)
    torch.testing.assert_close(logits(load_policy(Model(place, lora=lora))), expected)
    torch.testing.assert_close(logits(load_policy(Model(place))), expected, atol=1e-4, rtol=1e-4)
    saved = locate(place)
    assert saved.lora is not None
    assert saved.lora.scale == 4.0
    assert saved.patterns == (
        {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 16.0}}
        if kind == "qwen3_moe"
        else {}
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("alpha_pattern", {"(a+)+b": 4}, r"has alpha_pattern = .*, expected plain LoRA"),
        ("alpha_pattern", [1], r"has alpha_pattern = .*, expected plain LoRA"),
        ("rank_pattern", {"q_proj": 1.5}, r"has rank_pattern = .*, expected plain LoRA"),
        ("rank_pattern", {"q_proj": 10**9}, r"has rank 1000000000 for 'q_proj', which no tensor there has"),
        ("target_parameters", "experts", r"has target_parameters = 'experts', expected plain LoRA"),
    ],
)
def test_a_pattern_of_other_than_names_is_refused(name: str, value: object, problem: str, tmp_path: Path) -> None:
    policy = load_policy(Model("tiny", lora=Lora(2)))
    save_policy(policy, load_tokenizer(Model("tiny")), tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(RecipeError, match=problem):
        locate(str(tmp_path / "adapter"))


def test_all_linear_leaves_out_what_kernels_of_mixers_read() -> None:
    policy = add_lora(random_model("falcon_h1", **MAMBA), Lora(2))
    kinds = {name.split(".")[-2] for name in adapters_by_weight(base_model(policy))}
    assert kinds == {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(RecipeError, match=r"'out_proj' is incompatible with Mamba-based models"):
        add_lora(random_model("falcon_h1", **MAMBA), Lora(2, targets=["out_proj"]))


def test_servers_get_no_adapters_of_experts() -> None:
    policy = add_lora(random_model("qwen3_moe", **EXPERTS["qwen3_moe"]), Lora(2))
    runtime: Any = SimpleNamespace(
        policy=policy, device=torch.device("cpu"), autocast=nullcontext, context=64, stop_ids=(),
        gather_world=lambda x: [x],
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"adapters of experts and routers, which this model has; leave it out to"):
        SGLangServer(launch=Launch(adapter_only=True)).bind(runtime)
