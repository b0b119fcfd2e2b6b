"""`--checkpoint` of the verbs that train nothing: which policy and which recipe it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlkit_policy.checkpoint import with_checkpoint

from rlkit.base.errors import RecipeError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a final model."""
    folder = tmp_path / "run"
    (folder / "final").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    (folder / "final" / "config.json").write_text("{}")
    return folder


def test_it_stands_for_the_policy_and_the_recipe_of_a_run(run: Path) -> None:
    policy = [f"--model.path={run / 'final'}", "--model.lora=null"]
    recipe = ["--recipe", str(run / "recipe.yaml")]
    for given in ([f"--checkpoint={run}"], ["--checkpoint", str(run)], [f"--checkpoint={run / 'final'}", "--json"]):
        assert with_checkpoint(given) == [*recipe, *given, *policy]
    for own in (["--recipe=mine"], ["--recipe", "mine"]):  # another recipe is the user's choice
        assert with_checkpoint([*own, "--checkpoint", str(run)]) == [*own, "--checkpoint", str(run), *policy]
    assert with_checkpoint(["quickstart", "--json"]) == ["quickstart", "--json"]


def test_the_last_one_counts(run: Path) -> None:
    assert with_checkpoint(["--checkpoint=nowhere", "--checkpoint", str(run)])[-2:] == [
        f"--model.path={run / 'final'}", "--model.lora=null",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match="--checkpoint is 'nowhere', expected a run folder, its final/ or a"):
        with_checkpoint([f"--checkpoint={run}", "--checkpoint=nowhere"])
    with pytest.raises(RecipeError, match=f"there is no such folder: did you mean '{run}'"):
        with_checkpoint([f"--checkpoint={run}2"])


def test_a_model_has_no_recipe(run: Path) -> None:
    (run / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match="final', a model without a recipe; add the recipe by which it was trained"):
        with_checkpoint([f"--checkpoint={run / 'final'}"])
    assert with_checkpoint([f"--checkpoint={run / 'final'}", "--help"])


def test_a_run_in_the_place_of_a_recipe_is_refused_with_the_option(run: Path) -> None:
    with pytest.raises(RecipeError, match=f"^'{run}' is a run, expected a recipe; .* write --checkpoint {run}$"):
        with_checkpoint([str(run), "--json"])


@pytest.mark.parametrize("given", [["--checkpoint"], ["--checkpoint="], ["--checkpoint", "--json"]])
def test_without_a_path_it_is_refused(given: list[str]) -> None:
    with pytest.raises(RecipeError, match="--checkpoint has no value, expected a run folder"):
        with_checkpoint(given)
