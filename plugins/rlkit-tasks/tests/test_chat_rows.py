"""Rows of chats: one form, whatever the data set writes, in any file; all else is refused by row and column."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from rlkit_tasks.files import Columns
from rlkit_tasks.messages import Change
from rlkit_tasks.rows import Rows

from rlkit.base.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.tasks import HFDataset
from rlkit.types import JsonObject, Message, Prompt

USER = {"role": "user", "content": "Tide at Bergen?"}
SAID = {"role": "assistant", "content": "High at 06:10."}


def calling(arguments: object, name: str = "tide") -> Message:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


ANSWERED = {"role": "tool", "name": "tide", "tool_call_id": "c1", "content": "06:10"}
TALKS: list[tuple[list[Message], list[Message]]] = [
    ([USER, calling({"port": "Bergen"}), ANSWERED, SAID], [USER, calling({"port": "Bergen"}), ANSWERED, SAID]),
    ([USER, calling({"value": 2.0}, "convert")], [USER, calling({"value": 2.0}, "convert")]),
    ([USER, calling({"count": 3, "of": []}, "list")], [USER, calling({"count": 3, "of": []}, "list")]),
    (
        [USER, {"role": "assistant", "content": None, "tool_calls": calling({"port": "Oslo"})["tool_calls"]}],
        [USER, {"role": "assistant", "content": None, "tool_calls": calling({"port": "Oslo"})["tool_calls"]}],
    ),
    (
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
    ),
    (
        [USER, {**SAID, "weight": 0}, {"role": "user", "content": "Sure?"}, {**SAID, "weight": 1}],
        [USER, {**SAID, "trained": False}, {"role": "user", "content": "Sure?"}, SAID],
    ),
]  # fmt: skip
"""Messages as data sets write them, and their one form."""

EXPECTED = [expected for _, expected in TALKS]

Write = Callable[[Path, list[JsonObject]], Columns]


def lines(folder: Path, rows: list[JsonObject]) -> Columns:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file(folder / "rows.jsonl")


def as_json(folder: Path, rows: list[JsonObject]) -> Columns:
    (folder / "rows.json").write_text(json.dumps(rows))
    return file(folder / "rows.json")


def as_parquet(folder: Path, rows: list[JsonObject]) -> Columns:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return file(folder / "rows.parquet")


def as_arrow(folder: Path, rows: list[JsonObject]) -> Columns:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(folder / "rows.arrow", table.schema) as stream:
        stream.write_table(table)
    return file(folder / "rows.arrow")


def with_json_feature(rows: list[JsonObject]) -> datasets.Dataset:
    texts = isinstance(rows[0]["messages"], str)
    feature = datasets.Json() if texts else datasets.List(datasets.Json())
    return datasets.Dataset.from_list(rows, features=datasets.Features({"messages": feature}))


def as_json_feature(folder: Path, rows: list[JsonObject]) -> Columns:
    with_json_feature(rows).to_parquet(folder / "feature.parquet")
    return file(folder / "feature.parquet")


def file(path: Path) -> Columns:
    return HFDataset(str(path), answer_field=None)


def prompts_of(task: Columns) -> list[Prompt]:
    rows = task.rows("train")
    prompts = [task.prompt(row, index) for index, row in enumerate(rows)]
    assert [problem for problem in map(outputs.of_task, prompts) if problem] == []
    return prompts


CONTAINERS: dict[str, Write] = {
    "jsonl": lines,
    "json": as_json,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "Json": as_json_feature,
    "rows": lambda _, rows: Rows(rows, answer_field=None),
    "dataset": lambda _, rows: Rows(datasets.Dataset.from_list(rows), answer_field=None),
    "dataset of Json": lambda _, rows: Rows(with_json_feature(rows), answer_field=None),
    "NumPy": lambda _, rows: Rows(datasets.Dataset.from_list(rows).to_pandas().to_dict("records"), answer_field=None),
}


def with_texts(messages: list[Message]) -> list[Message]:
    """Return messages whose calls have arguments that are JSON text, as OpenAI's API has them."""
    copied = json.loads(json.dumps(messages))
    for function in (call["function"] for message in copied for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return copied


@pytest.mark.parametrize("container", CONTAINERS)
def test_messages_have_one_form_in_every_container(container: str, tmp_path: Path) -> None:
    """As objects, with arguments as JSON text, and as JSON text altogether."""
    for form in (list, with_texts, json.dumps):
        folder = tmp_path / form.__name__
        folder.mkdir()
        task = CONTAINERS[container](folder, [{"messages": form(messages)} for messages, _ in TALKS])
        prompts = prompts_of(task)
        assert [[*p.messages, *p.recorded[0].messages] for p in prompts] == EXPECTED
        numbers = [p.recorded[0].messages[0]["tool_calls"][0]["function"]["arguments"] for p in prompts[1:3]]
        assert [type(value) for numbers in numbers for value in numbers.values()] == [
            float,
            float if container == "NumPy" and form is list else int,  # pandas has no null among integers
            list,
        ]
        changes = [set(p.normalised) for p in prompts]
        assert (Change.ARGUMENTS in changes[0]) == (form is with_texts)
        assert Change.ROLES in changes[4]
        assert Change.UNTRAINED in changes[5]
        assert (Change.NULLS in changes[0]) == (form is not json.dumps and container in TABLES)


TABLES = ("parquet", "arrow", "dataset", "NumPy")
"""Containers in which a struct has all fields of all rows."""


def prompt_of(row: JsonObject) -> Prompt:
    return Rows([row], answer_field=None).prompt(row, 0)


def test_nulls_stay_where_the_data_set_wrote_them(tmp_path: Path) -> None:
    """In JSON lines and in JSON text; a table has nulls for what is missing."""
    arguments = {"port": "Bergen", "day": None, "of": [None], "at": {"hour": None}}
    row = {"messages": [USER, {**calling(arguments), "name": None}]}
    text = {"messages": json.dumps(row["messages"])}
    dropped = {"port": "Bergen", "of": [None], "at": {}}
    for prompt, expected in (
        (prompts_of(lines(tmp_path, [row]))[0], arguments),
        (prompt_of(text), dropped),
        (prompt_of({"messages": [USER, calling(json.dumps(arguments))]}), arguments),
        (prompt_of(row), dropped),
    ):
        assert prompt.recorded[0].messages == [calling(expected)]


COLUMNS: list[tuple[JsonObject, list[Message], list[list[Message]]]] = [
    ({"prompt": "2 + 3?"}, [{"role": "user", "content": "2 + 3?"}], []),
    ({"prompt": "[1, 2] has what sum?"}, [{"role": "user", "content": "[1, 2] has what sum?"}], []),
    ({"prompt": '[{"id": 1}] has what keys?'}, [{"role": "user", "content": '[{"id": 1}] has what keys?'}], []),
    ({"prompt": json.dumps([USER])}, [USER], []),
    ({"prompt": json.dumps([{"content": "Hi", "role": "user"}])}, [{"role": "user", "content": "Hi"}], []),
    ({"prompt": [USER], "completion": json.dumps([SAID])}, [USER], [[SAID]]),
    ({"prompt": [USER], "completion": [{"from": "bot", "value": "Yes"}]}, [USER], [[{**SAID, "content": "Yes"}]]),
    ({"prompt": [USER], "completions": json.dumps(["A", "B"])}, [USER], [[{**SAID, "content": c}] for c in "AB"]),
    ({"prompt": [USER], "completions": [json.dumps([SAID]), [SAID]]}, [USER], [[SAID], [SAID]]),
    (
        {"chosen": json.dumps([USER, SAID]), "rejected": json.dumps([USER, {**SAID, "content": "No"}])},
        [USER],
        [[SAID], [{**SAID, "content": "No"}]],
    ),
    (
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello."},
            "rejected": {"from": "gpt", "value": "What?"},
        },
        [{"role": "user", "content": "Hi"}],
        [[{**SAID, "content": "Hello."}], [{**SAID, "content": "What?"}]],
    ),
    (
        {"system": "Be kind.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        [[{**SAID, "content": "Hello."}]],
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "Tide?"},
                {"from": "function_call", "value": '{"name": "tide", "arguments": {"port": "Bergen"}}'},
                {"from": "observation", "value": "06:10"},
                {"from": "gpt", "value": "06:10."},
            ]
        },
        [{"role": "user", "content": "Tide?"}],
        [
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": {"port": "Bergen"}}}],
                },
                {"role": "tool", "content": "06:10"},
                {**SAID, "content": "06:10."},
            ]
        ],
    ),
    (  # ms-swift: calls after the turn's text, in messages of their own
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "Look:"},
                {"role": "tool_call", "content": '{"name": "a", "arguments": "{\\"x\\": 1}"}'},
                {"role": "tool_call", "content": '{"name": "b", "arguments": ""}'},
            ]
        },
        [USER],
        [
            [
                {
                    "role": "assistant",
                    "content": "Look:",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "a", "arguments": {"x": 1}}},
                        {"type": "function", "function": {"name": "b", "arguments": {}}},
                    ],
                }
            ]
        ],
    ),
    (  # OpenAI's older API
        {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "a", "arguments": "{}"}}]},
        [USER],
        [
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": {}}}],
                }
            ]
        ],
    ),
    (  # a call without its envelope
        {"prompt": "?", "completion": [{**SAID, "tool_calls": [{"id": "c1", "name": "a", "arguments": {"x": None}}]}]},
        [{"role": "user", "content": "?"}],
        [[{**SAID, "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "a", "arguments": {}}}]}]],
    ),
    ({"messages": [USER, SAID], "chosen": None, "rejected": None, "prompt": None}, [USER], [[SAID]]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages", "answers"), COLUMNS)
def test_columns_of_chats(row: JsonObject, messages: list[Message], answers: list[list[Message]]) -> None:
    prompt = prompt_of(row)
    assert prompt.messages == messages
    assert [answer.messages for answer in prompt.recorded] == answers


DEEP = json.loads("[" * 70 + "]" * 70)
REFUSED: dict[str, tuple[JsonObject, str]] = {
    "Python's repr": ({"prompt": str([USER])}, r"'prompt' looks like messages, but is .*expected JSON: .*json.dumps"),
    "text": ({"messages": "Hi"}, r"'messages' is 'Hi', expected chat messages"),
    "JSON of no messages": ({"messages": "[1, 2]"}, r"'messages' is '\[1, 2\]', expected chat messages"),
    "an object": ({"messages": USER}, r"'messages' is {.*, expected a list of chat messages"),
    "null": ({"messages": [USER, None]}, r"'messages', message 2 is None, expected an object"),
    "no role": ({"messages": [{"content": "x"}]}, r"'messages', message 1: role is None, expected one of system, "),
    "another role": ({"messages": [{"role": "robot", "content": "x"}]}, r"role is 'robot', expected one of"),
    "two roles": ({"messages": [{**USER, "from": "gpt"}]}, r"has role='user' and from='gpt'; remove one"),
    "number": ({"prompt": [{"role": "user", "content": 3}]}, r"'prompt', message 1: content is 3, expected text"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, r"message 2: content is None, expected text"),
    "NaN": ({"messages": [USER, calling('{"x": NaN}')]}, r"message 2, call 1: arguments of 'tide' is .*NaN is no JSON"),
    "a float NaN": ({"messages": [USER, calling({"x": float("nan")})]}, r"arguments of 'tide' holds nan, expected"),
    "1e999": ({"messages": [USER, calling('{"x": 1e999}')]}, r"expected JSON: 1e999 is beyond float64"),
    "5,000 digits": ({"messages": [USER, calling('{"x": ' + "1" * 5000 + "}")]}, r"expected JSON: Exceeds the limit"),
    "a repeated key": ({"messages": [USER, calling('{"x": 1, "x": 2}')]}, r"expected JSON: the key 'x' is repeated"),
    "deep": (
        {"messages": [USER, calling({"x": DEEP})]},
        r"arguments of 'tide' has more than 64 levels, expected fewer",
    ),
    "deep text": ({"messages": [USER, calling(json.dumps({"x": DEEP}))]}, r"has more than 64 levels"),
    "far too deep": ({"messages": [USER, calling("[" * 10**5)]}, r"expected JSON: it has far more than 64 levels"),
    "50 MB": ({"messages": [USER, calling('"' + "x" * 50_000_000 + '"')]}, r"it has 50,000,002 characters, at most"),
    "a list": ({"messages": [USER, calling("[1]")]}, r"arguments of 'tide' is \[1\], expected an object, or the JSON"),
    "twice JSON": ({"messages": [USER, calling(json.dumps("{}"))]}, r"arguments of 'tide' is '{}', expected an object"),
    "a call of text": (
        {"messages": [USER, calling({}) | {"tool_calls": ["tide()"]}]},
        r"call 1 is 'tide\(\)', expected",
    ),
    "no name": ({"messages": [USER, calling({}, "")]}, r"message 2, call 1 is .*, expected a call such as"),
    "half a pair": ({"messages": [USER, calling('{"x": "\\ud800"}')]}, r"'tide' holds '\\ud800', half of a surrogate"),
    "half a pair in a text": ({"prompt": "\ud800"}, r"'prompt' holds '\\ud800', half of a surrogate pair"),
    "a fraction": ({"messages": [USER, {**SAID, "weight": 0.5}]}, r"message 2: weight is 0.5, expected 0 or 1"),
    "a flag of text": ({"messages": [USER, {**SAID, "train": "no"}]}, r"message 2: train is 'no', expected 0 or 1"),
    "flags that differ": ({"messages": [USER, {**SAID, "train": True, "loss": 0}]}, r"message 2 is .*, expected flags"),
    "a trained user": (
        {"messages": [{**USER, "train": True}, SAID]},
        r"message 1 is .*the flag on turns of the assist",
    ),
    "parts of a turn": ({"messages": [USER, {**SAID, "train_detail": [{"train": False}]}]}, r"has train_detail, but"),
    "no trained turn": (
        {"messages": [USER, {**SAID, "weight": 0}]},
        r"flags leave all turns of an answer out of the loss",
    ),
    "chosen": ({"prompt": "?", "chosen": [{"role": "x"}], "rejected": "b"}, r"'chosen', message 1: role is 'x', expe"),
    "rejected": ({"prompt": "?", "chosen": "a", "rejected": {"a": 1}}, r"'rejected', message 1: role is None, expect"),
}


@pytest.mark.parametrize(("row", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_chat_is_refused_by_row_and_column(row: JsonObject, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^task, row 7: .*{message}"):
        Rows([row], answer_field=None).prompt(row, 7)


def test_files_are_refused_by_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rows.jsonl, line 2: 'messages', message 1: role is 'robot'"):
        prompts_of(lines(tmp_path, [{"messages": [USER, SAID]}, {"messages": [{"role": "robot", "content": "x"}]}]))
    with pytest.raises(RecipeError, match=r"rows.parquet, row 1: 'messages', message 1: role is 'robot'"):
        prompts_of(as_parquet(tmp_path, [{"messages": [{"role": "robot", "content": "x"}]}]))


PARAMETERS = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
FUNCTION = {"name": "tide", "description": "Next high tide", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}

TOOLS: list[tuple[object, Any]] = [
    (None, None),
    ("", None),
    ([], []),
    (["tide"], ["tide"]),
    ({"tide": {"create": {}}, "now": None}, ["tide"]),
    ([SCHEMA, OTHER], [SCHEMA, OTHER]),
    (json.dumps([SCHEMA, OTHER]), [SCHEMA, OTHER]),
    ([json.dumps(SCHEMA)], [SCHEMA]),
    ([FUNCTION], [SCHEMA]),
    ([FUNCTION, "now"], [SCHEMA, "now"]),
    ([{**SCHEMA, "function": {**FUNCTION, "parameters": json.dumps(PARAMETERS)}}], [SCHEMA]),
    ([{**SCHEMA, "function": {**FUNCTION, "strict": None}}], [SCHEMA]),
]


@pytest.mark.parametrize(("column", "tools"), TOOLS)
def test_tools_of_a_row(column: object, tools: object) -> None:
    prompt = prompt_of({"prompt": "Tide?", "tools": column})
    assert prompt.tools == tools
    assert outputs.of_task(prompt) is None


@pytest.mark.parametrize("container", [name for name in CONTAINERS if "Json" not in name])
def test_schemas_have_no_fields_of_others(container: str, tmp_path: Path) -> None:
    rows = [{"messages": [USER, SAID], "tools": tools} for tools in ([SCHEMA], [OTHER])]
    found = [prompt.tools for prompt in prompts_of(CONTAINERS[container](tmp_path, rows))]
    assert found == [[SCHEMA], [OTHER]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("tide", r"'tools' is 'tide', expected JSON"),
        (SCHEMA, r"'tools' is {.*, expected a list of tools"),
        (3, r"'tools' is 3, expected a list of tools"),
        ([3], r"'tools', element 1 is 3, expected a name, or {'type': 'function'"),
        ([{"type": "retrieval"}], r"'tools', element 1 is {'type': 'retrieval'}, expected a name, or"),
        ([{"type": "function", "function": "tide"}], r"'tools', element 1 is .*, expected a name, or"),
        ([{**FUNCTION, "parameters": [1]}], r"'tools', element 1: parameters of 'tide' is \[1\], expected an object"),
        ([SCHEMA, SCHEMA], r"'tools' is \['tide', 'tide'\], expected each name once"),
        ('[{"name": "tide", "name": "now"}]', r"'tools' is .*the key 'name' is repeated"),
        ([{**FUNCTION, "parameters": {"x": float("inf")}}], r"'tools', element 1 holds inf, expected a finite number"),
    ],
)
def test_what_is_no_tool_is_refused_by_row_and_column(column: object, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^task, row 0: {message}"):
        prompt_of({"prompt": "Tide?", "tools": column})


def test_a_prompt_that_ends_with_the_assistant_is_refused() -> None:
    """The template would close that turn and begin another, as for data sets that open it with `<think>`."""
    asked = [{"role": "user", "content": "2 + 2 = ?"}, {"role": "assistant", "content": "Let me think.\n<think>"}]
    with pytest.raises(RecipeError, match=r"row 0: 'prompt' ends with a turn of the assistant, .*; remove that turn"):
        Rows([{"prompt": asked, "answer": "4"}]).prompt({"prompt": asked, "answer": "4"}, 0)
