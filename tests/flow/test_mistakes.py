"""Each mistake of a plugin's author is one message of `rlkit fit`, with the plugin, the file, the line and a remedy."""

from __future__ import annotations

import shlex
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlkit.cli.main import main
from tests.conftest import write_plugin

IMPORTS = """\
import math, os, threading, time
import torch
from rlkit.base.ranges import PositiveInt
from rlkit.hooks import hookimpl
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.agent import Agent, AgentResult
from rlkit.interfaces.callback import Callback, Logger
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.launcher import Launcher
from rlkit.interfaces.loss import SequenceLoss, SequenceOutput, TokenLoss
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardFunction, RewardManager
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool
from rlkit.types import Completion, LossOutput, Prompt, Score, StopReason
"""
HOOK = "\n@hookimpl\ndef rlkit_register(register):\n    register(Mine)\n"
MARK = "  # <-"
SMALL = (
    "--recipe=quickstart", "--train.steps=1", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation=null", "--out=out",
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A section of `mistakes.txt`, which says what it holds."""

    name: str
    flags: str
    options: tuple[str, ...]
    says: str
    module: str

    @classmethod
    def read(cls, section: str) -> Mistake:
        head, says, source = section.split("\n", 2)
        words = shlex.split(head)
        flags = words.pop(0) if words[0] in ("!", "~") else ""
        hook = "" if "rlkit_register" in source or "rlkit_recipes" in source else HOOK
        module = f"{IMPORTS}\n{source.rstrip()}\n{hook}"
        return cls(words[0].replace("-", "_"), flags, tuple(words[1:]), says.removeprefix("# "), module)

    @property
    def line(self) -> int:
        [line] = [n for n, text in enumerate(self.module.splitlines(), 1) if text.endswith(MARK)]
        return line


_, *SECTIONS = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").split("\n### ")
MISTAKES = [
    pytest.param(mistake, id=mistake.name, marks=[pytest.mark.slow] * (mistake.flags == "~"))
    for mistake in map(Mistake.read, SECTIONS)
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = write_plugin(tmp_path / "site", mistake.name, mistake.module)
    file = site / f"rlkit_{mistake.name}_parts.py"
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    before = threading.enumerate()
    status = main(["fit", *SMALL, *mistake.options])
    printed = "".join(capfd.readouterr())
    assert (status == 0) == (mistake.flags == "!"), printed
    assert "Traceback" not in printed
    messages = [line for line in printed.splitlines() if mistake.says in line]
    assert messages, printed
    assert f"plugin {mistake.name!r}" in messages[0]
    assert f"{file}, line {mistake.line}: " in messages[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "rlkit-rollouts" and thread not in before]
