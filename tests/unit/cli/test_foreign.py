"""Options by the names of other toolkits: the message has rlkit's name."""

from __future__ import annotations

import pytest

from rlkit import fit
from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.recipe.parsing.foreign import FOREIGN, NO_OPTION
from rlkit.recipe.parsing.suggest import known_keys
from rlkit.registry import load_plugins

TYPED = {
    "learning_rate": "train.lr",
    "train.learning_rate": "train.lr",
    "beta": "kl_loss.coef",
    "rollout.num_generations": "rollout.group_size",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch",
    "train.batch_size": "train.prompts_per_step",
    "loss.epsilon_high": "loss.clip_high",
    "scale_rewards": "advantage.scale_by_std",
    "use_vllm": "rollout.engine",
    "lora_r": "model.lora.rank",
    "model_name_or_path": "model.path",
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "algorithm.adv_estimator": "advantage",
    "trainer.n_gpus_per_node": "fabric.devices",
    "n_samples_per_prompt": "rollout.group_size",
    "train.stpes": "train.steps",
    "rollout.group_szie": "rollout.group_size",
}


@pytest.mark.parametrize("name", TYPED)
def test_a_foreign_or_misspelt_name_has_the_right_suggestion(name: str) -> None:
    with pytest.raises(RecipeError, match="did you mean") as error:
        parse("fit", ["--recipe=quickstart", f"--{name}=1"])
    assert f"did you mean '{TYPED[name]}'?" in str(error.value)


def test_an_option_of_the_recipes_loss_precedes_a_foreign_name() -> None:
    with pytest.raises(RecipeError, match="unknown option") as error:
        parse("fit", ["--recipe=quick_dpo", "--beta=1"])
    assert "did you mean 'loss.beta'?" in str(error.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--logging_steps=3", "logging_steps is not an option of rlkit: every step is logged"),
        ("--train.logging_steps=3", "every step is logged; remove it"),
        ("--wandb", "--log.loggers='[{class_path: Wandb, init_args: {project: NAME}}]'"),
        ("--use_peft", "unknown option 'use_peft'; did you mean 'model.lora'?"),
        ("--train.lr", "--train.lr has no value; write --train.lr=VALUE"),
        ("--loss=Clip", "did you mean 'ClipLoss'?"),
        ("--reward=math", "did you mean 'MathReward'?"),
        ("--model=Qwen/x", "a model's name or folder is --model.path=Qwen/x"),
    ],
)
def test_what_is_no_option_has_a_hint(word: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse("fit", ["--recipe=quickstart", word])
    assert hint in str(error.value)


def test_the_way_to_wandb_is_one() -> None:
    words = NO_OPTION["wandb"].partition(" logs")[0].replace("'", "")
    [logger] = parse("fit", ["--recipe=quickstart", words]).recipe.log.loggers
    assert type(logger).__name__ == "Wandb"


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [("quick", "quickstart"), ("quickstrt", "quickstart"), ("quick_g", "quick_grpo"), ("grpo", "grpo_geo3k")],
)
def test_the_beginning_of_a_recipe_is_completed(recipe: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=f"did you mean '{hint}'"):
        parse("fit", [recipe])


def test_an_unknown_section_of_help_has_the_nearest() -> None:
    with pytest.raises(RecipeError, match="unknown section 'trian'; did you mean 'train'?"):
        parse("fit", ["--help", "trian"])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("lr", 'train={"lr": ...}'),
        ("learning_rate", 'train={"lr": ...}'),
        ("temperature", 'rollout={"sampling": {"temperature": ...}}'),
        ("rewards", "'reward'"),
    ],
)
def test_an_option_is_named_by_its_argument_in_python(argument: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        fit("quickstart", **{argument: 3})  # type: ignore[arg-type]
    assert f"fit has no argument '{argument}'; did you mean {hint}?" in str(error.value)


def test_every_suggestion_is_an_option() -> None:
    registry = load_plugins(entry_points=False)
    sections = {"lora": {}, "launch": {}}
    tree = {
        "model": sections, "critic": {}, "kl_loss": {}, "kl_reward": {}, "reference": {}, "validation": {},
        "save": {}, "log": {},
        "advantage": {"class_path": "GRPO", "init_args": {}}, "loss": {"class_path": "ClipLoss", "init_args": {}},
        "rollout": {"engine": {"class_path": "SGLangEngine", "init_args": sections}},
        "task": {"class_path": "Verl", "init_args": {}}, "reward": {"class_path": "ModelReward", "init_args": {}},
    }  # fmt: skip
    assert {key for key in FOREIGN.values() if not key.startswith("--")} - set(known_keys(registry, tree)) == set()
    assert {key for key in FOREIGN.values() if key.startswith("--")} == {"--out", "--resume"}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--config", "mine.yaml"], "--config is not an option of rlkit: write --recipe FILE"),
        (["--config=mine.yaml"], "--config is not an option of rlkit: write --recipe FILE"),
        (["--print_config"], "`rlkit recipe show RECIPE` prints a recipe with every option filled in"),
        (["quickstart", "--print_config=skip_default"], "`rlkit recipe show RECIPE` prints a recipe"),
    ],
)
def test_options_of_jsonargparse_are_redirected(words: list[str], remedy: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse("fit", words)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("option", "example"),
    [
        (
            "--log.loggers=Wandb",
            "`log.loggers: [Wandb]`; a class with options is {class_path: Wandb, init_args: {...}}",
        ),
        ("--log.loggers={class_path: CSV}", "`log.loggers: [CSV]`"),
        ("--log.loggers={csv: CSV}", "`log.loggers: [CSV]`"),
        ("--callbacks=Mine", "`callbacks: [MyClass]`"),
        ("--tools=Calculator", "`tools: {calculator: Calculator}`"),
        ("--tools=[Calculator]", "`tools: {calculator: Calculator}`"),
        ("--tools=[{class_path: Calculator}]", "`tools: {calculator: Calculator}`"),
        ("--tools=[null]", "`tools: {calculator: Calculator}`"),
    ],
)
def test_lists_and_mappings_of_parts_show_their_form(option: str, example: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse("fit", ["quickstart", option])
    assert f"; for example {example}" in str(raised.value)
