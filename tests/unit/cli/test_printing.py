"""What is printed: to readers that are gone, in poor encodings, with texts of others in it."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlkit.base.terminal import echo, show
from rlkit.cli.display import Display
from rlkit.cli.main import main
from rlkit.cli.streams import UnfailingStream, unfailing
from rlkit.records.rewards import MeanReward
from rlkit.run.metrics_log import MetricsLog
from tests.conftest import read_jsonl


def test_a_reader_that_is_gone_silences_the_descriptor() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        stream = UnfailingStream(pipe)
        for _ in range(3):
            stream.write("x" * 100_000)
            stream.flush()
        os.write(writing, b"a child's")  # to the null device by now


def test_what_an_encoding_does_not_know_is_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    UnfailingStream(stream).write("Grüße ✓ \ud800\n")
    assert raw.getvalue() == b"Gr??e ? ?\n"


def test_what_was_printed_is_written_when_the_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams may be buffered, as those into files are."""
    raws = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, raw in raws.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8"))
    with unfailing():
        for name in raws:
            getattr(sys, name).writelines(["one\n", f"two of {name}"])
        assert all(raw.getvalue() == b"" for raw in raws.values())
    assert {name: raw.getvalue().decode() for name, raw in raws.items()} == {
        name: f"one\ntwo of {name}" for name in raws
    }


def test_closed_streams_are_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with unfailing():
        print("nobody hears this")
        sys.stdout.write("nor this")
    assert sys.stdout is None


def test_texts_of_others_are_no_markup_and_carry_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    Display(3).note("bad [/bold] [red]x[/red] \x1b[2J http://me:pw@host")
    echo("[/bold]\x1b", error=True)
    printed = capsys.readouterr()
    assert printed.out == "bad [/bold] [red]x[/red] \\x1b[2J http://***@host\n"
    assert printed.err == "[/bold]\\x1b\n"


def test_an_error_is_safe_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["\x1b[31m" + "x" * 100_000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "\x1b" not in error
    assert len(error) < 30_000


PHASES = {"time/sample": 4.0, "time/logps": 0.5, "time/score": 0.5, "time/update": 4.0, "time/sync": 1.0}
ENDED = {"status": "ok", "steps": 2, "seconds": 11, "validation": {"before": None, "after": None}}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows its last number."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    return now


def test_the_time_left_is_unknown_before_the_second_step(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    """The first step does much that is done once. Then one at 10 s, so 8 more take 80 s; with one of 20 s, 105 s."""
    display = Display(10)
    for seconds in (50, 10, 20):
        clock.append(clock[-1] + seconds)
        display.step(len(clock) - 1, {})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "step 1/10  "
    assert second.endswith("left 1:20")
    assert third.endswith("left 1:45")


def test_the_time_left_is_known_right_after_a_resume(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    """Steps of 10 s before it: 9 more take 90 s."""
    display = Display(100)
    display.resumed([PHASES, PHASES])
    display.step(91, {})
    assert capsys.readouterr().out == "step 91/100    left 1:30\n"
    clock.append(clock[-1] + 40)
    display.step(92, {})
    assert capsys.readouterr().out == "step 92/100    left 2:40\n"  # 8 at the mean of 10, 10 and 40 s


def test_a_terminal_shows_a_table_that_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr("rlkit.cli.display._on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # no control codes
    display = Display(4)
    display.validated(0, {"accuracy": 0.25, "accuracy_low": 0.125, "accuracy_high": 0.5})
    display.step(1, {"reward/mean": 0.25, **PHASES})
    clock.append(1010.0)
    display.step(2, {"reward/mean": 0.5, "policy/entropy": 0.125, "memory/rss_mb": 1234.0, **PHASES})
    assert display._live is not None
    with display.console.capture() as captured:
        display.console.print(display._live.renderable)
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines == [
        "step ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 2/4 0:10 elapsed, 0:20 left",
        "metrics reward 0.500 entropy 0.125",
        "reward 0.375, mean of 2 steps",
        "time 10.00 s a step: sample 40% logps 5% score 5% update 40% sync 10%",
        "validation accuracy 0.250 (0.12-0.50), after step 0",
        "memory host 1,234 MiB",
    ]
    display.finish(ENDED, "x")
    assert "ok: 2 steps in 0:11; x" in capsys.readouterr().out


def test_validations_during_a_run_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    """That after the last step is in the table at the end."""
    display = Display(4)
    metrics = {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, "sampled_accuracy": 0.375, "length": 9.0}
    display.validated(2, metrics)
    display.validated(4, metrics)
    assert capsys.readouterr().out == ("validation after 2 steps: accuracy 0.500 (0.25-0.75)  sampled_accuracy 0.375\n")


def test_the_comparison_leaves_out_what_did_not_happen(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"accuracy": 0.5, "failed": 0.0, "unscored": 0.0, "sampled_failed": 1.0}
    after = {"accuracy": 0.75, "failed": 0.0, "unscored": 2.0}
    Display(1).finish(
        {"status": "ok", "steps": 1, "seconds": 3700, "validation": {"before": before, "after": after}}, "x"
    )
    lines = capsys.readouterr().out.splitlines()
    cells = [[word for word in line.split() if word[0].isalnum() or word == "-"] for line in lines]
    assert ["accuracy", "0.500", "0.750"] in cells
    assert ["unscored", "0.000", "2.000"] in cells
    assert ["sampled_failed", "1.000", "-"] in cells
    assert not [row for row in cells if row[:1] == ["failed"]]
    assert lines[-1] == "ok: 1 step in 1:01:40; x"


def test_without_validation_the_training_reward_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    first: MeanReward = {"mean": 0.25, "low": 0.125, "high": 0.375, "steps": 20}
    result = {"status": "ok", "steps": 50, "seconds": 9, "validation": {"before": None, "after": None}}
    change = {"first": first, "last": first | {"mean": 0.5, "low": None, "high": None}}
    Display(50).finish({**result, "training_reward": change}, "x")
    [line, _] = capsys.readouterr().out.splitlines()
    assert line == "training reward 0.250 (0.12-0.38) in the first 20 steps -> 0.500 in the last"
    Display(50).finish({**result, "training_reward": change, "verdict": VERDICT}, "x")
    assert "training reward" not in capsys.readouterr().out


def test_a_run_without_a_signal_gets_no_other_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """The warning of fewer steps is not shown again, and the verdict has no remedy of its own."""
    validation = {"before": {"reward": 0.0}, "after": {"reward": 0.0}}
    result = {"status": "ok", "steps": 9, "seconds": 9, "validation": validation, "verdict": VERDICT}
    warnings = ["warning: reward 0 in all 8 samples of 5 steps, so", "warning: slow"]
    Display(9).finish({**result, "warnings": warnings, "diagnosis": "reward 0 in all 20 samples: read them"}, "x")
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("1 warning in this run:")
    assert lines[start + 1 :] == [
        "- slow",
        "reward 0 in all 20 samples: read them",
        "unchanged: greedy reward 0.000 -> 0.000 (p-value 1)",
        "ok: 9 steps in 0:09; x",
    ]


def test_validations_show_reward_where_there_is_no_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"reward": 0.5, "reward_low": 0.25, "reward_high": 0.75, "sampled_reward": 0.375}
    Display(4).validated(2, metrics)
    assert capsys.readouterr().out == "validation after 2 steps: reward 0.500 (0.25-0.75)  sampled_reward 0.375\n"


def test_the_last_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"status": "interrupted", "steps": 3, "seconds": 61.0, "validation": {"before": None, "after": None}}
    Display(9).finish(result, "the run is in 'a [red] b'")
    assert capsys.readouterr().out == "interrupted: 3 steps in 1:01; the run is in 'a [red] b'\n"


VERDICT = {"metric": "reward", "before": 0.0, "after": 0.0, "p_value": 1.0, "change": "unchanged"}


class Logger:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.told.append((step, metrics))

    def finalize(self, status: str) -> None:
        self.told.append(status)


@pytest.mark.parametrize(("status", "told"), [("ok", "success"), ("failed", "failed"), ("interrupted", "failed")])
def test_loggers_are_told_how_the_run_ended(status: str, told: str, tmp_path: Path) -> None:
    """In the words of Lightning's loggers, of which some know no others."""
    logger = Logger()
    log = MetricsLog(tmp_path / "metrics.jsonl", [logger])
    log.write(1, {"a": 0.5})
    log.close(status)
    assert logger.told == [(1, {"a": 0.5}), told]


def test_a_line_of_metrics_keeps_a_float32_to_the_bit_and_loggers_all_digits(tmp_path: Path) -> None:
    """2**-23 / 3, rounded to float32, is 3.973643103449831e-08."""
    logger = Logger()
    metrics = {"a": 3.973643103449831e-08, "b": 1.0, "c": float("nan"), "d": 12345678901, "e": -0.0, "f": 1e16}
    metrics |= {"time/sample": 0.0720911, "time/tokens_per_second": 29975.9, "memory/rss_mb": 538.5117, "time/x": inf}
    MetricsLog(tmp_path / "metrics.jsonl", [logger]).write(1, metrics)
    written = (tmp_path / "metrics.jsonl").read_text()
    assert written == (
        '{"step":1,"a":3.9736431e-08,"b":1,"c":NaN,"d":12345678901,"e":0,"f":1e+16,'
        '"time/sample":0.07209,"time/tokens_per_second":29980,"memory/rss_mb":538.5,"time/x":Infinity}\n'
    )
    assert np.float32(json.loads(written)["a"]) == np.float32(2**-23 / 3)
    assert logger.told == [(1, metrics)]


@given(st.floats(width=32))
def test_any_float32_comes_back_from_a_line_of_metrics(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    """A zero has no sign there."""
    path = tmp_path_factory.mktemp("any") / "metrics.jsonl"
    MetricsLog(path, []).write(1, {"a": value})
    [row] = read_jsonl(path)
    assert np.float32(row["a"]) == np.float32(value) or (isnan(row["a"]) and isnan(value))


def test_lines_that_find_no_room_are_written_later_and_whole(tmp_path: Path) -> None:
    import resource

    path, logger = tmp_path / "metrics.jsonl", Logger()
    log = MetricsLog(path, [logger])
    log.write(1, {"a": 0.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.write(2, {"a": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [row["step"] for row in read_jsonl(path)] == [1]
    log.write(3, {"a": 0.125})
    assert [told[0] for told in logger.told] == [1, 2, 3]  # type: ignore[index]
    assert read_jsonl(path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25}, {"step": 3, "a": 0.125}]


def test_what_a_model_says_is_painted_without_its_escape_codes() -> None:
    from rlkit_policy.generate import paint

    from rlkit.types import Prompt, StopReason, Trajectory

    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    tokens = list(b"\x1b]0;[red]owned\x07\n")
    said = Trajectory(
        Prompt("p", []), 0, tokens, [True] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), StopReason.STOP
    )
    assert paint(said, Bytes()).plain == "\\x1b]0;[red]owned\\x07\n"


def test_tables_show_markup_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(("plugin [x]", "offers"), [("[/bold]", "\x1b[31mBROKEN")])
    out = capsys.readouterr().out
    assert "[/bold]" in out
    assert "\\x1b[31mBROKEN" in out


def test_a_word_that_is_wider_than_its_column_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/" + "x" * 300
    show(("what", "found"), [("path", f"cannot be read: {path}")])
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert cells[0] == "cannot be read:"
    assert "".join(cells[1:]) == path


def test_a_narrower_terminal_keeps_no_copy_of_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Lines of at most 50 columns in a terminal of 20 columns fold; for each row that this adds, one more is erased."""
    monkeypatch.setattr("rlkit.cli.display._on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    display = Display(4)
    display.step(1, {"reward/mean": 0.25, **PHASES})
    lengths = display._line_lengths
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "20")
    display.console = Console(force_terminal=True, width=20)
    display.step(2, {"reward/mean": 0.25, **PHASES})
    added = sum(-(-length // 20) - 1 for length in lengths)
    assert added > 0
    assert capsys.readouterr().out.startswith("\r\x1b[2K\x1b[1A" * added)
    display.finish(ENDED, "x")


def test_words_stay_whole_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Notes are wrapped between words; the last line, whose commands are copied, is not."""
    monkeypatch.setattr("rlkit.cli.display._on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "20")  # without which a dumb terminal has 80 columns
    display = Display(4)
    display.note("micro-batches of at most 2048 tokens, more of shorter ones")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "micro-batches of at most 2048", "tokens, more of shorter ones"
    ]  # fmt: skip
    display.finish(ENDED, "the run is in runs/a\nto use the model: rlkit export --checkpoint runs/a --out MODEL")
    *_, last, command = capsys.readouterr().out.splitlines()
    assert last.endswith("; the run is in runs/a")
    assert command == "to use the model: rlkit export --checkpoint runs/a --out MODEL"
