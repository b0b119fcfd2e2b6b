"""What a configuration does is carried over or to be set by hand, in forty of them; nothing is silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from behaviour_cases import CASES as EARLIER
from behaviour_cases import FILES
from recent_cases import CASES as RECENT
from rlkit_convert import convert
from rlkit_convert.conversion import Conversion
from rlkit_convert.trl import TRAINER
from rlkit_convert.write import recipe_problems, recipe_text

from tests.conftest import ROOT, write_metadata

CASES = EARLIER | {f"late 2025: {name}": case for name, case in RECENT.items()}
PACKAGES = ("rlkit-convert", "rlkit-tool-search", "rlkit-engine-vllm", "rlkit-env-verifiers")
NEEDED = (
    "allow_code",
    "train.steps",
    "train.data_epochs",
    "reward",
    "no loss",
    "no advantage",
    "nothing corrects",
    "is not installed",
)
"""In what a recipe still needs: code, packages, and what a file leaves open."""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Make the packages' parts known, as `pip install` does."""
    site = tmp_path_factory.mktemp("site")
    for name in PACKAGES:
        write_metadata(ROOT / "plugins" / name, site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


def silent(conversion: Conversion) -> set[str]:
    """Return the options that are neither in the recipe nor listed."""
    options = {*conversion.options.values, *conversion.options.unresolved}
    sources = {source for _, text in conversion.recipe.values() for source in text.split(", ")}
    return options - sources - conversion.notes.keys() - {TRAINER}


@pytest.mark.parametrize("name", CASES)
def test_behaviour_is_carried_over_or_to_be_set_by_hand(name: str) -> None:
    case = CASES[name]
    conversion = convert(case.peer, case.text, case.file, [])
    assert {key: conversion.recipe[key][0] for key in case.carried if key in conversion.recipe} == case.carried
    assert conversion.by_hand == case.by_hand
    assert not silent(conversion)
    text = recipe_text(conversion)
    assert yaml.safe_load(text)["model"]["path"] == "org/model"
    assert not [line for line in recipe_problems(text) if not any(word in line for word in NEEDED)]


def test_forty_configurations_are_tried() -> None:
    assert [sum(case.peer == peer for case in CASES.values()) for peer in ("verl", "trl", "openrlhf", "prime-rl")] == [
        13, 14, 7, 6,
    ]  # fmt: skip
