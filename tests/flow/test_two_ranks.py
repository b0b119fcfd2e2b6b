"""Estimators and losses that measure a mini-batch give the same on one rank and on two: their statistics are global."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.flow.two_ranks import results, whole


@pytest.mark.slow
def test_estimators_and_selections_on_two_ranks(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("two_ranks.py"))
    done = subprocess.run(
        (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
            str(tmp_path / "r"),
        ),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = results(whole(), distributed=False)
    for rank in range(2):
        rows, found = torch.load(f"{tmp_path / 'r'}.{rank}")
        assert len(found) == 17
        for name, mine in found.items():
            wide = expected[name][rows][:, : mine.shape[1]]
            torch.testing.assert_close(mine, wide, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert all(value.any() for value in expected.values())
