"""Numbers outside of the ranges that their types state: refused by name, on the command line and in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge, Le

from rlkit import Recipe
from rlkit.base.errors import RecipeError
from rlkit.base.ranges import (
    LARGEST_FLOAT,
    NUMBER,
    Count,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Share,
    ShareBelowOne,
    outside,
)
from rlkit.cli.main import main
from rlkit.recipe import Train
from rlkit.recipe.parsing.suggest import describe
from rlkit.registry import Registry
from rlkit.rewards import MathReward


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (PositiveInt, "a whole number of 1 or more"),
        (Count, "a whole number from 1 to 65536"),
        (PositiveFloat | None, "a number above 0, or null"),
        (FiniteFloat, "a number"),
        (Share, "a number from 0 to 1"),
        (ShareBelowOne, "a number above 0 and below 1"),
        (Annotated[float, Ge(-LARGEST_FLOAT), Le(0), NUMBER], "a number at most 0"),
        (Seconds, "a number above 0 and at most 31536000"),
        (tuple[PositiveInt, ...], "a list, each of it a whole number of 1 or more"),
        (dict[str, Share] | None, "names, each with a number from 0 to 1, or null"),
    ],
)
def test_a_range_in_words(hint: object, words: str) -> None:
    assert describe(hint, Registry()) == words


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train.lr=.inf", "train.lr is .inf, expected a number above 0"),
        ("--train.lr=1e40", "train.lr is 1e40, expected a number above 0 and at most 1"),
        ("--train.lr=null", "train.lr is null, expected a number above 0"),
        ("--train.entropy_coef=.nan", "train.entropy_coef is .nan, expected a number"),
        (
            "--rollout.sampling.temperature=inf",
            "temperature is inf, expected a number from 0 to 100",
        ),
        (
            "--rollout.sampling.stop_ids=[-1]",
            "rollout.sampling.stop_ids is [-1], expected a list, each of it a whole number of 0 or more",
        ),
        ("--advantage.eps=-5", "advantage.eps is -5, expected a number above 0"),
        ("--train.max_grad_norm=1e40", "train.max_grad_norm is 1e40, expected a number above 0 and at most 1e+30"),
        ("--loss.clip_high=nan", "loss.clip_high is nan, expected a number from 0 to 1e+30"),
        ("--reward.timeout=-1", "reward.timeout is -1, expected a number above 0 and at most 31536000"),
        ("--task.validation_size=-7", "task.validation_size is -7, expected a whole number of 1 or more"),
        ("--task.max_operand=1e40", "task.max_operand is 1e40, expected a whole number from 4 to 999"),
        (
            "--train.prompts_per_step=999999999999",
            "is 999999999999, expected a whole number from 1 to 65536",
        ),
        ("--model.lora.rank=100000", "model.lora.rank is 100000, expected a whole number from 1 to 4096"),
        ("--train.steps=true", "train.steps is 'true', expected a whole number of 1 or more"),
        ("--train.steps=1.5", "train.steps is 1.5, expected a whole number of 1 or more"),
        ('--train={"steps":true}', "train.steps is true, expected a whole number of 1 or more"),
        ('--train.lr={"a":[1]}', 'train.lr is {"a":[1]}, expected a number above 0'),
        ('--tools={"calc":{"class_path":"Calculator","init_args":{"bonus":"x"}}}', "bonus is 'x', expected a number"),
        ("--rollout.engine=SGLangServer --rollout.engine.retry.retries=-1", "rollout.engine.retry.retries is -1"),
        (
            '--advantage=GDPO --advantage.weights={"a":.inf}',
            "advantage.weights.a is inf, expected a number from -1e+30",
        ),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--recipe", "quickstart", *option.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_recipe_made_in_python_is_checked_too() -> None:
    recipe = Recipe("tiny", "Arithmetic", MathReward(timeout=-1.0), train=Train(steps=True, lr=float("nan")))
    with pytest.raises(RecipeError) as refused:
        recipe.yaml()
    assert sorted(str(refused.value).splitlines()) == [
        "reward.timeout is -1.0, expected a number above 0 and at most 31536000",
        "train.lr is nan, expected a number above 0 and at most 1",
        "train.steps is true, expected a whole number of 1 or more, or null",
    ]


class OwnReward(MathReward):
    """A reward that no recipe can name."""


def test_a_part_that_no_recipe_can_name_is_checked_too() -> None:
    recipe = Recipe("tiny", "Arithmetic", OwnReward(timeout=-1.0))
    with pytest.raises(RecipeError, match=r"^reward\.timeout is -1\.0, expected a number above 0"):
        recipe.yaml()


@dataclass
class Inner:
    share: Share


class Outer:
    def __init__(self, parts: dict[str, Inner], one: Inner | None = None) -> None:
        self.parts, self.one = parts, one


def test_parts_inside_of_parts_are_found() -> None:
    found = outside(Outer({"a": Inner(2.0), "b": Inner(1.0)}, Inner(-1.0)), "outer")
    assert [text.partition(" ")[0] for text in found] == ["outer.parts.a.share", "outer.one.share"]


def test_help_says_ranges_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--help-all", "--advantage.help=GRPO"):
        with pytest.raises(SystemExit):
            main(["fit", "--recipe", "quickstart", option])
    text = " ".join(capsys.readouterr().out.split())
    assert "The peak learning rate. (type: a number above 0 and at most 1; default: 1e-06)" in text
    assert "added to the standard deviation. (type: a number above 0; default: 1e-06)" in text
    assert "Annotated" not in text
