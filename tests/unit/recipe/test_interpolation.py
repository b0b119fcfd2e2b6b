"""References of a recipe to its own options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.base.errors import RecipeError
from rlkit.commands import Parsed, parse, with_recipe_of

BASE = "model: {path: tiny}\ntask: Arithmetic\nloss: ClipLoss\nadvantage: GRPO\nreward: MathReward\n"  # five lines


@pytest.fixture
def compose(tmp_path: Path) -> Any:
    def parsed(text: str, *options: str) -> Parsed:
        (tmp_path / "mine.yaml").write_text(BASE + text)
        return parse("fit", [f"--recipe={tmp_path / 'mine.yaml'}", *options], trains=True)

    return parsed


def refusal(compose: Any, text: str, *options: str) -> str:
    with pytest.raises(RecipeError) as error:
        compose(text, *options)
    return str(error.value)


def test_a_reference_has_the_value_of_the_composed_recipe(compose: Any) -> None:
    text = (
        "train: {steps: 3, prompts_per_step: 16, lr: 0.5}\n"
        "rollout:\n  group_size: ${train.prompts_per_step}\n"
        "save:\n  every: ${train.steps}\n"
        "validation:\n  limit: ${save.every}\n  samples: ${save.keep_last}\n"  # a chain, and a default
    )
    made = compose(text).recipe
    assert (made.rollout.group_size, made.save.every, made.validation.limit, made.validation.samples) == (16, 3, 3, 2)
    made = compose(text, "--train.prompts_per_step=4", "--train.steps=7", "--save.keep_last=5").recipe
    assert (made.rollout.group_size, made.save.every, made.validation.limit, made.validation.samples) == (4, 7, 7, 5)
    assert compose(text, "--rollout.group_size=2").recipe.rollout.group_size == 2
    assert compose(text, "--rollout.group_size=${train.steps}").recipe.rollout.group_size == 3


def test_references_in_texts_lists_and_options_of_parts(compose: Any) -> None:
    """A text option takes a number as text; `null` is a value; an element of a list refers by its own type."""
    made = compose(
        "train:\n  steps: 3\n  optimizer: {class_path: AdamW, init_args: {betas: [0.5, '${loss.clip_low}']}}\n"
        "rollout:\n  sampling:\n    stop: ['</${model.path}-${train.steps}>']\n  sampling_column: ${train.steps}\n"
        "  max_prompt_tokens: ${rollout.max_gap}\n"
        "log:\n  loggers:\n  - class_path: Wandb\n    init_args: {project: 'p-${train.optimizer.betas.0}'}\n"
    ).recipe
    assert list(made.train.optimizer.betas) == [0.5, 0.2]
    assert list(made.rollout.sampling.stop) == ["</tiny-3>"]
    assert (made.rollout.sampling_column, made.rollout.max_prompt_tokens) == ("3", None)
    assert made.log.loggers[0].project == "p-0.5"


def test_the_recorded_recipe_has_values_and_is_read_as_it_is(compose: Any, tmp_path: Path) -> None:
    parsed = compose("train: {steps: 3}\nsave: {every: '${train.steps}'}\nrollout: {sampling: {stop: ['$${a.b}']}}\n")
    recorded = yaml.safe_load(parsed.yaml)
    assert recorded["save"]["every"] == 3
    assert recorded["rollout"]["sampling"]["stop"] == ["$${a.b}"]
    (tmp_path / "recipe.yaml").write_text(parsed.yaml)
    again = parse("fit", [f"--recipe={tmp_path / 'recipe.yaml'}", "--train.steps=9"])
    assert again.recipe.save.every == 3
    assert list(parsed.recipe.rollout.sampling.stop) == list(again.recipe.rollout.sampling.stop) == ["${a.b}"]


@pytest.mark.parametrize(
    "text",
    ["$", "$5", "$$", "${x}", "${}", "$ {a.b}", "{a.b}", "$x^{a.b}$", "\\frac{$a}{b}", "${X.y}", "${a:b}", "${a.b"],
)
def test_other_dollars_are_text(text: str, compose: Any) -> None:
    made = compose(f"train: {{steps: 1}}\nrollout: {{sampling: {{stop: ['{text}']}}}}\n").recipe
    assert list(made.rollout.sampling.stop) == [text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "save:\n  every: ${train.stepz}\n",
            "save.every refers to ${train.stepz}, which is no option of this recipe; did you mean 'train.steps'? A "
            "text is written $${train.stepz} (mine.yaml:7)",
        ),
        ("save:\n  every: ${data.size}\n", "save.every refers to ${data.size}, which is no option of this recipe; "),
        ("save:\n  every: ${loss.epz}\n", "save.every refers to ${loss.epz}, which is no option of this recipe; "),
        (
            "save:\n  every: ${rollout.sampling}\n",
            "save.every refers to ${rollout.sampling}, which has options of its own; refer to one of them, such as "
            "${rollout.sampling.temperature} (mine.yaml:7)",
        ),
        ("save:\n  every: ${train}\n", "save.every refers to ${train}, which has options of its own; "),
        ("save:\n  every: ${loss}\n", "such as ${loss.clip_low} (mine.yaml:7)"),
        (
            "save:\n  every: ${oc.env:HOME}\n",
            "save.every refers to ${oc.env:HOME}, which is outside of the recipe; refer to its options, "
            "${section.option}, or to a credential, ${RLKIT_NAME} (mine.yaml:7)",
        ),
        ("save:\n  every: ${env:HOME}\n", "save.every refers to ${env:HOME}, which is outside of the recipe"),
        (
            "save:\n  every: ${validation.every}\nvalidation: {every: '${save.every}'}\n",
            "save.every refers to itself: save.every -> validation.every -> save.every; give one of them a value "
            "(mine.yaml:7)",
        ),
        (
            "save:\n  every: ${save.every}\n",
            "save.every refers to itself: save.every -> save.every; give one of them a value (mine.yaml:7)",
        ),
        ("save:\n  every: ${model.path}\n", "save.every is 'tiny', expected a whole number"),
        ("save:\n  every: ${train.steps}0.5\n", "save.every is 10.5, expected a whole number"),
        ("curriculum: ${loss.clip_low}\n", "curriculum is '${loss.clip_low}', "),
        (
            "rollout: {sampling: {stop: ['${rollout.max_gap}!']}}\n",
            "rollout.sampling.stop refers to ${rollout.max_gap}, which is null, which has no place in a text or a "
            "list; set it (mine.yaml:6)",
        ),
        (
            "rollout: {sampling_column: $, sampling: {stop: ['${rollout.sampling_column}{train.steps}']}}\n",
            "rollout.sampling.stop becomes ",
        ),
        (
            "interaction:\n  class_path: Retry\n  init_args:\n    tries: ${model.path}\n",
            "interaction.tries is 'tiny', expected ",
        ),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_named(text: str, message: str, compose: Any, tmp_path: Path) -> None:
    assert message in refusal(compose, text, "--train.steps=1").replace(f"{tmp_path}/", "")


def test_a_credential_is_not_referred_to(compose: Any) -> None:
    """It would be written where nothing tells that it is one."""
    remote = ("--reward=RemoteReward", "--reward.url=https://me:secret@h.example/", "--train.steps=1")
    message = refusal(compose, "", *remote, "--rollout.sampling_column=${reward.url}")
    assert "rollout.sampling_column refers to ${reward.url}, which holds a credential" in message
    assert "secret" not in message


def test_a_strangers_recipe_is_judged_by_its_values(compose: Any, tmp_path: Path) -> None:
    text = "train: {steps: 1}\nrollout: {sampling_column: http}\ntask: {class_path: HFDataset, init_args: {path: "
    text = BASE.replace("task: Arithmetic\n", "") + text + "'${rollout.sampling_column}://h.example/x.jsonl'}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="http://h.example/x.jsonl"):
        with_recipe_of(tmp_path, [])
