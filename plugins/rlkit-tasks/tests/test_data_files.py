"""Data files: many, nested, divided, and malformed in every way that was met."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from rlkit_tasks.table import Table

from rlkit.base.errors import RecipeError, RlkitError
from rlkit.interfaces.rows import location_of
from rlkit.tasks import GSM8K, HFDataset, Jsonl
from rlkit.testing import check_task
from tests.unit.base.test_http_client import CHUNKED, OK, serving

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def questions(*names: object) -> list[dict[str, str]]:
    return [{"prompt": f"{name}?", "answer": str(name)} for name in names]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_in_the_form_of_verl(tmp_path: Path, kind: str) -> None:
    import datasets

    path = tmp_path / f"train.{kind}"
    rows = [VERL, {**VERL, "prompt": [{"role": "user", "content": "x", "name": "Mira"}]}]
    if kind == "jsonl":
        write(path, *rows)
        task: Jsonl | HFDataset = Jsonl(str(path), answer_field="reward_model.ground_truth")
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)  # whose first row now has "name": null
        task = HFDataset(str(path), answer_field="reward_model.ground_truth")
    prompt = task.prompt(task.rows("train")[0], 0)
    assert prompt.messages == VERL["prompt"]
    assert (prompt.answer, prompt.meta["data_source"], prompt.meta["extra_info"]["index"]) == ("4", "openai/gsm8k", 0)


def test_a_column_with_a_dot_precedes_a_nested_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"prompt": "?", "a.b": "flat", "a": {"b": "nested"}})
    task = Jsonl(path, answer_field="a.b")
    assert task.prompt(task.rows("train")[0], 0).answer == "flat"


def test_a_missing_nested_column_lists_those_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", VERL)
    with pytest.raises(
        RecipeError, match=r"line 1: no field 'answer' \(task.answer_field\).*reward_model.ground_truth"
    ):
        Jsonl(path).rows("train")


@pytest.mark.parametrize("task", [Jsonl, HFDataset])
def test_several_files_by_pattern_and_by_list(tmp_path: Path, task: type[Jsonl] | type[HFDataset]) -> None:
    for name in "ba":
        write(tmp_path / f"{name}.jsonl", *questions(name))
    pattern, listed = str(tmp_path / "*.jsonl"), [str(tmp_path / "b.jsonl"), str(tmp_path / "[a].jsonl")]
    assert [row["answer"] for row in task(pattern).rows("train")] == ["a", "b"]
    assert [row["answer"] for row in task(listed).rows("train")] == ["b", "a"]
    with pytest.raises(
        RecipeError, match=r"task.path is '.*\*.txt', which matches no file; .* holds: a.jsonl, b.jsonl"
    ):
        Jsonl(str(tmp_path / "*.txt")).rows("train")
    with pytest.raises(RecipeError, match=r"task.path is \[\], expected a file"):
        Jsonl([]).rows("train")


def test_files_of_any_kinds_are_one_table(tmp_path: Path) -> None:
    import datasets

    write(tmp_path / "a.json", {"prompt": "a", "answer": "1"})
    (tmp_path / "b.csv").write_text('prompt,answer\n"b, ""two""\nlines",007\n\nc,None\n')
    (tmp_path / "c.tsv").write_text("answer\tprompt\n4\td\n")
    datasets.Dataset.from_list([{"prompt": "e", "answer": "5"}]).to_parquet(tmp_path / "d.parquet")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"prompt": "f", "answer": "6"}) + "\n")
    task = HFDataset(str(tmp_path / "*.*"))
    prompts = [task.prompt(row, i) for i, row in enumerate(task.rows("train"))]
    assert [(p.messages[0]["content"], p.answer) for p in prompts] == [
        ("a", "1"), ('b, "two"\nlines', "007"), ("c", "None"), ("d", "4"), ("e", "5"), ("f", "6"),
    ]  # fmt: skip
    places = [location_of(row, "").rpartition("/")[2] for row in task.rows("train")]
    assert places == ["a.json, row 1", "b.csv, line 3", "b.csv, line 5", "c.tsv, line 2", "d.parquet, row 1",
                      "e.jsonl.gz, line 1"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,1\nb\n", r"t.csv, line 3: 1 fields, expected 2: prompt, answer"),
        ("prompt,answer\na,1\nb,2,3,4\n", r"t.csv, line 3: 4 fields, expected 2: prompt, answer"),
        ('prompt,answer\na,1\n"b,2\n', r"t.csv, after line 2: not a row of a CSV file"),
        ("question,answer\na,1\n", r"t.csv, line 2: no field 'prompt' .*the row has: question, answer"),
        ("prompt,answer\na,1\n\x00,2\n", r"t.csv, line 3: a NUL byte"),
        ("prompt,answer,prompt\na,1,b\n", r"t.csv, line 1: several columns are named 'prompt'; rename all but one"),
    ],
)
def test_a_malformed_row_of_a_csv_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        HFDataset(str(path)).rows("train")


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.csv.xz", "t.parquet.bz2"])
def test_a_damaged_packed_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no such format")
    with pytest.raises(RecipeError, match=rf"{name} cannot be read"):
        HFDataset(str(tmp_path / name)).rows("train")


def test_urls_and_patterns_of_urls(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, row in (("b", {"prompt": "b", "answer": "2"}), ("a", {"prompt": "a", "answer": "1"})):
        memory.pipe(f"/rows/{name}.jsonl", json.dumps(row).encode())
    rows = HFDataset("memory://rows/*.jsonl").rows("train")
    assert [row["prompt"] for row in rows] == ["a", "b"]
    local = write(tmp_path / "t.json", {"prompt": "c", "answer": "3"})
    assert [row["prompt"] for row in HFDataset(["memory://rows/b.jsonl", f"file://{local}"]).rows("train")] == [
        "b",
        "c",
    ]
    with pytest.raises(RecipeError, match=r"task.path is 'memory://rows/\*.csv', which matches no file"):
        HFDataset("memory://rows/*.csv").rows("train")
    with pytest.raises(RecipeError, match=r"memory://rows/none.jsonl cannot be read"):
        HFDataset("memory://rows/none.jsonl").rows("train")
    with pytest.raises(RecipeError, match=r"unknown://x/a.jsonl cannot be read: .*unknown"):
        HFDataset("unknown://x/a.jsonl").rows("train")
    with pytest.raises(RlkitError) as refused:  # nobody listens there
        HFDataset("http://name:secret@127.0.0.1:9/a.jsonl").rows("train")
    assert "secret" not in str(refused.value)


def test_folders_that_datasets_has_saved(tmp_path: Path) -> None:
    import datasets

    train, test = (datasets.Dataset.from_list(questions(*names)) for names in ("ab", "c"))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    both = HFDataset(str(tmp_path / "both"))
    assert [[row["answer"] for row in both.rows(split)] for split in ("train", "validation")] == [["a", "b"], ["c"]]
    one = HFDataset(str(tmp_path / "one"), validation_split=0.5)
    assert sorted(row["answer"] for split in ("train", "validation") for row in one.rows(split)) == ["a", "b"]
    with pytest.raises(RecipeError, match=r"both has no split 'dev'; there are: train, test"):
        HFDataset(str(tmp_path / "both"), validation_split="dev").rows("validation")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(RecipeError, match=r"one cannot be read as Arrow files"):
        one.rows("train")


def test_a_template_takes_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"q": "2+2?", "extra": {"hint": ["a", 1]}, "answer": 4, "prompt": "x"})
    task = HFDataset(path, template="{q} {{n}}\n{extra.hint}", system="Be brief.")
    prompt = task.prompt(task.rows("train")[0], 0)
    assert prompt.messages[1]["content"] == '2+2? {n}\n["a", 1]'
    assert prompt.messages[0]["role"] == "system"
    assert (prompt.answer, prompt.meta["prompt"], prompt.meta["q"]) == ("4", "x", "2+2?")
    with pytest.raises(RecipeError, match=r"line 1: no field 'question' \(task.template\); the row has: q, extra"):
        HFDataset(path, template="{question}").rows("train")


@pytest.mark.parametrize("text", ["{", "{}", "}", "no column", "{q!r}", "{q:>5}", ""])
def test_a_template_has_only_names_of_columns(text: str) -> None:
    with pytest.raises(RecipeError, match=r"task.template is"):
        HFDataset("x.jsonl", template=text)


def test_a_template_runs_no_code(tmp_path: Path) -> None:
    """`str.format` would follow attributes and items."""
    path = write(tmp_path / "t.jsonl", {"q": "x", "answer": "y"})
    for text in ("{q.__class__}", "{q[0]}"):
        with pytest.raises(RecipeError, match=r"no field 'q"):
            HFDataset(path, template=text).rows("train")


@pytest.mark.parametrize("task", [Jsonl, HFDataset])
def test_a_share_is_held_out_whatever_the_order(tmp_path: Path, task: type[Jsonl] | type[HFDataset]) -> None:
    rows = [*questions(*range(40)), *questions(3, 3, 3)]  # equal prompts stay together
    first = task(write(tmp_path / "a.jsonl", *rows), validation_split=0.25)
    second = task(write(tmp_path / "b.jsonl", *reversed(rows)), validation_split=0.25)
    sides = [{row["answer"] for row in first.rows(split)} for split in ("train", "validation")]
    assert sides == [{row["answer"] for row in second.rows(split)} for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert [row["answer"] for row in first.rows("validation")] == [row["answer"] for row in second.rows("validation")]
    assert 8 <= len(sides[1]) <= 11  # 0.25 * 43 = 10.75 rows
    assert len(first.rows("train")) + len(first.rows("validation")) == 43
    other = task(first.path, validation_split=0.25, split_seed=1)
    assert {row["answer"] for row in other.rows("validation")} != sides[1]
    check_task(first)


def test_the_same_rows_are_held_out_in_each_release(tmp_path: Path) -> None:
    """A run that goes on after an upgrade must not train on rows that it was validated on."""
    path = write(tmp_path / "a.jsonl", *questions(*range(10)))
    for seed, answers in ((0, ["8", "6", "1"]), (1, ["9", "1", "3"])):
        task = Jsonl(path, validation_split=0.3, split_seed=seed)
        assert [row["answer"] for row in task.rows("validation")] == answers


def test_the_same_share_of_a_table_and_of_lines_is_held_out(tmp_path: Path) -> None:
    """A table has nulls where a message has no such key, and texts stand for messages of the user."""
    import datasets

    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(20)]
    table = [*rows, {"prompt": [{"role": "user", "content": "!", "name": "Mira"}], "answer": "x"}]
    datasets.Dataset.from_list(table).to_parquet(tmp_path / "t.parquet")
    lines = write(tmp_path / "t.jsonl", *questions(*range(20)), table[-1])
    tasks = [HFDataset(str(tmp_path / "t.parquet"), validation_split=0.2), Jsonl(lines, validation_split=0.2)]
    assert len({tuple(row["answer"] for row in task.rows("validation")) for task in tasks}) == 1


def test_a_share_of_a_parquet_file_stays_on_disk(tmp_path: Path) -> None:
    import datasets

    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list(questions(*range(10))).to_parquet(path)
    task = HFDataset(path, validation_split=0.01)  # at least one
    rows = task.rows("train")
    assert isinstance(rows, Table)
    assert isinstance(rows.tables[0][1], datasets.Dataset)
    assert (len(task.rows("train")), len(task.rows("validation"))) == (9, 1)


@pytest.mark.parametrize("task", [Jsonl, HFDataset])
def test_no_validation_rows_names_the_options_that_there_are(tmp_path: Path, task: type[Jsonl]) -> None:
    with pytest.raises(RecipeError, match=r"set task.validation_path, .*task.validation_split.*validation: null"):
        task(write(tmp_path / "t.jsonl", *questions(1))).rows("validation")


GOOD = json.dumps({"prompt": "x", "answer": "y"}).encode()
MALFORMED = {
    "number": (b'{"prompt": 3, "answer": "y"}', "'prompt' is 3, expected text, or chat messages"),
    "null": (b'{"prompt": null, "answer": "y"}', "'prompt' is None, expected text, or chat messages"),
    "texts": (b'{"prompt": ["a", "b"], "answer": "y"}', r"'prompt' is \['a', 'b'\], expected text, or chat messages"),
    "no messages": (b'{"prompt": [], "answer": "y"}', r"'prompt' is \[\], expected text"),
    "no role": (b'{"prompt": [{"content": "x"}], "answer": "y"}', "'prompt', message 1: role is None, expected one of"),
    "content a number": (
        b'{"prompt": [{"role": "user", "content": 7}], "answer": "y"}',
        "content is 7, expected text, typed",
    ),
    "an object": (b'{"prompt": {"role": "user"}, "answer": "y"}', "expected a list of chat messages"),
    "surrogate": (rb'{"prompt": "\ud83d", "answer": "y"}', r"'\\ud83d' is half of a surrogate pair"),
    "surrogate in meta": (rb'{"prompt": "x", "answer": "y", "m": {"\uDC00": 1}}', "half of a surrogate pair"),
    "latin-1": ('{"prompt": "é", "answer": "y"}'.encode("latin-1"), "byte 0xe9 in column 13 is not UTF-8"),
    "binary": (b"\x1f\x8b\x08\x00\x93", "byte 0x8b in column 2 is not UTF-8"),
    "nul": (b'{"prompt": "x\x00", "answer": "y"}', "a NUL byte"),
    "digits": (b'{"prompt": "x", "answer": ' + b"1" * 5000 + b"}", "not JSON .*4300 digits"),
    "deep": (b"[" * 200_000, "not JSON"),
    "a list": (b"[1, 2]", r"\[1, 2\], expected one JSON object a line"),
    "cut": (b'{"prompt": "x"', "not JSON"),
    "no prompt": (b'{"question": "x"}', r"no field 'prompt' \(task.prompt_field\); the row has: question"),
    "nothing": (b"{}", "the row has: nothing"),
}


@pytest.mark.parametrize("kind", [Jsonl, HFDataset])
def test_rows_are_held_out_or_given_but_not_both(kind: type[Jsonl | HFDataset], tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *questions(1))
    with pytest.raises(RecipeError, match=r"validation_path='v.jsonl' and validation_split=0.5; remove one"):
        kind(str(path), "v.jsonl", validation_split=0.5)


@pytest.mark.parametrize(("task", "name"), [*((Jsonl, name) for name in MALFORMED), (HFDataset, "cut")])
def test_a_malformed_line_is_named(tmp_path: Path, task: type[Jsonl], name: str) -> None:
    (line, message), path = MALFORMED[name], tmp_path / "t.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n")
    with pytest.raises(RecipeError, match=f"t.jsonl, line 3: .*{message}") as raised:
        task(str(path)).rows("train")
    assert len(str(raised.value)) < 500


def test_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.decode().encode("utf-16"))
    with pytest.raises(RecipeError, match=r"line 1: the file is in UTF-16, expected UTF-8; .*iconv"):
        Jsonl(str(path)).rows("train")
    path.write_bytes(GOOD.decode().encode("utf-8-sig"))
    assert list(Jsonl(str(path)).rows("train")) == [{"prompt": "x", "answer": "y"}]


@pytest.mark.parametrize("task", [Jsonl, HFDataset])
def test_what_is_no_regular_file_is_refused_and_never_read(tmp_path: Path, task: type[Jsonl]) -> None:
    write(tmp_path / "a.jsonl", *questions(1))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in (
        ("pipe.jsonl", "a pipe, a socket or a device; expected a regular file"),
        ("zero.jsonl", "a pipe, a socket or a device"),
        ("loop.jsonl", "cannot be read"),
        ("folder.jsonl", r"a folder; expected files, such as '.*folder.jsonl/\*.jsonl'"),
        ("nosuch/deep.jsonl", "does not exist; .* holds: a.jsonl"),
        ("a.jsonl/b.jsonl", "does not exist"),
        ("x" * 300 + ".jsonl", "cannot be read: .*too long"),
        ("\0.jsonl", "cannot be read"),
        ("*\0.jsonl", "cannot be read"),
    ):
        with pytest.raises(RecipeError, match=f"task.path is .*{message}"):
            task(str(tmp_path / name)).rows("train")
    with pytest.raises(RecipeError, match="does not exist"):
        task("~nobody-is-called-so/a.jsonl").rows("train")


@pytest.mark.parametrize("name", ["t.arrow", "t.parquet", "t.json"])
def test_a_file_that_datasets_cannot_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'"\xff\xfe\x00{[\n\x00')
    with pytest.raises(RecipeError, match=rf"task.path: .*{name} cannot be read as \w+: \S+"):
        HFDataset(str(tmp_path / name)).rows("train")


def test_a_table_whose_prompts_are_none_names_the_row(tmp_path: Path) -> None:
    import datasets

    path = str(tmp_path / "t.parquet")
    datasets.Dataset.from_list([{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}]).to_parquet(path)
    task = HFDataset(path)
    with pytest.raises(RecipeError, match=r"t.parquet, row 2: 'prompt' is None, expected text"):
        task.prompt(task.rows("train")[1], 1)
    with pytest.raises(RecipeError, match=r"t.parquet, row 2: 'prompt' is None, expected text"):
        HFDataset(path, validation_split=0.5).rows("train")


def test_gsm8k_with_a_question_that_is_no_text(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"question": 3, "answer": "4"})
    with pytest.raises(RecipeError, match=r"train.jsonl, line 1: 'question' is 3, expected text"):
        GSM8K(str(tmp_path)).rows("train")


def test_a_pipe_among_the_parquet_files_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-0.parquet")
    for task in (GSM8K(str(tmp_path)), HFDataset(str(tmp_path / "*"))):
        with pytest.raises(RecipeError, match="train-0.parquet', a pipe, a socket or a device"):
            task.rows("train")


def test_ids_that_are_null_are_the_rows_numbers(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path / "t.jsonl", *({"prompt": "x", "answer": "y", "id": i} for i in (None, 7, 0))))
    assert [task.prompt(row, i).id for i, row in enumerate(task.rows("train"))] == ["0", "7", "0"]


def test_tables_without_rows_and_answers_that_are_not_there(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    none = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    pq.write_table(none, tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["x", "y"], "answer": [float("nan"), 2.0]}), tmp_path / "b.parquet")
    with pytest.raises(RecipeError, match=r"no train rows.*a\.parquet"):
        HFDataset(str(tmp_path / "a.parquet")).rows("train")
    task = HFDataset(str(tmp_path / "*.parquet"))
    assert [task.prompt(row, i).answer for i, row in enumerate(task.rows("train"))] == [None, "2.0"]


def test_answers_of_any_type_become_text(tmp_path: Path) -> None:
    answers = [3, 2.5, True, None, ["a", "é"], {"target": ["b"]}]
    task = Jsonl(write(tmp_path / "t.jsonl", *({"prompt": "x", "answer": a} for a in answers)))
    found = [task.prompt(row, i).answer for i, row in enumerate(task.rows("train"))]
    assert found == ["3", "2.5", "True", None, '["a", "é"]', '{"target": ["b"]}']


def test_a_path_begins_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n', encoding="utf-8")
    for path in ("~/rows.jsonl", "~/*.jsonl", str(tmp_path / "rows.jsonl")):
        assert len(Jsonl(path).rows("train")) == 1


def test_files_of_this_machine_are_read_without_progress_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a"] * 100}), tmp_path / "rows.parquet")
    datasets.enable_progress_bars()
    assert len(HFDataset(str(tmp_path / "rows.parquet"), answer_field=None).rows("train")) == 100
    assert capsys.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_server_need_not_state_a_length(suffix: str) -> None:
    lines = b"".join(b'{"prompt": "%d", "answer": "a"}\n' % number for number in range(5000))
    body = gzip.compress(lines) if suffix else lines
    pieces = (body[start : start + 999] for start in range(0, len(body), 999))
    chunked = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    for answer in (chunked, OK + b"Connection: close\r\n\r\n" + body):
        with serving(answer) as server:
            rows = Jsonl(f"{server.url}/a.jsonl{suffix}").rows("train")
            assert [row["prompt"] for row in rows] == [str(number) for number in range(5000)]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.csv", "\ufeffprompt;answer\n1,5 + 1;2,5\n", [("1,5 + 1", "2,5")]),  # as a spreadsheet with decimal commas
        ("b.csv", "\n\nprompt\tanswer\na;b\t1\n", [("a;b", "1")]),
        ("c.csv", 'prompt,"answer"\na;b,1;2\n', [("a;b", "1;2")]),
        ("d.csv.gz", '"prompt";"answer"\n"a\nb";1\n', [("a\nb", "1")]),
    ],
)
def test_the_first_line_of_a_csv_file_says_what_separates_columns(
    tmp_path: Path, name: str, text: str, rows: list[tuple[str, str]]
) -> None:
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    task = HFDataset(str(tmp_path / name))
    assert [(row["prompt"], row["answer"]) for row in task.rows("train")] == rows


def test_a_semicolon_in_quotes_separates_no_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"prompt;answer"\na;b\n', encoding="utf-8")
    task = HFDataset(str(tmp_path / "t.csv"), prompt_field="prompt;answer", answer_field=None)
    assert [dict(row) for row in task.rows("train")] == [{"prompt;answer": "a;b"}]
