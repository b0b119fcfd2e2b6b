"""Plugins: what is loaded, what is refused, and how it is said."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlkit import hookimpl, hooks
from rlkit.advantages import GRPO
from rlkit.base import installed
from rlkit.base import text as base_text
from rlkit.base.errors import PluginError
from rlkit.cli.main import main
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe.parsing.suggest import classes_at
from rlkit.recipe.schema import Choice
from rlkit.registry import checks, load_plugins
from rlkit.rewards import ExactReward
from rlkit.tools import Calculator
from tests.conftest import FakeDistribution, write_plugin

VERBS = [entry for entry in installed.entry_points("rlkit.commands") if installed.comes_with_rlkit(entry)]
"""Of packages that come with rlkit."""


class Other(ExactReward):
    """Another reward."""


class OtherCalculator(Calculator):
    """Another tool."""


OFFERED = [("rewards", "Other"), ("tools", "OtherCalculator")]


def plugin(name: str, *classes: Any, hook: str = "rlkit_register") -> tuple[str, ModuleType]:
    """Make a plugin that registers classes."""

    def implementation(register: Any) -> None:
        for cls in classes:
            register(cls)

    implementation.__name__ = hook
    module = ModuleType(name)
    setattr(module, hook, hookimpl(implementation))
    return name, module


@pytest.fixture(autouse=True)
def _sources_of_packages_are_looked_up_anew() -> Iterator[None]:
    """Entry points that a test replaces must not be remembered in the tests after it."""
    yield
    base_text._source_of_package.cache_clear()


def test_built_in_parts_are_there_with_where_they_come_from() -> None:
    registry = load_plugins(entry_points=False)
    part = registry.parts["advantages"]["GRPO"]
    assert (part.cls, part.plugin.distribution) == (GRPO, "rlkit-fabric")
    assert part.plugin.version == metadata.version("rlkit-fabric")
    from_plugins = {kind for kind in hooks.KINDS if not registry.parts[kind]}
    assert from_plugins == {"callbacks", "environments"}
    registry.require_healthy()


def test_a_plugin_offers_a_part() -> None:
    registry = load_plugins([plugin("mine", Other)], entry_points=False)
    assert registry.parts["rewards"]["Other"].plugin.name == "mine"
    assert "tests" in registry.packages or "test_registry" in registry.packages


class Abstract(RewardManager):
    """Does not score."""


class Both(ExactReward, Calculator):  # type: ignore[misc]
    """A reward and a tool."""


KNOWN = "expected exactly one of: AdvantageEstimator, PolicyLoss, RewardManager"


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([str], f"registers str, which subclasses no interface of rlkit, {KNOWN}"),
        ([Both], f"registers Both, which subclasses the interfaces RewardManager and Tool, {KNOWN}"),
        ([3], "registers 3, expected a class"),
        ([Other, Abstract], "registers Abstract, which does not implement RewardManager.score"),
    ],
)
def test_a_broken_plugin_is_listed_and_refused_by_name(classes: list[Any], message: str) -> None:
    registry = load_plugins([plugin("bad", *classes)], entry_points=False)
    assert "Other" not in registry.parts["rewards"]
    with pytest.raises(PluginError, match="plugin 'bad'.*RLKIT_DISABLE_PLUGINS=bad") as raised:
        registry.require_healthy()
    assert message in str(raised.value)


def test_an_unknown_hook_is_refused_with_those_that_there_are() -> None:
    registry = load_plugins([plugin("old", Other, hook="rlkit_register_rewards")], entry_points=False)
    with pytest.raises(PluginError, match="'old' .*unknown hook 'rlkit_register_rewards'.*; hooks: rlkit_register"):
        registry.require_healthy()


def test_a_classes_interface_tells_its_kind() -> None:
    registry = load_plugins([plugin("mine", Other, OtherCalculator)], entry_points=False)
    assert [registry.parts[kind][name].plugin.name for kind, name in OFFERED] == ["mine", "mine"]
    for kind, (_, interface, key) in hooks.KINDS.items():
        allowed = classes_at(key, registry)
        assert isinstance(allowed, Choice)
        assert allowed.kind == kind
        assert all(issubclass(part.cls, interface) for part in allowed.parts.values())


def test_two_plugins_with_one_class_name_are_refused_naming_both() -> None:
    registry = load_plugins([plugin("one", Other), plugin("two", Other)], entry_points=False)
    one, two = registry.plugins[-2:]
    for broken in (one, two):
        with pytest.raises(PluginError, match=r"'one' .* and 'two' .* both offer Other among rewards"):
            broken.require_healthy()
    assert "Other" not in registry.parts["rewards"]
    assert registry.plugins[0].error is None


def test_two_parts_of_one_name_in_a_plugin_are_refused_with_their_line() -> None:
    twin = type("Other", (Other,), {})
    registry = load_plugins([plugin("mine", twin, Other)], entry_points=False)
    assert registry.plugins[-1].error is not None
    assert "'mine' (mine) both offer Other among rewards; rename it, or" in registry.plugins[-1].error
    assert f"({__file__}, line " in registry.plugins[-1].error
    assert "Other" not in registry.parts["rewards"]


def test_a_part_called_like_rlkit_s_own_breaks_its_plugin_alone() -> None:
    twin = type("ExactReward", (Other,), {})
    registry = load_plugins([plugin("mine", twin)], entry_points=False)
    assert [broken.name for broken in registry.plugins if broken.error] == ["mine"]
    assert registry.parts["rewards"]["ExactReward"].cls is ExactReward


def module_of(tmp_path: Path, name: str, text: str) -> ModuleType:
    """Import a module from a file, so that its source can be read."""
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOK = "def rlkit_register(register): pass\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOOK, "its function rlkit_register is never called.*@hookimpl"),
        ("def rlkit_registers(register): pass\n", "marked with `@hookimpl`.*named `rlkit_register`"),
        (f"from rlkit import hookimpl\n@hookimpl\n{HOOK}@hookimpl\n{HOOK}", "defines rlkit_register 2 times"),
        (
            "from rlkit import hookimpl\n@hookimpl\ndef rlkit_register(reg): pass\n",
            r"'reg'.*hooks: rlkit_register\(register\)",
        ),
    ],
)
def test_a_hook_that_would_be_ignored_breaks_its_plugin(tmp_path: Path, text: str, message: str) -> None:
    registry = load_plugins([("odd", module_of(tmp_path, "odd", text))], entry_points=False)
    with pytest.raises(PluginError, match=message) as raised:
        registry.require_healthy()
    assert "\n" not in str(raised.value)


def test_a_module_without_hooks_is_noted() -> None:
    [note] = load_plugins([("empty", ModuleType("empty"))], entry_points=False).notes
    assert "has no hook, so it provides nothing" in note


class Typo(Callback):
    """Has a method that nobody calls, a hook and a helper."""

    def on_step_ends(self, event: Any) -> None: ...

    def on_batch(self, event: Any) -> None: ...

    def batch_mean(self) -> None: ...


class Misplaced(ExactReward):
    """Has a helper whose name is like that of a method that it overrides."""

    def grade(self, trajectory: Any) -> Any:
        return 0.0

    def grades(self) -> None: ...


def test_a_misspelt_method_is_noted_with_the_one_meant() -> None:
    [note] = load_plugins([plugin("typo", Typo, Misplaced)], entry_points=False).notes
    assert "Typo.on_step_ends is never called; did you mean `on_step_end`?" in note


class SyncTool(Calculator):
    """Cannot be awaited."""

    def call(self, arguments: Any, state: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return ""


class Wrapped(Calculator):
    """Returns what a coroutine function returns."""

    @functools.wraps(Calculator.call)  # type: ignore[misc]
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return super().call(*args, **kwargs)


class AsyncReward(ExactReward):
    """Returns a coroutine in place of a number."""

    async def grade(self, trajectory: Any) -> float:  # type: ignore[override]
        return 0.0


class NoEvent(Callback):
    """Cannot take an event."""

    def on_step_end(self) -> None: ...  # type: ignore[override]


class Static(Callback):
    """Takes the event without `self`."""

    @staticmethod
    def on_step_end(event: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (SyncTool, "SyncTool.call is a plain function, expected a coroutine: write `async def call`"),
        (AsyncReward, "AsyncReward.grade is a coroutine, which is never awaited"),
        (NoEvent, r"NoEvent.on_step_end\(self\).* is called with \(event\): too many positional arguments"),
    ],
)
def test_a_method_that_cannot_be_called_breaks_its_plugin(cls: type, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_plugins([plugin("bad", cls)], entry_points=False).require_healthy()


def test_wrapped_and_static_methods_are_fine() -> None:
    load_plugins([plugin("good", Wrapped, Static)], entry_points=False).require_healthy()


def entry(name: str, dist: str, load: Any, *requires: str) -> Any:
    return SimpleNamespace(name=name, value=name, dist=FakeDistribution(dist, "1.2", requires), load=load)


def fail() -> None:
    raise ImportError("no module named 'left_pad'")


def test_a_plugin_is_there_as_long_as_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "early" not in {plugin.name for plugin in installed.installed()}
    write_plugin(tmp_path, "early", "")
    assert "early" in {plugin.name for plugin in installed.installed()}
    shutil.rmtree(tmp_path / "rlkit_early-2.1.dist-info")
    assert "early" not in {plugin.name for plugin in installed.installed()}


def test_entry_points_are_loaded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    good = plugin("good", Other)[1]
    entries = [entry("bad", "rlkit-bad", fail), entry("good", "rlkit-good", lambda: good)]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else [])
    registry = load_plugins()
    assert "Other" in registry.parts["rewards"]
    with pytest.raises(PluginError, match=r"plugin 'bad' of rlkit-bad 1.2 .*no module named 'left_pad'"):
        registry.require_healthy()
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "bad, unknown")
    registry = load_plugins()
    registry.require_healthy()
    assert [p.name for p in registry.plugins if p.disabled] == ["bad"]


def test_two_distributions_with_one_entry_point_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plugin("same")[1]
    entries = [entry("same", dist, lambda: module) for dist in ("rlkit-a", "rlkit-b")]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else [])
    registry = load_plugins()
    broken = [listed for listed in registry.plugins if listed.name == "same"]
    assert [listed.distribution for listed in broken] == ["rlkit-a", "rlkit-b"]
    for listed in broken:
        with pytest.raises(PluginError, match="'same' is used by two distributions, rlkit-a and rlkit-b"):
            listed.require_healthy()


def test_slow_imports_and_foreign_requirements_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry("slow", "rlkit-slow", lambda: plugin("slow")[1], "rlkit" + ">=0.1")]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else [])
    monkeypatch.setattr(checks, "SLOW_IMPORT", -1.0)
    requirement, seconds = load_plugins().notes
    assert "requires `rlkit>=0.1`, which is another project; require `rlkit-fabric`" in requirement
    assert "plugin 'slow' of rlkit-slow 1.2: importing slow took 0.0 s" in seconds


def test_errors_are_listed_in_the_terminal_s_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    entries = [entry("bad", "rlkit-bad-with-a-long-name", fail)]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else VERBS)
    assert main(["plugins", "list"]) == 2
    lines = capsys.readouterr().out.splitlines()
    broken = "BROKEN: importing bad (entry point in pyproject.toml) raised ImportError: no module named 'left_pad'"
    assert broken in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [
        ("rlkit-fabric>=0.1,<0.2", True),
        ("rlkit_fabric", True),
        ("RLKit.Fabric>=0.2", False),
        ("rlkit-fabric<0.1", False),
        ("rlkit-fabric>=9; extra == 'new'", True),
        ("rlkit-fabric>=9; python_version < '3'", True),
        ("torch>=99", True),
        ("rlkit-fabric ~ nonsense", True),
    ],
)
def test_a_plugin_for_another_rlkit_is_not_imported(
    requirement: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = plugin("picky", Other)[1]
    imported: list[ModuleType] = []
    entries = [entry("picky", "rlkit-picky", lambda: imported.append(module) or module, requirement)]  # type: ignore[func-returns-value]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else [])
    registry = load_plugins()
    assert bool(imported) == ("Other" in registry.parts["rewards"]) == fits
    if fits:
        registry.require_healthy()
        return
    message = (
        r"'picky' of rlkit-picky 1.2 .*: it needs rlkit-fabric[<>=0-9.]+, but [0-9.]+ is installed; "
        r"install versions of rlkit-picky and rlkit-fabric that fit.*RLKIT_DISABLE_PLUGINS=picky"
    )
    with pytest.raises(PluginError, match=message):
        registry.require_healthy()


def test_a_name_that_disables_nothing_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [entry("length-reward", "rlkit-length-reward", lambda: plugin("good")[1])]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else VERBS)
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "lenght-reward, xyz")
    first, second = load_plugins().notes
    assert first.endswith("names 'lenght-reward', which is no installed plugin; did you mean 'length-reward'?")
    assert second.endswith("names 'xyz', which is no installed plugin; installed: length-reward")
    assert main(["plugins", "list"]) == 0
    assert f"note: {first}" in capsys.readouterr().out
    assert main(["explain", "--recipe=quickstart"]) == 0
    assert f"note: {first}" in capsys.readouterr().err
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "length-reward,")
    assert not load_plugins().notes


def test_the_list_shows_a_plugin_s_parts_by_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    main(["plugins", "list"])
    listed = capsys.readouterr().out
    assert "advantages: GAE, GDPO" in listed
    assert "filters: ZeroSignal" in listed
    assert "environments:" not in listed.partition("builtin")[2].partition("parsers:")[0]
