"""What a run will take: operations, time and memory by hand, for models of which there is a configuration alone."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from rlkit_inspect import estimate, footprint
from rlkit_inspect.gpus import H100

from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.data.measure import AnswerSizes
from rlkit.models.config import load_config
from rlkit.models.load import load_policy
from rlkit.models.size import cache_tokens, known_shapes, size_of
from rlkit.recipe import Model, Recipe
from rlkit.registry.builtin import rlkit_recipes

LORA = ("--model.lora.rank=32", "--model.lora.alpha=32")
SCORE = (
    "--model.head=score", "--rollout.engine=Recorded", "--loss=BradleyTerry", "--advantage=null", "--kl_loss=null",
    "--validation=null",
)  # fmt: skip
WIDE = ("--train.max_tokens_per_micro_batch=1200", "--fabric.accelerator=gpu", "--fabric.precision=32-true")
HALF = (*LORA, "--model.dtype=bfloat16")
FEW = "--task.max_operand=9"
"""100 problems instead of 10,000: `recipe check` measures as many as the run trains on."""


def recipe_of(shape: Path | str, *options: str, name: str = "grpo_gsm8k") -> Recipe:
    return parse("fit", ["--recipe", name, f"--model.path={shape}", "--train.lr=1e-5", *options]).recipe


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that hold nothing but the configurations of the models that the documentation names."""
    found = {}
    for size in ("0.5B", "7B"):
        found[size] = tmp_path_factory.mktemp("shapes") / size
        found[size].mkdir()
        config = known_shapes()[f"Qwen/Qwen2.5-{size}"]
        (found[size] / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize(
    ("size", "base", "lora"),
    [
        # as their model cards say; rank * (inputs + outputs) of seven matrices in each layer
        ("0.5B", 494_032_768, 24 * 32 * (2 * 1792 + 2 * 1024 + 3 * 5760)),
        ("7B", 7_615_616_512, 28 * 32 * (2 * 7168 + 2 * 4096 + 3 * 22528)),
    ],
)
def test_parameters_are_counted_without_weights(shapes: dict[str, Path], size: str, base: int, lora: int) -> None:
    recipe = recipe_of(shapes[size], *LORA)
    found = size_of(estimate.find_config(recipe.model), recipe.model.lora)
    assert (found.base, found.lora, found.trained) == (base, lora, lora)


def test_memory_of_lora_at_7b_by_hand(shapes: dict[str, Path]) -> None:
    """In float32 156 GB were found on a GPU; in bfloat16 with activations computed again it fits into 40 GB.

    16,384 tokens: activations of 28 layers x (25 x 3,584 + 8 x 18,944) = 110.6 GB; weights that autocast has cast 15.2;
    gradients of one layer, 3 x 2 x 18,944 + 16 x 3,584 bytes a token, 2.8; 256 MiB of logits, and as much in their
    gradient, 0.5; adapters, 80.7M: gradients 0.3, weights and moments 1; the
    base 30.5.
    """
    tokens = "--train.max_tokens_per_micro_batch=16384"
    default = footprint.memory(estimate.setting(recipe_of(shapes["7B"], *LORA, tokens), 128, 200))
    assert default["weights and optimizer"] * 2**20 / 1e9 == pytest.approx(30.46 + 0.97, abs=0.01)
    assert default["learning, besides"] * 2**20 / 1e9 == pytest.approx(110.63 + 2.80 + 15.23 + 0.54 + 0.32, abs=0.05)
    thrifty = recipe_of(shapes["7B"], *HALF, tokens, "--train.checkpoint_activations=true")
    small = footprint.memory(estimate.setting(thrifty, 128, 200))
    assert small["weights and optimizer"] * 2**20 / 1e9 == pytest.approx(15.23 + 0.97, abs=0.01)
    # each layer's input in bfloat16, 28 x 2 x 3,584 bytes a token, and one layer: 3.3 + 3.9 GB
    assert small["learning, besides"] * 2**20 / 1e9 == pytest.approx(3.29 + 3.95 + 2.80 + 0.54 + 0.32, abs=0.05)
    copies = small.pop("copies to sample through")
    assert copies * 2**20 / 1e9 == pytest.approx(15.23, abs=0.01)  # more than a quarter of 40 GB
    assert footprint.peak(small) * 2**20 < 40e9


def test_the_state_of_the_optimizer_in_force_counts(shapes: dict[str, Path]) -> None:
    """Muon keeps one number of each matrix of 24 blocks, and two of the embedding (151,936 x 896) and of vectors."""
    blocks = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    base, reference = 494_032_768, 494_032_768
    vectors = base - blocks - 151_936 * 896
    adafactor = 24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)) + 151_936 + 896 + vectors
    expected = {
        "AdamW": 2 * base,
        "Muon": 2 * base - blocks,
        "{class_path: TorchOptimizer, init_args: {name: SGD}}": 0,
        "{class_path: TorchOptimizer, init_args: {name: SGD, options: {momentum: 0.9}}}": base,
        "{class_path: TorchOptimizer, init_args: {name: Adafactor}}": adafactor,
    }
    for optimizer, numbers in expected.items():
        known = estimate.setting(recipe_of(shapes["0.5B"], f"--train.optimizer={optimizer}"), 128, 200)
        size = footprint.memory(known)["weights and optimizer"] * 2**20
        assert size == pytest.approx(4 * (base + reference + numbers), abs=8 * 1024), optimizer  # and step counters


def test_a_head_of_scores_counts_in_place_of_the_output_layer(shapes: dict[str, Path]) -> None:
    """Of the 7B model, whose output layer is its own, 152,064 rows become one; of the 0.5B model one is added."""
    for size, base, rows in (("7B", 7_615_616_512, 1 - 152_064), ("0.5B", 494_032_768, 1)):
        known = estimate.setting(recipe_of(shapes[size], *SCORE), 128, 200)
        width = known.policy.config.hidden_size
        assert known.policy.base == base + rows * width
        adapted = estimate.setting(recipe_of(shapes[size], *SCORE, *LORA), 128, 200).policy
        plain = size_of(known.policy.config, recipe_of(shapes[size], *LORA).model.lora)
        assert adapted.lora == plain.lora + width  # the head is trained whole
    loaded = load_policy(Model("tiny", head="score"))
    assert size_of(load_config(Model("tiny")), scores=True).base == sum(p.numel() for p in loaded.parameters())


def test_no_vocabulary_counts_in_the_memory_of_scores(shapes: dict[str, Path]) -> None:
    """2 bytes for one score of each of 1,024 tokens, for 151,936 logits at most twice 256 MiB."""
    options = (*SCORE, "--train.max_tokens_per_micro_batch=1024", "--train.checkpoint_activations=true")
    known = estimate.setting(recipe_of(shapes["0.5B"], *options), 128, 200, answers=AnswerSizes(512, 2, 50.0, 2.0))
    alike = replace(known, policy=replace(known.policy, outputs=151_936))
    found = [footprint.memory(one)["learning, besides"] for one in (known, alike)]
    assert found[1] - found[0] == pytest.approx(512 - 2 * 1024 / 2**20)


def test_recorded_answers_count_as_they_are(shapes: dict[str, Path]) -> None:
    """4 prompts x 2.5 answers x (100 + 50) tokens, of which none is sampled; the largest group is 3 rows of 400."""
    options = ("--rollout.engine=Recorded", "--loss=DPO", "--advantage=null", "--kl_loss=null", "--validation=null")
    small = ("--train.prompts_per_step=4", "--train.max_tokens_per_micro_batch=100", "--train.steps=90")
    recipe = recipe_of(shapes["0.5B"], *options, *small, "--fabric.accelerator=gpu", "--fabric.precision=32-true")
    known = estimate.setting(recipe, 100, 200, answers=AnswerSizes(400, 3, 50.0, 2.5))
    found = estimate.work(known)
    assert (found["tokens"], found["decode steps"]) == (10 * 150, 0)
    assert found["learn"] == 10 * 150 * 494_032_768 * (6 + 2)
    [size, time] = estimate.lines(known)
    assert size.startswith("a step, estimated: 10 rows of a prompt of 100 and an answer of 50 tokens (on average)")
    assert time.startswith("time, estimated: 0 s a step, 0.0 h for 90 steps without validation; assumes an H100 that")
    alone = footprint.memory(known)
    wide = footprint.memory(replace(known, recipe=recipe_of(shapes["0.5B"], *options, *small[::2], *WIDE)))
    assert alone == wide
    assert "copies to sample through" not in alone
    unread = estimate.setting(recipe, 100, 200)
    assert (unread.rows, unread.group_size, unread.completion_tokens) == (8, 2, 512)  # pairs, and half the limit


def test_work_by_hand(shapes: dict[str, Path]) -> None:
    """4 prompts x 8 rows x (100 + 512) tokens; 6 operations a weight to learn, 2 for the reference's log-probs."""
    options = ("--train.prompts_per_step=4", "--rollout.engine.max_rows=16")
    whole = estimate.work(estimate.setting(recipe_of(shapes["0.5B"], *options), 100, 200))
    assert whole["tokens"] == 32 * 612
    assert whole["learn"] == 32 * 612 * 494_032_768 * (6 + 2)
    assert whole["decode steps"] == 2 * 512 + 512  # twice 16 rows, and the longest answer's rest
    adapters = estimate.work(estimate.setting(recipe_of(shapes["0.5B"], *options, *HALF), 100, 200))
    assert adapters["learn"] == 32 * 612 * 494_032_768 * (4 + 2)  # no gradients of frozen weights
    again = (*options, *HALF, "--train.checkpoint_activations=true", "--train.epochs=2")
    # the forward pass twice, two epochs, and the old log-probs for the second
    twice = estimate.work(estimate.setting(recipe_of(shapes["0.5B"], *again), 100, 200))
    assert twice["learn"] == 32 * 612 * 494_032_768 * (6 * 2 + 2 + 2)


@pytest.mark.parametrize(("rows", "tokens"), [(64, 64 * (200 + 2048)), (4096, 1_380_625)])
def test_the_cache_takes_a_fifth_of_a_gpu_at_most(shapes: dict[str, Path], rows: int, tokens: int) -> None:
    """2 x 2 heads x 64 numbers of 2 bytes in 24 layers are 12,288 bytes a token; 79 GiB / 5 / 12,288 = 1,380,625."""
    options = (f"--train.prompts_per_step={rows // 8}", "--rollout.sampling.max_tokens=2048")
    recipe = recipe_of(shapes["0.5B"], *options, "--fabric.precision=bf16-mixed")
    setting = replace(estimate.setting(recipe, 100, 200), gpu=H100)
    assert footprint.memory(setting)["sampling, besides"] == pytest.approx(tokens * 12_288 / 2**20)
    assert cache_tokens(setting.policy.config, 2, H100.memory) == 1_380_625
    assert cache_tokens(setting.policy.config, 4, None) == 262_144


def test_an_average_of_the_weights_takes_as_much_as_they_do(shapes: dict[str, Path]) -> None:
    """Weights, two moments and the frozen reference, 4 bytes each, and so the steps of 290 tensors; to the byte."""
    for options, bytes_each in (((), 4 + 8 + 4), (("--train.ema=0.9",), 4 + 8 + 4 + 4)):
        found = footprint.memory(estimate.setting(recipe_of(shapes["0.5B"], *options), 100, 200))
        assert found["weights and optimizer"] * 2**20 == 494_032_768 * bytes_each + 290 * 4


def test_an_answer_is_half_the_limit_or_what_the_context_leaves(shapes: dict[str, Path]) -> None:
    """The context of the 0.5B model is 32,768 tokens."""
    recipe = recipe_of(shapes["0.5B"], "--rollout.sampling.max_tokens=1000")
    assert estimate.setting(recipe, 32_000, 32_000).completion_tokens == 500
    assert estimate.setting(recipe, 32_368, 32_368).completion_tokens == 400


def test_time_by_hand(shapes: dict[str, Path]) -> None:
    """1,536 decode steps of 24 layers x 0.2 ms + 494M weights x 2 bytes at 2 TB/s = 5.3 ms: 8.1 s.

    To learn: 32 x 612 x 494M x 8 = 7.74e13 operations at 30% of 67 TFLOP/s: 3.85 s. 90 steps of 12.0 s: 0.3 h.
    A model whose steps are not recorded takes 0.6 ms for a layer: 14.9 ms.
    """
    options = ("--train.prompts_per_step=4", "--rollout.engine.max_rows=16", "--train.steps=90")
    recipe = recipe_of(shapes["0.5B"], *options, "--fabric.accelerator=gpu", "--fabric.precision=32-true")
    setting = estimate.setting(recipe, 100, 200)
    [size, time] = estimate.lines(setting)
    assert size.startswith("a step, estimated: 32 rows of a prompt of 100 and an answer of 512 tokens")
    assert "= 19,584 tokens; 7.7e+13 operations to learn" in size
    assert "8 s to sample + 4 s to learn = 12 s a step, 0.3 h for 90 steps" in time
    assert "learns at 20 TFLOP/s (30% of its peak) and makes a decode step in 5 ms" in time
    config = copy(setting.policy.config)
    config.model_type = "gemma2"
    [_, time] = estimate.lines(replace(setting, policy=replace(setting.policy, config=config)))
    assert "23 s to sample + 4 s to learn = 27 s a step, 0.7 h for 90 steps" in time
    assert "makes a decode step in 15 ms" in time
    assert len(list(estimate.lines(estimate.setting(recipe_of(shapes["0.5B"], "--fabric.accelerator=cpu"), 1, 2)))) == 1


def test_a_critic_counts(shapes: dict[str, Path]) -> None:
    """Values of all tokens, and learning: 2 + 6 operations a weight; weights, gradients and two moments."""
    options = ("--model.path", str(shapes["0.5B"]), "--rollout.engine.max_kv_tokens=1")
    alone = estimate.setting(parse("fit", ["--recipe=ppo_gsm8k", *options]).recipe, 100, 200)
    assert alone.critic is not None
    adapted = parse("fit", ["--recipe=ppo_gsm8k", *options, "--critic.lora.rank=32", "--model.dtype=bfloat16"]).recipe
    with_lora = estimate.setting(adapted, 100, 200)
    base, lora, head = 494_032_768, 17_596_416, 896
    tokens = 256 * (100 + 256)
    policy = base * (6 + 2 + 2)
    assert estimate.work(alone)["learn"] == tokens * (policy + (base + head) * (2 + 6))
    assert estimate.work(with_lora)["learn"] == tokens * (policy + (base + head) * (2 + 4))
    states = [footprint.memory(known)["weights and optimizer"] * 2**20 for known in (alone, with_lora)]
    frozen_too = base * (12 + 2 + 2) + lora * 12 + head * (2 + 12)
    assert states == pytest.approx([base * (12 + 12 + 4) + head * 12, frozen_too])
    adapters = ("--model.dtype=bfloat16", "--model.lora.rank=32", "--critic.lora.rank=32")
    for more, bases in ((), 1), (("--train.offload_during_rollout=true",), 2):
        recipe = parse("fit", ["--recipe=ppo_gsm8k", *options, *adapters, *more]).recipe
        states = footprint.memory(estimate.setting(recipe, 100, 200))["weights and optimizer"] * 2**20
        assert states == pytest.approx(bases * base * 2 + 2 * lora * 12, rel=1e-4)  # the head is 896 numbers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if index % 4 == 0 else pytest.mark.slow)
        for index, path in enumerate(sorted(rlkit_recipes().glob("*_gsm8k*.yaml")))
    ],
)
def test_recipes_are_checked_without_a_network(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", name]) == 0
    out = capsys.readouterr().out
    assert "not checked: model.path is 'Qwen/Qwen2.5-" in out
    assert "time, estimated: " in out
    assert "weights and optimizer" in out
    assert "warning" not in out
    assert out.endswith("ok, as far as it could be checked\n")


def test_a_configuration_alone_is_planned_for(shapes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe=quickstart", f"--model.path={shapes['7B']}", "--train.lr=1e-6", "--fabric.precision=bf16-mixed"]
    assert main(["recipe", "check", *words, "--gpu=24000"]) == 1
    printed = capsys.readouterr()
    assert f"not checked: model.path {str(shapes['7B'])!r} has no tokenizer; add its tokenizer.json" in printed.out
    assert "weights and optimizer" in printed.out
    assert "error: " in printed.err  # 7.6e9 weights with their gradients and moments need 122 GB


def test_data_or_a_model_alone_are_checked(
    capsys: pytest.CaptureFixture[str], gsm8k_like: Path, shapes: dict[str, Path]
) -> None:
    assert main(["recipe", "check", "grpo_gsm8k", f"--task.path={gsm8k_like}"]) == 0
    out = capsys.readouterr().out
    assert "passes over 12 rows" in out
    assert "data set" not in out
    assert main(["recipe", "check", "grpo_gsm8k", "--model.path=nobody/nothing"]) == 0
    out = capsys.readouterr().out
    assert "not checked: model.path is 'nobody/nothing'" in out
    assert "memory of" not in out
    assert out.endswith(
        "ok, as far as it could be checked; memory and time were not estimated, since the shape of a model is unknown "
        "without its config.json\n"
    )
    assert main(["recipe", "check", "grpo_gsm8k", "--model.path=tiny"]) == 0
    out = capsys.readouterr().out
    assert "not checked: data set 'openai/gsm8k'" in out
    assert "weights and optimizer │ 7" in " ".join(out.split())  # of a reference too


def test_what_is_wrong_is_still_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", "grpo_gsm8k", "--task.path=/nowhere"]) == 2
    assert main(["recipe", "check", "grpo_gsm8k", "--deep"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_adapters_with_a_rate_for_whole_weights_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", "quick_grpo", FEW, "--model.lora.rank=4", "--train.lr=1e-6"]) == 0
    assert "warning: train.lr is 1e-06, with which adapters hardly learn; set it to 1e-5" in capsys.readouterr().out
    assert main(["recipe", "check", "quick_ppo", FEW, "--critic.lora.rank=4", "--critic.lr=4.9e-6"]) == 0
    assert "warning: critic.lr is 4.9e-06, with which" in capsys.readouterr().out
    for fine in (["--train.lr=1e-6"], ["--model.lora.rank=4", "--train.lr=5e-6"]):
        assert main(["recipe", "check", "quick_grpo", FEW, *fine]) == 0
        assert "hardly learn" not in capsys.readouterr().out


def test_an_uncorrected_loss_with_several_updates_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    plain, several = "--loss=PolicyGradient", "--train.minibatches=2"
    assert main(["recipe", "check", "quick_grpo", FEW, plain, several, "--train.epochs=3"]) == 0
    assert "warning: loss PolicyGradient does not correct for 6 optimizer steps" in capsys.readouterr().out
    for words in ([plain, "--train.minibatches=1"], [several], ["--loss=AdvantageRegression", several]):
        assert main(["recipe", "check", "quick_grpo", FEW, *words]) == 0
        assert "does not correct" not in capsys.readouterr().out


def test_a_tiny_model_has_no_time_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe", "check", "quickstart", "--fabric.accelerator=auto", "--train.steps=1", "--train.warmup_steps=0")
    assert main([*words]) == 0
    out = capsys.readouterr().out
    assert "time, estimated" not in out
    assert "1 step of 32 prompts" in out
    assert main([*words, "--gpu=h100"]) == 0
    assert "for 1 step without validation; assumes an H100" in capsys.readouterr().out
