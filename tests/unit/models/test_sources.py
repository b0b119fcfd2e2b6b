"""What `model.path` may name: adapters, runs and checkpoints besides models; read as data only."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlkit.base.errors import RecipeError
from rlkit.models.config import load_config
from rlkit.models.load import load_backbone, load_policy, load_tokenizer, stop_ids
from rlkit.models.lora import has_lora, merge_adapters
from rlkit.models.save import save_policy
from rlkit.models.source import ADAPTER, ADAPTER_WEIGHTS, SHIPPED, locate
from rlkit.recipe import Lora, Model
from rlkit.testing import save_random_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 11, 12]])


def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy(input_ids=TOKENS).logits.float()  # type: ignore[no-any-return]


def trained(model: Model) -> Any:
    """Load a policy whose adapters say something: they are 0 at the start."""
    policy = load_policy(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=generator)
    return policy


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run's folder with an adapter of `tiny` in `final/`, and that policy's logits."""
    model = Model("tiny", lora=Lora(rank=4, alpha=8))
    run = tmp_path_factory.mktemp("runs") / "run"
    policy = trained(model)
    run.mkdir()
    save_policy(policy, load_tokenizer(model), run / "final")
    (run / "recipe.yaml").write_text("model: {path: tiny}")
    (run / "result.json").write_text(json.dumps({"steps": 3}))
    return run, logits(policy)


@pytest.mark.parametrize("name", ["", "final"])
def test_an_adapter_goes_on_as_it_is_where_the_recipe_has_lora(adapter: tuple[Path, torch.Tensor], name: str) -> None:
    run, expected = adapter
    model = Model(str(run / name), lora=Lora(rank=4, alpha=8))
    policy = load_policy(model)
    torch.testing.assert_close(logits(policy), expected)
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.named_parameters() if "lora_" in n
    }
    assert load_config(model).model_type == "qwen2"
    assert load_tokenizer(model).chat_template
    assert stop_ids(model, load_tokenizer(model)) == stop_ids(Model("tiny"), load_tokenizer(Model("tiny")))
    with policy.disable_adapter():
        torch.testing.assert_close(logits(policy), logits(load_policy(Model("tiny"))))


def test_an_adapter_is_merged_if_all_weights_are_trained(adapter: tuple[Path, torch.Tensor]) -> None:
    run, expected = adapter
    policy = load_policy(Model(str(run)))
    assert not has_lora(policy)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in policy.parameters())
    torch.testing.assert_close(logits(policy), expected, rtol=1e-4, atol=1e-4)
    backbone, _ = load_backbone(Model(str(run)))
    hidden = backbone(input_ids=TOKENS).last_hidden_state
    torch.testing.assert_close(policy.get_output_embeddings()(hidden), logits(policy), rtol=1e-4, atol=1e-4)


def test_a_critics_own_adapters_may_have_another_rank(adapter: tuple[Path, torch.Tensor]) -> None:
    for empty in (False, True):
        backbone, _ = load_backbone(Model(str(adapter[0]), lora=Lora(rank=2, alpha=2)), empty=empty)
        assert {min(p.shape) for n, p in backbone.named_parameters() if "lora_" in n} == {2}


@pytest.mark.parametrize("other", [Lora(rank=8, alpha=8), Lora(rank=4, alpha=16)])
def test_an_adapter_of_another_shape_is_refused(adapter: tuple[Path, torch.Tensor], other: Lora) -> None:
    with pytest.raises(RecipeError, match=r"of rank 4 on tiny, of alpha 8, .*model.lora.rank: 4 .*--merge-lora"):
        load_config(Model(str(adapter[0]), lora=other))  # before any weights are read


def test_other_targets_are_refused_by_name(adapter: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(RecipeError, match=r"does not fit model.lora.*down_proj.lora_A.weight is \[4, 256\] there"):
        load_policy(Model(str(adapter[0]), lora=Lora(4, 8, ["q_proj", "v_proj"])))


def copied(adapter: tuple[Path, torch.Tensor], folder: Path, **changes: Any) -> Path:
    """Copy the adapter with its configuration changed."""
    config = json.loads((adapter[0] / "final" / ADAPTER).read_text()) | changes
    folder.mkdir()
    (folder / ADAPTER).write_text(json.dumps(config))
    save_file(load_file(adapter[0] / "final" / ADAPTER_WEIGHTS), folder / ADAPTER_WEIGHTS)
    return folder


def test_an_adapters_targets_are_its_list_or_its_tensors(adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """A pattern is not applied: the tensors have the names of the modules that it stands for."""
    listed = copied(adapter, tmp_path / "listed", target_modules=["v_proj", "q_proj"])
    assert locate(str(listed)).lora == Lora(4, 8, ["q_proj", "v_proj"])
    lora = locate(str(copied(adapter, tmp_path / "pattern", target_modules=".*_proj"))).lora
    assert lora is not None
    assert "model.layers.0.self_attn.q_proj" in lora.targets
    policy = load_policy(Model(str(tmp_path / "pattern"), lora=Lora(4, 8, lora.targets)))
    torch.testing.assert_close(logits(policy), adapter[1])


def test_an_adapter_of_a_shipped_model_has_it_beside(adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """peft loads the folder as it is, with rlkit's logits; rlkit knows the shipped model, also in a moved folder."""
    config = json.loads((adapter[0] / "final" / ADAPTER).read_text())
    assert config["base_model_name_or_path"] == str(adapter[0] / "final" / "base")
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(adapter[0] / "final")
    torch.testing.assert_close(logits(loaded.eval()), adapter[1])
    assert locate(str(adapter[0])).model == str(SHIPPED["tiny"])
    moved = tmp_path / "moved"
    shutil.copytree(adapter[0] / "final", moved)
    assert locate(str(moved)).model == str(SHIPPED["tiny"])
    (moved / "base" / "config.json").write_text((moved / "base" / "config.json").read_text() + " ")
    assert locate(str(moved)).model == str(moved / "base")  # no copy any more: the base that lies there


def test_adapters_of_an_adapter_merged_are_found_through_both(
    adapter: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """New adapters cannot start on another adapter, but on a folder into which it was merged."""
    base = tmp_path / "base"
    save_policy(merge_adapters(trained(Model("tiny", lora=Lora(4, 8)))), load_tokenizer(Model("tiny")), base)
    model = Model(str(base), lora=Lora(rank=2, alpha=2))
    policy = trained(model)
    save_policy(policy, load_tokenizer(model), tmp_path / "second")
    assert locate(str(tmp_path / "second")).base.location == str(base)  # type: ignore[union-attr]
    torch.testing.assert_close(logits(load_policy(Model(str(tmp_path / "second"), lora=Lora(2, 2)))), logits(policy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": None}, "does not name its base model; set base_model_name_or_path in"),
        ({"base_model_name_or_path": "/nowhere/a/model"}, "'/nowhere/a/model', which is not on this machine; set base"),
        ({"base_model_name_or_path": "nobody/nothing"}, "nobody/nothing, which cannot be loaded"),
        ({"peft_type": "IA3"}, "is of type 'IA3', expected plain LoRA"),
        ({"use_dora": True}, "has use_dora = True, expected plain LoRA, since .* has no lora_magnitude"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa', expected plain LoRA"),
        ({"r": 1_000_000_000}, "r = 1000000000, which is not the rank of the adapter's tensors"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan, expected a number above 0"),
        ({"lora_alpha": None}, "lora_alpha = None, expected a number above 0"),
        ({"lora_alpha": True}, "lora_alpha = True, expected a number above 0"),
        ({"lora_alpha": 10**400}, "expected a number above 0"),
        ({"base_model_name_or_path": "x" * 5000}, "which cannot be loaded"),
    ],
)
def test_adapters_that_cannot_be_used_say_why(
    adapter: tuple[Path, torch.Tensor], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_config(Model(str(copied(adapter, tmp_path / "a", **changes))))


def test_an_adapter_that_is_based_on_itself_is_refused(adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    copied(adapter, tmp_path / "a", base_model_name_or_path=str(tmp_path / "a"))
    with pytest.raises(RecipeError, match="is based on more than 8 other adapters"):
        locate(str(tmp_path / "a"))


def test_nothing_that_a_strangers_adapter_names_is_imported(
    adapter: tuple[Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft imports the module `megatron_core`, and a class of `auto_mapping`, where a configuration names them."""
    (tmp_path / "stranger.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    mapping = {"base_model_class": "Anything", "parent_library": "stranger"}
    folder = copied(adapter, tmp_path / "a", megatron_config={"a": 1}, megatron_core="stranger", auto_mapping=mapping)
    torch.testing.assert_close(logits(load_policy(Model(str(folder), lora=Lora(4, 8)))), adapter[1])
    assert "stranger" not in sys.modules


@pytest.mark.parametrize("odd", [float("nan"), 1])
def test_an_adapter_without_finite_numbers_is_refused(
    adapter: tuple[Path, torch.Tensor], tmp_path: Path, odd: float
) -> None:
    folder = copied(adapter, tmp_path / "a")
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name: torch.full(x.shape, odd) for name, x in tensors.items()}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(RecipeError, match="has numbers in base_model.* not finite"):
        load_policy(Model(str(folder)))


class Bomb:
    """What runs where a pickle is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (1,))


def test_pickled_weights_are_never_read(adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder = copied(adapter, tmp_path / "a")
    torch.save({"x": Bomb()}, folder / "adapter_model.bin")
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(RecipeError, match=r"without adapter_model.safetensors; save it as safetensors"):
        load_policy(Model(str(folder)))
    model = save_random_model(tmp_path / "m")
    torch.save({"x": Bomb()}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    for load in (load_policy, load_backbone):
        with pytest.raises(RecipeError, match=r"no file named model.safetensors"):
            load(Model(str(model)))


def test_code_that_comes_with_a_model_does_not_run(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text("raise SystemExit('ran')")
    for load in (load_config, load_policy):
        with pytest.raises(RecipeError, match="which cannot be loaded"):
            load(Model(str(model)))


def test_the_merged_weights_are_rounded_once(adapter: tuple[Path, torch.Tensor]) -> None:
    """In float32, and then to the base's type: rounding the difference first would lose a bit more."""
    run, _ = adapter
    exact = dict(load_policy(Model(str(run))).named_parameters())
    rounded = dict(load_policy(Model(str(run), dtype="bfloat16"), frozen=True).named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in rounded.values())
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())
    half = merge_adapters(load_policy(Model(str(run), dtype="bfloat16", lora=Lora(4, 8))))
    base, name = load_policy(Model("tiny")), "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(
        half.get_parameter(name),
        (base.get_parameter(name).bfloat16().float() + (exact[name] - base.get_parameter(name))).bfloat16(),
    )


def test_positions_stay_exact_in_bfloat16() -> None:
    exact, half = load_policy(Model("tiny")), load_policy(Model("tiny", dtype="bfloat16", lora=Lora(4, 8)))
    [frequencies] = [b for n, b in exact.named_buffers() if n.endswith("rotary_emb.inv_freq")]
    [rounded] = [b for n, b in half.named_buffers() if n.endswith("rotary_emb.inv_freq")]
    assert torch.equal(frequencies, rounded)


def test_a_plain_model_is_loaded_by_transformers_as_before(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "m")
    torch.testing.assert_close(
        logits(load_policy(Model(str(folder)))), logits(AutoModelForCausalLM.from_pretrained(folder))
    )
