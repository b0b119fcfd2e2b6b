"""Conversion of slime's launch scripts: arrays, methods with hand-computed losses, and runs of what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import slime_options
import torch
import yaml
from rlkit_convert import convert
from rlkit_convert.conversion import NO_RULE, Conversion
from rlkit_convert.shell import with_arrays
from rlkit_convert.write import recipe_problems, recipe_text

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.recipe import Recipe
from rlkit.train.credit import correct
from rlkit.train.objective import Objective, count_tokens
from rlkit.types import Batch, PolicyOutput, TrainBatch
from tests.conftest import ROOT, read_jsonl, write_metadata

SCRIPT = """#!/bin/bash
pkill -9 sglang
set -ex
HAS_NVLINK=$([ "$(nvidia-smi topo -m | grep -c NV)" -gt 0 ] && echo 1 || echo 0)
source "$(dirname "$0")/models/tiny.sh"
DATA=${DATA:-rows.jsonl}
CKPT_ARGS=(
   --hf-checkpoint tiny
   #--hf-checkpoint tiny-FP8
   --ref-load tiny_torch_dist
   --load run/ --save run/ --save-interval 20
)
ROLLOUT_ARGS=( --prompt-data "${DATA}"   # a comment
   --input-key prompt
   --label-key label

   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout $(( 2 + 1 ))
   --rollout-batch-size 4 --n-samples-per-prompt 8
   --rollout-max-response-len 12 --rollout-temperature 1
   --global-batch-size $((4 * 8)) )
EVAL_ARGS=(
   --eval-interval 2
   --eval-prompt-data sums held-out.jsonl
   --n-samples-per-eval-prompt 2 --eval-top-p 1
)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
   --entropy-coef 0.1 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis
)
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 )
OPTIMIZER_ARGS+=( --adam-beta1 0.9 --adam-beta2 0.98 )
PERF_ARGS=( --tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216 )
NEVER_ARGS=( --lr 1 )
if [ -n "$KEY" ]; then
   WANDB_ARGS=( --use-wandb --wandb-project mine --wandb-group tiny )
else
   WANDB_ARGS=()
fi
ENVIRONMENT="{
  \\"env_vars\\": {\\"NCCL_NVLS_ENABLE\\": \\"${HAS_NVLINK}\\"}
}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${ENVIRONMENT}" \\
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate \\
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \\
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]}
"""
FINE_TUNING = """
SFT_ARGS=(
   --hf-checkpoint tiny --prompt-data chats.jsonl --input-key messages --rollout-shuffle
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --num-epoch 2 --rollout-batch-size 8 --global-batch-size 8
   --loss-type sft_loss --calculate-per-token-loss
   --disable-compute-advantages-and-returns --debug-train-only
   --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-fraction 0.2
)
python3 train_async.py --actor-num-gpus-per-node 1 ${SFT_ARGS[@]}
"""
BASE = (
    "python3 train.py --hf-checkpoint tiny --prompt-data rows.jsonl --input-key prompt --label-key label "
    "--rm-type math --apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 8 --num-rollout 3 "
    "--global-batch-size 32 --rollout-max-response-len 12 --actor-num-gpus-per-node 1 "
)


@pytest.fixture(autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `rlkit convert` a verb, and rows as slime has them."""
    site = tmp_path_factory.mktemp("site")
    write_metadata(ROOT / "plugins" / "rlkit-convert", site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    for name, first in (("rows", 10), ("held-out", 60)):
        rows = [
            {"prompt": [{"role": "user", "content": f"{n} + 7 = ?"}], "label": str(n + 7), "metadata": {"n": n}}
            for n in range(first, first + 12)
        ]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chats = [
        {"messages": [{"role": "user", "content": f"{n} + 7 = ?"}, {"role": "assistant", "content": str(n + 7)}]}
        for n in range(24)
    ]
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chats))


def read(text: str, *overrides: str) -> Conversion:
    """Return a conversion, in which each option is carried over or listed by a rule."""
    conversion = convert("slime", text, "run.sh", list(overrides))
    names = {*conversion.options.values, *conversion.options.unresolved}
    sources = {source for _, origin in conversion.recipe.values() for source in origin.split(", ")}
    assert names <= sources | conversion.notes.keys()
    assert not [key for key, note in conversion.notes.items() if NO_RULE in note]
    return conversion


def recipe_of(conversion: Conversion) -> Recipe:
    Path("mine.yaml").write_text(recipe_text(conversion))
    return parse("test", ["--recipe", "mine.yaml"]).recipe


def test_a_script_with_arrays() -> None:
    conversion = read(SCRIPT)
    recipe = yaml.safe_load(recipe_text(conversion))
    assert recipe["model"] == {"path": "tiny"}
    assert recipe["task"] == {
        "class_path": "HFDataset",
        "init_args": {
            "path": "rows.jsonl", "prompt_field": "prompt", "answer_field": "label",
            "validation_path": "held-out.jsonl",
        },
    }  # fmt: skip
    assert recipe["rollout"]["group_size"] == 8
    assert recipe["rollout"]["engine"] == {
        "class_path": "SGLangEngine", "init_args": {"launch": {"release_memory": True}},
    }  # fmt: skip
    assert recipe["train"] == {
        "prompts_per_step": 4, "lr": 1e-4, "weight_decay": 0.1, "entropy_coef": 0.1, "seed": 1234, "minibatches": 1,
        "steps": 3, "shuffle": True, "schedule": "Constant", "aggregation": "seq_mean_token_mean",
        "optimizer": {"betas": [0.9, 0.98]},
    }  # fmt: skip
    assert recipe["advantage"] == {"class_path": "GRPO", "init_args": {"scale_by_std": True}}
    assert recipe["kl_loss"] == {"coef": 0.01, "estimator": "k3"}
    assert recipe["correction"] == {"high": 2.0}
    sampling = {"temperature": 1, "top_p": 1, "max_tokens": 12}  # those of rollouts, where there are none of its own
    assert recipe["validation"] == {"every": 2, "samples": 2, "sampling": sampling}
    logger = {"class_path": "Wandb", "init_args": {"project": "mine", "group": "tiny"}}
    assert recipe["log"]["loggers"] == [logger]
    assert conversion.by_hand == set()
    assert "architecture" in conversion.notes["MODEL_ARGS"]
    assert "does not pass" in conversion.notes["NEVER_ARGS"]


def test_arrays_are_filled_in_where_they_stand() -> None:
    text = 'A=( --a \'x y\' # z\n  $(seq 1 2) )\nA+=(--b)\nC=(1)\nrun ${A[@]} -- "${B[@]}" "" end\n'
    script = with_arrays(text, "run.sh")
    *words, substituted, b, dashes, empty, end = script.commands[0]
    assert words == ["run", "--a", "x y"]
    assert "\ue000" in substituted  # a command that is not run
    assert (b, dashes, empty, end) == ("--b", "--", "", "end")
    assert (script.missing, script.unused) == (["B"], [])  # C has no options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A=( --a 1 )\nB=( "${A[@]}"\n --b 2 )\nrun ${B[@]}', "run --a 1 --b 2"),
        ("A=( --a 1 )\nA=( ${A[@]}\n --b 2 )\nrun ${A[@]}", "run --a 1 --b 2"),
        ("A=( --a '(x)'\n --b \"y (z)\"\n --c 3 )\nrun ${A[@]}", "run --a (x) --b y (z) --c 3"),
        ("array: A\n(cd x; run)\n(run --a 1) 2>&1 | tee log", "array: A|(cd x|(run --a 1"),
    ],
    ids=["nested", "extended", "quoted", "subshells"],
)
def test_arrays_end_where_a_shell_ends_them(text: str, words: str) -> None:
    assert "|".join(" ".join(command) for command in with_arrays(text, "run.sh").commands) == words


@pytest.mark.parametrize("line", ["A+=( ${A[@]} ${A[@]} )", "run ${A[@]}"])
def test_a_script_whose_arrays_would_fill_the_memory_is_refused(line: str) -> None:
    elements = " x" * 1000
    with pytest.raises(RecipeError, match=r"run.sh passes more than 100,000 elements of arrays"):
        with_arrays(f"A=({elements} )\n" + f"{line}\n" * 101, "run.sh")


def test_a_script_that_runs_something_else_is_refused() -> None:
    with pytest.raises(RecipeError, match="has no options of slime"):
        convert("slime", "A=( --lr 1 )\npython other.py ${A[@]}", "run.sh", [])


def test_every_option_has_a_rule() -> None:
    slimes, megatrons = slime_options.SLIMES.split(), slime_options.MEGATRONS.split()
    assert (len(slimes), len(megatrons)) == (223, 134)
    conversion = read(BASE)
    assert [name for name in (*slimes, *megatrons) if conversion.rule(name) is None] == []


@pytest.mark.parametrize(("by_token", "loss"), [(False, -0.7477863), (True, -0.2021167)])
def test_the_objective_is_slimes(by_token: bool, loss: float) -> None:
    """Two samples of a prompt with the rewards 1 and 0, and with 1 and 3 tokens.

    A = +-0.5 / (0.7071068 + 1e-6) = +-0.7071058. The first token has the ratio 1.5, clipped to 1.28, the correction
    4, capped at 2, d = 0.5 and the entropy 0.3: -1.28 * 0.7071058 * 2 - 0.1 * 0.3 + 0.01 (e^-0.5 + 0.5 - 1) =
    -1.8391255. The others have the ratio 1, the correction 0.5, d = 0 and the entropy 0.1: 0.7071058 * 0.5 - 0.1 * 0.1
    = 0.3435529. slime's loss is (-1.8391255 + 0.3435529) / 2, and by token (-1.8391255 + 3 * 0.3435529) / 4.
    """
    recipe = recipe_of(read(SCRIPT, *(["--calculate-per-token-loss"] if by_token else [])))
    mask = torch.tensor([[True, False, False], [True, True, True]])
    first = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    old = torch.full((2, 3), -3.0)
    batch = Batch(
        tokens=torch.zeros(2, 3, dtype=torch.long), attention=mask, mask=mask, group=torch.tensor([0, 0]),
        rollout_logps=old - torch.where(first > 0, 4.0, 0.5).log(), versions=torch.zeros(2, 3, dtype=torch.long),
        token_rewards=first, rewards=first.sum(-1), components=torch.zeros(2, 0), component_names=(),
        trainer_logps=old,
    )  # fmt: skip
    correct(batch, recipe.correction, recipe.rejection, lambda x: x)
    assert recipe.advantage is not None
    recipe.advantage.estimate(batch)
    logps = old + torch.log(torch.tensor(1.5)) * first
    batch.ref_logps = logps - 0.5 * first
    trained = TrainBatch.of(batch)
    out = PolicyOutput(logps.requires_grad_(), (0.1 + 0.2 * first) * mask)
    share = Objective.of(recipe).share(out, trained, count_tokens(mask, lambda x: x))
    assert share.loss.item() == pytest.approx(loss, abs=1e-6)


def test_normalised_advantages_without_std_are_whitened_over_tokens() -> None:
    """R - mean is 0.5 for one token and -0.5 for three: mean -0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25."""
    words = ("--disable-grpo-std-normalization", "--normalize-advantages")
    estimator = recipe_of(read(BASE, *words)).advantage
    mask = torch.tensor([[True, False, False], [True, True, True]])
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = Batch(
        tokens=torch.zeros(2, 3, dtype=torch.long), attention=mask, mask=mask, group=torch.tensor([0, 0]),
        rollout_logps=torch.zeros(2, 3), versions=torch.zeros(2, 3, dtype=torch.long), token_rewards=rewards,
        rewards=rewards.sum(-1), components=torch.zeros(2, 0), component_names=(),
    )  # fmt: skip
    assert estimator is not None
    estimator.estimate(batch)
    expected = torch.tensor([[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]])
    torch.testing.assert_close(batch.advantages, expected, atol=1e-5, rtol=0)


CLIP = {"loss.clip_low": 0.2, "loss.clip_high": 0.2}
PLUS = "--advantage-estimator reinforce_plus_plus"
CASES: dict[str, tuple[dict[str, object], set[str]]] = {
    "": ({"advantage": "GRPO", "loss": "ClipLoss", **CLIP, "rollout.engine": "SGLangServer"}, set()),
    "--disable-grpo-std-normalization": ({"advantage.scale_by_std": False}, set()),
    "--disable-rewards-normalization": ({"advantage": "GRPO"}, {"disable_rewards_normalization"}),
    "--disable-rewards-normalization --normalize-advantages": ({"advantage": "ReinforcePP"}, set()),
    "--normalize-advantages": ({"advantage": "GRPO"}, {"normalize_advantages"}),
    "--kl-coef 0.1": ({"advantage": "GRPO"}, set()),  # slime's GRPO reads no KL
    "--kl-loss-coef 0.1": ({}, set()),  # without --use-kl-loss
    "--use-kl-loss --kl-loss-coef 0.1": ({"kl_loss.coef": 0.1, "kl_loss.estimator": "k1"}, set()),
    "--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --ref-update-interval 5": (
        {"kl_loss.importance_weighted": True, "reference.refresh_every": 5}, set(),
    ),
    "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --eps-clip-c 3": (
        {"advantage": "GRPO", "loss": "GSPO", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}, {"eps_clip_c"},
    ),
    "--advantage-estimator cispo --eps-clip 5 --eps-clip-high 4": (
        {"loss": "CISPO", "loss.clip_low": 1.0, "loss.clip_high": 4}, set(),
    ),
    "--eps-clip-c 3": ({"loss.clip_dual": 3}, set()),
    f"{PLUS} --normalize-advantages --kl-coef 0.1 --kl-loss-type k2 --gamma 0.9": (
        {"advantage": "ReinforcePP", "advantage.gamma": 0.9, "kl_reward.coef": 0.1, "kl_reward.estimator": "k2"}, set(),
    ),
    f"{PLUS}_baseline --normalize-advantages --kl-coef 0.1": ({"advantage": "ReinforcePPBaseline"}, {"kl_coef"}),
    "--advantage-estimator ppo --normalize-advantages --lambd 0.95 --num-critic-only-steps 2 --lr 2e-6": (
        {"advantage": "GAE", "advantage.lam": 0.95, "critic.clip": 0.2, "critic.lr": 2e-6, "critic.weight_decay": 0.01,
         "critic.schedule": "Linear", "critic.policy_delay_steps": 2}, set(),
    ),
    "--advantage-estimator ppo": ({"advantage": "GAE", "critic.lr": 1e-6}, {"advantage_estimator"}),
    "--use-tis --tis-clip 3": ({"correction.high": 3}, set()),
    "--use-tis --tis-clip-low 0.5": ({"correction.high": 2.0}, {"tis_clip_low"}),
    "--use-tis --tis-clip-low 0.5 --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function": (
        {"correction.low": 0.5, "correction.high": 2.0}, set(),
    ),
    "--use-tis --custom-tis-function-path mine.weights": ({}, {"custom_tis_function_path"}),
    "--use-rollout-logprobs --use-opsm": (
        {"train.old_logps": "rollout", "train.off_policy_mask_threshold": 1e-4}, set(),
    ),
    "--use-opd --opd-type megatron --opd-teacher-load teacher --opd-kl-coef 0.5": (
        {"teacher.path": "teacher", "teacher.coef": 0.5, "advantage": "GRPO"}, {"opd_teacher_load"},
    ),
    "--use-opd --opd-type sglang --rm-url http://a:1/generate "
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func": (
        {"teacher.urls": ["http://a:1"], "teacher.coef": 1.0}, {"opd_type"},
    ),
    "--rm-type dapo --reward-key score": ({"reward": "MathReward"}, set()),
    "--rm-type f1": ({}, {"rm_type"}),
    "--rm-type remote_rm --rm-url http://a:1": ({"reward": "RemoteReward", "reward.url": "http://a:1"}, {"rm_type"}),
    "--custom-rm-path mine.reward --group-rm": ({}, {"custom_rm_path"}),
    "--custom-generate-function-path mine.generate": ({}, {"custom_generate_function_path"}),
    "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std "
    "--over-sampling-batch-size 6": (
        {"rollout.filter": "ZeroSignal", "rollout.filter.max_refills": 1000, "rollout.oversample": 1.5}, set(),
    ),
    "--over-sampling-batch-size 16": ({"rollout.oversample": 2.0}, {"over_sampling_batch_size"}),
    "--dynamic-sampling-filter-path mine.filter": ({}, {"dynamic_sampling_filter_path"}),
    "--partial-rollout": ({}, {"partial_rollout"}),
    "--num-steps-per-rollout 2": ({"train.minibatches": 2}, set()),
    "--global-batch-size 8 --lr-warmup-iters 6": ({"train.minibatches": 4, "train.warmup_steps": 2}, set()),
    "--rollout-stop END --rollout-stop-token-ids 5 7 --rollout-top-p 0.9": (
        {"rollout.sampling.stop": ["END"], "rollout.sampling.stop_ids": [5, 7], "rollout.sampling.top_p": 0.9,
         "rollout.sampling.top_k": 1024}, set(),
    ),
    "--rollout-max-context-len 100": ({"rollout.max_prompt_tokens": 99, "rollout.overlong": "drop"}, set()),
    "--prompt-data rows.jsonl@[0:8]": ({"task.path": "rows.jsonl", "train.max_rows": 8}, set()),
    "--prompt-data rows.jsonl@[-8:]": ({"task.path": "rows.jsonl"}, {"prompt_data"}),
    "--eval-interval 5 --eval-prompt-data a held-out.jsonl b rows.jsonl --skip-eval-before-train": (
        {"validation.before": False, "validation.every": 5, "validation.tasks": {
            name: {"class_path": "HFDataset", "init_args": {
                "path": path, "validation_path": path, "prompt_field": "prompt", "answer_field": "label"}}
            for name, path in (("a", "held-out.jsonl"), ("b", "rows.jsonl"))}}, set(),
    ),
    "--eval-prompt-data a held-out.jsonl": ({"validation": None}, set()),  # without an interval nothing is evaluated
    "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2": (
        {"rollout.engine.servers": 2, "rollout.engine.first_gpu": 1, "rollout.engine.launch.tensor_parallel": 2}, set(),
    ),
    "--load other": ({}, {"load"}),
    "--hf-checkpoint tiny-FP8": ({"model.path": "tiny-FP8"}, {"hf_checkpoint"}),
    "--lr-decay-style WSD --optimizer sgd --clip-grad 0": (
        {"train.max_grad_norm": 1e15}, {"lr_decay_style", "optimizer"},
    ),
    '--apply-chat-template-kwargs {"enable_thinking":false}': (
        {"model.chat_template_kwargs": {"enable_thinking": False}}, set(),
    ),
    '--multimodal-keys {"image":"images"}': ({"model.vision.train": True}, set()),
    '--multimodal-keys {"image":"pictures"}': ({"model.vision.train": True}, {"multimodal_keys"}),
    "--debug-rollout-only": ({}, {"debug_rollout_only"}),
    "--rollout-seed 7": ({"train.seed": 7, "train.shuffle": False}, set()),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_a_method_is_carried_over_or_to_be_set_by_hand(words: str) -> None:
    carried, by_hand = CASES[words]
    conversion = read(BASE, *words.split())
    assert {key: conversion.recipe[key][0] for key in carried if key in conversion.recipe} == carried
    assert conversion.by_hand == by_hand
    sections = {key.partition(".")[0] for key in conversion.recipe}
    for section in ("kl_loss", "kl_reward", "correction", "teacher", "critic"):
        assert (section in sections) == any(key.startswith(section) for key in carried)
    needed = ("loss ClipLoss reads rewards", "does not exist", "teacher.")
    problems = [line for line in recipe_problems(recipe_text(conversion)) if not any(need in line for need in needed)]
    assert problems == []


def test_rollouts_that_run_ahead_need_a_correction() -> None:
    conversion = read(BASE.replace("train.py", "train_async.py"))
    assert conversion.recipe["rollout.max_staleness"] == (1, "train_async.py")
    assert "nothing corrects" in "".join(recipe_problems(recipe_text(conversion)))
    corrected = read(BASE.replace("train.py", "train_async.py"), "--use-tis", "--update-weights-interval", "2")
    assert corrected.recipe["rollout.max_staleness"][0] == 2
    assert recipe_problems(recipe_text(corrected)) == []


def test_what_only_a_shell_knows_is_to_be_set_by_hand() -> None:
    conversion = read(BASE.replace("rows.jsonl", "$BASE_DIR/rows.jsonl"))
    assert conversion.by_hand == {"prompt_data"}
    assert conversion.recipe["task"][0] == "HFDataset"
    assert "task.path" not in conversion.recipe


def converted(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("run.sh").write_text(text)
    assert main(["convert", "--from", "slime", "run.sh"]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)


CPU = ("--rollout.engine", "TorchEngine", "--fabric.precision", "32-true", "--validation", "null")


def test_what_is_printed_needs_nothing() -> None:
    assert recipe_problems(recipe_text(read(SCRIPT))) == []
    assert recipe_problems(recipe_text(read(FINE_TUNING))) == []


@pytest.mark.slow
def test_what_is_printed_for_grpo_trains(capsys: pytest.CaptureFixture[str]) -> None:
    converted(capsys, SCRIPT.replace("--use-wandb", ""))
    assert main(["recipe", "check", "mine.yaml", *CPU]) == 0
    assert main(["fit", "--recipe", "mine.yaml", *CPU, "--train.steps=2", "--out", "run"]) == 0
    assert [row["rollout/samples"] for row in read_jsonl(Path("run/metrics.jsonl"))] == [32, 32]


@pytest.mark.slow
def test_what_is_printed_for_fine_tuning_trains(capsys: pytest.CaptureFixture[str]) -> None:
    converted(capsys, FINE_TUNING)
    recipe = yaml.safe_load(Path("mine.yaml").read_text())
    assert (recipe["rollout"], recipe["loss"]) == ({"engine": "Recorded"}, "CrossEntropy")
    assert recipe["train"]["schedule"] == {"class_path": "Cosine", "init_args": {"min_lr_ratio": 0.1}}
    assert (recipe["train"]["steps"], recipe["train"]["aggregation"]) == (6, "token_mean")  # 24 rows, 8 a step, twice
    assert main(["recipe", "check", "mine.yaml"]) == 0
    assert main(["fit", "--recipe", "mine.yaml", "--fabric.precision", "32-true", "--out", "run"]) == 0
    losses = [row["policy/loss"] for row in read_jsonl(Path("run/metrics.jsonl"))]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("words", "by_hand"),
    [
        ("--input-key dialogue", {"input_key"}),
        ("--rollout-function-path mine.rows", {"rollout_function_path"}),
        ("--eval-interval 5 --eval-prompt-data a held-out.jsonl", {"eval_interval"}),
        ("--n-samples-per-prompt 1 --entropy-coef 0.1 --rollout-max-response-len 9 --use-rollout-logprobs", set()),
    ],
)
def test_other_options_of_fine_tuning(words: str, by_hand: set[str]) -> None:
    conversion = read(FINE_TUNING, *words.split())
    assert conversion.by_hand == by_hand
    assert recipe_problems(recipe_text(conversion)) == []
