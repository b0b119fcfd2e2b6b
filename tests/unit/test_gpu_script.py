"""The script that runs everything for GPUs, as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = ("bash", str(ROOT / "tests" / "gpu" / "all.sh"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*SCRIPT, *arguments), capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def fake_python(folder: Path, body: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_what_would_be_run_is_listed(tmp_path: Path) -> None:
    done = run("--dry-run", str(tmp_path))
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"model", "tests", "alone", "step-trl", "decode", "fsdp2", "lora-offload", "sampling-sglang"} <= set(names)
    assert (tmp_path / "table.txt").read_text().splitlines() == done.stdout.splitlines()[:-1]


@pytest.mark.parametrize(("body", "why"), [("echo 0", "no GPU: nothing was run"), ("exit 1", "has no rlkit")])
def test_without_a_gpu_nothing_is_run(tmp_path: Path, body: str, why: str) -> None:
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body))
    assert done.returncode == 2
    assert why in done.stdout


def test_the_table_says_how_each_check_went(tmp_path: Path) -> None:
    """One GPU, no SGLang, a bench that fails, one whose package is missing, and one that lasts too long."""
    body = """case "$*" in
        *cuda.device_count*) echo 1 ;;
        *sglang*) echo "No module named sglang" >&2; exit 1 ;;
        *bench.decode*) echo broken; exit 1 ;;
        *"gpu.bench step"*) echo trl is not installed; exit 3 ;;
        *fsdp2*) exit 124 ;;
        *) echo fine ;;
    esac"""
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body))
    assert done.returncode == 1
    table = {line.split()[0]: line for line in (tmp_path / "table.txt").read_text().splitlines()}
    assert table["alone"].split()[1] == "ok"
    assert table["alone"].endswith("fine")
    assert "FAILED" in table["decode"]
    assert table["decode"].endswith("broken")
    assert "not run" in table["step-trl"]
    assert table["step-trl"].endswith("trl is not installed")
    assert "TIMEOUT" in table["fsdp2"]
    assert table["fsdp2-two"].endswith("one GPU")
    assert table["sglang"].endswith("it cannot be imported: No module named sglang")


def test_what_there_is_no_time_for_is_not_run(tmp_path: Path) -> None:
    body = 'case "$*" in *cuda.device_count*) echo 1 ;; *sglang*) exit 1 ;; *) echo ran >>"$(dirname "$0")/ran" ;; esac'
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body), SECONDS_IN_ALL="10")
    assert done.returncode == 0
    assert "10 s have passed" in done.stdout
    assert (tmp_path / "ran").read_text() == "ran\n"  # rlkit doctor
