"""Former paths of modules and booleans of engines: plugins still work, and `fit` says once what to change."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import rlkit
from rlkit.cli.main import main
from rlkit.cli.parsing.parser import parse
from rlkit.engines import TorchEngine
from rlkit.former import FORMER, REMOVED_IN, FormerFlag, take_imported
from rlkit.interfaces.engine import Capability, RolloutEngine
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
    notes = [line for line in capsys.readouterr().err.splitlines() if "former names" in line]
    paths = (
        "rlkit.errors (now rlkit.base.errors), rlkit.ranges (now rlkit.base.ranges), "
        "rlkit.roles.reward (now rlkit.interfaces.reward)"
    )
    for note, name in zip(notes, ("first", "second"), strict=True):
        assert note.startswith(f"note: plugin 'former_{name}' of rlkit-former_{name} 2.1: it uses ")
        assert note.endswith(f"{paths}; the former names end in rlkit 0.2")


ENGINE = """
from rlkit import hookimpl
from rlkit.engines import TorchEngine

class OnServers(TorchEngine):
    reads_policy = False
    beside = True

    def __init__(self) -> None:
        super().__init__()
        self.interruptible = False
        assert (self.reads_policy, self.beside, self.returns_candidates) == (False, True, True)

@hookimpl
def rlkit_register(register):
    register(OnServers)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_former_booleans_of_engines_are_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plugin(tmp_path, "former_engine", ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    engine = parse("fit", ["--recipe=quickstart", "--rollout.engine=OnServers"]).recipe.rollout.engine
    kept = Capability.CANDIDATES | Capability.RESUMES_STRUCTURES
    assert engine.capabilities == kept | Capability.BESIDE
    assert type(engine).capabilities == kept | Capability.BESIDE | Capability.INTERRUPT
    assert TorchEngine.capabilities == kept | Capability.READS_POLICY | Capability.INTERRUPT
    names = "OnServers.reads_policy (now Capability.READS_POLICY), OnServers.beside (now Capability.BESIDE)"
    assert f"2.1: it uses {names}; the former names end in rlkit 0.2" in capsys.readouterr().err


def test_a_former_boolean_that_is_a_property_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Late\.beside is .* expected true or false; set `capabilities` in `__init__`"):
        type("Late", (TorchEngine,), {"beside": property(lambda self: True)})


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
    for flag in [member for member in vars(RolloutEngine).values() if isinstance(member, FormerFlag)]:
        assert f"| `{flag.name}` of an engine | `{flag.capability}` |" in text
