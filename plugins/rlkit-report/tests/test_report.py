"""`rlkit report`: what the file holds is what the run wrote, whatever that is."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlkit_report import page
from rlkit_report.tokens import TokenTexts

from rlkit.cli.main import main
from rlkit.records.rows import as_row
from rlkit.records.validation_metrics import GradedCompletion
from rlkit.run.answers import write_answers
from rlkit.run.evaluate import Evaluation
from rlkit.run.folder import RunFolder
from rlkit.types import Score
from tests.conftest import read_jsonl
from tests.run_folders import HOSTILE, trajectory, write_run

DATA = re.compile(r'<script type="application/octet-stream" id="([a-z0-9-]+)">([A-Za-z0-9+/=]*)</script>')


def report(*runs: Path, out: Path, options: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Write a report; return its text, and the data in it."""
    assert main(["report", *map(str, runs), "--out", str(out), *options]) == 0
    text = out.read_bytes().decode()
    return text, data_of(text)


def data_of(text: str) -> dict[str, Any]:
    """Return the data in a page by the name of the block."""
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in DATA.findall(text)}


def rows_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows in the order of the index, each looked up by its page and offset."""
    index = data["index"]
    pages = zip(index["page"], index["offset"], strict=True)
    return [data[f"page-{page}"]["rows"][offset] for page, offset in pages]


def without_data(text: str) -> str:
    return DATA.sub("", text)


def test_the_rollouts_are_those_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    _, data = report(run, out=tmp_path / "report.html")
    written = [row for path in sorted((run / "rollouts").iterdir()) for row in read_jsonl(path)]
    assert rows_of(data) == written
    assert len(written) == 12
    index = data["index"]
    assert index["reward"] == [row["reward"] for row in written]
    assert index["length"] == [2] * 12  # of the mask
    assert [index["names"]["when"][i] for i in index["when"][::4]] == ["step 1", "step 2", "step 3"]
    assert [index["names"]["prompt"][i] for i in index["prompt"][:4]] == ["0 + 1", "0 + 1", "1 + 1", "1 + 1"]
    assert index["asked"][0] == "What is 0 + 1?"
    assert index["names"]["source"] == ["sums"]
    assert index["names"]["stop"] == ["stop"]
    assert index["sample"][:4] == [0, 1, 0, 1]
    assert index["group"][:4] == [0, 0, 1, 1]
    assert len(set(index["group"])) == 6  # group 0 of step 1 is another than that of step 2


def test_tokens_have_the_texts_of_the_tokenizer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    _, data = report(run, out=tmp_path / "report.html")
    assert data["page-0"]["texts"] == {"16": "1", "84": "u", "257": "<|im_start|>", "258": "<|im_end|>"}
    assert data["runs"][0]["notes"] == []


def test_parts_of_characters_are_shown_as_their_bytes() -> None:
    pieces = ("\u0120a", "\u00e2\u0124", "<0xE2>")  # of byte-level vocabularies, and of SentencePiece
    texts = TokenTexts((" a", "\ufffd", "\ufffd").__getitem__, pieces.__getitem__)
    assert texts.of([0, 1, 2, 3]) == {"0": " a", "1": "⟨e2 82⟩", "2": "<0xE2>"}


def test_without_a_tokenizer_ids_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, recipe=f"model:\n  path: {tmp_path / 'gone'}\n")
    _, data = report(run, out=tmp_path / "report.html")
    assert data["page-0"]["texts"] == {}
    assert "tokens are shown as ids" in data["runs"][0]["notes"][0]


def test_metrics_are_the_runs_with_both_validations(tmp_path: Path) -> None:
    _, data = report(write_run(tmp_path / "run"), out=tmp_path / "report.html")
    run = data["runs"][0]
    assert run["steps"] == [0, 1, 2, 3]
    assert run["metrics"]["reward/mean"] == [None, 0.1, 0.2, 0.3]
    assert run["metrics"]["validation/accuracy"] == [0.25, None, None, 0.75]
    assert run["metrics"]["validation/accuracy_high"] == [0.5, None, None, 0.5]
    assert run["phases"] == ["time/sample", "time/update"]
    assert run["recipe"] == "model:\n  path: tiny\n"
    assert run["environment"] == {"python": "3.11.7", "run_id": "a"}
    assert run["result"]["status"] == "ok"


def test_hostile_texts_are_in_the_data_and_nowhere_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, text=HOSTILE, recipe="model:\n  path: tiny\n# </script><b>bold</b>\n")
    hostile = trajectory(HOSTILE, 5, 1.0)
    hostile.credit[HOSTILE] = [0.0] * 4
    RunFolder(run, "").dump("step-00002", [hostile])
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, f"reward/{HOSTILE}": 1.0}) + "\n")
    text, data = report(run, out=tmp_path / "report.html")
    rest = without_data(text)
    for piece in ("alert(", "onerror", "<b>", "evil.example", "\x1b", "\x00", "\u2028"):
        assert piece not in rest
    assert rest.count("<script>") == rest.count("</script>") == 2
    assert rows_of(data)[0]["text"] == HOSTILE
    assert HOSTILE in rows_of(data)[-1]
    assert f"reward/{HOSTILE}" in data["runs"][0]["metrics"]
    assert "<b>bold</b>" in data["runs"][0]["recipe"]


def test_the_page_is_the_same_for_every_run(tmp_path: Path) -> None:
    """Nothing of a run is outside of its data, so that no text of one can be read as HTML."""
    one, _ = report(write_run(tmp_path / "one"), out=tmp_path / "one.html")
    two, _ = report(write_run(tmp_path / "two", text=HOSTILE, recipe="a: '<i>'\n"), out=tmp_path / "two.html")
    assert without_data(one).replace("\n", "") == without_data(two).replace("\n", "")


def test_the_policy_allows_only_the_pages_scripts(tmp_path: Path) -> None:
    text, _ = report(write_run(tmp_path / "run", steps=1), out=tmp_path / "report.html")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    assert set(rules) == {"default-src", "img-src", "script-src", "style-src", "connect-src", "base-uri", "form-action"}
    for kind, pattern in (("script-src", r"<script>(.*?)</script>"), ("style-src", r"<style>(.*?)</style>")):
        found = re.findall(pattern, text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() for inner in found)
        assert rules[kind].split() == [f"'sha256-{digest}'" for digest in digests]


def test_the_page_names_no_network_and_parses_no_html(tmp_path: Path) -> None:
    text, _ = report(write_run(tmp_path / "run", steps=1), out=tmp_path / "report.html")
    rest = without_data(text)
    credit = "/*! https://github.com/leeoniya/uPlot (v1.6.32) */"  # where the library's own file says what it is
    assert rest.count(credit) == 1
    assert not re.search(r"[a-z]+://|\bsrc=|<link|@import|url\(", rest.replace(credit, ""))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", rest
    )
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|\bimport\(", rest)
    assert "The MIT License (MIT)" in rest


def test_a_run_in_progress_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "result.json").unlink()
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines[:-20])  # the last line is being written
    last = run / "rollouts" / "step-00003.jsonl.gz"
    last.rename(last.with_name(f"{last.name}.partial"))  # as `write_atomically` writes
    _, data = report(run, out=tmp_path / "report.html")
    found = data["runs"][0]
    assert found["steps"] == [1, 2]
    assert (found["result"], found["notes"]) == ({}, [])
    assert len(rows_of(data)) == 8


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("model:\n  path: tiny\n")
    _, data = report(tmp_path / "run", out=tmp_path / "report.html")
    assert data["index"]["excerpts"] == []
    assert data["runs"][0]["metrics"] == {}


def validated(run: Path) -> dict[str, float]:
    """Write the answers of a validation, of which two ranks have some; return its metrics."""
    rows = [trajectory(str(i), i, float(i % 3 == 0)) for i in range(7)]
    for row in rows:
        row.score = Score(row.reward, {"accuracy": row.reward or 0.0, "strict": 0.0}, answer="7")
    found = Evaluation()
    for prefix, mine in (("", rows), ("sampled_", [row for row in rows for _ in range(2)])):
        found.add(prefix, mine, [GradedCompletion.of(row) for row in mine])
    for rank in (0, 1):
        part = replace(
            found, answers={k: [t for t in some if t.group % 2 == rank] for k, some in found.answers.items()}
        )
        write_answers(RunFolder(run, "", rank=rank).rollouts("validation-before"), part)
    return found.metrics


def test_a_run_in_progress_shows_the_validation_before_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    (run / "result.json").unlink()
    expected = validated(run)
    _, data = report(run, out=tmp_path / "report.html")
    found = data["runs"][0]
    assert found["steps"] == [0, 1, 2]
    first = {name: values[0] for name, values in found["metrics"].items() if values[0] is not None}
    assert first == {f"validation/{name}": value for name, value in expected.items()}
    assert first["validation/accuracy"] == pytest.approx(3 / 7)
    assert "validation/sampled_maj@2" in first


def test_a_damaged_validation_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "result.json").unlink()
    (run / "rollouts" / "validation-before.jsonl.gz").write_bytes(gzip.compress(b'{"messages": 1}\n'))
    _, data = report(run, out=tmp_path / "report.html")
    assert data["runs"][0]["steps"] == [1]
    assert "no validation before training: " in data["runs"][0]["notes"][0]


def test_profiles_are_listed_with_their_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "profile").mkdir()
    (run / "profile" / "step-00003.trace.json.gz").write_bytes(b"x" * 2_500_000)
    (run / "profile" / "step-00003.txt").write_text(f"aten::mm {HOSTILE}", errors="backslashreplace")
    text, data = report(run, out=tmp_path / "report.html")
    trace, table = data["runs"][0]["profile"]
    assert (trace["name"], trace["bytes"]) == ("profile/step-00003.trace.json.gz", 2_500_000)
    assert table["text"].startswith("aten::mm </script>")
    assert "alert(" not in without_data(text)


def test_damaged_files_are_noted_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (run / "rollouts" / "step-00001.jsonl.gz").write_bytes(b"no gzip")
    broken = [b"[1]", b'{"a":', json.dumps(as_row(trajectory("1", 0, 1.0))).encode()]
    (run / "rollouts" / "step-00002.jsonl.gz").write_bytes(gzip.compress(b"\n".join(broken)))
    (run / "environment.json").write_text("[1, 2")
    _, data = report(run, out=tmp_path / "report.html")
    assert len(rows_of(data)) == 1 + 4
    notes = data["runs"][0]["notes"]
    assert "step-00001.jsonl.gz cannot be read after line 0" in notes[0]
    assert "step-00002.jsonl.gz, line 1 is no JSON object" in notes[1]
    assert "step-00002.jsonl.gz, line 2 is no JSON object" in notes[2]
    assert "warning: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prompt", "messages", "conversation", "tokens", "mask", "text", "stop", "meta"])
@pytest.mark.parametrize("value", [None, 1e400, [None, {"a": 1}], {"b": [2]}, "text", True])
def test_rows_of_any_shape_are_kept(tmp_path: Path, name: str, value: object) -> None:
    run = write_run(tmp_path / "run", steps=0)
    row = {**as_row(trajectory("1", 0, 1.0)), name: value}
    (run / "rollouts" / "step-00001.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    _, data = report(run, out=tmp_path / "report.html")
    assert rows_of(data) == [{**row, name: "Infinity" if value == 1e400 else value}]


LINES = {
    b'{"text": "\xed\xa0\x80"}': {"text": "\ud800"},  # half of a pair as bytes, and as an escape
    b'{"text": "\\ud800 \xc3\xa9 \xe2\x80\xa8"}': {"text": "\ud800 \u00e9 \u2028"},
    b'\t{"text": "a", "text": "b"} ': {"text": "b"},
    b'{"text": "NaN", "reward": NaN}': {"text": "NaN", "reward": "NaN"},
    b'{"text": "</script>\x7f"}': {"text": "</script>\x7f"},
}


def test_lines_are_kept_as_browsers_read_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    wide = '{"text": "\u00e9"}'.encode("utf-16-be")  # a line that Python reads, too
    lines = b"\n".join([*LINES, wide])
    (run / "rollouts" / "step-00001.jsonl.gz").write_bytes(gzip.compress(lines))
    _, data = report(run, out=tmp_path / "report.html")
    assert rows_of(data) == [*LINES.values(), {"text": "\u00e9"}]


def test_numbers_that_are_not_finite_are_texts_for_a_browser(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    nan = float("nan")
    RunFolder(run, "").dump("step-00001", [replace(trajectory("1", 0, 1.0), logps=[0.0, nan, float("-inf"), -1.0])])
    (run / "metrics.jsonl").write_text('{"step": 1, "grad_norm": NaN}\n{"step": 2, "grad_norm": 1e999}\n')
    _, data = report(run, out=tmp_path / "report.html")
    assert rows_of(data)[0]["logps"] == [0.0, "NaN", "-Infinity", -1.0]
    assert data["runs"][0]["metrics"]["grad_norm"][-2:] == ["NaN", "Infinity"]


def test_the_scripts_are_small_files_and_one_library(tmp_path: Path) -> None:
    ours = [path.read_text(encoding="utf-8").count("\n") for path in (page.HERE / "web").iterdir()]
    assert len(ours) == len(page.SCRIPTS) + 3  # the body, the style, and the script of a page that is served
    assert max(ours) <= 400
    assert {path.name for path in (page.HERE / "vendor").iterdir()} == {"LICENSE", "uPlot.iife.min.js", "uPlot.min.css"}


def test_several_runs_and_several_ranks(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", steps=1), write_run(tmp_path / "two", steps=1)
    RunFolder(two, "", rank=1).dump("step-00001", [trajectory("9", 0, 1.0)])
    _, data = report(one, two, out=tmp_path / "report.html")
    assert [run["name"] for run in data["runs"]] == [str(one), str(two)]
    assert data["index"]["run"] == [0] * 4 + [1] * 5
    assert len(set(data["index"]["group"])) == 5
    assert len(rows_of(data)) == 9


def test_prompts_with_the_same_id_and_other_messages_are_others(tmp_path: Path) -> None:
    """Tasks count the rows of each split from 0; names that begin alike are no reason either."""
    run = write_run(tmp_path / "run", steps=0)
    one, two = trajectory("0", 0, 1.0), trajectory("0", 0, 1.0)
    two.prompt.messages = [{"role": "user", "content": "Another?"}]
    long = [trajectory("x" * 200 + end, 1, 1.0) for end in "ab"]
    RunFolder(run, "").dump("validation-before", [one])
    RunFolder(run, "").dump("step-00001", [two, *long])
    _, data = report(run, out=tmp_path / "report.html")
    assert data["index"]["prompt"] == [0, 1, 2, 3]
    assert data["index"]["names"]["prompt"] == ["0", "0", "x" * 120 + "…", "x" * 120 + "…"]
    assert data["index"]["asked"][:2] == ["What is 0?", "Another?"]


def test_many_rows_come_in_pages_and_the_index_is_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    rows = [trajectory(str(i // 4), i // 4, i % 2 * 1.0) for i in range(200)]
    RunFolder(run, "").dump("step-00001", rows)
    _, data = report(run, out=tmp_path / "report.html")
    assert [len(data[f"page-{i}"]["rows"]) for i in range(4)] == [64, 64, 64, 8]
    assert [row["prompt"] for row in rows_of(data)] == [str(i // 4) for i in range(200)]
    assert len(json.dumps(data["index"])) < 100 * 200


def test_of_more_rollouts_than_fit_those_of_some_steps_are_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=7)
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    _, data = report(run, out=tmp_path / "report.html", options=("--max-mb", str(size / 3 / 1e6 + 1e-6)))
    assert data["index"]["names"]["when"] == ["step 1", "step 4", "step 7"]
    assert data["runs"][0]["notes"] == [f"{run}: rollouts of 3 of 7 steps, for size; raise --max-mb for more"]


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=1)
    assert main(["report", str(run)]) == 0
    first = (run / "report.html").read_bytes()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_bytes() == first
    (run / "notes.html").write_text("my notes")
    assert main(["report", str(run), "--out", str(run / "notes.html")]) == 2
    assert (run / "notes.html").read_text() == "my notes"
    assert "is no report of rlkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gone"], "'gone' is no run folder; "),
        (["{run}", "--open"], "unknown option '--open'"),
        (["{run}", "--max-mb", "nan"], "--max-mb is nan, expected a number above 0"),
        (["{run}", "--out", "{run}/rollouts"], "cannot be written"),
        (["{run}", "--out", "{run}/no/report.html"], "cannot be written"),
        (["{run}", "--port", "80"], "--port is of the page that --serve serves; add --serve"),
        (["{run}", "--serve", "--port", "65536"], "--port is 65536, expected a whole number from 0 to 65535"),
        (["{run}", "--serve", "--port", "x"], "invalid int value: 'x'"),
        (["{run}", "--serve", "--out", "a.html"], "--serve writes no file, expected no --out with it"),
    ],
)
def test_mistakes_are_explained(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=1)
    assert main(["report", *(word.format(run=run) for word in words)]) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.partial"))
