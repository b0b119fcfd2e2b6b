"""Reading rows from files and from the Hugging Face hub."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rlkit.base.errors import RecipeError, UnavailableError, show, unreachable
from rlkit.base.files import is_url, nearby, no_such
from rlkit.base.hub import work_offline_without_network
from rlkit.base.text import redact
from rlkit.types import Row
from rlkit_tasks.lines import COMPRESSED, delimiter_of, first_line, suffix_of
from rlkit_tasks.table import Table
from rlkit_tasks.text_rows import TextRows

Rows = Sequence[Row]
Paths = str | list[str]
"""A file, a URL, a pattern such as `data/*.jsonl`, or a list of these."""

KINDS = {
    ".parquet": "parquet", ".json": "json", ".arrow": "arrow", ".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
"""Formats of files by suffix: the first three are read by `datasets`."""

TEXTS = (".jsonl", ".csv", ".tsv")
"""Suffixes of files whose rows are read from their text."""

SAVED = ("state.json", "dataset_dict.json")
"""One of these is in a folder that `datasets` has saved."""


def existing(path: Path, option: str) -> Path:
    """Return the path if it exists.

    Raises:
        RecipeError: It does not; the message names the option and what exists nearby.
    """
    try:
        path = Path(os.path.expanduser(path))
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecipeError(f"{option} is {str(path)!r}, {no_such(str(path))}") from error
    except (OSError, ValueError, RuntimeError) as error:  # no permission, too long, a NUL, an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{option} is {show(str(path))}, which cannot be read: {reason}") from error
    return path


def expand(names: Paths, option: str) -> list[str]:
    """Return the regular files and the URLs that a name, a pattern, or a list of them stands for.

    Raises:
        RecipeError: One is missing or not a regular file: a folder, a pipe, a device.
    """
    listed = [names] if isinstance(names, str) else names
    paths = [path for name in listed for path in (_remote(name, option) if is_url(name) else _matches(name, option))]
    if not paths:
        raise RecipeError(
            f"{option} is {names!r}, expected a file, a URL, a pattern such as 'data/*.jsonl', or a list of them"
        )
    return [name if is_url(name) else str(regular(Path(name), option)) for name in paths]


def local(names: Paths | None, option: str) -> list[tuple[str, str]]:
    """Return the files without patterns that an option names, each with the option; neither URLs nor a hub's names."""
    listed = [names] if isinstance(names, str) else names or []
    return [(option, name) for name in listed if not is_url(name) and not glob.has_magic(name)]


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


def matching(paths: Paths, option: str) -> Table:
    """Open all files that names and patterns stand for; see `expand` and `files`."""
    return files(expand(paths, option), option)


def files(names: Sequence[str], option: str) -> Table:
    """Open files of any of the formats, whose rows stay on disk.

    Args:
        names: From `expand`.
        option: For messages.

    Raises:
        RecipeError: A file is of another format, or unreadable.
    """
    for name in names:
        if suffix_of(name) not in KINDS:
            raise RecipeError(
                f"{option} names {redact(name)!r}, expected a file that ends in {', '.join(KINDS)}, or in one of these "
                f"and {', '.join(COMPRESSED)}"
            )
    parts: list[tuple[str, Any]] = []
    for in_text, group in groupby(names, lambda name: suffix_of(name) in TEXTS):
        if in_text:
            texts = [*group]
            rows = TextRows(texts, [*map(delimiter_of, texts)])
            parts.append((", ".join(rows.names), rows))
        else:
            parts += [(redact(name), _open(KINDS[suffix_of(name)], name, option)) for name in group]
    return Table(parts)


def saved(folder: Path, split: str, option: str) -> Rows:
    """Open a folder that `datasets` has saved: one table, or a split of several.

    Raises:
        RecipeError: It cannot be read, or has no such split.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise RecipeError(f"{option}: {folder} cannot be read as Arrow files: {first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise RecipeError(f"{option}: {folder} has no split {split!r}; there are: {', '.join(loaded)}")
        loaded = loaded[split]
    return Table([(str(folder), _undecoded(loaded.with_format(None)))])  # a format would change or hide columns


def hub(path: str, name: str | None, split: str, option: str) -> Rows:
    """Load a split of a data set of the Hugging Face hub, or of a local folder in its form, through `datasets`.

    Raises:
        RecipeError: It cannot be loaded; the message has the reason of `datasets` and the way without the hub.
    """
    import datasets

    if not os.path.isdir(path):
        work_offline_without_network()
    try:
        return Table([(f"{path}, split {split}", _undecoded(datasets.load_dataset(path, name, split=split)))])
    except Exception as error:
        kind = UnavailableError if unreachable(error) else RecipeError
        raise kind(
            f"data set {path!r}, split {split!r} cannot be loaded: {first_line(error)}. Without a network, set "
            f"{option} to a local folder or file"
        ) from error


def divide(rows: Rows, share: float, digests: NDArray[np.uint64]) -> tuple[Rows, Rows]:
    """Divide rows into those to train on and those to hold out.

    The order of the rows does not matter, and rows of equal content are in the same split. Held-out rows are sorted by
    their digests, so that the first of them do not depend on the order either.

    Args:
        rows: All of them.
        share: The share to hold out; at least one row is.
        digests: [rows]: of the content of each row and the seed.
    """
    if not len(rows):
        return rows, rows
    last = np.sort(digests)[max(1, round(share * len(rows))) - 1]
    held_out = np.flatnonzero(digests <= last)
    held_out = held_out[np.argsort(digests[held_out], kind="stable")]
    return _select(rows, np.flatnonzero(digests > last)), _select(rows, held_out)


def _open(kind: str, name: str, option: str) -> Any:
    import datasets
    import pyarrow.parquet

    try:
        local = kind == "parquet" and name.endswith(".parquet") and not is_url(name)
        if local and not pyarrow.parquet.read_metadata(name).num_rows:  # which `datasets` cannot read
            return []
        with nullcontext() if is_url(name) else _without_progress():
            return _undecoded(datasets.load_dataset(kind, data_files=[name], split="train"))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:  # the message of `datasets` itself is only that it failed
            cause = cause.__cause__ or cause.__context__ or cause
        text = f"{option}: {redact(name)} cannot be read as {kind}: {redact(first_line(cause))}"
        raise (UnavailableError if is_url(name) and unreachable(error) else RecipeError)(text) from error


@contextmanager
def _without_progress() -> Iterator[None]:
    """Let `datasets` show no progress bars, which a file of this machine needs not."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _undecoded(table: Any) -> Any:
    """Return a table of `datasets` whose images, videos and audio stay files, since decoders may be missing."""
    for name, feature in table.features.items():
        if getattr(feature, "decode", False):
            table = table.cast_column(name, type(feature)(decode=False))
    return table


def _remote(url: str, option: str) -> list[str]:
    """Return the URLs that a pattern matches; one without a pattern is itself."""
    if not glob.has_magic(urlsplit(url).path):
        return [url]
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        urls = [system.unstrip_protocol(name) for name in sorted(system.glob(path))]
    except Exception as error:
        raise RecipeError(f"{option} is {redact(url)!r}, which cannot be listed: {redact(str(error))}") from error
    if not urls:
        raise RecipeError(f"{option} is {redact(url)!r}, which matches no file")
    return urls


def _matches(name: str, option: str) -> list[str]:
    path = Path(name)
    if not glob.has_magic(name) or "\0" in name or os.path.exists(path):
        return [name if not name.startswith("~") else str(existing(path, option))]
    matches = sorted(
        file for file in glob.glob(str(Path(os.path.expanduser(path))), recursive=True) if not os.path.isdir(file)
    )
    if not matches:
        raise RecipeError(f"{option} is {name!r}, which matches no file; {nearby(Path(os.path.expanduser(path)))}")
    return matches


def _select(rows: Rows, chosen: NDArray[np.int64]) -> Rows:
    select = getattr(rows, "select", None)  # of a table, which leaves the rows on disk
    return cast(Rows, select(chosen)) if select is not None else [rows[int(i)] for i in chosen]
