"""Engines that die, hang or are slow while rollouts run ahead of the trainer: what ends the run, and what does not."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, read_jsonl, rlkit, write_plugin
from tests.flow.test_faults import ended, start, wait_for

pytestmark = pytest.mark.slow

ODD = '''
import asyncio
from rlkit import hookimpl
from rlkit.engines import TorchEngine
from rlkit.base.errors import EngineError

class OddEngine(TorchEngine):
    """Samples as TorchEngine does, and something else after some requests.

    Args:
        how: What it does then.
        after: After so many requests.
    """

    def __init__(self, how: str, after: int = 40) -> None:
        super().__init__()
        self.how, self.after, self.requests = how, after, 0

    async def generate(self, request):
        self.requests += 1
        if self.requests > self.after:
            if self.how == "dies":
                raise EngineError("the engine is gone")
            if self.how == "hangs":
                await asyncio.Event().wait()
            await asyncio.sleep(1)
        return await super().generate(request)

@hookimpl
def rlkit_register(register):
    register(OddEngine)
'''

AHEAD = (
    "--rollout.max_staleness=2", "--correction.high=2.0", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--validation=null", "--rollout.lead=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH where OddEngine is installed."""
    return os.pathsep.join((str(write_plugin(tmp_path_factory.mktemp("site"), "odd", ODD)), str(ROOT)))


def fit(site: str, folder: Path, how: str, *words: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Return the exit status, `result.json` and the metrics of a run."""
    engine = ("--rollout.engine=OddEngine", f"--rollout.engine.how={how}")
    done = rlkit("fit", "--recipe=quickstart", *AHEAD, *engine, *words, "--out=out", cwd=folder, site=site)
    assert "Traceback" not in done.stderr, done.stderr
    result = json.loads((folder / "out" / "result.json").read_text())
    if result["error"]:
        assert result["error"]["message"].splitlines()[0] in done.stderr
    return done.returncode, result, read_jsonl(folder / "out" / "metrics.jsonl")


def test_an_engine_that_dies_ends_the_run_with_its_error(site: str, tmp_path: Path) -> None:
    status, result, rows = fit(site, tmp_path, "dies", "--train.steps=50")
    assert (status, result["status"]) == (1, "failed")
    assert result["error"] == {"type": "EngineError", "message": "the engine is gone"}
    assert 1 <= len(rows) == result["steps"] < 4


def test_a_hanging_engine_ends_the_run_with_both_states(site: str, tmp_path: Path) -> None:
    status, result, rows = fit(site, tmp_path, "hangs", "--train.steps=50", "--train.deadline=20")
    assert (status, result["status"], result["error"]["type"]) == (1, "failed", "RolloutError")
    assert "no progress for 20 s (train.deadline): the trainer waits, with " in result["error"]["message"]
    assert " requests are in OddEngine, and 0 conversations wait for something else" in result["error"]["message"]
    assert 1 <= len(rows) < 4


def test_a_slow_engine_ends_nothing(site: str, tmp_path: Path) -> None:
    status, result, rows = fit(site, tmp_path, "slow", "--train.steps=4", "--train.deadline=60")
    assert (status, result["status"], len(rows)) == (0, "ok", 4)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_ends_a_run_ahead(tmp_path: Path, signals: int) -> None:
    """After the step, or at once; no process is left, and what is written can be resumed."""
    process = start(tmp_path, "--recipe=quick_tool", *AHEAD, "--save.every=1")
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    for _ in range(signals):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    printed = ended(process)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert "never retrieved" not in printed
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "interrupted"
    steps = result["steps"] + 1
    done = rlkit("fit", "--resume=out", f"--train.steps={steps}", "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_jsonl(metrics)] == list(range(1, steps + 1))


def test_validation_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    """Groups wait while the engine answers held-out prompts, and go on as if there had been none."""
    from rlkit_report.comparison import compare

    from rlkit.cli.main import main

    words = ("--recipe=quick_tool", *AHEAD, "--train.steps=4", "--log.rollouts.limit=null")
    validation = (
        "--validation.every=1",
        "--validation.limit=4",
        "--validation.before=false",
        "--validation.after=false",
    )
    assert main(["fit", *words, f"--out={tmp_path / 'without'}"]) == 0
    assert main(["fit", *words, *validation, f"--out={tmp_path / 'with'}"]) == 0
    found = compare(tmp_path / "without", tmp_path / "with", ("validation/",))
    assert (found.step, found.answer, found.tensor) == (None, None, None)
