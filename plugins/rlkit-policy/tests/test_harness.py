"""`rlkit validate --harness`: what is refused before a model is loaded, and what is taken of the results."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
from rlkit_policy import harness

from rlkit.cli.main import main
from rlkit.records.validation_metrics import metric_rows


def refused(*options: str) -> int:
    return main(["validate", "quickstart", "--harness", "sums", "--fabric.accelerator=cpu", *options])


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = util.find_spec
    monkeypatch.setattr(harness, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    assert refused() == 2
    assert "pip install -e '.[harness]' in a checkout of rlkit" in capsys.readouterr().err


def test_what_it_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("--harness-path", str(tmp_path / "nowhere")) == 2
    assert "expected a folder with the YAML files of tasks" in capsys.readouterr().err
    assert main(["validate", "quickstart", "--harness-path", str(tmp_path)]) == 2
    assert "there is no --harness; add it" in capsys.readouterr().err
    assert refused("--harness-path", str(tmp_path), "--fabric.devices=2", "--fabric.strategy=ddp") == 2
    assert "--harness runs in one process, not in 2; add --fabric.devices=1" in capsys.readouterr().err


def test_metrics_have_their_standard_errors() -> None:
    """Of a filter its name is shown; what is no number, or no metric, is left out."""
    results = {
        "sums": {"alias": "sums", "sample_len": 12, "exact_match,last": 0.5, "exact_match_stderr,last": 0.1},
        "all": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
    }
    metrics = dict(harness._metrics(results))
    assert metrics == {"sums/exact_match,last": 0.5, "sums/exact_match,last_stderr": 0.1, "all/acc": 0.25}
    assert metric_rows(metrics) == [("sums/exact_match,last", "0.500 ± 0.100"), ("all/acc", "0.250")]
