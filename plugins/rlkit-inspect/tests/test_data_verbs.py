"""`rlkit data show` and `stats`: prompts as the policy reads them, their lengths, and which occur more than once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlkit_authors.models import build_tokenizer
from rlkit_inspect.data_report import BINS, histogram

from rlkit.cli.main import main
from rlkit.models.source import source_of
from rlkit.recipe import Model

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t['function']['name'] }}: {{ t['function']['description'] }}>{% endfor %}"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ROWS = [
    {"id": "first", "prompt": "aa", "answer": "1", "data_source": "sums", "level": 3},
    {"id": "second", "prompt": "bbbb", "answer": "2", "data_source": "sums"},
    {"id": "again", "prompt": "aa", "answer": "5", "data_source": "words"},
    {"id": "long", "prompt": "c" * 300, "answer": "3", "data_source": "words"},
    {"id": "middle", "prompt": "d" * 60, "answer": None, "data_source": "words"},
]
HELD_OUT = [{"id": "new", "prompt": "eeee", "answer": "7"}, {"id": "known", "prompt": "bbbb", "answer": "2"}]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A recipe on files, whose model has a configuration and a tokenizer, but no weights."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("train", ROWS), ("validation", HELD_OUT)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "model").mkdir()
    shutil.copy(Path(source_of(Model("tiny")).location) / "config.json", folder / "model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    return [
        "--recipe=quick_tool", f"--model.path={folder / 'model'}", "--task=Jsonl",
        f"--task.path={folder / 'train.jsonl'}", f"--task.validation_path={folder / 'validation.jsonl'}",
        "--rollout.max_prompt_tokens=200",
    ]  # fmt: skip


def found(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["data", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prompts_are_shown_as_the_policy_reads_them(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of five rows those at 0, 1 and 3, with special tokens and the tool that the recipe has."""
    first, second, third = found(capsys, "show", *options)["rows"]
    tool = first["text"].partition(">")[0]
    assert tool.startswith("<calculator: ")
    assert first["text"] == f"{tool}><|im_start|>user\naa<|im_end|>\n<|im_start|>assistant\n"
    assert (first["id"], first["row"], first["source"], first["answer"]) == ("first", 0, "sums", "1")
    assert (first["meta"], first["tools"]) == ({"data_source": "sums", "level": 3}, ["calculator"])
    assert (second["id"], third["id"]) == ("second", "long")
    assert second["tokens"] == first["tokens"] + 2
    assert not third["shortened"]
    cut = found(capsys, "show", *options, "--rollout.overlong=middle")["rows"][2]
    assert (cut["shortened"], cut["tokens"]) == (True, 200)


def test_what_is_shown_is_safe_for_a_terminal(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x\x1b[2J", "answer": "\x07", "more": "\u202e"}) + "\n")
    assert main(["data", "show", *options, f"--task.path={path}"]) == 0
    shown = capsys.readouterr().out
    assert "x\\x1b[2J<|im_end|>" in shown
    assert "answer: \\x07" in shown
    assert "tools: calculator" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


TALKS = [
    {"messages": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b.", "weight": 0},
                  {"from": "human", "value": "c?"}, {"from": "gpt", "value": "d."}]},
    {"messages": json.dumps([{"role": "user", "content": "e?"}, {"role": "assistant", "content": "f."}])},
]  # fmt: skip


@pytest.fixture
def recorded(options: list[str], tmp_path: Path) -> list[str]:
    """The recipe's model, trained on recorded turns."""
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS))
    changes = ("--recipe=quick_sft", options[1], "--task=Jsonl", f"--task.path={tmp_path / 'talks.jsonl'}")
    return [*changes, "--task.answer_field=null", "--validation=null", "--reward=null"]


def test_trained_text_is_told_from_context(recorded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Turns without loss are context; what was normalised is counted by row."""
    report = found(capsys, "show", *recorded)
    [[first], [second]] = (row["answers"] for row in report["rows"])
    assert first["spans"] == [
        {"trained": False, "text": "b.<|im_end|>\n<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\n"},
        {"trained": True, "text": "d.<|im_end|>"},
    ]
    assert second == {"reward": 0.0, "tokens": 3, "trained": 3, "spans": [{"trained": True, "text": "f.<|im_end|>"}]}
    changes = {"messages decoded from JSON text": 1, "roles mapped": 1, "turns without loss": 1}
    assert report["normalised"] == {"rows": 2, "changes": changes}


@pytest.mark.parametrize("colours", [False, True])
def test_trained_text_has_a_colour_or_brackets(
    recorded: list[str], colours: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1" if colours else "0")
    if not colours:
        monkeypatch.delenv("FORCE_COLOR")
    assert main(["data", "show", *recorded]) == 0
    shown = capsys.readouterr().out
    trained = "\x1b[1;32md.<|im_end|>\x1b[0m" if colours else "\n⟦d.<|im_end|>⟧"
    assert trained in shown
    assert ("\x1b[36mb.<|im_end|>" in shown) == colours
    assert "--- answer 1 of 1: reward 0, 28 tokens, of which 3 are trained" in shown
    assert "normalised, of 2 rows: messages decoded from JSON text in 1, roles mapped in 1, turns without" in shown


def test_lengths_sources_duplicates_and_overlap_are_counted(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Around its question each prompt has the same tokens, those of the tool among them."""
    whole = found(capsys, "stats", *options)
    train, validation = whole["splits"]["train"], whole["splits"]["validation"]
    around = found(capsys, "show", *options)["rows"][0]["tokens"] - 2
    assert (train["rows"], validation["rows"]) == (5, 2)
    assert train["mean"] == pytest.approx(around + (2 + 4 + 2 + 300 + 60) / 5)
    assert (train["median"], train["p95"], train["max"]) == (around + 4, around + 300, around + 300)
    assert train["sources"] == {"words": 3, "sums": 2}
    assert (whole["limit"], train["too_long"], validation["too_long"]) == (200, 1, 0)
    assert (train["without_answer"], train["without_answer_ids"]) == (1, ["middle"])
    assert whole["duplicates"] == {"count": 1, "pairs": [["first", "again"]]}
    assert whole["overlap"] == {"count": 1, "ids": ["known"]}
    assert sum(count for *_, count in whole["histogram"]["train"]) == 5


def test_answers_that_the_context_would_cut_are_counted(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An answer leaves room for a question of 50 tokens: that of 60 is too long, that of 300 is refused anyway."""
    around = found(capsys, "show", *options)["rows"][0]["tokens"] - 2
    whole = found(capsys, "stats", *options, f"--rollout.sampling.max_tokens={4096 - around - 50}")
    assert whole["splits"]["train"]["answers_cut"] == 1


def test_the_text_of_the_metrics(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train sources (2): words 3, sums 2" in shown
    assert "1 train prompts have more than 200 tokens: rollout.overlong is error" in shown
    assert "1 train prompts have no reference answer, such as middle" in shown
    assert "duplicates in training: 1, such as again (of first)" in shown
    assert "validation prompts that are in training too: 1, such as known" in shown
    assert "########################################" in shown


def test_without_validation_there_is_one_split(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, "stats", *options, "--validation=null")["splits"].keys() == {"train"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["count"], "rlkit data has no verb 'count', expected sample, prepare, show or stats"),
        (["show"], "rlkit data show needs a recipe"),
        (["stats", "--recipe=quickstart", "--out=x"], "unknown option 'out'"),
    ],
)
def test_what_is_no_verb_or_option_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *words]) == 2
    assert problem in capsys.readouterr().err


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_a_histogram_has_all_lengths_in_a_few_round_bins(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert 1 <= len(bins) <= BINS
    for first, last, count in bins:
        assert count == sum(first <= length <= last for length in lengths)
    assert sum(count for *_, count in bins) == len(lengths)
    assert bins[0][2]
    assert bins[-1][2]


def test_bins_by_hand() -> None:
    assert histogram([7]) == [(7, 7, 1)]
    assert histogram([0, 11, 11]) == [(i, i, {0: 1, 11: 2}.get(i, 0)) for i in range(12)]
    assert histogram([0, 12]) == [(0, 1, 1), *((i, i + 1, 0) for i in range(2, 12, 2)), (12, 13, 1)]
