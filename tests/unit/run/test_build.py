"""The engine of a recipe that names none: on GPUs the fastest that is installed and fits, elsewhere TorchEngine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_inspect import recipe as recipe_verb
from rlkit_servers.engine import DeviceEngine, names_model
from rlkit_servers.sglang import engine as sglang

from rlkit.commands import parse
from rlkit.engines import SGLangEngine, TorchEngine
from rlkit.interfaces.optimizer import WeightKind
from rlkit.models.size import Size
from rlkit.recipe import FSDP2, Fabric, Lora, Model, Recipe
from rlkit.run.build import GIB, choose_engine, choose_precision
from rlkit.run.preflight.plan import batches
from rlkit.testing import random_model

GPU = ("--fabric.accelerator=auto", "--fabric.precision=bf16-mixed")


class Second(SGLangEngine):
    """A slower engine, of another product."""

    preference = 1

    @classmethod
    def missing(cls) -> str | None:
        return None

    @classmethod
    def implements(cls, architecture: str) -> bool:
        return architecture == "Qwen2ForCausalLM"


class Absent(DeviceEngine):  # type: ignore[misc]
    """A faster engine that is not installed."""

    preference = 3

    @classmethod
    def missing(cls) -> str | None:
        return "fast is not installed in this environment"


def gpus(monkeypatch: pytest.MonkeyPatch, gib: float, count: int = 1) -> None:
    """Have torch see GPUs of a size."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = SimpleNamespace(total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SGLang look installed, with a Qwen2."""
    monkeypatch.setattr(SGLangEngine, "missing", classmethod(lambda cls: None))
    monkeypatch.setattr(SGLangEngine, "implements", classmethod(lambda cls, name: name == "Qwen2ForCausalLM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention heads of 64."""
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen2", hidden_size=128, num_attention_heads=2, num_key_value_heads=1).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def recipe_of(folder: Path, *words: str) -> Recipe:
    return parse("fit", ("--recipe=quickstart", f"--model.path={folder}", *GPU, *words)).recipe


def test_a_recipe_that_names_no_engine_gets_the_fastest(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    gpus(monkeypatch, 80)
    install(monkeypatch)
    parsed = parse("fit", ("--recipe=quickstart", f"--model.path={folder}", *GPU))
    engine = parsed.recipe.rollout.engine
    assert isinstance(engine, SGLangEngine)
    assert engine.launch.release_memory
    assert "SGLangEngine" in parsed.yaml  # a run that is resumed keeps it
    line = "engine: SGLangEngine, the fastest that is installed and fits; rollout.engine chooses another"
    assert line in batches(parsed.recipe, None)


@pytest.mark.parametrize("words", [("--rollout.engine=TorchEngine",), ("--rollout.engine.max_rows=8",)])
def test_an_engine_that_is_named_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, words: tuple[str, ...]
) -> None:
    gpus(monkeypatch, 80)
    install(monkeypatch)
    engine = recipe_of(folder, *words).rollout.engine
    assert isinstance(engine, TorchEngine)
    assert engine.chosen == ""


def test_on_a_cpu_it_is_torch_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    install(monkeypatch)
    gpus(monkeypatch, 80)
    on_cpu = recipe_of(folder, "--fabric.accelerator=cpu").rollout.engine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without_gpu = recipe_of(folder).rollout.engine
    assert [type(on_cpu), type(without_gpu)] == [TorchEngine, TorchEngine]
    assert on_cpu.chosen == without_gpu.chosen == ""


def test_engines_are_tried_in_their_order(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    recipe = recipe_of(folder)
    gpus(monkeypatch, 80)
    parts: list[type] = [TorchEngine, Second, SGLangEngine, Absent]
    monkeypatch.setattr(sglang, "require_sglang", lambda: None)
    monkeypatch.setattr(sglang, "find_spec", lambda name: None)
    engine, reason = choose_engine(recipe, parts)
    assert engine is Second
    assert reason == (
        "the fastest that is installed and fits; not Absent: fast is not installed in this environment; not "
        "SGLangEngine: torch-memory-saver, which launch.release_memory needs, is not installed"
    )


def size_of_layers(rank: int = 0) -> Size:
    """Return the size of 2e9 weights in linear layers, with 1e6 adapters per rank."""
    config: Any = SimpleNamespace(head_dim=64)
    trained = 10**6 * rank or 2 * 10**9
    shapes = Counter({(WeightKind.MATRIX, torch.Size((trained,))): 1})
    return Size(config, 0, base=2 * 10**9, linear=2 * 10**9, lora=10**6 * rank, shapes=shapes)


def chosen(recipe: Recipe) -> tuple[Any, str]:
    return choose_engine(recipe, [SGLangEngine])


def test_what_does_not_fit_says_why(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder)
    gpus(monkeypatch, 80)
    install(monkeypatch)
    assert chosen(recipe)[0] is SGLangEngine
    small_heads = random_model("qwen2", hidden_size=128, num_attention_heads=8, num_key_value_heads=1)
    small_heads.save_pretrained(tmp_path / "heads")
    random_model("llama").save_pretrained(tmp_path / "llama")
    monkeypatch.setattr(SGLangEngine, "picture_models", ())
    refused = {
        "attention heads of 16, expected 64, 128, 256": {"model": Model(str(tmp_path / "heads"))},
        "it does not implement LlamaForCausalLM": {"model": Model(str(tmp_path / "llama"))},
        "it does not serve pictures of model_type": {"model": Model("tiny-vision")},
        "the configuration of model.path cannot be read": {"model": Model(str(tmp_path / "none"))},
        "model.trust_remote_code is true": {"model": replace(recipe.model, trust_remote_code=True)},
        "fabric.precision is 32-true": {"fabric": replace(recipe.fabric, precision="32-true")},
    }
    for problem, changes in refused.items():
        engine, reason = chosen(replace(recipe, **changes))
        assert engine is None
        assert reason.startswith(f"not SGLangEngine: {problem}")
    assert chosen(replace(recipe, model=replace(recipe.model, head="score"))) == (None, "")


def test_memory_is_what_the_trainer_leaves(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A model of 2e9 parameters: 3.7 GiB in 16 bits, 29.8 GiB to train; an engine gets 0.4 of the rest."""
    recipe = recipe_of(folder)
    install(monkeypatch)
    size = size_of_layers()
    monkeypatch.setattr("rlkit.models.size.size_of", lambda *args, **options: size)
    gpus(monkeypatch, 47)  # 0.4 * (47 - 29.8) = 6.9
    assert chosen(recipe)[0] is SGLangEngine
    gpus(monkeypatch, 46)  # 0.4 * (46 - 29.8) = 6.5
    assert chosen(recipe) == (None, "not SGLangEngine: it needs 6.7 GiB, and beside the trainer it has 6.5")
    gpus(monkeypatch, 32, count=2)  # two shards: 0.4 * (32 - 14.9) = 6.8
    assert chosen(recipe)[0] is None
    sharded = replace(recipe.fabric, devices=2, strategy=FSDP2())
    assert chosen(replace(recipe, fabric=sharded))[0] is SGLangEngine
    gpus(monkeypatch, 17)  # 0.4 * 17 = 6.8
    assert chosen(replace(recipe, train=replace(recipe.train, offload_during_rollout=True)))[0] is SGLangEngine


def test_a_base_in_four_bits_leaves_room_for_a_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Of 2e9 frozen weights: 0.96 GiB in 4 bits and 3.7 in bfloat16, beside 0.01 of adapters; a server takes 6.7."""
    recipe = recipe_of(folder)
    install(monkeypatch)
    monkeypatch.setattr("rlkit.models.size.size_of", lambda *args, **options: size_of_layers(rank=1))
    gpus(monkeypatch, 18)  # 0.4 * (18 - 0.97) = 6.8; 0.4 * (18 - 3.7) = 5.7
    model = replace(recipe.model, lora=Lora(1), dtype="bfloat16")
    assert chosen(replace(recipe, model=model))[0] is None
    assert chosen(replace(recipe, model=replace(model, quantization="nf4")))[0] is SGLangEngine


@pytest.mark.parametrize(
    ("fabric", "fits"),
    [
        (Fabric(strategy="fsdp2"), True),
        (Fabric(devices=2, strategy="fsdp2"), False),
        (Fabric(devices=[1, 3], strategy="fsdp2"), False),
        (Fabric(devices=1, num_nodes=8, strategy=FSDP2()), True),
        (Fabric(devices=4, num_nodes=2, strategy=FSDP2(replicate=4)), False),
        (Fabric(devices=16, num_nodes=2, strategy=FSDP2(replicate=4)), True),
        (Fabric(devices=8, strategy="ddp"), False),
    ],
)
def test_weights_are_sharded_over_the_ranks_of_the_run(
    fabric: Fabric, fits: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Of 8 GPUs with 24 GiB; an engine takes 6.7 of 0.4 * (24 - 29.8 / shards): 8.1 for 8 shards, 3.6 for 2."""
    recipe = recipe_of(folder)
    install(monkeypatch)
    size = size_of_layers()
    monkeypatch.setattr("rlkit.models.size.size_of", lambda *args, **options: size)
    gpus(monkeypatch, 24, count=8)
    engine, _ = chosen(replace(recipe, fabric=replace(fabric, precision="bf16-mixed")))
    assert (engine is SGLangEngine) == fits


@pytest.mark.parametrize(
    ("devices", "fits"), [("auto", False), (1, False), ([0, 1], False), (2, False), ([1], True), ([1, 2, 9], True)]
)
def test_memory_is_that_of_the_smallest_gpu_that_is_used(
    devices: Any, fits: bool, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The first of 4 GPUs is small; a 10th is not there, which Fabric refuses when the run starts."""
    recipe = recipe_of(folder)
    install(monkeypatch)
    gpus(monkeypatch, 80, count=4)
    memory = [GIB, 80 * GIB, 80 * GIB, 80 * GIB]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=memory[index]))
    engine, _ = chosen(replace(recipe, fabric=replace(recipe.fabric, devices=devices)))
    assert (engine is SGLangEngine) == fits


def test_models_of_a_package_are_read_without_its_import() -> None:
    assert names_model("transformers", "models/qwen2/*.py", "Qwen2ForCausalLM")
    assert not names_model("transformers", "models/qwen2/*.py", "Qwen2For")
    assert not names_model("rlkit_absent", "*.py", "Qwen2ForCausalLM")


@pytest.mark.parametrize(
    ("accelerator", "devices", "expected"),
    [
        ("auto", {"cuda"}, "bf16-mixed"), ("gpu", {"cuda"}, "bf16-mixed"), ("auto", {"old cuda", "cpu"}, "32-true"),
        ("cpu", {"cuda"}, "32-true"), ("cpu", {"cpu"}, "bf16-mixed"), ("auto", {"cpu"}, "bf16-mixed"),
        ("auto", {"mps", "cpu"}, "32-true"), ("mps", {"mps", "cpu"}, "32-true"), ("auto", set(), "32-true"),
    ],
)  # fmt: skip
def test_auto_is_the_faster_precision(
    accelerator: str, devices: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the devices that compute in bfloat16, and an old GPU that does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices & {"cuda", "old cuda"}))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: "cuda" in devices)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": "cpu" in devices, "amx_bf16": False})
    assert choose_precision(accelerator) == expected
    parsed = parse("fit", ["--recipe=quickstart", "--fabric.precision=auto", "--fabric.accelerator=cpu"])
    assert parsed.recipe.fabric.precision == choose_precision("cpu")
    assert f"precision: {choose_precision('cpu')}" in parsed.yaml


def test_auto_is_that_of_the_gpu_a_check_plans_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    words = ["--recipe=quickstart", "--fabric.precision=auto"]
    assert parse("recipe check", words, [recipe_verb.GPU]).recipe.fabric.precision == "32-true"
    assert parse("recipe check", [*words, "--gpu=h100"], [recipe_verb.GPU]).recipe.fabric.precision == "bf16-mixed"
