"""The way to train: resolved once from a recipe, and asked what a run needs, not which one it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlkit.commands import parse
from rlkit.recipe.method import Method, NoEngine, ReinforcementLearning, RewardModelling, Supervised
from rlkit.run.method import procedure_of
from rlkit.train.rl import rl_step
from rlkit.train.supervised import supervised_step
from tests.conftest import ROOT
from tests.gates.trees import SHIPPED, tree_of


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("quickstart", ReinforcementLearning),
        ("quick_online_dpo", ReinforcementLearning),
        ("quick_sft", Supervised),
        ("quick_dpo", Supervised),
        ("quick_rm", RewardModelling),
    ],
)
def test_the_method_follows_from_engine_and_head(recipe: str, method: type[Method]) -> None:
    parsed = parse("fit", [f"--recipe={recipe}"]).recipe
    assert type(parsed.method) is method
    assert parsed.method is parsed.method
    assert procedure_of(parsed).step is (rl_step if method is ReinforcementLearning else supervised_step)
    assert bool(procedure_of(parsed).checks) is (method is not RewardModelling)


def test_only_reinforcement_learning_scores_training_completions() -> None:
    reward = parse("fit", ["--recipe=quickstart"]).recipe.reward
    sft = parse("fit", ["--recipe=quick_sft"]).recipe
    assert reward is not None
    assert (sft.reward is None, sft.method.training_reward(sft)) == (False, None)


def test_a_reward_model_uses_no_engine() -> None:
    recipe = parse("fit", ["--recipe=quick_rm"]).recipe
    assert isinstance(recipe.engine, NoEngine)
    assert recipe.rollout.engine not in recipe.parts()
    assert (recipe.engine.needs_weights, recipe.engine.health(), recipe.engine.server_gpus) == (True, {}, ())


def test_code_tells_methods_apart_at_one_place() -> None:
    """They are named where they are defined and resolved, and in `procedure_of` alone."""
    names = {"ReinforcementLearning", "Supervised", "RewardModelling"}
    places = {
        str(path.relative_to(ROOT))
        for path in SHIPPED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and node.id in names
    }
    assert places == {f"rlkit/{name}.py" for name in ("recipe/method", "recipe/recipe", "run/method")}


def test_few_places_ask_whether_completions_are_sampled() -> None:
    """The number may only fall; engines and recipes have no such question at all."""
    asked = [
        node.attr
        for path in map(Path, SHIPPED)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and (node.attr == "generates" or ast.unparse(node).endswith(("method.samples", "engine.recorded")))
    ]
    assert set(asked) == {"samples"}
    assert len(asked) <= 8
