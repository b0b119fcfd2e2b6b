"""The ways in, as a newcomer types them, in processes of their own: the commands are those of the documentation."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_jsonl
from tests.pages import README, blocks, commands, own_example, write_files

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a virtual environment of its own, with `rlkit` and its dependencies, and `pip` without a network."""
    folder = tmp_path / "venv"
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", str(folder)), check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n{ROOT}\n")
    scripts = {
        "rlkit": f'exec {folder}/bin/python -m rlkit "$@"',
        "pip": f'verb=$1; shift; exec {sys.executable} -m pip --python {folder}/bin/python "$verb" -q --no-deps '
        '--no-build-isolation "$@"',
    }
    for name, line in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def run(lines: Sequence[Sequence[str]], folder: Path, environment: dict[str, str]) -> None:
    """Run commands, and print the seconds that each takes."""
    for words in lines:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{time.perf_counter() - start:6.1f} s, {cpu:6.1f} s of CPU: {' '.join(words)}")
        assert done.returncode == 0, done.stdout + done.stderr


def test_from_a_table_and_a_function_to_a_report(tmp_path: Path, environment: dict[str, str]) -> None:
    write_files(README, tmp_path)
    (tmp_path / "mine.yaml").unlink()  # the commands write it
    run(own_example(), tmp_path, environment)
    assert (tmp_path / "runs" / "mine" / "report.html").stat().st_size > 10_000


def test_a_folder_with_a_space_and_a_locale_without_utf_8(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "new user"
    folder.mkdir()
    few = ("--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=4", "--validation.limit=4")
    lines = [
        ("rlkit", "fit", "--recipe", "quickstart", *few, "--out", "my run"),
        ("rlkit", "report", "my run"),
        ("rlkit", "validate", "--checkpoint", "my run", "--validation.limit=4"),
    ]
    run(lines, folder, {**environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (folder / "my run" / "report.html").stat().st_size > 10_000


def test_from_plugins_new_to_a_reward_in_fit(tmp_path: Path, environment: dict[str, str]) -> None:
    lines = [*commands(next(block for block in blocks("plugins") if block.language == "bash"))]
    assert len(lines) <= 4
    assert [words[:2] for words in lines] == [["rlkit", "plugins"], ["pip", "install"], ["rlkit", "fit"]]
    run(lines, tmp_path, environment)
    [rollouts] = tmp_path.glob("runs/*/rollouts/step-00001.jsonl.gz")
    for row in read_jsonl(rollouts):  # the package that is written counts words, 10 being worth 1
        assert row["reward"] == pytest.approx(min(1.0, len(row["text"].split()) / 10))
