"""verl's options whose values or defaults mean something else in rlkit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rlkit_convert import convert, run
from rlkit_convert.conversion import UNUSED

BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
DAPO = [
    "custom_reward_function.path=my.py", "custom_reward_function.name=score", "reward_model.reward_manager=dapo",
    f"+{BUFFER}.enable=True", f"+{BUFFER}.penalty_factor=1.0", "data.max_response_length=64",
]  # fmt: skip


def test_a_function_of_the_user_keeps_dapos_penalty() -> None:
    conversion = convert("verl", "", "run.sh", [*DAPO, f"+{BUFFER}.len=16"])
    length = {"class_path": "Overlong", "init_args": {"max_tokens": 64, "buffer": 16, "factor": 1.0}}
    function = {"class_path": "PythonReward", "init_args": {"function": "my.py:score"}}
    assert conversion.recipe["reward"][0] == "Composite"
    rewards, sources = conversion.recipe["reward.rewards"]
    assert rewards == {"score": function, "length": length}
    assert sources.startswith("custom_reward_function.path, custom_reward_function.name, ")
    assert "reward.function" not in conversion.recipe
    assert not [key for key in conversion.notes if BUFFER in key or "custom_reward" in key]


@pytest.mark.parametrize("size", ["0", "65"])
def test_a_penalty_that_cannot_be_set_is_listed(size: str) -> None:
    conversion = convert("verl", "", "run.sh", [*DAPO, f"+{BUFFER}.len={size}"])
    assert conversion.recipe["reward.function"][0] == "my.py:score"
    assert "options of Overlong" in conversion.notes[f"{BUFFER}.len"]


def test_a_penalty_beside_a_function_of_unknown_name() -> None:
    conversion = convert("verl", "", "run.sh", [*DAPO, f"+{BUFFER}.len=16", "custom_reward_function.name=${NAME}"])
    assert not {"reward.function", "reward.rewards"} & conversion.recipe.keys()


@pytest.mark.parametrize("limit", [[], ["algorithm.filter_groups.max_num_gen_batches=0"]])
def test_refills_without_a_limit_are_set_and_listed(limit: list[str]) -> None:
    conversion = convert("verl", "", "run.sh", ["algorithm.filter_groups.enable=True", *limit])
    assert conversion.recipe["rollout.filter.max_refills"][0] == 9
    assert "no limit" in conversion.notes["algorithm.filter_groups.max_num_gen_batches"]


@pytest.mark.parametrize(("reward", "component"), [([], "accuracy"), (["custom_reward_function.path=my.py"], "acc")])
def test_groups_are_filtered_by_what_the_reward_returns(reward: list[str], component: str) -> None:
    """A function of verl's, whose groups are filtered by `acc`, returns a mapping with it."""
    conversion = convert("verl", "", "run.sh", ["algorithm.filter_groups.enable=True", *reward])
    assert conversion.recipe["rollout.filter.component"][0] == component


NULLS = ("algorithm.rollout_correction.rollout_is", "custom_reward_function.path", "trainer.total_training_steps")


def test_null_is_an_absent_option_in_each_form() -> None:
    absent = convert("verl", "", "run.sh", ["trainer.nnodes=1"])
    command = convert("verl", "", "run.sh", ["trainer.nnodes=1", *(f"{key}=null" for key in NULLS)])
    lines = "".join(f"{key}: ${{oc.select:none.set,null}}\n" for key in NULLS)
    file = convert("verl", f"trainer.nnodes: 1\n{lines}", "a.yaml", [])
    assert command.recipe == file.recipe == absent.recipe
    assert command.notes == file.notes == absent.notes


def test_null_on_the_command_line_unsets_a_files_option() -> None:
    script = "python -m verl.trainer.main_ppo custom_reward_function.path=my.py trainer.nnodes=1"
    conversion = convert("verl", script, "run.sh", ["custom_reward_function.path=null"])
    assert conversion.recipe["reward"][0] == "MathReward"


@pytest.mark.parametrize(("words", "coef"), [([], 0.1), (["ppo_kl_coef=0.5"], 0.5)])
def test_the_penalty_of_kl_cov_is_verls(words: list[str], coef: float) -> None:
    prefix = "actor_rollout_ref.actor.policy_loss"
    conversion = convert("verl", "", "run.sh", [f"{prefix}.{word}" for word in ("loss_mode=kl_cov", *words)])
    assert conversion.recipe["loss.coef"][0] == coef
    assert "loss.fraction" not in conversion.recipe  # the same default


@pytest.mark.parametrize("words", [[], ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=1"]])
def test_nothing_is_said_of_sequence_parallelism_that_is_off(words: list[str]) -> None:
    conversion = convert("verl", "", "run.sh", ["trainer.nnodes=1", *words])
    assert conversion.recipe["fabric.strategy"][0] == "fsdp2"
    [remark] = [conversion.notes.get(key, UNUSED) for key in words] or [UNUSED]
    assert remark == UNUSED
    assert len([key for key in conversion.notes if "ulysses" in key]) == len(words)


def test_a_problem_of_the_recipe_names_its_line_and_no_file_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.total_training_steps=-3\n")
    assert run(["--from", "verl", str(script)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# From verl: {script}. The comment after each option names the option of verl that it ")
    [number] = re.findall(r"train\.steps.*\(recipe:(\d+)\)", shown)
    assert "steps: -3" in shown.splitlines()[int(number) - 1]
    assert "recipe.yaml" not in shown
