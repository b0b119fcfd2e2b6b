"""What `rlkit report` needs: no torch, no transformers, and rollouts of so many steps only as a browser opens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rlkit_report.files import RunFiles
from test_report import data_of, report, validated

from tests.conftest import ROOT
from tests.run_folders import write_run

TINY = ROOT / "rlkit" / "models" / "tiny"
HEAVY = ("torch", "transformers", "lightning.fabric", "numpy", "pydantic")


def heavy_imports(run: Path) -> list[str]:
    """Write a run's report in a process of its own; return the heavy packages that it has imported."""
    script = f"import json, sys; from rlkit.cli.main import main; main(['report', {str(run)!r}])\n"
    script += f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_a_report_of_a_run_in_progress_imports_no_torch(tmp_path: Path) -> None:
    """The intervals of its first validation are drawn again, for which numpy is enough."""
    run = write_run(tmp_path / "run", steps=1)
    (run / "result.json").unlink()
    expected = validated(run)
    assert heavy_imports(run) == ["numpy"]
    values = data_of((run / "report.html").read_text())["runs"][0]["metrics"]
    assert values["validation/sampled_accuracy_low"][0] == expected["sampled_accuracy_low"] > 0


@pytest.mark.parametrize("where", ["final", "model"])
def test_a_report_imports_nothing_heavy(where: str, tmp_path: Path) -> None:
    """The tokenizer of the run's own folder, or of the model's before it has ended, gives tokens their texts."""
    folder = tmp_path / "run" / "final" if where == "final" else tmp_path / "model"
    run = write_run(tmp_path / "run", steps=1, recipe=f"model:\n  path: {tmp_path / 'model'}\n")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    assert heavy_imports(run) == []
    data = data_of((run / "report.html").read_text())
    assert data["page-0"]["texts"] == {"16": "1", "84": "u", "257": "<|im_start|>", "258": "<|im_end|>"}
    assert data["runs"][0]["notes"] == []


def test_of_a_long_run_some_steps_have_rollouts(tmp_path: Path) -> None:
    """Of 1,001 steps every third is read, and the last one; all are, where a size is asked for."""
    run = write_run(tmp_path / "run", steps=1)
    first = run / "rollouts" / "step-00001.jsonl.gz"
    for step in range(2, 1002):
        os.link(first, run / "rollouts" / f"step-{step:05d}.jsonl.gz")
    files = RunFiles(run, 1e9)
    assert len({file.step for file, _, _ in files.rollouts()}) == 335
    assert files.notes == [f"{run}: rollouts of 335 of 1,001 steps, for size; raise --max-mb for more"]
    _, data = report(run, out=tmp_path / "report.html", options=("--max-mb=100",))
    assert len(data["index"]["page"]) == 4004
    assert json.dumps(data["runs"][0]["notes"]) == "[]"
