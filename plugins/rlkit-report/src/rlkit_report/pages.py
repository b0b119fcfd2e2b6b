"""Rollouts as pages that are decompressed only when they are looked at, and an index of few columns to find them by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from rlkit.interfaces.content import described
from rlkit.types import JsonObject
from rlkit_report.files import RolloutFile, chosen, token_ids
from rlkit_report.pictures import RunPictures
from rlkit_report.tokens import TokenTexts

MAX_ROWS = 64
"""Rows of a page."""

MAX_PAGE = 2_000_000
"""Characters of a page as JSON, beyond which it gets no further row."""

ONLY_PYTHON = (b"NaN", b"Infinity", b"\0")
"""What may be in a line that Python reads as JSON and browsers do not, or in one of another encoding than UTF-8."""

EXCERPT = 120
"""Characters of a text that the index has."""


class Numbering:
    """Numbers names from 0 in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self.excerpts: list[str] = []

    def number(self, name: object, *qualifiers: object) -> int:
        """Return the number of a name; `qualifiers` tell apart what has the same name."""
        key: object = (name, *qualifiers)
        if not all(map(_is_short, (name, *qualifiers))):
            key = blake2b(repr(key).encode("utf-8", "backslashreplace"), digest_size=16).digest()
        if key not in self._numbers:
            self._numbers[key] = len(self.excerpts)
            self.excerpts.append(_short(name))
        return self._numbers[key]


def _is_short(part: object) -> bool:
    return part is None or type(part) is int or (type(part) is str and len(part) <= EXCERPT)


COLUMNS = ("run", "when", "order", "kind", "prompt", "group", "sample", "reward", "accuracy", "length", "stop",
           "source", "page", "offset")  # fmt: skip
NAMED = ("when", "kind", "prompt", "group", "stop", "source")


@dataclass
class PageIndex:
    """What rows are found, filtered and sorted by: a list for each column, in the order of the rows.

    Columns of `NAMED` are numbers of `names`.
    """

    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    excerpts: list[str] = field(default_factory=list)
    names: dict[str, Numbering] = field(default_factory=lambda: {name: Numbering() for name in NAMED})
    prompts: dict[int, str] = field(default_factory=dict)
    """The beginning of a prompt's text by its number."""
    samples: Counter[int] = field(default_factory=Counter)
    """Rows of each group so far."""

    def add(self, run: int, file: RolloutFile, row: JsonObject, page: int, row_index: int) -> None:
        """Add a row that is at an index of a page."""
        prompt = self.names["prompt"].number(row.get("prompt"), row.get("messages"))
        group = self.names["group"].number(
            row.get("group"), run, file.kind, file.when, file.rank, row.get("kind"), prompt
        )
        values = {
            "run": run,
            "when": self.names["when"].number(f"{file.kind} {file.when.lstrip('0') or '0'}"),
            "order": 1e9 if file.when == "after" else file.step or 0,
            "kind": self.names["kind"].number(row.get("kind") or file.kind),
            "prompt": prompt,
            "group": group,
            "sample": self.samples[group],
            "reward": _number(row.get("reward")),
            "accuracy": _accuracy(row),
            "length": chosen(row),
            "stop": self.names["stop"].number(row.get("stop")),
            "source": self.names["source"].number(_source(row)),
            "page": page,
            "offset": row_index,
        }
        self.samples[group] += 1
        for name, value in values.items():
            self.columns[name].append(value)
        self.excerpts.append(_short(row.get("text")))
        self.prompts.setdefault(prompt, _asked(row))

    def content(self) -> JsonObject:
        """Return it as JSON holds it."""
        names = {name: table.excerpts for name, table in self.names.items() if name != "group"}
        return {**self.columns, "excerpts": self.excerpts, "names": names, "asked": list(self.prompts.values())}


def pages(
    rollouts: Iterable[tuple[RolloutFile, JsonObject, bytes]],
    texts: TokenTexts,
    pictures: RunPictures,
    index: PageIndex,
    *,
    run: int,
    first: int,
) -> Iterator[str]:
    """Yield pages of a run's rows, and add each row to the index.

    A page is JSON of `rows`, as they were saved, `texts`, those of the token ids in them, and their `pictures`.

    Args:
        rollouts: Rows with the files and the lines that they are from.
        texts: Of the run's tokenizer.
        pictures: Of the run's rollouts.
        index: Of all runs.
        run: The run's number.
        first: The number of the first page.
    """
    rows: list[str] = []
    tokens: set[int] = set()
    shown: dict[str, str] = {}
    size = 0
    for file, row, line in rollouts:
        index.add(run, file, row, first, len(rows))
        rows.append(_as_saved(row, line))
        tokens.update(token_ids(row))
        new = {name: picture for name, picture in pictures.of(row).items() if name not in shown}
        shown |= new
        size += len(rows[-1]) + sum(map(len, new.values()))
        if len(rows) == MAX_ROWS or size > MAX_PAGE:
            yield _page(rows, texts.of(tokens), shown)
            rows, tokens, shown, size, first = [], set(), {}, 0, first + 1
    if rows:
        yield _page(rows, texts.of(tokens), shown)


def _page(rows: list[str], texts: dict[str, str], pictures: dict[str, str]) -> str:
    return f'{{"rows":[{",".join(rows)}],"texts":{as_json(texts)},"pictures":{as_json(pictures)}}}'


def _as_saved(row: JsonObject, line: bytes) -> str:
    """Return a row as its line has it, which is fast, if that is JSON for browsers, too."""
    try:
        if line.startswith(b"{") and not any(mark in line for mark in ONLY_PYTHON):
            return line.decode("utf-8").rstrip()
    except UnicodeDecodeError:  # half of a pair, which Python reads
        pass
    return as_json(row)


def as_json(content: object) -> str:
    """Return JSON as browsers read it: in ASCII, and numbers that are not finite as texts."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number of so many digits that it is infinite was read
        return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else json.dumps(value)  # its name, as a text
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _short(value: object) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def _number(value: object) -> float | None:
    """Return a finite number, None for anything else."""
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if is_finite and isinstance(value, int | float) else None


def _accuracy(row: JsonObject) -> float | None:
    components = row.get("components")
    return _number(components.get("accuracy")) if isinstance(components, dict) else None


def _source(row: JsonObject) -> object:
    meta = row.get("meta")
    return row.get("source") or (meta.get("data_source") if isinstance(meta, dict) else None)


def _asked(row: JsonObject) -> str:
    """Return the beginning of the prompt's last message."""
    asked = row.get("messages")
    last = asked[-1] if isinstance(asked, list) and asked else None
    return _short(described(last.get("content")) if isinstance(last, dict) else None)
