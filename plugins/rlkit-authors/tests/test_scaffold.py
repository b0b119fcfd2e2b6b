"""`rlkit plugins new` and `test`: what is written works as it is, and what is broken is found and named."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rlkit_authors.plugins import USAGE
from rlkit_authors.scaffold import PLURALS, WRITTEN, scaffold

from rlkit import hookimpl
from rlkit.base import installed
from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.loss import AdvantageLoss, PolicyLoss
from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.interfaces.reward import RewardFunction
from rlkit.interfaces.task import Task
from rlkit.interfaces.tool import Tool
from rlkit.registry import load_plugins
from rlkit.rewards import ExactReward
from rlkit.testing import (
    check_advantage,
    check_engine,
    check_environment,
    check_filter,
    check_interaction,
    check_loss,
    check_options,
    check_parser,
    check_plugin,
    check_reward,
    check_schema,
    check_task,
    check_tool,
)
from rlkit.types import Completion, LossOutput, Prompt, StopReason
from tests.conftest import ROOT, FakeDistribution


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the rows of tables on one line."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of every kind."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in WRITTEN:
        scaffold(f"rlkit-my-{kind}", kind, folder / f"rlkit-my-{kind}")
    return folder


@pytest.mark.slow
def test_their_own_tests_pass_as_they_are(packages: Path) -> None:
    sources = os.pathsep.join(map(str, [ROOT, *packages.glob("*/src")]))
    command = (sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", str(packages))
    env = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run(command, cwd=packages, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 2 * len(WRITTEN)  # type: ignore[index]


def test_each_written_package_passes_ruff(packages: Path) -> None:
    pytest.importorskip("ruff")
    rules = ("--select=I,F,E4,E7,E9", "--config", 'src = ["*/src"]')
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", *rules, ".")
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", PLURALS)
def test_what_is_written_is_found_and_conforms(kind: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packages / f"rlkit-my-{kind}"
    monkeypatch.syspath_prepend(package / "src")
    cls = "My" + "".join(word.capitalize() for word in kind.split("-"))
    name = f"rlkit_my_{kind}".replace("-", "_")
    module = importlib.import_module(name)
    part = load_plugins([(f"my-{kind}", module)], entry_points=False).parts[PLURALS[kind]][cls]
    assert part.plugin.name == f"my-{kind}"
    assert {f.state for f in check_plugin(f"my-{kind}", module)} == {"ok"}
    [fragment] = re.findall(r"In a recipe:\n\n    (.+)\n", (package / "README.md").read_text())
    assert cls in str(yaml.safe_load(fragment))
    assert f'my-{kind} = "{name}"' in (package / "pyproject.toml").read_text()
    assert not re.search(r"\$\w", "".join(p.read_text() for p in package.rglob("*.*") if p.suffix != ".pyc"))
    sys.modules.pop(name)  # `plugins new` refuses the name of a module that is imported


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MyTool", "expected lower-case words joined by dashes, such as my-tool"),
        ("rlkit_my_tool", "such as rlkit-my-tool"),
        ("../x", "such as x"),
        ("2", "such as rlkit-my-tool"),
        ("rlkit-2d", r"names no class of Python \(2d\); try rlkit-my-2d"),
        ("rlkit", "there is a module rlkit already"),
        ("json", "there is a module json already; uninstall it or choose another name"),
        ("class", "names no class of Python"),
        ("rlkit-arithmetic", "rlkit has Arithmetic itself; try rlkit-my-arithmetic"),
        ("rlkit-task", "rlkit has Task itself"),
    ],
)
def test_names_that_do_not_do_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        scaffold(name, "task", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "rlkit-your-tool", "--kind", "tool"]) == 0
    assert "pip install -e 'rlkit-your-tool[test]'" in capsys.readouterr().out
    assert main(["plugins", "new", "rlkit-your-tool", "--kind", "tool"]) == 2
    assert "rlkit-your-tool exists and is not an empty folder; choose a new one" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["plugins", "new", "rlkit-your-tool", "--kind", "tool", "--out", "empty"]) == 0
    assert main(["plugins", "new", "rlkit-your-tool", "--kind", "toll"]) == 2
    assert main(["plugins", "new", "rlkit-your-tool", "--kind", "tool", "--in=x"]) == 2
    assert all(kind in USAGE for kind in WRITTEN)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


class GoodTool(Tool):
    """Counts its calls, in the conversation's state."""

    name = "count"
    description = "Counts."
    parameters = SCHEMA

    async def call(self, arguments: Any, state: Any, **kwargs: Any) -> Any:
        state["calls"] = state.get("calls", 0) + 1
        return str(state["calls"])


class LeakyTool(GoodTool):
    """Counts the calls of all conversations."""

    calls = 0

    async def call(self, arguments: Any, state: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return str(self.calls)


class MuteTool(GoodTool):
    """Answers with no text."""

    async def call(self, arguments: Any, state: Any, **kwargs: Any) -> Any:
        return None


class GreedyTool(GoodTool):
    """Cannot be released unless it was called."""

    async def release(self, state: Any, **kwargs: Any) -> None:
        del state["calls"]


class StubbornTool(GoodTool):
    """Cannot be closed twice."""

    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class RandomTool(GoodTool):
    """Answers with another text each time."""

    async def call(self, arguments: Any, state: Any, **kwargs: Any) -> Any:
        return os.urandom(8).hex()


class LeakyUser(Interaction):
    """Asks once in its life."""

    asked = False

    async def reply(self, messages: Any, state: Any) -> Reply:
        done, self.asked = self.asked, True
        return Reply([{"role": "user", "content": "Sure?"}], done)


class SilentUser(Interaction):
    """Goes on without a word."""

    async def reply(self, messages: Any, state: Any) -> Reply:
        return Reply([], done=False)


class Meddler(Interaction):
    """Writes into the conversation itself."""

    async def reply(self, messages: Any, state: Any) -> Reply:
        messages.append({"role": "user", "content": "!"})
        return Reply([], done=True)


class LeakyGame(Environment):
    """Has one seed for all episodes."""

    async def reset(self, prompt: Prompt, seed: int, state: Any) -> str:
        self.seed = seed
        return "go"

    async def step(self, action: str, state: Any) -> Observation:
        return Observation(str(self.seed))


class RandomGame(LeakyGame):
    """Does not heed the seed."""

    async def step(self, action: str, state: Any) -> Observation:
        return Observation(os.urandom(8).hex())


class FragileGame(LeakyGame):
    """Takes numbers only."""

    async def step(self, action: str, state: Any) -> Observation:
        return Observation(str(int(action)))


class LateEngine(RolloutEngine):
    """Never takes a version."""

    def bind(self, runtime: Any) -> None:
        pass

    async def generate(self, request: Any) -> Completion:
        return Completion([5], [-0.5], [0], StopReason.LENGTH)

    async def sync(self, stream: Any, version: int) -> None:
        pass


class LongEngine(LateEngine):
    """Has no budget."""

    async def generate(self, request: Any) -> Completion:
        return Completion([5] * 9, [-0.5] * 9, [3] * 9, StopReason.STOP)


class UnmaskedAdvantage(AdvantageEstimator):
    """Pays the prompt too."""

    def estimate(self, batch: Any) -> None:
        batch.advantages = batch.outcomes()[:, None].expand(batch.mask.shape).clone()


class Unsafe(AdvantageEstimator):
    """Divides by a deviation that may be 0."""

    def estimate(self, batch: Any) -> None:
        outcomes = batch.outcomes()
        batch.advantages = ((outcomes - outcomes.mean()) / outcomes.std())[:, None] * batch.mask


class MeanLoss(PolicyLoss):
    """Divides, which is the loop's business."""

    def __call__(self, out: Any, batch: Any) -> LossOutput:
        return LossOutput(-(batch.advantages * out.logps).mean(), {})


class HastyLoss(AdvantageLoss):
    """Has a gradient without an advantage."""

    def __call__(self, out: Any, batch: Any) -> LossOutput:
        return LossOutput(-(batch.advantages + 0.1) * out.logps * batch.mask, {})


class ExplodingLoss(PolicyLoss):
    """Overflows."""

    def __call__(self, out: Any, batch: Any) -> LossOutput:
        return LossOutput(torch.exp(10 * (out.logps - batch.old_logps)) * batch.advantages, {})


class NanReward(RewardFunction):
    """Divides by the length."""

    def grade(self, trajectory: Any) -> float:
        return 1 / len(trajectory.text) if trajectory.text else float("nan")


class ClosureReward(ExactReward):
    """Holds what cannot be sent to a worker."""

    def __init__(self) -> None:
        self.ask = lambda: 1


class EmptyTask(Task):
    """Has nothing to learn."""

    def rows(self, split: Any) -> Any:
        return []

    def prompt(self, row: Any, index: int) -> Prompt:
        return Prompt("p", [])


class UndecidedFilter(GroupFilter):
    """Answers with a number."""

    def keep(self, group: Any) -> Any:
        return 0.5


class StrictParser(ToolParser):
    """Raises where a call is not whole."""

    @classmethod
    def detects(cls, template: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        if "<tool_call>" in text and "</tool_call>" not in text:
            raise ValueError("unclosed")
        return ParsedTurn(text)


class EagerParser(StrictParser):
    """Finds calls everywhere."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text, [ToolCall("f")])


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (check_tool, LeakyTool, r"LeakyTool returned \['1', '3'.* beside another conversation and \['1', '2'.* alone"),
        (check_tool, MuteTool, "MuteTool.call returned None, expected a text or a ToolReply"),
        (check_tool, GreedyTool, r"GreedyTool.release\(state\) a second time raised KeyError: 'calls'"),
        (check_tool, StubbornTool, r"StubbornTool.close\(\) a second time raised RuntimeError: closed already"),
        (check_interaction, LeakyUser, "LeakyUser returned .*in its state"),
        (check_interaction, SilentUser, "SilentUser.reply returned .*expected messages with role and content, or done"),
        (check_interaction, Meddler, "Meddler.reply modified the messages"),
        (check_environment, LeakyGame, "LeakyGame returned .* beside another conversation"),
        (check_environment, RandomGame, "expected the same for the same seed"),
        (check_environment, FragileGame, "FragileGame.step raised ValueError.* on the action 'yes'"),
        (check_engine, LateEngine, "LateEngine.generate returned .*, expected the version of the last sync, 3"),
        (check_engine, LongEngine, "LongEngine.generate returned .*, expected 1 to max_tokens = 1 tokens"),
        (check_advantage, UnmaskedAdvantage(), "UnmaskedAdvantage wrote advantages outside the mask"),
        (check_advantage, Unsafe(), r"Unsafe wrote advantages .* for rewards \[1.0, 1.0, 1.0, 1.0\], expected finite"),
        (check_loss, MeanLoss(), r"MeanLoss returned a loss of shape \(\), expected a LossOutput of shape \(4, 6\)"),
        (check_loss, HastyLoss(), "HastyLoss is an AdvantageLoss, but has a gradient where advantages"),
        (check_loss, ExplodingLoss(), "ExplodingLoss is not finite where the log-ratio is 20"),
        (check_reward, NanReward(), "NanReward returned nan for '', expected finite numbers, or an error"),
        (check_reward, ClosureReward(), "ClosureReward cannot be pickled"),
        (check_task, EmptyTask(), "EmptyTask has no train rows"),
        (check_filter, UndecidedFilter(), "UndecidedFilter.keep returned 0.5"),
        (check_parser, StrictParser(), "StrictParser.parse raised ValueError: unclosed on 'See. <tool_call>'"),
        (check_parser, EagerParser(), "EagerParser made .*expected the text and no calls"),
    ],
)
def test_a_broken_part_is_named_with_what_is_wrong(check: Callable[[Any], Any], broken: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(broken)


def test_what_is_random_or_well_behaved_passes() -> None:
    assert check_tool(GoodTool) == ["1", "2", "3", "4", "5", "6"]
    assert len(set(check_tool(RandomTool))) == 6


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "p is None, expected a JSON schema of type object"),
        ({"type": "string"}, "expected a JSON schema of type object"),
        ({"type": "object", "properties": {"x": {"type": "int"}}}, "p.x has the type 'int', expected one of object"),
        ({"type": "object", "required": ["x"]}, "p.required has \\['x'\\], expected names of its properties"),
        ({"type": "object", "properties": {"x": {"enum": {1}}}}, "p is not JSON"),
        ({"type": "object", "properties": {"x": {"items": 3}}}, "p.x.items is 3, expected a schema"),
    ],
)
def test_schemas(schema: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_schema(schema, "p")


class Undocumented(ExactReward):
    """Says nothing of its option."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


class Untyped(ExactReward):
    """Takes anything.

    Args:
        weight: How much.
    """

    def __init__(self, weight=1.0) -> None:  # type: ignore[no-untyped-def]
        self.weight = weight


class Loose(ExactReward):
    """Takes all."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


def test_options_are_typed_documented_and_named() -> None:
    for cls, message in ((Undocumented, "is not documented"), (Untyped, "has no type"), (Loose, "takes .kwargs")):
        with pytest.raises(AssertionError, match=message):
            check_options(cls)


def offer(*classes: type) -> Any:
    """Make a plugin's module that registers classes."""

    def rlkit_register(register: Any) -> None:
        for cls in classes:
            register(cls)

    return SimpleNamespace(__name__="mine", rlkit_register=hookimpl(rlkit_register))


def test_plugins_test_prints_what_failed_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {
        "good": offer(GoodTool),
        "mixed": offer(LeakyTool, Undocumented),
        "none": offer(),
    }
    dists = {"good": "rlkit-fine", "mixed": "rlkit-mixed", "none": "rlkit-none", "sick": "rlkit-sick"}
    entries = [
        SimpleNamespace(
            name=name,
            value=name,
            dist=FakeDistribution(dist, "1", ("rlkit-fabric>=0.1,<0.2",)),
            load=lambda name=name: modules[name],
        )
        for name, dist in dists.items()
    ]
    verbs = [entry for entry in installed.entry_points("rlkit.commands") if installed.comes_with_rlkit(entry)]
    monkeypatch.setattr(installed, "entry_points", lambda group: entries if group == "rlkit" else verbs)
    assert main(["plugins", "test", "rlkit_fine"]) == 0
    assert re.search(r"GoodTool +│ contract +│ ok", capsys.readouterr().out)
    assert main(["plugins", "test", "mixed"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"LeakyTool +│ contract +│ failed +│ LeakyTool returned \['1', '3'", out)
    assert re.search(r"Undocumented +│ options +│ failed +│ Undocumented.weight is not documented", out)
    assert main(["plugins", "test", "none"]) == 1
    assert "is a hook marked with @hookimpl?" in capsys.readouterr().out
    assert main(["plugins", "test", "sick"]) == 1
    assert "importing sick (entry point in pyproject.toml) raised KeyError" in capsys.readouterr().out
    assert main(["plugins", "test", "mixd"]) == 2
    assert "no plugin or distribution is named 'mixd'; did you mean 'mixed'?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_built_in_parts_conform(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "builtin"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"TorchEngine +│ contract +│ ok", out)
    assert re.search(r"CISPO +│ golden vector +│ ok", out)
    assert re.search(r"Composite +│ contract +│ not run +│ it needs options: rewards", out)
