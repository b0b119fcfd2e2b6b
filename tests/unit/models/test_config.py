"""`model.config`: values that replace those of a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import random_model, save_random_model
from rlkit_policy.folder import export
from transformers import AutoConfig, AutoModelForCausalLM

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.models.actor import Actor
from rlkit.models.config import context_length, context_limit, experts_of, load_config
from rlkit.models.load import load_backbone, load_policy, load_tokenizer
from rlkit.models.size import find_config
from rlkit.models.source import SHIPPED, locate
from rlkit.recipe import Lora, Model
from rlkit.recipe.check_model import refused_keys
from rlkit.types import JsonObject
from tests.conftest import read_jsonl
from tests.flow.test_architectures import KINDS

YARN: JsonObject = {"rope_type": "yarn", "factor": 4.0}
STRETCHED: JsonObject = {"rope_parameters": YARN, "max_position_embeddings": 16384}
SCALED: JsonObject = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096, **YARN}
"""The rotary parameters of `tiny` with YARN: rope_theta stays, and so does the maximum that it stretches."""
OPTIONS = (
    "--model.config.rope_parameters.rope_type=yarn", "--model.config.rope_parameters.factor=4.0",
    "--model.config.max_position_embeddings=16384",
)  # fmt: skip
FEW = (
    "fit", "--recipe=quickstart", "--model.path=tiny", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation=null", "--train.schedule=Constant",
)  # fmt: skip


def folder_of(tmp_path: Path, **values: object) -> str:
    """Return a folder with the files of `tiny`, and other values in its configuration."""
    for file in SHIPPED["tiny"].iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((SHIPPED["tiny"] / "config.json").read_text(encoding="utf-8")) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return str(tmp_path)


def rope(model: Model) -> JsonObject:
    return load_config(model).get_text_config().rope_parameters  # type: ignore[attr-defined,no-any-return]


LONG: JsonObject = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "rope_theta": 10000.0}
"""Rotations of Phi-3: a row beyond the original length changes those of all rows in its batch."""


@pytest.mark.parametrize(
    ("kind", "options", "context"),
    [
        ("phi3", {"original_max_position_embeddings": 160, "rope_scaling": {"type": "longrope", **LONG}}, 160),
        ("phi3", {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096, **LONG},
            "original_max_position_embeddings": 160}, 160),
        ("llama", {"rope_parameters": {
            "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, **LONG}}, 256),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, **LONG}}, 512),
        ("gemma3_text", {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 128, **LONG},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}, 128),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 512),
        ("llama", {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
    ],
)  # fmt: skip
def test_rotations_that_depend_on_the_batch_bound_the_context(
    kind: str, options: JsonObject, context: int, tmp_path: Path
) -> None:
    """Of models with 512 positions, for which `dynamic` rotations are fixed."""
    config = load_config(Model(str(save_random_model(tmp_path, kind, **options))))
    assert context_length(config) == context
    limit = f"context: {context} of the model's 512 positions; a longer row would change the rotations "
    assert (context_limit(config) or limit).startswith(limit)
    assert (context_limit(config) is None) == (context == 512)


def test_a_configuration_of_remote_code_may_have_the_old_keys() -> None:
    """Some releases of transformers leave them as they are."""
    rotations: JsonObject = {"type": "longrope", **LONG}
    text = SimpleNamespace(max_position_embeddings=512, rope_scaling=rotations, original_max_position_embeddings=160)
    text.get_text_config = lambda: text
    assert context_length(text) == 160  # type: ignore[arg-type]
    text.rope_scaling = None
    assert context_length(text) == 512  # type: ignore[arg-type]


@pytest.mark.parametrize("length", ["x", -1, [4], float("nan"), float("inf"), 1e300, 10**400])
def test_an_original_length_that_is_no_length_is_named(length: object) -> None:
    """A configuration is data, and may be anybody's."""
    rotations: JsonObject = {"rope_type": "longrope", "original_max_position_embeddings": length}
    text = SimpleNamespace(max_position_embeddings=512, rope_parameters=rotations)
    text.get_text_config = lambda: text
    with pytest.raises(RecipeError, match="original_max_position_embeddings is .*, expected a number of positions"):
        context_length(text)  # type: ignore[arg-type]


def test_a_row_within_the_context_has_the_log_probs_of_it_alone(tmp_path: Path) -> None:
    """Beside a row of 160 tokens, which is the context; beside one of 162, the log-probs are other ones."""
    options = {"original_max_position_embeddings": 160, "rope_scaling": {"type": "longrope", **LONG}}
    actor = Actor(load_policy(Model(str(save_random_model(tmp_path, "phi3", **options)))))
    tokens = torch.arange(3, 3 + 162).expand(2, -1).clone()
    columns = torch.arange(162)[None]

    def logps(*lengths: int) -> torch.Tensor:
        mask = (columns >= 1) & (columns < torch.tensor(lengths)[:, None])
        longest = max(lengths)
        return actor(tokens[: len(lengths), :longest], mask[:, :longest], 1.0).logps[0, 1:30].detach()

    torch.testing.assert_close(logps(30, 160), logps(30), atol=1e-4, rtol=0)
    assert (logps(30, 162) - logps(30)).abs().max() > 0.1


def test_values_are_merged_into_the_configuration() -> None:
    config = load_config(Model("tiny", config=STRETCHED | {"attention_dropout": 0.1}))
    assert rope(Model("tiny", config=STRETCHED)) == SCALED
    assert context_length(config) == 16384
    assert config.attention_dropout == 0.1  # type: ignore[attr-defined]
    assert context_length(load_config(Model("tiny"))) == 4096  # nothing of it stays


def test_log_probs_are_those_of_transformers() -> None:
    config = AutoConfig.from_pretrained(SHIPPED["tiny"])
    config.max_position_embeddings, config.rope_parameters = 16384, dict(SCALED)
    theirs = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"], config=config).eval()
    tokens = torch.arange(3, 203).reshape(2, 100)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        logits = theirs(tokens).logits[:, :-1].log_softmax(-1)
        expected = logits.gather(-1, tokens[:, 1:, None])[..., 0]
        ours, plain = (Actor(load_policy(Model("tiny", config=c)))(tokens, mask).logps for c in (STRETCHED, {}))
    torch.testing.assert_close(ours[:, 1:], expected, atol=2e-5, rtol=1e-5)
    assert (plain[:, 1:] - expected).abs().max() > 0.01


def test_all_that_reads_the_configuration_has_the_values() -> None:
    model = Model("tiny", config=STRETCHED)
    for empty in (False, True):
        assert load_policy(model, empty=empty).config.rope_parameters == SCALED  # type: ignore[attr-defined]
        assert load_backbone(model, empty=empty)[0].config.rope_parameters == SCALED  # type: ignore[attr-defined]
    assert load_policy(Model("tiny", Lora(4), config=STRETCHED)).config.rope_parameters == SCALED  # type: ignore[attr-defined]
    assert find_config(model).rope_parameters == SCALED  # type: ignore[attr-defined]
    shipped = Model("Qwen/Qwen2.5-0.5B-Instruct", config={"max_position_embeddings": 65536})
    assert context_length(find_config(shipped)) == 65536  # without access to the hub
    with pytest.raises(RecipeError, match="hidden_size"):
        find_config(Model(shipped.path, config={"hidden_size": 64}))


def test_a_model_at_another_path_has_its_own_values() -> None:
    model = Model("tiny", Lora(4), config=STRETCHED, trust_remote_code=True)
    assert model.at(None) == Model("tiny", config=STRETCHED, trust_remote_code=True)
    assert model.at("tiny-tools", Lora(8)) == Model("tiny-tools", Lora(8), trust_remote_code=True)


def test_sections_of_a_vision_language_model_are_merged() -> None:
    plain = load_config(Model("tiny-vision")).get_text_config()
    model = Model("tiny-vision", config={"text_config": STRETCHED})
    assert rope(model) == plain.rope_parameters | SCALED | {"rope_theta": plain.rope_parameters["rope_theta"]}  # type: ignore[attr-defined]
    assert load_config(model).get_text_config().hidden_size == plain.hidden_size
    assert context_length(load_config(model)) == 16384
    assert load_policy(model).config.get_text_config().rope_parameters == rope(model)  # type: ignore[attr-defined]


def test_older_names_of_rotary_parameters_are_replaced(tmp_path: Path) -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16.0}}
    path = folder_of(tmp_path, rope_parameters=..., **old)
    before = rope(Model(path))
    assert before["original_max_position_embeddings"] == 4096
    assert rope(Model(path, config={"rope_parameters": {"factor": 4.0}})) == before | {"factor": 4.0}
    assert rope(Model(path, config={"max_position_embeddings": 8192})) == before  # YARN stretches the former maximum
    linear = rope(Model(path, config={"rope_parameters": {"rope_type": "linear", "factor": 2.0}}))
    assert {k: v for k, v in linear.items() if k != "type"} == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500}


@pytest.mark.parametrize(
    ("path", "config", "message"),
    [
        ("tiny", {"atention_dropout": 0.1}, "lacks; did you mean 'attention_dropout'?"),
        ("tiny", {"rope_parameters": {"fator": 2}}, "lacks; did you mean 'rope_parameters.factor'?"),
        ("tiny", {"temperature": 0.1}, "has the key 'temperature', which Qwen2Config lacks"),
        ("tiny-vision", {"rms_norm_eps": 0.1}, "did you mean 'text_config.rms_norm_eps'?"),
        ("tiny-vision", {"text_config": {"rms_nrm_eps": 0.1}}, "did you mean 'text_config.rms_norm_eps'?"),
        ("tiny-vision", {"text_config": 3}, "text_config is 3, expected a mapping"),
        ("tiny", {"rope_parameters": None}, "rope_parameters is None, expected a mapping"),
        ("tiny", {"attention_dropout": "a"}, "expected float, got str"),
        ("tiny", {"max_position_embeddings": 4096.0}, "expected int, got float"),
        ("tiny", {"use_cache": 1}, "expected bool, got int"),
        ("tiny", {"hidden_act": "strange"}, "KeyError: 'strange'"),
        ("tiny", {"layer_types": ["strange"] * 3}, "entries must be in"),
        ("tiny", {"sliding_window": 64}, "sliding_window is 64, but transformers makes it None"),
        ("tiny", {"rope_parameters": {"rope_type": "yarn"}}, "Missing required keys"),
        ("tiny", {"rope_parameters": YARN | {"factor": 0.5}}, "factor field must be a float or int >= 1, got 0.5"),
        ("tiny", {"rope_parameters": YARN | {"low_freq_factor": 1.0}}, "Unrecognized keys"),
        ("tiny", {"rope_parameters": YARN | {"rope_type": "strange"}}, "KeyError: 'strange'"),
        ("tiny", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, "would depend on the other rows"),
        ("tiny", {"hidden_size": 64}, "embed_tokens.weight would be of shape [264, 64], but in model.path it is of "),
        ("tiny", {"vocab_size": 300}, "embed_tokens.weight would be of shape [300, 128]"),
        ("tiny", {"tie_word_embeddings": False}, "would be of shape [264, 128], but in model.path it is absent"),
        ("tiny", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "layers.2."),
        ("tiny", {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "layers.3."),
        ("tiny-vision", {"vision_config": {"depth": 7}}, "visual.blocks."),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(path: str, config: JsonObject, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_config(Model(path, config=config))
    assert message in str(caught.value)
    assert "model.config" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoConfig": "evil.Config"}), ("_name_or_path", "/etc"), ("quantization_config", {}),
        ("attn_implementation", "someone/kernel"), ("_attn_implementation", "eager"), ("model_type", "llama"),
        ("architectures", ["X"]), ("dtype", "bfloat16"), ("num_labels", 3), ("eos_token_id", 1), ("rope_theta", 1e6),
        ("return_dict", False), ("max_position_embeddings", 0), ("attention_dropout", float("nan")),
    ],
)  # fmt: skip
def test_a_recipe_may_not_set_such_keys(key: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    for nested in ({key: value}, {"text_config": {key: value}}):
        with pytest.raises(RecipeError, match=f"^model.config.(text_config.)?{key}[. ]"):
            load_config(Model("tiny-vision", config=nested))
    if not isinstance(value, float):
        assert main(["recipe", "check", "quickstart", f"--model.config.{key}={json.dumps(value)}"]) == 2
        assert f"model.config.{key}" in capsys.readouterr().err


def test_adapters_of_a_stranger_may_not_set_such_keys(tmp_path: Path) -> None:
    export_lora(tmp_path / "adapter", {})
    (tmp_path / "adapter" / "model_config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(RecipeError, match="auto_map"):
        load_policy(Model(str(tmp_path / "adapter")))


def test_weights_that_the_files_lack_are_not_made_up(tmp_path: Path) -> None:
    path = folder_of(tmp_path, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    for load in (load_policy, load_backbone):
        with pytest.raises(RecipeError, match=r"lack 12 weights of its configuration, such as .*layers\.3\."):
            load(Model(path))


def export_lora(folder: Path, config: JsonObject, path: str = "tiny") -> None:
    """Write new adapters that were trained with overrides."""
    from rlkit.models.save import save_policy

    model = Model(path, Lora(4), config=config)
    save_policy(load_policy(model), load_tokenizer(model), folder, overrides=config)


def test_an_adapter_keeps_the_values_of_its_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    export_lora(tmp_path / "shipped", STRETCHED)
    export_lora(tmp_path / "own", STRETCHED, folder_of(base))
    for name in ("shipped", "own"):
        model = Model(str(tmp_path / name))
        assert rope(model) == load_policy(model).config.rope_parameters == SCALED  # type: ignore[attr-defined]
        export(model.path, tmp_path / f"{name}-merged", merge=True)
        merged = json.loads((tmp_path / f"{name}-merged" / "config.json").read_text(encoding="utf-8"))
        assert merged["rope_parameters"] == SCALED
        more = Model(str(tmp_path / name), config={"rope_parameters": {"factor": 8.0}})
        assert rope(more) == SCALED | {"factor": 8.0}
    written = json.loads((tmp_path / "shipped" / "base" / "config.json").read_text(encoding="utf-8"))
    assert written["rope_parameters"] == SCALED  # peft reads the folder


@pytest.mark.parametrize("lora", [(), ("--model.lora.rank=4",)])
def test_a_run_saves_its_configuration_and_goes_on(tmp_path: Path, lora: tuple[str, ...]) -> None:
    out = tmp_path / "run"
    every = (*FEW, *OPTIONS, *lora, f"--out={out}", "--save.every=1")
    assert main([*every, "--train.steps=1"]) == 0
    assert read_jsonl(out / "metrics.jsonl")[0]["mismatch/max"] < 1e-4  # TorchEngine samples from the same model
    for path in (out, out / "final", out / "checkpoints" / "step-000001"):
        is_full_model = not lora and path.name in ("run", "final")  # whose own configuration has the values
        assert locate(str(path)).overrides == ({} if is_full_model else STRETCHED)
        assert rope(Model(str(path))) == SCALED
    card = (out / "final" / "README.md").read_text(encoding="utf-8")
    assert '"rope_type": "yarn"' in card
    assert main([*every, "--train.steps=2", "--resume=auto"]) == 0
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    assert main([*FEW, *lora, f"--out={out}", "--save.every=1", "--train.steps=3", "--resume=auto"]) == 2
    assert main(["report", str(out)]) == 0
    assert main(["recipe", "check", str(out / "recipe.yaml")]) == 0
    export(str(out / "checkpoints" / "step-000002"), tmp_path / "exported", merge=bool(lora))
    assert rope(Model(str(tmp_path / "exported"))) == SCALED


def test_the_context_of_a_run_is_the_one_that_is_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = [*FEW, "--train.steps=1", f"--out={tmp_path / 'run'}", "--model.config.max_position_embeddings=12"]
    assert main(few) == 2
    assert "12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"a": [None, True, 3, "b", 0.5, [1]], "rope_parameters": {"rope_theta": 1e4}}, None),
        (
            {"a": {"b": float("inf")}},
            "model.config.a.b is inf, expected null, true or false, a finite number, text, or",
        ),
        ({"a": [1, {2}]}, "model.config.a is [1, {2}], expected null, true or false, a finite number, text, "),
        ({"max_position_embeddings": 0}, "model.config.max_position_embeddings is 0, expected a whole number from 1"),
        ({"pad_token_id": 3}, "model.config.pad_token_id is 3, but this key cannot be set: ids of tokens are those of"),
    ],
)
def test_keys_and_values_that_no_configuration_takes_are_named(config: dict[str, Any], problem: str | None) -> None:
    found = [*refused_keys(config)]
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


@pytest.mark.parametrize(("pattern", "experts"), [("M*-", 0), ("M*E", 4), ("M-E", 4)])
def test_experts_count_where_a_layer_has_some(pattern: str, experts: int) -> None:
    """The configuration of Nemotron-H has a number of experts even if none of its layers is a mixture."""
    policy = random_model("nemotron_h", **{**KINDS["nemotron_h"], "hybrid_override_pattern": pattern})
    assert any("experts" in name for name, _ in policy.named_parameters()) == (experts > 0)
    assert experts_of(policy.config) == experts
