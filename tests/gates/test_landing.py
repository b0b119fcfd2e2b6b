"""The gate's own scripts: what fails, what was chance, and which suites have to run again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

TESTS = """
from pathlib import Path
def test_good(): pass
def test_bad(): assert 1 == 2
def test_by_chance():
    before = Path(__file__).with_suffix(".ran")
    first = not before.exists()
    before.touch()
    assert not first
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    for name in ("gate", "suites"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gate  # type: ignore[import-not-found]

    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "FLAKY", tmp_path / "flaky.txt")
    return gate


def test_a_failed_test_is_tried_again_alone(gate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(TESTS)
    words = (sys.executable, "-m", "pytest", "-n", "0", "test_it.py")
    failures = gate.tests(words, tmp_path / "log", {})
    assert [failure.name for failure in failures] == ["test_it.py::test_bad", "test_it.py::test_by_chance"]
    assert "assert 1 == 2" in failures[0].message
    remaining, flaky = gate.retry(failures, tmp_path / "log")
    assert [failure.name for failure in remaining] == ["test_it.py::test_bad"]
    assert [line.partition("  ")[0] for line in flaky] == ["test_it.py::test_by_chance"]
    assert "pytest -n 0 -o 'addopts=-q --strict-markers' test_it.py::test_bad" in str(remaining[0])


def test_a_command_that_runs_no_test_fails(gate: Any, tmp_path: Path) -> None:
    [failure] = gate.tests(("false",), tmp_path / "log", {})
    assert (failure.name, failure.test) == ("pytest ended with exit status 1", False)
    assert gate.retry([failure], tmp_path / "log") == ([failure], [])


def test_a_test_may_be_flaky_once_and_three_in_a_run(gate: Any) -> None:
    assert not gate.judge_flaky(["a::b  error", "a::c  error", "a::d  error"])
    assert gate.FLAKY.read_text() == "a::b  error\na::c  error\na::d  error\n"
    [again] = gate.judge_flaky(["a::b  other error"])
    assert again.name == "a::b  other error"
    assert len(gate.judge_flaky([f"a::{n}  error" for n in range(4)])) == 1


@pytest.mark.parametrize(("pinned", "failures"), [("", 0), ("no module", 1)])
def test_newer_packages_close_nothing(
    pinned: str, failures: int, gate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quickstart(log: Path, variables: dict[str, str]) -> tuple[str, str]:
        return (pinned, "") if variables else ("no module", "transformers==99.0\nrich==1.0\n")

    monkeypatch.setattr(gate, "ROOT", ROOT)
    monkeypatch.setattr(gate, "_quickstart", quickstart)
    assert len(gate.quickstart(Path("log"))) == failures
    assert ("NEWER PACKAGES" in capsys.readouterr().out) is not failures


def test_a_suite_is_as_stamped_until_a_file_changes(gate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suites = gate.suites
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "STAMPS", tmp_path / "stamps.json")
    monkeypatch.setattr(suites, "SUITES", {"one": suites.Suite(("a/**/*.py",), ("tests",), ("tests",))})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "read.py").write_text("1")
    monkeypatch.setattr(suites.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "abc\n"}))
    assert suites.changed() == ["one"]
    suites.stamp("one")
    assert suites.changed() == []
    (tmp_path / "other.py").write_text("1")
    assert suites.changed() == []
    (tmp_path / "a" / "read.py").rename(tmp_path / "a" / "renamed.py")
    assert suites.changed() == ["one"]


def test_every_suite_and_every_slow_test_of_the_gate_is_there(gate: Any) -> None:
    lines = [line for line in (ROOT / ".ci" / "gate.txt").read_text(encoding="utf-8").splitlines() if line]
    listed = [line for line in lines if not line.startswith("#")]
    listed += [test for suite in gate.suites.SUITES.values() for test in suite.smoke]
    for test in listed:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text or not name, test
    for suite in gate.suites.SUITES.values():
        for pattern in suite.reads:
            assert list(ROOT.glob(pattern)), pattern
