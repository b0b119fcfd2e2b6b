"""`rlkit validate` on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from tests.conftest import ROOT, rlkit

TWO = ("--fabric.devices=2", "--fabric.strategy=ddp")
MODEL = str(ROOT / "rlkit" / "models" / "tiny")


@pytest.mark.slow
def test_several_checkpoints_on_two_ranks(tmp_path: Path) -> None:
    """Each rank writes its answers, which together are those of one rank; metrics and p-values are of both."""
    metrics, tables = [], []
    for name, ranks in (("one", ()), ("two", TWO)):
        done = rlkit(
            "validate", "quickstart", "--checkpoint", MODEL, "--checkpoint", "tiny", "--validation.limit=9",
            "--validation.samples=2", "--fabric.accelerator=cpu", "--json", f"--out={name}", *ranks, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "distributed_backend" not in done.stdout + done.stderr  # a note of Lightning's
        metrics.append(json.loads(done.stdout.splitlines()[-1]))
        files = sorted((tmp_path / name).glob("answers-2*.parquet"))
        assert len(files) == 1 + len(ranks) // 2
        table = pandas.concat(map(pandas.read_parquet, files)).sort_values(["kind", "group", "sample"])
        tables.append(table[["prompt", "kind", "sample", "text", "final_answer", "accuracy"]].to_dict("records"))
        results = json.loads((tmp_path / name / "results.json").read_text())["results"]
        assert [result["metrics"] for result in results] == list(metrics[-1].values())
    assert metrics[0] == metrics[1]
    assert metrics[0]["tiny"]["accuracy_p_first"] == metrics[0]["tiny"]["sampled_accuracy_p_first"] == 1
    assert tables[0] == tables[1]
    assert len(tables[0]) == 9 * 3
