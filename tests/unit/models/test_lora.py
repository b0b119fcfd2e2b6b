"""Variants of adapters: rsLoRA's scale and DoRA's magnitudes, against peft and by hand."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from rlkit_servers.sglang.launch import Launch

from rlkit.base.errors import EngineError, RecipeError
from rlkit.commands import parse
from rlkit.distributed.ranks import Ranks
from rlkit.engines import SGLangServer
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.models.lora import adapters_off, add_lora, merge_adapters, merged_weight
from rlkit.models.save import save_policy
from rlkit.models.source import locate
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Lora, Model
from rlkit.run.preflight.adapter_check import check_adapters
from rlkit.testing import random_model, save_random_model
from rlkit.train.models import Models, Placer
from rlkit.train.setup import fabric_for

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 11, 12]])
VARIANTS = [Lora(4, 8, use_rslora=True), Lora(4, 8, use_dora=True), Lora(4, 8, use_rslora=True, use_dora=True)]


def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy(input_ids=TOKENS).logits.float()  # type: ignore[no-any-return]


def trained(policy: Any) -> Any:
    """Return a policy whose adapters have an effect; at the start they have none."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])  # weights [O,I] and [I,O]
@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_merged_weights_are_pefts(kind: str, lora: Lora) -> None:
    policy = trained(add_lora(random_model(kind), lora))
    expected = logits(policy)
    with adapters_off(policy):
        assert (logits(policy) - expected).abs().max() > 0.1
    peft: Any = deepcopy(policy)
    merged_by_peft = dict(peft.merge_and_unload().named_parameters())
    streamed = {name: x for bucket in PolicyWeights(policy).buckets() for name, x in bucket}
    merged = merge_adapters(policy)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter.detach(), merged_by_peft[name].detach(), atol=1e-6, rtol=1e-5)
        assert torch.equal(streamed[name], parameter)


def test_a_merged_weight_by_hand() -> None:
    """W + 2 B A = [[3, 4], [0, 1]] + 2 [[0], [1]] [[0.5, 1]] = [[3, 4], [1, 3]]: norms 5 and sqrt(10)."""
    model: Any = torch.nn.Sequential()
    model.config = SimpleNamespace(model_type="custom", tie_word_embeddings=False, get=lambda *_: None)
    model.layer = torch.nn.Linear(2, 2, bias=False)
    model.layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    adapted: Any = add_lora(model, Lora(1, 2.0, ["layer"], use_dora=True), task=None)  # type: ignore[arg-type]
    layer = adapted.base_model.model.layer
    assert layer.lora_magnitude_vector["default"].weight.tolist() == [5.0, 1.0]
    layer.lora_A["default"].weight.data = torch.tensor([[0.5, 1.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[0.0], [1.0]])
    layer.lora_magnitude_vector["default"].weight.data = torch.tensor([10.0, 1.0])
    root = 10**0.5
    torch.testing.assert_close(
        merged_weight(layer, layer.base_layer.weight), torch.tensor([[6.0, 8.0], [1 / root, 3 / root]])
    )


def test_rslora_divides_alpha_by_the_root_of_the_rank() -> None:
    policy: Any = add_lora(random_model("qwen2"), Lora(4, 8, use_rslora=True))
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == Lora(4, 8, use_rslora=True).scale == 4.0
    parcel = PolicyWeights(policy).adapter()
    assert parcel is not None
    assert (parcel[0]["r"], parcel[0]["lora_alpha"]) == (4, 16.0)  # servers divide alpha by the rank


@pytest.mark.parametrize("lora", VARIANTS, ids=str)
def test_a_saved_variant_is_loaded_by_peft_and_trained_further(lora: Lora, tmp_path: Path) -> None:
    base = save_random_model(tmp_path / "base")
    policy = trained(load_policy(Model(str(base), lora=lora)))
    expected, tensors = logits(policy), get_peft_model_state_dict(policy)
    parcel = PolicyWeights(policy).adapter()
    assert parcel is not None
    assert {name: x.tolist() for name, x in parcel[1]} == {name: x.tolist() for name, x in tensors.items()}
    save_policy(policy, load_tokenizer(Model(str(base))), tmp_path / "adapter")
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(load_policy(Model(str(base))), tmp_path / "adapter")), expected
    )
    saved = locate(str(tmp_path / "adapter")).lora
    assert saved is not None
    assert (saved.rank, saved.alpha, saved.use_rslora, saved.use_dora) == (4, 8, lora.use_rslora, lora.use_dora)
    torch.testing.assert_close(logits(load_policy(Model(str(tmp_path / "adapter"), lora=lora))), expected)
    merged = load_policy(Model(str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RecipeError, match=f"set model.lora.rank: 4 .*use_dora: {str(lora.use_dora).lower()}; for new"):
        load_policy(Model(str(tmp_path / "adapter"), lora=Lora(4, 8)))


def test_dora_starts_as_a_base_in_bfloat16(tmp_path: Path) -> None:
    """Norms that are rounded to 8 bits would scale each output by up to 0.4%."""
    base = str(save_random_model(tmp_path / "base"))
    policy = load_policy(Model(base, lora=Lora(4, use_dora=True), dtype="bfloat16"))
    layer: Any = policy.get_base_model().model.layers[0].self_attn.q_proj  # type: ignore[attr-defined]
    magnitudes = layer.lora_magnitude_vector["default"].weight
    assert magnitudes.dtype == torch.float32
    assert torch.equal(magnitudes, layer.base_layer.weight.float().norm(dim=1))
    x = torch.randn(3, 32)
    torch.testing.assert_close(layer(x.bfloat16()), layer.base_layer(x.bfloat16()))


def test_what_cannot_apply_dora_is_refused() -> None:
    options = ["--fabric.strategy=FSDP2", "--fabric.strategy.tensor_parallel=2", "--fabric.devices=2"]
    options.append("--rollout.engine=SGLangServer")
    adapters = ["--model.lora.use_dora=true", "--critic.lora.use_dora=true"]
    with pytest.raises(RecipeError) as caught:
        parse("fit", ["--recipe=quick_ppo", *options, *adapters])
    assert [line.partition(",")[0] for line in str(caught.value).splitlines()] == [
        "model.lora.use_dora is true",
        "critic.lora.use_dora is true",
    ]
    policy = load_policy(Model("tiny", lora=Lora(2, use_dora=True)))
    runtime: Any = SimpleNamespace(
        policy=policy,
        device=torch.device("cpu"),
        autocast=nullcontext,
        context=64,
        stop_ids=(),
        gather_world=lambda x: [x],
    )
    with pytest.raises(EngineError, match=r"servers do not apply DoRA; leave it out to send merged weights"):
        SGLangServer(launch=Launch(adapter_only=True)).bind(runtime)


def test_policy_and_critic_share_one_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are those of a critic with a base of its own."""

    def gradients(*options: str) -> tuple[int, int, list[torch.Tensor]]:
        recipe = parse("fit", ["--recipe=quick_ppo", "--model.lora.rank=4", "--critic.lora.rank=2", *options]).recipe
        fabric = fabric_for(recipe)
        fabric.launch()
        models = Models(recipe, Placer(fabric, Ranks(fabric)))
        assert models.critic is not None
        policy, critic = ({p.data_ptr(): p.nbytes for p in m.parameters() if not p.requires_grad}
                          for m in (models.actor, models.critic.inner))  # fmt: skip
        torch.nn.init.ones_(models.critic.inner.head.weight)
        tokens = torch.arange(24).view(2, 12)
        losses = (
            models.critic.module(tokens, tokens > 0).square().sum(),
            models.policy.module(tokens, tokens > 0).logps.sum(),
        )
        for model, loss in zip((models.critic, models.policy), losses, strict=True):
            model.backward(loss)
        trained = [p.grad for m in (models.actor, models.critic.inner) for p in m.parameters() if p.grad is not None]
        return sum(policy.values()), sum((policy | critic).values()), [*losses, *trained]

    base, both, shared = gradients()
    assert both == base > 1_900_000
    assert gradients("--critic.path=tiny")[1] == base  # the same weights, by a path of its own
    monkeypatch.setattr("rlkit.train.models.share_frozen", lambda weights, others: None)
    base, both, apart = gradients()
    assert both == 2 * base
    assert len(shared) == len(apart) > 20
    assert sum(gradient.abs().max() > 0 for gradient in shared) > 20
    assert all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))
    assert gradients("--train.offload_during_rollout=true")[1] == 2 * base


def test_what_cannot_use_four_bits_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = ["--fabric.strategy=FSDP2", "--fabric.strategy.tensor_parallel=2"]
    options = ["--model.quantization=nf4", *ranks, "--rollout.engine=SGLangServer"]
    monkeypatch.setattr("rlkit.recipe.check_model.find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        parse("fit", ["--recipe=quickstart", *options])
    start = "model.quantization is 'nf4', but "
    assert [line.partition(start)[2].partition("; ")[0] for line in str(caught.value).splitlines()] == [
        "all weights are trained, which needs more than 4 bits",
        "fabric.strategy has tensor_parallel=2, which divides matrices in 4 bits",
        "bitsandbytes is not installed: pip install -e '.[4bit]' in a checkout of rlkit",
    ]
    mixture = Model(str(save_random_model(tmp_path / "mixture", "qwen3_moe")), Lora(2), quantization="nf4")
    for refuse in (load_policy, lambda model: [*check_adapters(model)]):
        with pytest.raises(RecipeError, match=r"the model has experts, which would stay as they are; set it to null"):
            refuse(mixture)
    with pytest.raises(RecipeError, match=r"expected null|expected 'nf4'|expected nf4"):
        parse("fit", ["--recipe=quick_lora", "--model.quantization=int3"])
