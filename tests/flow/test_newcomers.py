"""A newcomer's folder and locale: commands in processes of their own, with names that are not plain ASCII words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FEW = ("--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=4", "--validation.limit=4")


@pytest.mark.slow
def test_a_folder_with_a_space_and_a_locale_without_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "new user"
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (
        ("fit", "--recipe", "quickstart", *FEW, "--out", "my run"),
        ("report", "my run"),
        ("validate", "--checkpoint", "my run", "--validation.limit=4"),
    ):
        command = (sys.executable, "-m", "rlkit", *words)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "my run" / "report.html").stat().st_size > 10_000
