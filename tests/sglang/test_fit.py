"""`rlkit fit` with SGLang from end to end: it learns, also where its server is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conftest import FAST, read_jsonl, rlkit
from tests.sglang.conftest import children


def check_versions(out: Path, steps: int) -> None:
    """Nothing was learned from weights other than the step's own."""
    for number in range(1, steps + 1):
        for row in read_jsonl(out / "rollouts" / f"step-{number:05d}.jsonl"):
            assert {v for v, chosen in zip(row["versions"], row["mask"], strict=True) if chosen} == {number - 1}


def test_sglang_server_learns_while_its_server_is_killed(tmp_path: Path) -> None:
    """Killed after about 10 steps, wherever that is: in a rollout, while learning or in a sync."""
    steps, out = 24, tmp_path / "out"
    words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", f"--train.steps={steps}", "--validation.limit=100")
    run = subprocess.Popen((sys.executable, "-m", "rlkit", "fit", *words, "--out=out"), cwd=tmp_path)
    metrics = out / "metrics.jsonl"
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 10:
            assert run.poll() is None
            time.sleep(0.05)
        [server] = [server for supervisor in supervisors(run.pid) for server in children(supervisor)]
        os.kill(server, signal.SIGKILL)
        assert run.wait(300) == 0
    finally:
        run.kill()
    outcome: dict[str, Any] = json.loads((out / "result.json").read_text())
    before, after = outcome["validation"]["before"], outcome["validation"]["after"]
    assert 0.25 <= before["sampled_accuracy"] <= 0.5
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.2
    rows = read_jsonl(metrics)
    assert rows[-1]["engine/restarts"] == 1
    assert sum(row["rollout/failed"] for row in rows) == 0
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    check_versions(out, steps)


def supervisors(pid: int) -> list[int]:
    """Give the ids of a run's children that stand between it and a server."""
    return [child for child in children(pid) if b"sglang_supervisor" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_sglang_engine_learns_from_a_sharded_trainer_and_releases_its_memory(tmp_path: Path) -> None:
    """Two ranks under FSDP2, an engine each; TorchEngine gains as much in as many steps."""
    ranks = ("--fabric.devices=2", "--fabric.strategy=fsdp2", "--rollout.engine.launch.release_memory=true")
    words = (
        "--recipe=quickstart",
        "--rollout.engine=SGLangEngine",
        *ranks,
        "--train.steps=14",
        "--validation.limit=100",
    )
    done = rlkit("fit", *words, "--train.prompts_per_step=24", "--out=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/failed"] == 0
    validation = json.loads((tmp_path / "out" / "result.json").read_text())["validation"]
    assert validation["after"]["sampled_accuracy"] >= validation["before"]["sampled_accuracy"] + 0.08
    check_versions(tmp_path / "out", 12)


def test_a_server_samples_for_sharded_lora(tmp_path: Path) -> None:
    words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", *FAST, "--fabric.devices=2", "--out=out")
    done = rlkit("fit", *words, "--fabric.strategy=fsdp2", "--model.lora.rank=4", "--train.lr=0.01", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/failed"] == 0
    check_versions(tmp_path / "out", 2)


def test_without_sglang_the_error_names_the_extra(tmp_path: Path) -> None:
    hide = "import importlib.metadata as m, sys; found = m.version\n"
    hide += "def version(name):\n    if name == 'sglang': raise m.PackageNotFoundError(name)\n    return found(name)\n"
    hide += "m.version = version\nfrom rlkit.cli.main import main; sys.exit(main())"
    words = (sys.executable, "-c", hide, "fit", "--recipe=quickstart", "--rollout.engine=SGLangServer", "--out=out")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "sglang is not installed in this environment; install it: pip install 'rlkit[sglang]'" in done.stderr
    assert "Traceback" not in done.stderr
