"""Rows of `rollouts/`: what was kept comes back, and a damaged or hostile file names file and line."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.base.errors import RecipeError
from rlkit.records.folder import json_lines
from rlkit.records.rows import MAX_META, MAX_OUTPUT, SavedRow, as_row, read_rows
from rlkit.types import AgentSpan, Fork, Message, Prompt, Score, StopReason, Trajectory, Turn

ASKED: list[Message] = [{"role": "user", "content": "?"}]


def bytes_of(messages: list[Message], text: str) -> tuple[list[int], list[int]]:
    return list(str(messages[-1]["content"]).encode()), [*text.encode("utf-8", "replace"), 0]


def read(path: Path) -> list[SavedRow]:
    return list(read_rows(path, bytes_of))


def saved(tmp_path: Path, *trajectories: Trajectory) -> list[SavedRow]:
    path = tmp_path / "step-00001.jsonl.gz"
    path.write_bytes(json_lines(map(as_row, trajectories)))
    return read(path)


def plain(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "prompt": Prompt("p", ASKED, "7", {"data_source": "sums", "tools": {"add": {"call": {"y": 2}}}}, ["add"]),
        "group": 3,
        "tokens": [5, 6, 8, 9], "mask": [False, True, False, True], "logps": [0.0, -0.5, 0.0, -0.25],
        "versions": [-1, 0, -1, 0], "stop": StopReason.TURNS, "text": "last", "turn_rewards": [0.5, 0.0],
        "turns": [Turn("user", 0, 1), Turn("assistant", 1, 2), Turn("tool", 2, 3), Turn("assistant", 3, 4)],
        "counts": {"tool_calls": 1}, "score": Score(1.0, {"accuracy": 1.0}, [0.25, 0.0], None, True, "7"),
        "messages": [*ASKED, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "7", "name": "add"},
                     {"role": "assistant", "content": "last"}],
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def test_a_conversation_comes_back_as_it_was(tmp_path: Path) -> None:
    given = trajectory()
    [row] = saved(tmp_path, given)
    assert (row.reward, row.components, row.failed, row.left_out) == (1.75, {"accuracy": 1.0}, False, [])
    assert row.location == f"{tmp_path / 'step-00001.jsonl.gz'}, line 1"
    assert row.trajectory == given


@given(st.text(), st.text(), st.dictionaries(st.text(), st.integers(-9, 9) | st.text() | st.none(), max_size=4))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str, answer: str, meta: Any) -> None:
    given = trajectory(prompt=Prompt("p", ASKED, answer, meta), text=text)
    [row] = saved(tmp_path_factory.mktemp("any"), given)
    assert row.trajectory == given


@given(st.floats(max_value=0.0, width=32, allow_infinity=False))
def test_log_probs_are_kept_to_the_bit(tmp_path_factory: pytest.TempPathFactory, logp: float) -> None:
    """Engines compute them in float32."""
    [row] = saved(tmp_path_factory.mktemp("any"), trajectory(logps=[0.0, -0.5, 0.0, logp]))
    assert struct.pack("f", row.trajectory.logps[3]) == struct.pack("f", logp)


def test_log_probs_that_are_only_read_have_five_decimals() -> None:
    logps = [0.0, -0.123456789, -4e-7, float("nan")]
    sample = trajectory(logps=logps)
    sample.span.branches = [trajectory(logps=logps)]
    row = as_row(sample, exact=False)
    assert json.dumps(row["logps"]) == "[0, -0.12346, 0, NaN]"
    assert json.dumps(row["branches"][0]["logps"]) == "[0, -0.12346, 0, NaN]"


def test_an_agents_session_comes_back_as_it_was(tmp_path: Path) -> None:
    secret = "sk-1234567890"
    main = trajectory(span=AgentSpan(positions=[0, 2]))
    branch = trajectory(messages=ASKED, span=AgentSpan(fork=Fork(0, 2), positions=[1]), counts={})
    branch.score, branch.credit = None, {"advantages": [0.0, 0.5, 0.0, 0.5]}
    main.span.branches = [branch]
    output = "x" * 20_000 + f"\nauthorization: Bearer {secret}\nend\n"
    main.span.result = {"folder": "/gone", "status": 3, "output": output}
    [row] = saved(tmp_path, main)
    assert row.trajectory.span.positions == [0, 2]
    assert row.trajectory.span.branches == [branch]
    agent = row.trajectory.agent
    assert agent.keys() == {"status", "output"}
    assert agent["status"] == 3
    assert agent["output"].endswith("\nend\n")
    assert secret not in agent["output"]
    assert len(agent["output"]) <= MAX_OUTPUT


def test_a_session_that_an_earlier_version_saved_is_read(tmp_path: Path) -> None:
    branch = {"text": "b", "tokens": [5], "fork": [0, 2], "role": "solver", "speaker": 2, "positions": [1]}
    ending = {"agent": {"status": 0, "output": "end"}, "role": "proposer", "speaker": 1, "positions": [0]}
    row = {"prompt": "p", "messages": ASKED, "text": "a", "reward": 1.0, "tokens": [5], "branches": [branch], **ending}
    [read_back] = read(plain(tmp_path, row))
    span = read_back.trajectory.span
    assert (span.result, span.role, span.speaker, span.positions) == (ending["agent"], "proposer", 1, [0])
    assert [sample.span for sample in span.branches] == [
        AgentSpan(role="solver", speaker=2, fork=Fork(0, 2), positions=[1])
    ]


def test_failures_are_told_apart(tmp_path: Path) -> None:
    """The conversation of the first failed, though it had ended; the second's reward failed"""
    rows = saved(tmp_path, trajectory(score=None, error="late"), trajectory(score=Score(None, error="bad")))
    assert [(row.failed, row.reward) for row in rows] == [(True, None), (False, None)]


def test_columns_that_are_no_json_or_too_long_are_named(tmp_path: Path) -> None:
    meta = {"id": 4, "image": object(), "long": "x" * MAX_META, "gap": float("nan"), "level": 2}
    [row] = saved(tmp_path, trajectory(prompt=Prompt("p", ASKED, None, meta)))
    assert row.trajectory.prompt.meta == {"id": 4, "level": 2}
    assert row.left_out == ["image", "long", "gap"]


def test_a_row_of_a_step_reads_as_the_version_before_wrote_it(tmp_path: Path) -> None:
    """That had another order of the fields, and zeros with a point; log-probs are as one of 64 rows has them."""
    given = trajectory(logps=[0.0, -0.51794, 0.0, -0.00003], credit={"advantages": [0, 0.35355, 0, 0.35355]})
    before = (
        '{"prompt":"p","group":3,"messages":[{"role":"user","content":"?"}],"answer":"7",'
        '"meta":{"data_source":"sums","tools":{"add":{"call":{"y":2}}}},"tools":["add"],"text":"last","conversation":'
        '[{"role":"assistant","content":"call"},{"role":"tool","content":"7","name":"add"},'
        '{"role":"assistant","content":"last"}],"reward":1.75,"score":{"reward":1.0,"turn_rewards":[0.25,0.0],'
        '"token_rewards":null,"ungradable":true,"feedback":null},"final_answer":"7","components":{"accuracy":1.0},'
        '"error":null,"failed":false,"stop":"turns","tokens":[5,6,8,9],"mask":[0,1,0,1],'
        '"logps":[0.0,-0.51794,0.0,-3e-05],"versions":[-1,0,-1,0],"turns":[["user",0,1],["assistant",1,2],["tool",2,3],'
        '["assistant",3,4]],"turn_rewards":[0.5,0.0],"advantages":[0.0,0.35355,0.0,0.35355],"counts":{"tool_calls":1}}'
    )
    path = tmp_path / "step-00002.jsonl.gz"
    path.write_bytes(gzip.compress(before.encode() + b"\n") + json_lines([as_row(given, exact=False)]))
    first, second = read(path)
    assert first.trajectory == second.trajectory == given


def test_rows_of_older_files_are_read(tmp_path: Path) -> None:
    """Those had neither `meta`, `conversation` nor `failed`."""
    old = as_row(trajectory())
    for name in ("meta", "conversation", "failed"):
        del old[name]
    ended = old | {"stop": "error", "error": "late", "reward": None}
    first, second = read(plain(tmp_path, old, ended))
    assert (first.failed, first.trajectory.prompt.meta, first.reward) == (False, {}, 1.75)
    assert first.trajectory.messages == [*ASKED, {"role": "assistant", "content": "last"}]
    assert second.failed


def test_rows_without_tokens_get_them_from_the_tokenizer(tmp_path: Path) -> None:
    """Here a token is a byte; prompts of several forms are one."""
    lines = [{"messages": ASKED, "text": "ab", "answer": "7"}, {"prompt": "?", "text": "ab"},
             {"prompt": ASKED, "text": "ab", "id": 7}]  # fmt: skip
    rows = read(plain(tmp_path, *lines))
    assert [row.trajectory.tokens for row in rows] == [[63, 97, 98, 0]] * 3
    assert [row.trajectory.prompt.messages for row in rows] == [ASKED] * 3
    first = rows[0].trajectory
    assert first.mask == [False, True, True, True]
    assert first.turns == [Turn("user", 0, 1), Turn("assistant", 1, 4)]
    assert rows[0].group == rows[1].group  # the same question, so samples of one prompt
    assert rows[2].trajectory.prompt.id == "7"


ROW = {"messages": ASKED, "text": "x", "tokens": [1, 2], "mask": [0, 1]}
WRONG: list[tuple[object, str]] = [
    (7, "is 7, expected an object with messages, text and answer"),
    ({"text": "x"}, "'messages' is missing, expected messages"),
    (ROW | {"messages": [{"role": "user"}]}, "'messages' is [{'role': 'user'}], expected messages"),
    (ROW | {"messages": "?"}, "'messages' is '?', expected messages"),
    ({"messages": ASKED}, "'text' is missing, expected the completion's text"),
    (ROW | {"text": 5}, "'text' is 5, expected the completion's text"),
    (ROW | {"answer": 5}, "'answer' is 5, expected a text"),
    (ROW | {"reward": float("nan")}, "'reward' is nan, expected a finite number"),
    (ROW | {"reward": 10**400}, "expected a finite number"),
    (ROW | {"reward": True}, "'reward' is True, expected a finite number"),
    (ROW | {"components": {"a": "b"}}, "'components' is {'a': 'b'}, expected finite numbers by name"),
    (ROW | {"mask": [0]}, "'mask' is [0], expected a list of 2 numbers"),
    (ROW | {"logps": ["a", "b"]}, "'logps' is ['a', 'b'], expected a list of 2 numbers"),
    (ROW | {"tokens": [1.5, 2]}, "'tokens' is [1.5, 2], expected token ids"),
    (ROW | {"tokens": [True, 2]}, "'tokens' is [True, 2], expected token ids"),
    (ROW | {"stop": "soon"}, "'stop' is 'soon', expected one of stop, length, turns"),
    (ROW | {"stop": ["stop"]}, "'stop' is ['stop'], expected one of stop"),
    (ROW | {"turns": [["user", 0]]}, "'turns' is [['user', 0]], expected [role, start, end] each"),
    (ROW | {"turns": 3}, "'turns' is 3, expected [role, start, end] each"),
    (ROW | {"meta": []}, "'meta' is [], expected an object"),
    (ROW | {"group": "a"}, "'group' is 'a', expected a whole number"),
    (ROW | {"conversation": [3]}, "'conversation' is [3], expected messages"),
    (ROW | {"failed": 1}, "'failed' is 1, expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_a_wrong_row_names_file_and_line(tmp_path: Path, row: object, problem: str) -> None:
    path = plain(tmp_path, ROW, row)
    with pytest.raises(RecipeError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 2")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"nothing"])
def test_a_line_that_is_no_json_names_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(RecipeError, match=r"rows.jsonl, line 3 is not JSON: "):
        read(path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "none", "checksum"])
def test_a_damaged_archive_names_file_and_line(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(b"".join(json.dumps(ROW | {"id": i}).encode() + b"\n" for i in range(3000))))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    elif damage == "none":
        packed = bytearray(b"no archive")
    else:
        packed[-6] ^= 0xFF
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(
        RecipeError, match=r"rows.jsonl.gz(, line [0-9]+ is not JSON| cannot be read after line [0-9]+): "
    ):
        read(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.sampled_from([*as_row(trajectory()), "id", "kind", "agent", "branches", "positions"]),
)
def test_any_value_of_a_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, name: str
) -> None:
    path = plain(tmp_path_factory.mktemp("any"), as_row(trajectory()) | {name: value})
    try:
        [row] = read(path)
    except RecipeError as error:
        refused = str(error)
    else:
        refused = ""
        assert len(row.trajectory.mask) == len(row.trajectory.tokens) == len(row.trajectory.logps)
    assert "line 1" in refused or not refused
