"""The choice of `model.attention`: refused where it cannot be, and the same metrics whichever it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.probe import why_not
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.models.actor import Actor
from rlkit.models.load import load_backbone, load_policy
from rlkit.recipe import Fabric, Model, Recipe, check, check_model
from rlkit.run.preflight.plan import batches
from rlkit.testing import random_model
from rlkit.train.setup import fabric_for
from tests.unit.phases import recipe

FLASH: Any = "flash_attention_2"


def of(attention: Any, **fabric: Any) -> Recipe:
    return recipe(model=Model("tiny", attention=attention), fabric=Fabric(**fabric))


@pytest.fixture
def only_flash() -> Iterator[str]:
    """An implementation that reads no masks, as those for GPUs."""

    def attend(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        raise RuntimeError("FlashAttention only supports CUDA")

    ALL_ATTENTION_FUNCTIONS.register("only_flash", attend)
    yield "only_flash"
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop("only_flash")


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_models_are_loaded_with_it(name: Any) -> None:
    model = Model("tiny", attention=name)
    assert load_policy(model).config._attn_implementation == name  # type: ignore[attr-defined]
    assert load_policy(model, empty=True).config._attn_implementation == name  # type: ignore[attr-defined]
    assert load_backbone(model)[0].config._attn_implementation == name  # type: ignore[attr-defined]


def test_log_probs_are_those_of_the_other() -> None:
    tokens = torch.tensor([[5, 3, 4, 6, 7], [5, 3, 8, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()
    one, other = (Actor(load_policy(Model("tiny", attention=name)))(tokens, mask).logps for name in ("sdpa", "eager"))  # type: ignore[arg-type]
    assert torch.allclose(one, other, atol=1e-5)


def test_flash_attentions_needs_are_checked_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError) as found:
        check(of(FLASH, accelerator="cpu"))
    assert "flash_attn is not installed: pip install flash-attn, or choose sdpa" in str(found.value)
    assert "which needs a GPU, but fabric.accelerator is 'cpu'" in str(found.value)
    assert "fabric.precision is '32-true'; set fabric.precision: bf16-mixed" in str(found.value)
    monkeypatch.setattr(check_model, "find_spec", lambda name: object() if name == "flash_attn" else None)
    check(of(FLASH, precision="bf16-mixed"))
    check(of("eager"))
    with pytest.raises(RecipeError, match="but there is no GPU; set it to sdpa"):
        fabric_for(of(FLASH, precision="bf16-mixed"))


def test_the_plan_says_what_it_costs() -> None:
    assert not [line for line in batches(of("sdpa"), None) if "attention" in line]
    assert [line for line in batches(of("eager"), None) if line.startswith("attention: eager, which trains on padded")]


def test_the_decoder_has_masks_of_its_own(only_flash: str) -> None:
    """It samples with SDPA, whatever the trainer attends by, which stays as it is."""
    model = random_model("gemma2")
    expected = Decoder(model)
    logits = [expected.admit([[5, 3, 4], [5, 3]], [2, 1]), expected.step(torch.tensor([4, 5, 6]))]
    model.config._attn_implementation = only_flash  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="only supports CUDA"):
        model(input_ids=torch.tensor([[5, 3]]))
    assert why_not(model) is None
    found = Decoder(model)
    assert torch.equal(found.admit([[5, 3, 4], [5, 3]], [2, 1]), logits[0])
    assert torch.equal(found.step(torch.tensor([4, 5, 6])), logits[1])
    assert model.config._attn_implementation == only_flash  # type: ignore[attr-defined]


def test_the_head_is_probed_without_it(only_flash: str) -> None:
    model = random_model("qwen2")
    model.config._attn_implementation = only_flash  # type: ignore[attr-defined]
    assert Actor(model).chunked  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_the_cache_is_in_the_type_of_autocast(kind: str) -> None:
    """Rotated keys are float32 under autocast, and would take twice the memory."""
    decoder = Decoder(random_model(kind), lambda: torch.autocast("cpu", torch.bfloat16))
    decoder.admit([[5, 3, 4], [5, 3]], [2, 1])
    decoder.step(torch.tensor([4, 5, 6]))
    assert {layer.keys.dtype for layer in decoder.layers} == {torch.bfloat16}


def test_an_unknown_one_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", "quickstart", "--model.attention=fast"]) == 2
    shown = capsys.readouterr().err
    assert "fast" in shown
    assert "flash_attention_2" in shown
