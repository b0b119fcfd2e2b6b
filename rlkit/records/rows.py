"""Rows of `rollouts/`: a trajectory as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlkit.base.errors import RecipeError, explain, shorten, show
from rlkit.base.text import redact
from rlkit.interfaces.content import are_tools
from rlkit.interfaces.picture import Picture
from rlkit.records.fields import read_fields, stored_fields
from rlkit.records.lines import LOGP_DECIMALS, nine_digits, read_lines
from rlkit.types import AgentSpan, Fork, JsonObject, Message, Prompt, Row, Score, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MAX_META = 65_536
"""Characters of a row's `meta` as JSON."""

MAX_OUTPUT = 16_384
"""Characters of the end of an agent's output."""

SCORE_FIELDS = ("reward", "turn_rewards", "token_rewards", "ungradable", "feedback")
"""Fields of a score that a row has under `score`; its other fields are fields of the row."""

CREDIT = ("advantages", "greedy_reward", "again")
"""Fields of a trajectory's credit that are read back."""

Check = Callable[[object], bool]
Tokenize = Callable[[list[Message], str], tuple[list[int], list[int]]]
"""Returns the token ids of a prompt's messages, and of the completion."""


def as_row(trajectory: Trajectory, exact: bool = True) -> JsonObject:
    """Return a trajectory as a row of JSON data; an agent's rollout has its session's further samples and its log.

    Args:
        trajectory: A scored trajectory, or one that failed.
        exact: Whether log-probs keep all bits, as learning from the row needs, or `LOGP_DECIMALS`.
    """
    score, prompt = trajectory.score, trajectory.prompt
    error = trajectory.error or (score and score.error)
    return {
        "prompt": prompt.id,
        "group": trajectory.group,
        "messages": stored_messages(prompt.messages),
        "answer": prompt.answer,
        **_meta(prompt.meta),
        **({} if prompt.tools is None else {"tools": prompt.tools}),
        "text": trajectory.text,
        "conversation": stored_messages(trajectory.messages[len(prompt.messages) :]),
        **_agent(trajectory, exact),
        "reward": trajectory.reward,
        "score": score and {name: getattr(score, name) for name in SCORE_FIELDS} | stored_fields(score.fields),
        "final_answer": None if score is None else score.answer,
        "components": {} if score is None else score.components,
        "error": redact(shorten(error)) if error else None,
        "failed": trajectory.error is not None,
        **_sample(trajectory, exact),
        "counts": trajectory.counts,
        **({"metrics": trajectory.metrics} if trajectory.metrics else {}),
    }


def _agent(trajectory: Trajectory, exact: bool) -> JsonObject:
    """Return an agent's result and the further samples of a rollout, each with all of its messages."""
    span = trajectory.span
    if not span.result and not span.branches:
        return {}
    branches = [
        {
            "text": branch.text,
            "conversation": stored_messages(branch.messages),
            "fork": branch.span.fork and list(branch.span.fork),
            **_sample(branch, exact),
        }
        for branch in span.branches
    ]
    if not span.result:  # an answer that was recorded
        return {"branches": branches}
    output = redact(str(span.result["output"])[-MAX_OUTPUT:])
    return {"agent": {"status": span.result["status"], "output": output}, "branches": branches}


def _sample(trajectory: Trajectory, exact: bool) -> JsonObject:
    """Return a trajectory's inputs to training, and its results."""
    span = trajectory.span
    return {
        "stop": trajectory.stop.value,
        "turns": [list(turn) for turn in trajectory.turns],
        "turn_rewards": trajectory.turn_rewards,
        "mask": list(map(int, trajectory.mask)),
        "versions": trajectory.versions,
        "tokens": trajectory.tokens,
        "logps": [nine_digits(x) if exact else round(x, LOGP_DECIMALS) or 0 for x in trajectory.logps],
        **({"candidates": list(map(list, trajectory.candidates))} if trajectory.candidates else {}),
        **({"role": span.role, "speaker": span.speaker} if span.role else {}),
        **({"positions": span.positions} if span.positions else {}),
        **({"opened_thinking": trajectory.opened_thinking} if trajectory.opened_thinking else {}),
        **stored_fields(trajectory.fields),
        **trajectory.credit,
    }


def stored_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as JSON data, with the file names of pictures."""
    return [
        {**message, "content": [_stored_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def picture_file(picture: Picture) -> str:
    """Return the name of a picture's file in `rollouts/`."""
    return f"media/{picture.digest}{picture.suffix}"


def _stored_part(part: JsonObject) -> JsonObject:
    image = part.get("image")
    return {**part, "image": picture_file(image)} if isinstance(image, Picture) else part


def _meta(meta: Row) -> JsonObject:
    """Return the row's other columns, and the names of columns that are not JSON or too large."""
    columns: JsonObject = {}
    left_out = []
    room = MAX_META
    for name, value in meta.items():
        try:
            size = len(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            size = room + 1
        if size > room:
            left_out.append(name)
        else:
            columns[name] = value
            room -= size
    return {"meta": columns} | ({"meta_left_out": left_out} if left_out else {})


@dataclass(frozen=True)
class SavedRow:
    """A row that was read back.

    Args:
        location: File and line, for messages.
        trajectory: The trajectory, with its score if the row has all of it, as rlkit's own rows do.
        group: A key shared by the samples of a prompt that were scored together.
        reward: The total reward; None if it had none.
        components: The components of its score.
        failed: Whether the conversation failed, so that it was not scored.
        left_out: Columns of the data that the file does not contain.
        columns: The row as the file has it.
    """

    location: str
    trajectory: Trajectory
    group: tuple[str, ...]
    reward: float | None
    components: dict[str, float]
    failed: bool
    left_out: list[str]
    columns: JsonObject = field(default_factory=dict)


def read_rows(path: Path, tokenize: Tokenize | None = None) -> Iterator[SavedRow]:
    """Yield the rows of a file of `rollouts/`, or of any JSON lines with a prompt's `messages`, `text` and `answer`.

    Args:
        path: Path of a .jsonl or .jsonl.gz file.
        tokenize: Tokenises rows without tokens; None if all rows must have tokens.

    Raises:
        RecipeError: The file cannot be read, or a line is not a row; the message names the file and the line.
    """
    for number, line in read_lines(path):
        location = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{location} is not JSON: {explain(error)}") from error
        if not isinstance(row, dict):
            raise RecipeError(f"{location} is {show(row)}, expected an object with messages, text and answer")
        yield _saved(_Fields(row, location), tokenize)


class _Fields:
    """The fields of a line, each checked when it is read; null is the same as a missing field."""

    def __init__(self, row: JsonObject, location: str) -> None:
        self.row = row
        self.location = location

    def get(self, name: str, check: Check, expected: str, default: T) -> T:
        value = self.row.get(name)
        if value is None:
            return default
        if not check(value):
            raise self.wrong(name, expected)
        return cast(T, value)

    def wrong(self, name: str, expected: str) -> RecipeError:
        """Return an error about a field."""
        value = show(self.row[name]) if name in self.row else "missing"
        return RecipeError(f"{self.location}: {name!r} is {value}, expected {expected}")


def _saved(fields: _Fields, tokenize: Tokenize | None) -> SavedRow:
    prompt = _prompt(fields)
    text = fields.row.get("text")
    if not isinstance(text, str):
        raise fields.wrong("text", "the completion's text")
    group = fields.get("group", _is_int, "a whole number", 0)
    trajectory = _trajectory(fields, prompt, group, text, tokenize)
    failed = trajectory.stop is StopReason.ERROR  # in files without `failed`
    failed = fields.get("failed", lambda value: isinstance(value, bool), "true or false", failed)
    components = fields.get("components", _are_numbers_by_name, "finite numbers by name", cast(dict[str, float], {}))
    trajectory.error = fields.get("error", _is_text, "a text", "it failed") if failed else None
    trajectory.score = _score(fields, components)
    trajectory.span.result = fields.get("agent", _is_ending, "an object with status and output", {})
    branches: list[JsonObject] = fields.get("branches", _list_of(_is_object), "samples", [])
    for index, branch in enumerate(branches):
        trajectory.span.branches.append(_branch(_Fields(branch, f"{fields.location}, branch {index}"), prompt, group))
    return SavedRow(
        fields.location,
        trajectory,
        (str(fields.row.get("kind")), str(group), prompt.id or json.dumps(prompt.messages)),
        fields.get("reward", _is_number, "a finite number", None),
        components,
        failed,
        fields.get("meta_left_out", _list_of(_is_text), "names of columns", []),
        fields.row,
    )


def _branch(fields: _Fields, prompt: Prompt, group: int) -> Trajectory:
    text = fields.get("text", _is_text, "the text of the last turn", "")
    branch = _trajectory(fields, prompt, group, text, None)
    branch.messages = branch.messages[len(prompt.messages) :]
    fork = fields.get("fork", _list_of(_is_int, 2), "[sample, tokens]", cast(Any, None))
    branch.span.fork = Fork(*fork) if fork else None
    return branch


def _score(fields: _Fields, components: dict[str, float]) -> Score | None:
    row = fields.get("score", _is_object, "an object", cast(JsonObject | None, None))
    if row is None:
        return None
    score_fields = _Fields(row, f"{fields.location}, 'score'")
    return Score(
        score_fields.get("reward", _is_number, "a finite number", None),
        components,
        score_fields.get("turn_rewards", _are_numbers, "finite numbers", None),
        fields.get("error", _is_text, "a text", None),
        score_fields.get("ungradable", lambda value: isinstance(value, bool), "true or false", False),
        fields.get("final_answer", _is_text, "a text", None),
        score_fields.get("feedback", _is_text, "a text", None),
        score_fields.get("token_rewards", _are_numbers, "finite numbers", None),
        _open_fields(score_fields),
    )


def _open_fields(fields: _Fields) -> dict[str, Tensor]:
    """Return the fields that parts filled.

    Raises:
        RecipeError: They are not as rlkit writes them.
    """
    stored = fields.get("fields", _is_object, "fields by name", cast(dict[str, str], {}))
    try:
        return read_fields(stored) if stored else {}
    except Exception as error:  # a hostile file may hold anything
        raise fields.wrong("fields", "safetensors in base64 by name") from error


def _prompt(fields: _Fields) -> Prompt:
    """Return the prompt: `messages`, or in files not written by rlkit `prompt` as messages or text."""
    row = fields.row
    if "messages" not in row and _is_text(row.get("prompt")):
        name = ""
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        key = "messages" if "messages" in row else "prompt"
        name = row["prompt"] if _is_text(row.get("prompt")) else ""
        messages = fields.get(key, _is_messages, MESSAGES, cast(list[Message], []))
        if not messages:
            raise fields.wrong("messages", MESSAGES)
    name = str(fields.get("id", lambda value: isinstance(value, str | int), "a name", name))
    meta = fields.get("meta", _is_object, "an object", cast(JsonObject, {}))
    answer = fields.get("answer", _is_text, "a text", None)
    tools = fields.get("tools", are_tools, "names or schemas of tools", None)
    return Prompt(name, messages, answer, meta, tools, fields.get("source", _is_text, "a text", None))


def _trajectory(fields: _Fields, prompt: Prompt, group: int, text: str, tokenize: Tokenize | None) -> Trajectory:
    """Return the trajectory; if the row has no tokens, the policy's tokenizer makes them from the text."""
    stop: str = fields.get("stop", lambda value: value in list(StopReason), f"one of {REASONS}", "stop")
    reply: list[Message] = [{"role": "assistant", "content": text}]
    trajectory = Trajectory(prompt, group, [], [], [], [], StopReason(stop), text=text)
    trajectory.messages = [*prompt.messages, *fields.get("conversation", _is_messages, MESSAGES, reply)]
    trajectory.turn_rewards = fields.get("turn_rewards", _are_numbers, "finite numbers", trajectory.turn_rewards)
    trajectory.counts = fields.get("counts", _are_numbers_by_name, "numbers by name", trajectory.counts)
    trajectory.metrics = fields.get("metrics", _by_name(_are_numbers), "lists of numbers by name", trajectory.metrics)
    role, speaker = fields.get("role", _is_text, "a text", ""), fields.get("speaker", _is_int, "a whole number", 0)
    positions = fields.get("positions", _are_ints, "whole numbers", list[int]())
    trajectory.span = AgentSpan(role=role, speaker=speaker, positions=positions)
    trajectory.opened_thinking = fields.get("opened_thinking", _is_text, "a text", "")
    trajectory.credit = {name: fields.row[name] for name in CREDIT if name in fields.row}
    trajectory.fields = _open_fields(fields)
    if "tokens" not in fields.row and tokenize is not None:
        try:
            prompt_ids, completion_ids = tokenize(prompt.messages, text)
        except Exception as error:  # templates and tokenizers may raise anything for invalid messages
            raise RecipeError(f"{fields.location} cannot be tokenised: {explain(error)}") from error
        start, new = len(prompt_ids), len(completion_ids)
        trajectory.tokens = [*prompt_ids, *completion_ids]
        trajectory.mask = [False] * start + [True] * new
        trajectory.logps = [0.0] * (start + new)
        trajectory.versions = [-1] * start + [0] * new
        trajectory.turns = [Turn("user", 0, start), Turn("assistant", start, start + new)]
        return trajectory
    if not _are_ints(fields.row.get("tokens")):
        raise fields.wrong("tokens", "token ids")
    trajectory.tokens = fields.row["tokens"]
    size = len(trajectory.tokens)
    trajectory.mask = list(map(bool, _per_token(fields, "mask", [0] * size)))
    trajectory.logps = _per_token(fields, "logps", [0.0] * size)
    trajectory.versions = _per_token(fields, "versions", [-1] * size)
    expected = f"a list of {size} lists of token ids"
    trajectory.candidates = fields.get("candidates", _list_of(_are_ints, size), expected, [])
    turns = fields.get("turns", _list_of(_is_turn), "[role, start, end] each", list[Any]())
    trajectory.turns = [Turn(*turn) for turn in turns]
    return trajectory


def _per_token(fields: _Fields, name: str, default: list[T]) -> list[T]:
    """Return a field with a number for each token; a log-prob may be NaN."""
    check = _list_of(lambda value: isinstance(value, int | float), len(default))
    return fields.get(name, check, f"a list of {len(default)} numbers, one for each of the tokens", default)


REASONS = ", ".join(StopReason)
MESSAGES = "messages, each with role and content"


def _is_messages(value: object) -> bool:
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Check whether a value is a finite number; an integer of 400 digits is not."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < 1e300


def _list_of(check: Check, size: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and size in (None, len(value)) and all(map(check, value))


def _by_name(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_are_ints, _are_numbers = _list_of(_is_int), _list_of(_is_number)
_are_numbers_by_name = _by_name(_is_number)


def _is_ending(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("status")) is int and _is_text(value.get("output"))


def _is_turn(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_text(value[0]) and _are_ints(value[1:])
