"""A saved policy: where its generation stops, and the model card beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rlkit_authors.models import build_tokenizer, random_model
from transformers import GenerationConfig

from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.models.lora import add_lora
from rlkit.models.save import model_card, save_policy
from rlkit.recipe import Lora

FEW = ("--train.steps=2", "--train.prompts_per_step=2", "--validation.limit=4")


def header_of(text: str) -> dict[str, object]:
    _, header, _ = text.split("---\n", 2)
    return yaml.safe_load(header)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "library"), [("quickstart", "transformers"), ("quick_lora", "peft")])
def test_a_run_describes_what_it_has_trained(tmp_path: Path, name: str, library: str) -> None:
    assert main(["fit", f"--recipe={name}", *FEW, f"--out={tmp_path / 'run'}"]) == 0
    text = (tmp_path / "run" / "final" / "README.md").read_text(encoding="utf-8")
    assert header_of(text) == {"library_name": library, "tags": ["rlkit"]}  # the shipped model is no name on the hub
    where = ", which ships with rlkit and is in `base/`" if library == "peft" else ""
    assert f"| base model | `tiny`{where} |" in text
    assert (tmp_path / "run" / "final" / "base").exists() == (library == "peft")
    assert "| training | 2 steps of 2 prompts, learning rate" in text
    assert "| accuracy | 0." in text
    expected = r"^(Improved|Unchanged|Worse): greedy accuracy 0\.\d{3} -> \d\.\d{3} \(p-value (< )?[0-9.e-]+\)\.$"
    assert re.search(expected, text, re.M)
    assert f"from {library} import Auto" in text
    assert str(tmp_path) not in text
    assert "More Information Needed" not in text


@pytest.mark.parametrize(("known", "expected"), [(256, [256, 258]), ([256, 258], [256, 258]), (None, [258])])
def test_a_saved_model_stops_where_its_template_ends_turns(
    known: int | list[int] | None, expected: list[int], tmp_path: Path
) -> None:
    """A base model's files may know <|endoftext|> (256) only, while its template ends turns with <|im_end|> (258)."""
    policy = random_model("qwen2")
    policy.generation_config.eos_token_id = known
    save_policy(policy, build_tokenizer(), tmp_path / "final", ends=[258])
    assert GenerationConfig.from_pretrained(tmp_path / "final").eos_token_id == expected


@pytest.mark.parametrize("adapters", [False, True])
def test_whoever_reads_the_configuration_reads_the_weights(adapters: bool, tmp_path: Path) -> None:
    """Such as the server of another user; safetensors writes a file for its owner alone."""
    policy = random_model("qwen2")
    if adapters:
        policy = add_lora(policy, Lora(rank=2))
    save_policy(policy, build_tokenizer(), tmp_path / "final")
    files = [*(tmp_path / "final").glob("*config.json"), *(tmp_path / "final").glob("*.safetensors")]
    assert len(files) >= 2
    assert len({file.stat().st_mode for file in files}) == 1


def test_a_name_on_the_hub_is_the_base_model() -> None:
    recipe = parse("fit", ["--recipe=grpo_gsm8k"]).recipe
    text = model_card(recipe, 7, {"before": None, "after": {"accuracy": 0.5}}, "")
    assert header_of(text)["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "| accuracy |  | 0.500 |" in text
    assert "| advantage | `GRPO` |" in text


def test_a_path_cannot_write_into_the_card() -> None:
    recipe = parse("fit", ["--recipe=quickstart"]).recipe
    hostile = replace(recipe.model, path="a/b`\n---\nlicense: mit\n| x |\x1b[2J")
    text = model_card(replace(recipe, model=hostile), 1, {}, "")
    assert set(header_of(text)) == {"library_name", "tags", "base_model"}
    assert "\nlicense" not in text.split("---\n", 2)[2]
    assert "\x1b" not in text
