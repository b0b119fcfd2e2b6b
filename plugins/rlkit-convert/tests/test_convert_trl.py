"""TRL's options whose numbers or defaults mean something else in rlkit."""

from __future__ import annotations

import pytest
from rlkit_convert import convert
from rlkit_convert.conversion import Conversion
from rlkit_convert.write import recipe_problems, recipe_text

UPDATES = """{model_name_or_path: m, dataset_name: d, per_device_train_batch_size: 8, steps_per_generation: 4,
num_iterations: 2, warmup_steps: 81, eval_strategy: steps, eval_steps: 80, beta: 0.04, sync_ref_model: true,
ref_model_sync_steps: 4, max_steps: 800"""
INTERVALS = ("train.steps", "train.warmup_steps", "validation.every", "reference.refresh_every", "save.every")


def converted(words: str) -> Conversion:
    return convert("trl", f"trl {words} --model_name_or_path m --dataset_name d", "run.sh", [])


def intervals(conversion: Conversion) -> list[object]:
    return [conversion.recipe[key][0] for key in INTERVALS]


@pytest.mark.parametrize("hint", ["", ", rloo_k: 8", ", lmbda: 1.0"])
def test_intervals_in_updates_become_rollouts(hint: str) -> None:
    """Of a rollout of 4 x 8 completions, an update takes 8; 2 passes are 8 updates."""
    conversion = convert("trl", f"{UPDATES}, save_steps: 80{hint}}}", "a.yaml", [])
    if "lmbda" in hint:  # GOLD has no reference
        conversion.recipe["reference.refresh_every"] = (1, "")
    assert intervals(conversion) == [100, 11, 10, 1, 10]
    conversion = convert("trl", f"{UPDATES}{hint}}}", "a.yaml", [])
    assert conversion.recipe["save.every"] == (63, "default of save_steps")  # 500 / 8
    conversion = convert("trl", f"{UPDATES}{hint}, save_steps: 0}}", "a.yaml", [])
    assert conversion.recipe["save.every"] == (0, "save_steps")


def test_ppo_counts_rollouts() -> None:
    words = "--num_mini_batches 4 --warmup_steps 80 --eval_strategy steps --eval_steps 50 --sync_ref_model"
    conversion = converted(f"ppo {words} --ref_model_sync_steps 30 --total_episodes 3200")
    # a rollout has 8 x 4 completions
    assert intervals(conversion) == [100, 80, 50, 30, 500]


def test_intervals_of_unknown_rollouts_are_left_out() -> None:
    conversion = converted("grpo --num_iterations $N --save_steps 80 --warmup_steps 80")
    assert not {"train.steps", "save.every", "train.warmup_steps"} & conversion.recipe.keys()
    assert "depends on an option whose value is unknown" in conversion.notes["save_steps"]
    assert "depends on an option whose value is unknown" in conversion.notes["warmup_steps"]


def test_a_fraction_of_all_steps_is_no_interval() -> None:
    conversion = converted("grpo --save_steps 0.1")
    assert "expected a number of steps" in conversion.notes["save_steps"]
    assert "save.every" not in conversion.recipe


@pytest.mark.parametrize(("words", "mix"), [("--ref_model_mixup_alpha 0.9", 0.9), ("", 0.6)])
def test_the_references_mix_is_trls_alpha(words: str, mix: float) -> None:
    """In both it is the policy's weight."""
    conversion = converted(f"grpo --beta 0.1 --sync_ref_model {words}")
    assert conversion.recipe["reference.mix"][0] == mix


@pytest.mark.parametrize(
    ("trainer", "is_corrected"), [("grpo", True), ("rloo", False), ("gold", False), ("online_dpo", False)]
)
def test_only_trls_grpo_corrects_vllm(trainer: str, is_corrected: bool) -> None:
    conversion = converted(f"{trainer} --use_vllm --vllm_importance_sampling_cap 2.0")
    assert ("correction.high" in conversion.recipe) is is_corrected
    assert ("vllm_importance_sampling_cap" in conversion.notes) is not is_corrected


def test_adapters_without_targets_get_a_remark() -> None:
    """TRL leaves the choice to peft, which chooses by the type of the model."""
    assert "[q_proj, v_proj]" in converted("grpo --use_peft").notes["use_peft"]
    assert "use_peft" not in converted("grpo --use_peft --lora_target_modules all-linear").notes
    script = "GRPOTrainer('m', 'accuracy_reward', GRPOConfig(max_steps=3), peft_config=LoraConfig(r=8))"
    assert "[q_proj, v_proj]" in convert("trl", script, "train.py", []).notes["use_peft"]


@pytest.mark.parametrize("peer", ["trl", "verl"])
@pytest.mark.parametrize(
    ("target", "logger"), [("wandb", "Wandb"), ("trackio", "Trackio"), ("swanlab", "SwanLab"), ("clearml", "ClearML")]
)
def test_loggers_with_a_project_are_carried_over(peer: str, target: str, logger: str) -> None:
    trls = ["--report_to", target, "--project", "p", "--run_name", "n"]
    verls = [f"trainer.logger={target}", "trainer.project_name=p", "trainer.experiment_name=n"]
    conversion = convert(peer, "", "run.sh", {"trl": trls, "verl": verls}[peer])
    expected = [{"class_path": logger, "init_args": {"project": "p", "name": "n"}}]
    assert conversion.recipe["log.loggers"][0] == expected
    assert not [line for line in recipe_problems(recipe_text(conversion)) if "logger" in line]


def test_what_rlkit_has_for_another_loss_is_named() -> None:
    notes = converted("grpo --neftune_noise_alpha 5 --trackio_space_id me/runs").notes
    assert "CrossEntropy only: neftune_alpha" in notes["neftune_noise_alpha"]
    assert "Trackio has space_id" in notes["trackio_space_id"]
