"""Reading rows from files and from the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from rlkit.errors import RecipeError, UnavailableError, show, unreachable
from rlkit.types import Row

Rows = Sequence[Row]
Paths = str | list[str]
"""A file, a pattern such as `data/*.jsonl`, or a list of either."""

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Names of file formats in `datasets`, by suffix."""


def existing(path: Path, option: str) -> Path:
    """Return the path if it exists.

    Raises:
        RecipeError: It does not; the message names the option and what exists nearby.
    """
    try:
        path = path.expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecipeError(f"{option} is {str(path)!r}, which does not exist; {_nearby(path)}") from error
    except (OSError, ValueError, RuntimeError) as error:  # no permission, too long, a NUL, an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{option} is {show(str(path))}, which cannot be read: {reason}") from error
    return path


def expand(names: Paths, option: str) -> list[Path]:
    """Return the regular files that a path, a pattern, or a list of them names.

    Raises:
        RecipeError: One is missing or not a regular file: a folder, a pipe, a device.
    """
    listed = [names] if isinstance(names, str) else names
    paths = [path for name in listed for path in _matches(name, option)]
    if not paths:
        raise RecipeError(
            f"{option} is {names!r}, expected a file, a pattern such as 'data/*.jsonl', or a list of them"
        )
    return [regular(path, option) for path in paths]


def regular(path: Path, option: str) -> Path:
    """Return the path if it is a regular file, which can be read to its end.

    Raises:
        RecipeError: It is missing, a folder, a pipe or a device.
    """
    mode = existing(path, option).stat().st_mode
    if stat.S_ISDIR(mode):
        kinds = [kind for kind in KINDS if glob.glob(f"{glob.escape(str(path))}/*{kind}")] or [".jsonl"]
        raise RecipeError(f"{option} is {str(path)!r}, a folder; expected files, such as '{path}/*{kinds[0]}'")
    if not stat.S_ISREG(mode):
        raise RecipeError(f"{option} is {str(path)!r}, a pipe, a socket or a device; expected a regular file")
    return path


def jsonl(paths: Sequence[Path], check: Callable[[Row, str], object]) -> Rows:
    """Read files with one JSON object a line, in UTF-8.

    Args:
        paths: From `expand`.
        check: Called with each row and its place (the file and the line); raises RecipeError if the row is unusable.

    Raises:
        RecipeError: A line is not such an object; the message names the file and the line.
    """
    rows = []
    for path in paths:
        for place, line in _lines(path):
            row = _parse(line, place)
            check(row, place)
            rows.append(row)
    return rows


def files(paths: Sequence[Path], option: str) -> Rows:
    """Read parquet, JSON or CSV files through `datasets`; rows are read from disk when asked for.

    Raises:
        RecipeError: A file is missing, of another kind, or unreadable.
    """
    for path in paths:
        regular(path, option)
        if path.suffix not in KINDS:
            raise RecipeError(f"{option} names {path.name!r}, expected a file ending in {', '.join(KINDS)}")
        if path.suffix != paths[0].suffix:
            raise RecipeError(f"{option} names {paths[0].name!r} and {path.name!r}, expected files of one kind")
    import datasets

    try:
        loaded = datasets.load_dataset(KINDS[paths[0].suffix], data_files=[str(p) for p in paths], split="train")
    except Exception as error:
        names = ", ".join(map(str, paths[:3])) + (" …" if len(paths) > 3 else "")
        cause: BaseException = error
        while inner := cause.__cause__ or cause.__context__:  # the message of `datasets` itself is only that it failed
            cause = inner
        raise RecipeError(
            f"{option}: {names} cannot be read as {KINDS[paths[0].suffix]}: {_first_line(cause)}"
        ) from error
    return cast(Rows, loaded)


def hub(path: str, name: str | None, split: str, option: str) -> Rows:
    """Load a split of a data set of the Hugging Face hub, or of a local folder in its form, through `datasets`.

    Raises:
        RecipeError: It cannot be loaded; the message has the reason of `datasets` and the way without the hub.
    """
    import datasets

    try:
        return cast(Rows, datasets.load_dataset(path, name, split=split))
    except Exception as error:
        kind = UnavailableError if unreachable(error) else RecipeError
        raise kind(
            f"data set {path!r}, split {split!r} cannot be loaded: {_first_line(error)}. Without a network, set "
            f"{option} to a local folder or file"
        ) from error


def divide(rows: Rows, share: float, seed: int, content: Callable[[Row, int], str]) -> tuple[Rows, Rows]:
    """Divide rows into those to train on and those to hold out, by a hash of each row's content and the seed.

    The order of the rows does not matter, and rows of equal content are in the same split. Held-out rows are sorted by
    their hashes, so that the first of them do not depend on the order either.

    Args:
        rows: All of them.
        share: The share to hold out; at least one row is.
        seed: Seed of the selection.
        content: Returns what identifies a row, from the row and its number.
    """
    texts = (f"{seed}\x1f{content(row, index)}" for index, row in enumerate(rows))
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    last = sorted(hashes)[max(1, round(share * len(rows))) - 1] if hashes else b""
    held_out = sorted((i for i, digest in enumerate(hashes) if digest <= last), key=hashes.__getitem__)
    kept = [i for i, digest in enumerate(hashes) if digest > last]
    return _select(rows, kept), _select(rows, held_out)


def column(row: Row, name: str, place: str, option: str) -> object:
    """Return the value of a column; `a.b` is the field `b` of the column `a`, unless a column has this name.

    Raises:
        RecipeError: There is none; the message lists the columns of the row.
    """
    if name in row:
        return row[name]
    value: object = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise RecipeError(
                f"{place}: no field {name!r} ({option}); the row has: {', '.join(_names(row)) or 'nothing'}"
            )
        value = value[key]
    return value


def _nearby(path: Path) -> str:
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    try:
        return f"{parent} holds: {', '.join(sorted(p.name for p in parent.iterdir())[:8]) or 'nothing'}"
    except OSError as error:
        return f"{parent} cannot be listed: {error.strerror}"


def _matches(name: str, option: str) -> list[Path]:
    path = Path(name)
    if not glob.has_magic(name) or "\0" in name or path.exists():
        return [path if not name.startswith("~") else existing(path, option)]
    found = sorted(file for file in glob.glob(str(path.expanduser()), recursive=True) if not Path(file).is_dir())
    if not found:
        raise RecipeError(f"{option} is {name!r}, which matches no file; {_nearby(path.expanduser())}")
    return list(map(Path, found))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Read the lines of a file that are not empty, each with its place."""
    try:
        with path.open("rb") as raw:
            for number, line in enumerate(raw, 1):
                if text := _decode(line, number, place := f"{path}, line {number}").strip():
                    yield place, text
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error


def _decode(line: bytes, number: int, place: str) -> str:
    if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError(f"{place}: the file is in UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{place}: byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8, expected a text file "
            "in UTF-8; if it is text in another encoding, convert it: iconv -f LATIN1 -t UTF-8"
        ) from error
    if "\0" in text:
        raise RecipeError(f"{place}: a NUL byte, expected a text file with one JSON object a line")
    return text


def _parse(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.end]
        raise RecipeError(
            f"{place}: {found!a} is half of a surrogate pair, which is not valid text; remove it, or write the "
            "character in UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise RecipeError(f"{place}: not JSON ({_first_line(error)}); expected one object a line") from error
    if not isinstance(row, dict):
        raise RecipeError(f'{place}: {show(row)}, expected one JSON object a line, such as {{"prompt": "2 + 2?"}}')
    return row


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.split("\n")[0] if text else type(error).__name__


def _select(rows: Rows, chosen: Sequence[int]) -> Rows:
    select = getattr(rows, "select", None)  # of `datasets`, which leaves the rows on disk
    return cast(Rows, select(chosen)) if select is not None else [rows[i] for i in chosen]


def _names(row: Row, prefix: str = "") -> Iterator[str]:
    """Return the names of all columns, with the fields inside them."""
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and prefix.count(".") < 2:
            yield from _names(value, f"{prefix}{name}.")
