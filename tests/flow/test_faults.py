"""What must not cost a run: Ctrl-C, and rewards that raise, hang or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import FAST, ROOT, read_jsonl, rlkit

MOODY = '''
import os, signal, time
from rlkit import hookimpl
from rlkit.interfaces.reward import RewardFunction

class Moody(RewardFunction):
    """Misbehaves on some samples.

    Args:
        how: What it does then.
        on_error: What becomes of the group.
    """

    def __init__(self, how: str, on_error: str = "drop") -> None:
        self.how, self.on_error, self.timeout = how, on_error, 1.0

    def grade(self, trajectory):
        if sum(trajectory.tokens) % 7 == 3:
            if self.how == "raise":
                raise ValueError("bad mood")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return float(len(trajectory.text) % 2)

@hookimpl
def rlkit_register(register):
    register(Moody)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH with an installed plugin."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "moody.py").write_text(MOODY)
    info = folder / "rlkit_moody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlkit-moody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlkit]\nmoody = moody\n")
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "hang", "die"])
def test_a_reward_that_misbehaves_never_ends_the_run(tmp_path: Path, site: str, how: str) -> None:
    reward = ("--reward=Moody", f"--reward.how={how}", "--train.steps=1", "--validation.limit=2")
    done = rlkit("fit", "--recipe=quickstart", *FAST, *reward, "--out=out", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    [row] = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    rows = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    failed = [r for r in rows if sum(r["tokens"]) % 7 == 3]
    assert failed
    assert row["reward/failed"] == len(failed)
    assert row["reward/groups_dropped"] == len({r["group"] for r in failed})
    assert all(r["reward"] is None and "Moody of plugin 'moody'" in r["error"] for r in failed)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["GRPO", "GAE", "ReMax", "GPG"])
def test_steps_go_on_where_every_reward_fails(tmp_path: Path, advantage: str) -> None:
    from rlkit.cli.main import main

    (tmp_path / "bad.py").write_text("def bad(text):\n    raise ValueError('always')\n")
    options = [
        "--reward=PythonReward", f"--reward.function={tmp_path}/bad.py:bad", "--reward.allow_code=true",
        f"--advantage={advantage}", "--kl_reward.coef=0.1", "--shaping.normalize=true", "--rejection.level=seq_max",
        "--correction.level=sequence", *(("--critic.lr=0.01",) if advantage == "GAE" else ()),
        "--train.require_reward=false",
    ]  # fmt: skip
    assert (
        main(["fit", "--recipe=quickstart", *FAST, *options, f"--out={tmp_path / 'out'}"]) == 1
    )  # nothing was learned
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["reward/failed"] == 16
        assert row["update/empty"] == 1


def start(tmp_path: Path, *options: str) -> forks.Started:
    """Start a long run in a process group of its own, as a shell does."""
    words = ("-m", "rlkit", "fit", "--recipe=quickstart", *FAST, "--train.steps=100000", *options, "--out=out")
    return forks.start(words, tmp_path)


def wait_for(condition: Callable[[], bool], process: forks.Started) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(process: forks.Started) -> str:
    try:
        return process.communicate(timeout=400)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
