"""TRL's KTO, ORPO, SimPO, reward models, online DPO, GKD and Distillation become recipes, which train."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from rlkit_convert import convert
from rlkit_convert.conversion import Conversion
from rlkit_convert.write import recipe_problems, recipe_text

from rlkit.base.errors import RecipeError
from tests.conftest import read_jsonl, rlkit_in_process

USUAL = "--model_name_or_path tiny --dataset_name rows.jsonl --max_steps 2"


def converted(words: str) -> Conversion:
    conversion = convert("trl", f"trl {words} {USUAL}", "run.sh", [])
    assert recipe_problems(recipe_text(conversion)) == []
    return conversion


def recipe_of(words: str) -> dict:
    recipe: dict = yaml.safe_load(recipe_text(converted(words)))
    return recipe


LOSSES = {
    "kto": ("KTO", {"beta": 0.1}),
    "kto --beta 0.3 --desirable_weight 1.5 --undesirable_weight 0.5": (
        "KTO", {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    "orpo": ("ORPO", {"coef": 0.1}),
    "cpo --loss_type simpo --cpo_alpha 0": ("SimPO", {"beta": 0.1, "gamma": 0.5}),
    "cpo --loss_type simpo --cpo_alpha 0 --beta 2 --simpo_gamma 1.2": ("SimPO", {"beta": 2.0, "gamma": 1.2}),
    "reward --center_rewards_coefficient 0.01": ("BradleyTerry", {"centre": 0.01}),
    "online_dpo --reward_funcs accuracy_reward": ("DPO", {"beta": 0.1}),
    "online_dpo --reward_funcs accuracy_reward --beta 0.3 0.1": ("DPO", {"beta": 0.3}),
    "gkd --lmbda 1 --teacher_model_name_or_path t": ("Distillation", {"beta": 0.5}),
    "distillation --teacher_model_name_or_path t": ("Distillation", {"beta": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize(("words", "loss"), LOSSES.items())
def test_losses_and_their_options(words: str, loss: tuple[str, dict[str, float]]) -> None:
    recipe = recipe_of(words)
    assert recipe["loss"] == {"class_path": loss[0], "init_args": loss[1]}
    assert not {"advantage", "kl_loss", "kl_reward"} & recipe.keys()


def test_a_reward_model_has_a_head_and_leaves_long_pairs_out() -> None:
    recipe = recipe_of("reward --lora_modules_to_save score --use_peft --lora_target_modules all-linear")
    assert recipe["model"]["head"] == "score"
    assert recipe["rollout"] == {"engine": "Recorded", "overlong": "drop"}
    assert recipe["train"]["lr"] == 1e-4
    assert recipe["loss"] == "BradleyTerry"
    assert "nothing to do" in converted("reward --use_peft --lora_modules_to_save score").notes["lora_modules_to_save"]


def test_online_dpo_compares_two_samples_of_a_prompt() -> None:
    words = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --reward_model_path org/rm"
    recipe = recipe_of(f"online_dpo {words} --max_new_tokens 32")
    assert recipe["rollout"]["group_size"] == 2
    assert recipe["rollout"]["sampling"] == {"max_tokens": 32, "temperature": 0.9}
    assert recipe["train"]["prompts_per_step"] == 8  # TRL's batches count prompts
    assert recipe["train"]["lr"] == 5e-7
    assert recipe["reward"] == {"class_path": "ModelReward", "init_args": {"path": "org/rm"}}


def test_distillation_samples_with_its_temperature_or_reads_rows() -> None:
    words = "--teacher_model_name_or_path t --temperature 0.7 --max_completion_length 99"
    recipe = recipe_of(f"distillation {words} --per_device_train_batch_size 4")
    assert recipe["rollout"] == {"group_size": 1, "sampling": {"max_tokens": 99, "temperature": 0.7}}
    assert recipe["train"]["prompts_per_step"] == 4
    assert recipe["teacher"] == {"path": "t"}
    recorded = recipe_of("gkd --lmbda 0 --teacher_model_name_or_path t")
    assert recorded["rollout"] == {"group_size": 1, "engine": "Recorded", "sampling": {"max_tokens": 128}}


def test_transformers_new_name_of_checkpointing_is_read() -> None:
    assert recipe_of("kto --activation_checkpointing false")["train"]["checkpoint_activations"] is False


def test_the_reference_of_kto_follows_the_policy() -> None:
    assert recipe_of("kto --sync_ref_model --ref_model_sync_steps 5")["reference"] == {"refresh_every": 5, "mix": 0.6}
    assert "ref_model_sync_steps" in converted("orpo --sync_ref_model --ref_model_sync_steps 5").notes


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("kto --loss_type apo_zero_unpaired", "loss_type"),
        ("cpo --loss_type simpo", "cpo_alpha"),
        ("cpo --loss_type simpo --label_smoothing 0.1", "label_smoothing"),
        ("cpo --loss_type simpo --alpha 0.25", "alpha"),
        ("orpo --is_encoder_decoder", "is_encoder_decoder"),
        ("online_dpo --loss_type ipo", "loss_type"),
        ("online_dpo --beta 0.2 0.1", "beta"),
        ("online_dpo --missing_eos_penalty 1", "missing_eos_penalty"),
        ("gkd", "lmbda"),
        ("gkd --lmbda 1", "temperature"),
        ("gkd --seq_kd", "seq_kd"),
        ("gold --lmbda 0", "temperature"),
        ("gold", "top_p"),
        ("distillation --top_k 20", "top_k"),
    ],
)
def test_what_changes_learning_is_to_be_set_by_hand(words: str, key: str) -> None:
    assert key in convert("trl", f"trl {words} {USUAL}", "run.sh", []).by_hand


@pytest.mark.parametrize(
    ("trainer", "words"),
    [("kto", "z is the mean"), ("orpo", "those of the prompts too"), ("reward", "head starts at 0"),
     ("online_dpo", "equal rewards are left out"), ("distillation", "complete vocabulary")],
)  # fmt: skip
def test_how_the_training_differs_is_said(trainer: str, words: str) -> None:
    assert words in convert("trl", f"trl {trainer} {USUAL}", "run.sh", []).notes["the trainer"]


@pytest.mark.parametrize("loss", ["", "--loss_type sigmoid", "--loss_type hinge", "--loss_type alphapo"])
def test_other_losses_of_cpo_are_refused(loss: str) -> None:
    kind = loss.removeprefix("--loss_type ") or "by default, sigmoid"
    with pytest.raises(RecipeError, match=rf"run.sh trains with TRL's CPOTrainer and its loss_type .*{kind}.* simpo"):
        convert("trl", f"trl cpo {loss} {USUAL}", "run.sh", [])


TRAINERS = [
    ("desirable_weight: 1.2", "train.yaml", "kto"),
    ("center_rewards_coefficient: 0.01", "train.yaml", "reward"),
    ("loss_type: simpo", "train.yaml", "cpo"),
    ("{max_new_tokens: 64, beta: 0.1}", "train.yaml", "online_dpo"),
    ("{max_new_tokens: 64, lmbda: 0.5}", "train.yaml", "gkd"),
    ("teacher_model_name_or_path: t", "train.yaml", "distillation"),
    ("{max_length: 512, beta: 0.1}", "orpo.yaml", "orpo"),
    ("{max_length: 512, eos_token: x}", "reward.yaml", "reward"),
    ("{max_length: 512, precompute_ref_log_probs: true}", "kto.yaml", "kto"),
    ("num_generations: 4", "dpo.yaml", "grpo"),
    ("python examples/scripts/reward_modeling.py --max_steps 3", "run.sh", "reward"),
    ("python examples/scripts/dpo_online.py --max_steps 3", "run.sh", "online_dpo"),
    ("trl reward --max_steps 3", "run.sh", "reward"),
    ("KTOTrainer('m', args=KTOConfig(max_steps=3))", "train.py", "kto"),
    ("trl.RewardTrainer('m', args=trl.RewardConfig(max_steps=3))", "train.py", "reward"),
    ("GKDTrainer('m', 't', GKDConfig('out', max_steps=3))", "train.py", "gkd"),
    ("OnlineDPOTrainer('m', None, 'org/rm', OnlineDPOConfig(max_steps=3))", "train.py", "online_dpo"),
]


@pytest.mark.parametrize(("text", "name", "trainer"), TRAINERS)
def test_the_trainer_is_that_of_the_command_the_classes_the_options_or_the_file(
    text: str, name: str, trainer: str
) -> None:
    assert convert("trl", text, name, []).options.values["the trainer"] == trainer


def test_arguments_by_position_are_those_of_the_class() -> None:
    conversion = convert("trl", TRAINERS[-2][0], "train.py", [])
    assert conversion.recipe["teacher.path"][0] == "t"
    conversion = convert("trl", TRAINERS[-1][0], "train.py", [])
    assert conversion.recipe["reward.path"][0] == "org/rm"
    assert "ref_model" not in conversion.by_hand
    other = convert("trl", TRAINERS[-1][0].replace("None", "'org/other'"), "train.py", [])
    assert "the policy at the start" in other.notes["ref_model"]


OPTIONS = {
    "kto": "beta desirable_weight disable_dropout loss_type max_length precompute_ref_batch_size "
    "precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps sync_ref_model undesirable_weight",
    "reward": "center_rewards_coefficient chat_template_path disable_dropout eos_token max_length pad_token",
    "orpo": "beta generate_during_eval is_encoder_decoder max_completion_length max_length padding_value",
    "cpo": "alpha beta cpo_alpha generate_during_eval is_encoder_decoder label_smoothing loss_type "
    "max_completion_length max_length simpo_gamma",
    "online_dpo": "beta loss_type max_length max_new_tokens missing_eos_penalty repetition_penalty reward_model_path "
    "reward_weights vllm_gpu_memory_utilization vllm_mode",
    "gkd": "assistant_only_loss beta dataset_kwargs lmbda loss_type max_length max_new_tokens packing seq_kd "
    "teacher_model_init_kwargs teacher_model_name_or_path temperature truncation_mode",
    "distillation": "beta log_completions max_completion_length max_tool_calling_iterations teacher_model_revision",
}
"""Options of TRL 1.16's trainers, besides those that several have."""


@pytest.mark.parametrize("trainer", OPTIONS)
def test_every_option_has_a_rule(trainer: str) -> None:
    conversion = convert("trl", f"trl {trainer} --loss_type simpo --max_steps 3", "run.sh", [])
    assert [name for name in OPTIONS[trainer].split() if conversion.rule(name) is None] == []


def sums(kind: str) -> list[dict[str, object]]:
    """Return eight sums, half of them wrong where rows have a label."""
    rows: list[dict[str, object]] = []
    for n in range(8):
        prompt, right = f"{n} + 5 = ?", str(n + 5)
        if kind == "label":
            rows.append({"prompt": prompt, "completion": right if n % 2 else "0", "label": bool(n % 2)})
        elif kind == "pair":
            rows.append({"prompt": prompt, "chosen": right, "rejected": "0"})
        else:
            rows.append({"prompt": prompt, "completion": right})
    return rows


@pytest.mark.parametrize(
    ("words", "kind", "first_loss"),
    [
        ("kto --desirable_weight 1.2", "label", (1.2 + 1) / 4),  # 1 - sigmoid(0) is a half, half of it weighs 1.2
        ("reward", "pair", math.log(2)),  # the head is 0
        ("gkd --lmbda 0 --teacher_model_name_or_path tiny", "completion", 0.0),  # the teacher is the policy
    ],
)
def test_a_converted_recipe_trains(words: str, kind: str, first_loss: float, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(kind)), encoding="utf-8")
    text = recipe_text(converted(f"{words} --learning_rate 1e-3 --bf16 false"))
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    done = rlkit_in_process("fit", "--recipe=mine.yaml", "--fabric.accelerator=cpu", "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [line["policy/loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(first_loss, abs=1e-6)
    assert len(losses) == 2
    assert losses[1] < losses[0] or kind == "completion"
