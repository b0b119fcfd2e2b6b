"""Plugins: what is loaded, what is refused, and how it is said."""

from __future__ import annotations

from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlkit import hookimpl, hooks
from rlkit.advantages import GRPO
from rlkit.cli.main import main
from rlkit.cli.parsing.schema import Choice
from rlkit.cli.parsing.suggest import classes_at
from rlkit.errors import PluginError
from rlkit.interfaces.reward import RewardManager
from rlkit.registry import load_plugins
from rlkit.rewards import ExactReward
from rlkit.tools import Calculator


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


KNOWN = "of which a part has one: AdvantageEstimator, PolicyLoss, RewardManager"


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([str], f"registers str, which subclasses no interface of rlkit, {KNOWN}"),
        ([Both], f"registers Both, which subclasses the interfaces RewardManager and Tool, {KNOWN}"),
        ([3], "registers 3, expected a class"),
        ([Other, Abstract], "registers Abstract, which does not implement score of RewardManager"),
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


def test_the_interface_of_a_class_tells_its_kind_and_the_recipe_s_key() -> None:
    registry = load_plugins([plugin("mine", Other, OtherCalculator)], entry_points=False)
    assert [registry.parts[kind][name].plugin.name for kind, name in OFFERED] == ["mine", "mine"]
    for kind, (_, interface, key) in hooks.KINDS.items():
        allowed = classes_at(key, registry)
        assert isinstance(allowed, Choice)
        assert allowed.kind == kind
        assert all(issubclass(part.cls, interface) for part in allowed.parts.values())


def test_two_plugins_with_one_class_name_are_refused_naming_both() -> None:
    twins = [plugin("one", Other), plugin("two", Other)]
    with pytest.raises(PluginError, match=r"'one' .* and 'two' .* both offer Other among rewards"):
        load_plugins(twins, entry_points=False)


def entry(name: str, dist: str, load: Any, *requires: str) -> Any:
    installed = SimpleNamespace(name=dist, version="1.2", requires=list(requires))
    return SimpleNamespace(name=name, value=name, dist=installed, load=load)


def fail() -> None:
    raise ImportError("no module named 'left_pad'")


def test_entry_points_are_loaded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    good = plugin("good", Other)[1]
    entries = [entry("bad", "rlkit-bad", fail), entry("good", "rlkit-good", lambda: good)]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "rlkit" else [])
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
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "rlkit" else [])
    with pytest.raises(PluginError, match="'same' is used by two distributions, rlkit-a and rlkit-b"):
        load_plugins()


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
def test_a_plugin_for_another_rlkit_is_not_imported_and_says_what_to_do(
    requirement: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = plugin("picky", Other)[1]
    imported: list[ModuleType] = []
    entries = [entry("picky", "rlkit-picky", lambda: imported.append(module) or module, requirement)]  # type: ignore[func-returns-value]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "rlkit" else [])
    registry = load_plugins()
    assert bool(imported) == ("Other" in registry.parts["rewards"]) == fits
    if fits:
        registry.require_healthy()
        return
    message = (
        r"'picky' of rlkit-picky 1.2 .*: it needs rlkit-fabric[<>=0-9.]+, but [0-9.]+ is installed; .*"
        r"pip install --upgrade rlkit-picky rlkit-fabric.*RLKIT_DISABLE_PLUGINS=picky"
    )
    with pytest.raises(PluginError, match=message):
        registry.require_healthy()


def test_a_name_that_disables_nothing_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [entry("length-reward", "rlkit-length-reward", lambda: plugin("good")[1])]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "rlkit" else [])
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
