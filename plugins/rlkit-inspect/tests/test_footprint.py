"""Whether a run fits a GPU: the memory that is estimated, and that which the code allocates, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers.integrations.sdpa_attention as attention
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_inspect import estimate, footprint
from rlkit_inspect.gpus import GPUS, H100, gpu_named

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.models.activations import token_limit
from rlkit.models.size import find_config, known_shapes, kv_bytes, size_of
from rlkit.ops import logps
from rlkit.ops.logps import GPU_CHUNK_BYTES, chunk_bytes
from rlkit.recipe import Lora, Model, Recipe
from rlkit.recipe.model import Quantization
from rlkit.registry.builtin import rlkit_recipes
from rlkit.testing import random_model
from tests.flow.counted_memory import learning_peak

RECIPES = [path.stem for path in sorted(rlkit_recipes().glob("*.yaml"))]

PUBLISHED = {  # billions of parameters, as the model cards give them
    "Qwen/Qwen2.5-14B-Instruct": 14.77, "Qwen/Qwen2.5-72B": 72.71, "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-32B": 32.76, "meta-llama/Llama-3.2-1B": 1.236, "meta-llama/Llama-3.2-3B-Instruct": 3.213,
    "meta-llama/Llama-3.1-8B": 8.03, "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    "HuggingFaceTB/SmolLM2-135M": 0.1345, "mistralai/Mistral-7B-v0.3": 7.248,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_shapes_have_the_published_parameters(name: str, billions: float) -> None:
    assert size_of(find_config(Model(name))).base / 1e9 == pytest.approx(billions, rel=1e-3)
    assert name in known_shapes()


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what `recipe check` prints; its status is the first word."""

    def run(*words: str) -> str:
        status = main(["recipe", "check", *words])
        captured = capsys.readouterr()
        return f"{status} {captured.out}{captured.err}"

    return run


def test_a_gpu_is_planned_for_where_there_is_none(check: Callable[..., str]) -> None:
    large = check("grpo_gsm8k", "--gpu=h100", "--price=2.5", "--fabric.accelerator=gpu")
    assert large.startswith("0 ")
    assert large.endswith("ok, as far as it could be checked\n")  # nothing of Lightning's on stderr
    assert "fits H100, 79 GiB: yes, 34.5 GiB free at the peak of 44.5 GiB" in large
    table = " ".join(large.split())
    for name, gib in (("learning, besides", "36.2"), ("CUDA", "1.0"), ("at the peak of a step", "44.5")):
        assert f"{name} │ {gib}" in table
    assert "memory of H100 │ 79.0" in table
    assert "cost, estimated: 4.8 GPU hours at 2.5 = 11.90" in large
    small = check("grpo_gsm8k", "--gpu", "4090")
    assert "fits RTX 4090, 23 GiB: yes" in small  # smaller micro-batches
    assert "learning, besides" in small
    assert "assumes an RTX 4090 that learns at 50 TFLOP/s" in small
    two = check("grpo_gsm8k", "--gpu", "a100", "--fabric.devices=2", "--fabric.strategy=fsdp2")
    assert "on each rank" in two


def test_a_gpu_that_is_too_small_says_what_helps(check: Callable[..., str]) -> None:
    output = check("grpo_gsm8k", "--gpu=8000", "--model.path=Qwen/Qwen3-8B")
    assert output.startswith("1 ")
    [excess] = re.findall(r"fits a GPU of 8,000 MiB, 8 GiB: no, ([\d.]+ GiB too much)", output)
    assert output.endswith(
        f"error: the run does not fit a GPU of 8,000 MiB: {excess}; to make it fit: model.lora, "
        "train.checkpoint_activations: true, fabric.precision: bf16-true with train.optimizer: AdamW8bit, "
        "fabric.strategy: fsdp2 on more GPUs\n"
    )
    assert "\nok" not in output
    assert check("quickstart", "--gpu=1100").startswith("1 ")  # with the data, too
    assert "time, estimated" not in output  # its speed is unknown
    server = check("grpo_gsm8k", "--gpu=h100", "--rollout.engine=SGLangServer")
    assert "not included: the server of SGLangServer" in server


def test_a_base_in_four_bits_is_an_eighth_of_a_float32_one() -> None:
    """Of Qwen2.5-7B, 6,525,288,448 weights are in linear layers: 28 blocks of 233,046,016."""
    path = "Qwen/Qwen2.5-7B-Instruct"
    quantizations: tuple[Quantization | None, ...] = (None, "nf4")
    sizes = []
    for quantization in quantizations:
        recipe = parse("fit", ["--recipe=quick_lora"]).recipe
        recipe.model = Model(path, Lora(8), quantization=quantization)
        sizes.append(footprint.memory(setting_of(recipe))[footprint.STATES] * 2**20)
    assert sizes[0] - sizes[1] == pytest.approx(6_525_288_448 * (4 - 4.126953125 / 8))


def test_four_bits_are_no_remedy_for_a_mixture() -> None:
    linear = [size_of(random_model(kind).config).linear for kind in ("qwen3_moe", "qwen3_next", "qwen3_5_text")]
    assert linear[:2] == [0, 0]
    assert linear[2] > 0


def test_a_large_model_with_a_tiny_ones_options_is_warned_of(check: Callable[..., str]) -> None:
    few = "--task.max_operand=9"
    large = ("--model.path=Qwen/Qwen2.5-0.5B-Instruct", few)
    output = check("quickstart", *large, "--gpu=h100", "--train.lr=5e-4")
    assert "warning: train.lr is 0.0005, expected at most 5e-05 where all weights of a model of 494M" in output
    assert "warning: fabric.precision is 32-true, in which a GPU is" in output
    assert "critic.lr" not in output
    good = (*large, "--train.lr=5e-5", "--fabric.precision=bf16-mixed", "--gpu=h100")
    assert "warning" not in check("quickstart", *good)
    assert "expected at most" not in check("quickstart", *large, "--model.lora.rank=8", "--gpu=h100")
    assert "warning" not in check("quickstart", few, "--gpu=h100", "--train.lr=5e-4")  # tiny
    assert "warning: critic.lr is 0.001, expected at most" in check("quick_ppo", *large, "--critic.lr=1e-3")


@pytest.mark.parametrize(
    "options",
    [["--gpu=b300"], ["--gpu=0"], ["--gpu=h100", "--price=free"], ["--price=-1"]],
)
def test_what_is_no_gpu_or_no_price_is_refused(check: Callable[..., str], options: list[str]) -> None:
    output = check("quickstart", *options)
    assert output.startswith("2 ")
    assert f"{options[-1].partition('=')[0]} is '{options[-1].partition('=')[2]}', expected" in output
    assert check("quickstart", "--gpu=h100", "--deep").startswith("2 ")


def test_micro_batches_are_those_of_the_gpu(check: Callable[..., str]) -> None:
    """0.3 of 23 GiB for activations, 24 layers of 31 x 896 + 8 x 4,864 bytes a token, 151,936 logits: 3,890 tokens.

    0.6 of 79 GiB less 32 bytes of each of 494,032,768 weights: 18,423.
    """
    recipe = parse("fit", ["--recipe=grpo_gsm8k"]).recipe
    limits = [token_limit(recipe, GPUS[name].memory) for name in ("4090", "h100")]
    assert limits == [3890, 18423]
    assert "micro-batches of at most 65536 tokens" in check("quickstart", "--gpu=l40s")
    assert "micro-batches of at most 77 tokens" in check(
        "quickstart", "--gpu=l40s", "--train.max_tokens_per_micro_batch=77"
    )


def setting_of(recipe: Recipe) -> estimate.Setting:
    return replace(estimate.setting(recipe, 128, 128), gpu=H100)


def test_ranks_that_share_tokens_have_a_part_of_the_activations() -> None:
    """And of the operations; weights and gradients are divided by the number of all ranks in any case."""
    recipes = [
        parse("fit", ["--recipe=grpo_gsm8k", "--train.max_tokens_per_micro_batch=8192", *options]).recipe
        for options in ([], ["--fabric.strategy=FSDP2", "--fabric.strategy.sequence_parallel=2"])
    ]
    one, two = (estimate.setting(recipe, 4096, 4096, ranks=2, shards=4) for recipe in recipes)
    assert estimate.work(two)["learn"] == estimate.work(one)["learn"] / 2
    learning = [footprint.memory(setting)[footprint.LEARNING] for setting in (one, two)]
    sharded = learning[0] - footprint.memory(replace(one, shards=10**9))[footprint.LEARNING]
    logits = 2 * chunk_bytes(None) / 2**20
    halved = [size - sharded - logits for size in learning]
    assert halved[1] == pytest.approx(halved[0] / 2, rel=0.01)


def compile_passes_over_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep and divide logits as on an H100, and let passes over them take no memory besides what they return."""

    def statistics(logits: torch.Tensor, *options: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        column = logits.new_zeros(len(logits), dtype=torch.float32)
        return [column] * 5, torch.empty_like(logits) if options[-1] else None

    limit = logps.kept_bytes(H100.memory)
    monkeypatch.setattr(logps, "CHUNK_BYTES", GPU_CHUNK_BYTES)
    monkeypatch.setattr(logps, "kept_bytes", lambda _: limit)
    monkeypatch.setattr(logps, "_fuses", lambda *_: True)
    monkeypatch.setattr(logps, "softmax_statistics", statistics)
    monkeypatch.setattr(logps, "softmax_grads_", lambda logits, *_: logits)


@pytest.mark.slow
def test_learning_takes_the_memory_that_was_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10% for shipped recipes; of those with the same kinds of models and precision, the first is counted."""
    monkeypatch.setattr(attention, "use_gqa_in_sdpa", lambda *_: True)  # as on a GPU: keys are not repeated,
    compile_passes_over_logits(monkeypatch)
    counted = set()
    for name in RECIPES:
        recipe = parse("fit", ["--recipe", name]).recipe
        recomputed = recipe.train.checkpoint_activations
        kinds = (recipe.model.lora is None, recipe.critic is None, recipe.needs_reference)
        key = (*kinds, recipe.model.head, recipe.fabric.precision, recomputed)
        if key in counted:
            continue
        counted.add(key)
        setting = setting_of(recipe)
        limit = token_limit(recipe, H100.memory)
        tokens = min(limit, setting.rows * setting.longest_row)
        phases = footprint.memory(setting)
        estimated = (phases[footprint.STATES] + phases[footprint.LEARNING]) * 2**20
        assert estimated == pytest.approx(learning_peak(setting, tokens), rel=0.1), name


def test_the_cache_takes_at_most_the_memory_estimated() -> None:
    """32 rows of 16 + 112 tokens; a prompt is stored once for the rows that share it."""
    policy = random_model("qwen2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    decoder = FusedDecoder(policy)
    logits = decoder.admit([[5 + i] * 16 for i in range(4)], [8] * 4)
    for _ in range(111):
        logits = decoder.step(logits.argmax(-1))
    tensors = [value for layer in decoder.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert kv_bytes(policy.config, 32 * 112) <= allocated <= kv_bytes(policy.config, 32 * 128) * 1.1


@pytest.mark.parametrize(("name", "gib"), [("24GB", 23), ("80 GiB", 79), ("24576", 24), ("24576 MiB", 24)])
def test_a_gpu_is_named_by_its_memory(name: str, gib: int) -> None:
    """Of a size in GB, drivers and displays take 1 GiB, as in the table of GPUs."""
    assert gpu_named(name).memory == gib * 2**30


@pytest.mark.parametrize("name", ["9" * 5000, "0", "24", "1GB", "-5", "24TB", "nan"])
def test_what_is_no_memory_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="or its memory, such as 24GB"):
        gpu_named(name)


def test_smaller_batches_are_named_where_they_are_enough(check: Callable[..., str]) -> None:
    output = check("grpo_gsm8k_lora_7b", "--gpu=24GB")
    assert output.startswith("1 ")
    remedy = re.search(
        r"to make it fit: (train.max_tokens_per_micro_batch: \d+) with (rollout.engine.\w+: \d+),", output
    )
    assert remedy is not None
    options = [f"--{option.replace(': ', '=')}" for option in remedy.groups()]
    assert "fits a GPU of 24 GB, 23 GiB: yes" in check("grpo_gsm8k_lora_7b", "--gpu=24GB", *options)


def test_a_price_without_a_speed_or_steps_is_explained(check: Callable[..., str]) -> None:
    assert "cost, not estimated: it needs the speed of the GPU, which is known of --gpu h100, h200" in check(
        "grpo_gsm8k", "--gpu=40GB", "--price=1"
    )
    assert "cost, not estimated: it needs the speed" in check("quickstart", "--price=1")


def test_a_check_finds_that_calls_of_tools_cannot_be_read(check: Callable[..., str]) -> None:
    output = check("quick_tool", "--parser=null")
    assert output.startswith("2 ")
    assert "does not show how the model writes tool calls; set parser: HermesParser" in output
