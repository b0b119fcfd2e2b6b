"""The verdict on a run, and the warnings that its outcome keeps."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.cli.display import Display
from rlkit.ops.statistics import paired_p_value
from rlkit.records.verdict import SMALLEST_P, Verdict, p_text, verdict_on
from rlkit.run.folder import RunFolder
from rlkit.run.outcome import MAX_WARNINGS, part_warnings_as
from rlkit.run.record import RunRecord

Metrics = dict[str, float]


@pytest.mark.parametrize(
    ("before", "after", "p_value", "change"),
    [
        (0.7, 0.9, 0.01, "improved"),
        (0.9, 0.5, 8e-10, "worse"),
        (0.5, 0.6, 0.051, "unchanged"),
        (0.6, 0.5, 0.9, "unchanged"),
        (0.5, 0.5, 0.0, "unchanged"),  # every prompt as before
    ],
)
def test_a_verdict_follows_from_accuracy_and_p_value(before: float, after: float, p_value: float, change: Any) -> None:
    verdict = verdict_on({"accuracy": before}, {"accuracy": after, "accuracy_p_start": p_value})
    assert verdict == Verdict("accuracy", before, after, p_value, change)


def test_sampled_accuracy_decides_without_greedy() -> None:
    verdict = verdict_on({"sampled_accuracy": 0.5}, {"sampled_accuracy": 0.75, "sampled_accuracy_p_start": 0.01})
    assert verdict == Verdict("sampled_accuracy", 0.5, 0.75, 0.01, "improved")


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, {"accuracy": 1.0}), ({"accuracy": 1.0}, None), ({"accuracy": 1.0}, {"accuracy": 1.0}), ({}, {})],
)
def test_without_a_comparison_there_is_no_verdict(before: Metrics | None, after: Metrics | None) -> None:
    assert verdict_on(before, after) is None


def ended(tmp_path: Path, after: float, *notes: str) -> dict[str, Any]:
    """Return the `result.json` of a run with these notes, whose last lines are printed."""
    record = RunRecord(RunFolder(tmp_path, ""), Display(3), first=True)
    record.outcome.status, record.outcome.steps = "ok", 3
    record.outcome.validation = {"before": {"accuracy": 0.5}, "after": {"accuracy": after, "accuracy_p_start": 0.001}}
    for note in notes:
        record.reporter.note(note)
    record.write_result()
    record.reporter.finish(vars(record.outcome), "done")
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


def test_ok_never_stands_over_accuracy_that_fell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tmp_path, 0.25)["verdict"]["change"] == "worse"
    lines = " ".join(capsys.readouterr().out.split())
    assert "worse: greedy accuracy 0.500 -> 0.250 (p-value 0.001)" in lines
    assert "worse: 3 steps" in lines
    assert "ok:" not in lines


def test_an_improvement_is_said_before_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tmp_path, 0.75)["verdict"]["change"] == "improved"
    assert "improved: greedy accuracy 0.500 -> 0.750 (p-value 0.001) ok: 3 steps" in " ".join(
        capsys.readouterr().out.split()
    )


def test_warnings_are_kept_once_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = (
        "warning: the reward is flat",
        "a note",
        "warning: the reward is flat",
        "warning: https://u:secret@host is slow",
    )
    result = ended(tmp_path, 0.75, *notes)
    assert result["warnings"] == ["warning: the reward is flat", "warning: https://***@host is slow"]
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("2 warnings in this run:")
    assert lines[start + 1 : start + 3] == ["- the reward is flat", "- https://***@host is slow"]


def test_a_run_keeps_a_bounded_number_of_warnings(tmp_path: Path) -> None:
    record = RunRecord(RunFolder(tmp_path, ""), SimpleNamespace(note=lambda text: None), first=True)  # type: ignore[arg-type]
    for number in range(MAX_WARNINGS + 5):
        record.reporter.note(f"warning: {number}")
    assert len(record.outcome.warnings) == MAX_WARNINGS


def test_a_set_clock_does_not_change_the_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(RunFolder(tmp_path, ""), SimpleNamespace(note=lambda text: None), first=True)  # type: ignore[arg-type]
    monkeypatch.setattr("time.time", lambda: 0.0)
    record.write_result()
    assert 0 <= json.loads((tmp_path / "result.json").read_text())["seconds"] < 60


def test_the_smallest_p_value_is_an_upper_bound() -> None:
    """No resample of 4,000 is as extreme as 50 equal differences, so that p is 1 / 4,001."""
    assert paired_p_value([1.0] * 50) == SMALLEST_P
    verdict = verdict_on({"reward": 0.0}, {"reward": 1.0, "reward_p_start": paired_p_value([1.0] * 50)})
    assert str(verdict) == "improved: greedy reward 0.000 -> 1.000 (p-value < 0.0003)"
    assert p_text(0.00026) == "0.00026"


def test_a_run_without_a_last_validation_shows_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord(RunFolder(tmp_path, ""), Display(3), first=True)
    record.outcome.status, record.outcome.steps = "interrupted", 1
    record.outcome.validation = {"before": {"accuracy": 0.5}, "after": None}
    record.reporter.finish(vars(record.outcome), "done")
    assert capsys.readouterr().out.startswith("interrupted: 1 step in ")


def warn_in(module: str, category: type[Warning] = UserWarning) -> None:
    exec(
        "import warnings\nwarnings.warn('too slow', category, stacklevel=1)", {"__name__": module, "category": category}
    )


def test_warnings_of_parts_are_those_of_the_run() -> None:
    """Of rlkit, of the packages that come with it and of plugins; what libraries warn of is printed as before."""
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown: list[str] = []
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        before = warnings.showwarning
        with part_warnings_as(notes.append):
            warn_in("rlkit.ops.fusion")
            warn_in("rlkit_servers.server")
            assert (notes, shown) == (["warning: too slow"] * 2, [])
            warn_in("torch.nn")
            warn_in("rlkit_servers.server", DeprecationWarning)
            assert (notes, shown) == (["warning: too slow"] * 2, ["too slow"] * 2)
        assert warnings.showwarning is before
