"""Former import paths of moved modules: plugins still load, and `fit` says once what to change."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import rlkit
from rlkit.cli.main import main
from rlkit.former import FORMER, REMOVED_IN, take_imported
from tests.conftest import FAST, ROOT, write_plugin

SOURCE = """
from rlkit import hookimpl
from rlkit.errors import RecipeError
from rlkit.ranges import PositiveInt
from rlkit.roles.reward import RewardFunction

class {name}(RewardFunction):
    def __init__(self, limit: PositiveInt = 5) -> None:
        self.limit = limit

    def grade(self, trajectory):
        return float(len(trajectory.text) <= self.limit)

@hookimpl
def rlkit_register(register):
    register({name})
"""


@pytest.mark.filterwarnings("ignore:rlkit:DeprecationWarning")
def test_plugins_of_former_paths_train_with_one_note_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("First", "Second"):
        write_plugin(tmp_path, f"former_{name.lower()}", SOURCE.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        main(["fit", "--recipe=quickstart", *FAST, "--reward=First", "--validation=null", f"--out={tmp_path}/out"]) == 0
    )
    notes = [line for line in capsys.readouterr().err.splitlines() if "former paths" in line]
    paths = (
        "rlkit.errors (now rlkit.base.errors), rlkit.ranges (now rlkit.base.ranges), "
        "rlkit.roles.reward (now rlkit.interfaces.reward)"
    )
    for note, name in zip(notes, ("first", "second"), strict=True):
        assert note.startswith(f"note: plugin 'former_{name}' of rlkit-former_{name} 2.1: it imports ")
        assert note.endswith(f"{paths}; the former paths end in rlkit 0.2")


@pytest.mark.parametrize("former", FORMER)
def test_a_former_path_has_the_names_of_the_new_one(former: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = import_module(former)
    new = import_module(FORMER[former])
    public = {name for name in vars(new) if not name.startswith("_")}
    assert {name for name in public if getattr(module, name) is not getattr(new, name)} == set()
    assert any(f"{former} is now {FORMER[former]}" in str(warning.message) for warning in caught)
    take_imported()


def test_former_paths_are_removed_in_time() -> None:
    assert Version(rlkit.__version__) < Version(REMOVED_IN)


def test_the_changelog_lists_all_moved_modules() -> None:
    _, _, text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("Upgrading plugins")
    for former, new in FORMER.items():
        assert f"| `{former}` | `{new}` |" in text
