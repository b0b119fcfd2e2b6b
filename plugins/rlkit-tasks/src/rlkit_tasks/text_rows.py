"""Rows of text files, each parsed when it is asked for: the text, and an index of the bytes of each row."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import shutil
import tempfile
import time
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlkit.base.errors import RecipeError
from rlkit.base.files import cache_folder, is_url
from rlkit.base.text import redact
from rlkit.interfaces.rows import LocatedRow
from rlkit.types import Row
from rlkit_tasks.lines import decoded, fields, header, is_packed, lines_with_text, opened, parsed, separated_rows

FORMAT = 1
"""Of a stored index; copies with another one are not opened."""

IN_MEMORY = 1 << 20
"""Bytes of files that are not copied."""

MOST_BYTES = 32 << 30
"""Of all copies together; those that were opened longest ago are removed."""

ABANDONED_SECONDS = 24 * 3600
"""After which a copy that was never completed is removed."""

BLOCK = 1 << 20
TEXT, ROWS, FILES, BUILDING = "text", "rows.npy", "files.npy", "building-"


class RowIndex(NamedTuple):
    """Where the rows of files are in their joined text.

    Args:
        rows: [rows, 3]: first byte, end, and line in the file.
        files: [files + 1, 4]: first byte of the file, number of rows before its end, and first byte and end of the
            columns' names; the last one is the end of the text.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.int64]


class TextRows(Sequence[Row]):
    """The rows of text files.

    Large files are copied to the user's cache, under a digest of their content: a run reads what was checked at its
    start, whatever becomes of the files, and the next start need not search them for rows again.

    Args:
        names: Paths and URLs of files.
        delimiters: What separates the columns of each, None for JSON lines.

    Raises:
        RecipeError: A file cannot be read, copied, or divided into rows.
    """

    def __init__(self, names: Sequence[str], delimiters: Sequence[str | None]) -> None:
        self.names = [redact(name) for name in names]
        self._delimiters = delimiters
        self.folder: Path | None = None
        self._text: bytes | mmap.mmap
        if any(is_url(name) or is_packed(name) for name in names) or sum(map(os.path.getsize, names)) > IN_MEMORY:
            self.folder, self._text, index = self._copied(names)
        else:
            contents = [b"".join(_blocks(name)) for name in names]
            self._text = b"".join(contents)
            index = self._index(io.BytesIO(self._text), [*map(len, contents)])
        self._rows = index.rows
        self._starts, self._ends = index.files[:-1, 0].tolist(), index.files[:-1, 1].tolist()
        self._columns = [self._header(file, *index.files[file, 2:].tolist()) for file in range(len(names))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end, line = self._rows[index].tolist()
        file = bisect_right(self._ends, index)
        location = f"{self.names[file]}, line {line}"
        text = decoded(self._text[start:end], start == self._starts[file], location)
        delimiter = self._delimiters[file]
        if delimiter is not None:
            return LocatedRow.at(location, self._named(fields(text, delimiter), self._columns[file], location))
        row = LocatedRow.at(location, parsed(text, location))
        row.as_written = True
        return row

    def stored(self, name: str, compute: Callable[[], NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Return an array with an element for each row, which is stored beside the copy of the text, if there is one.

        Args:
            name: What it depends on besides the rows, as the name of a file.
            compute: Makes the array.
        """
        path = self.folder and self.folder / f"{name}.npy"
        if path is None:
            return compute()
        with suppress(OSError, ValueError, EOFError):
            values: NDArray[np.uint64] = np.load(path)
            if len(values) == len(self):
                return values
        values = compute()
        with suppress(OSError):
            _save(path, values)
        return values

    def _header(self, file: int, start: int, end: int) -> list[str]:
        """Return the names of a file's columns; none for JSON lines."""
        delimiter, location = self._delimiters[file], f"{self.names[file]}, line 1"
        if delimiter is None or start == end:
            return []
        return header(decoded(self._text[start:end], start == self._starts[file], location), delimiter, location)

    @staticmethod
    def _named(values: Sequence[str], columns: Sequence[str], location: str) -> Row:
        if len(values) != len(columns):
            raise RecipeError(f"{location}: {len(values)} fields, expected {len(columns)}: {', '.join(columns)}")
        return dict(zip(columns, values, strict=True))

    def _index(self, file: BinaryIO, sizes: Sequence[int]) -> RowIndex:
        """Find the rows in the joined text of all files."""
        numbers, places, start = array("q"), array("q"), 0
        for name, delimiter, size in zip(self.names, self._delimiters, sizes, strict=True):
            lines = _lines(file, size)
            spans = lines_with_text(lines) if delimiter is None else separated_rows(lines, delimiter, name)
            names = next(spans, (0, 0, 0)) if delimiter is not None else (0, 0, 0)
            for first, end, line in spans:
                numbers.extend((start + first, start + end, line))
            places.extend((start, len(numbers) // 3, start + names[0], start + names[1]))
            start += size
        places.extend((start, len(numbers) // 3, start, start))
        return RowIndex(np.array(numbers).reshape(-1, 3), np.array(places).reshape(-1, 4))

    def _copied(self, names: Sequence[str]) -> tuple[Path, bytes | mmap.mmap, RowIndex]:
        """Return a folder with the joined text and its index, both open: one that there is already, or a new one.

        Where the cache cannot be written, it is a temporary folder.
        """
        cache = cache_folder() / "rows"
        with suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        in_cache = os.access(cache, os.W_OK)
        folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=cache if in_cache else None))
        try:
            digest, sizes = _copy(names, folder / TEXT, repr((FORMAT, self._delimiters)))
            completed = cache / digest
            if not in_cache:
                self._write_index(folder, sizes)
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                return folder, *_open_copy(folder)
            copy = None
            with suppress(OSError, ValueError, EOFError):  # missing, or damaged
                copy = _open_copy(completed)
            if copy is None:
                shutil.rmtree(completed, ignore_errors=True)
                self._write_index(folder, sizes)
                with suppress(OSError):  # unless another process has been faster
                    folder.rename(completed)
                copy = _open_copy(completed)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RecipeError(
                f"{', '.join(self.names)} cannot be copied to {folder}: {error.strerror}; make room, or set "
                "XDG_CACHE_HOME to a folder with room"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        os.utime(completed)
        _remove_old(cache, completed)
        return completed, *copy

    def _write_index(self, folder: Path, sizes: Sequence[int]) -> None:
        """Find the rows in a folder's text, and write their index beside it."""
        with (folder / TEXT).open("rb") as text:
            index = self._index(text, sizes)
        _save(folder / ROWS, index.rows)
        _save(folder / FILES, index.files)


def _blocks(name: str) -> Iterator[bytes]:
    """Read a file, unpacked."""
    with opened(name) as file:
        while block := file.read(BLOCK):
            yield block


def _lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Read the lines in the next bytes of a file."""
    while size > 0 and (line := file.readline(size)):
        size -= len(line)
        yield line


def _copy(names: Sequence[str], path: Path, kind: str) -> tuple[str, list[int]]:
    """Copy files to one; return the digest of their content and kind, and the bytes of each."""
    digest, sizes = hashlib.blake2b(kind.encode(), digest_size=16), []
    with path.open("wb") as text:
        for name in names:
            start = text.tell()
            for block in _blocks(name):
                digest.update(block)
                text.write(block)
            sizes.append(text.tell() - start)
    digest.update(repr(sizes).encode())
    return digest.hexdigest(), sizes


def _open_copy(folder: Path) -> tuple[bytes | mmap.mmap, RowIndex]:
    """Return the text of a copy, and its index.

    Raises:
        OSError: A file is missing.
        EOFError, ValueError: A file is cut, or no array.
    """
    with (folder / TEXT).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    index = RowIndex(np.asarray(np.load(folder / ROWS, mmap_mode="r")), np.load(folder / FILES))
    if (len(text), len(index.rows)) != tuple(index.files[-1, :2]):
        raise ValueError(f"the index in {folder} is of another text")
    return text, index


def _save(path: Path, values: NDArray[np.int64] | NDArray[np.uint64]) -> None:
    """Write an array, which appears when it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.save(file, values, allow_pickle=False)
    os.replace(file.name, path)


def _remove_old(cache: Path, opened_now: Path) -> None:
    """Remove copies that were never completed, and those opened longest ago while all have too many bytes."""
    with suppress(OSError):
        folders = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        total = 0
        for folder in folders:
            total += sum(file.stat().st_size for file in folder.iterdir())
            abandoned = time.time() - folder.stat().st_mtime > ABANDONED_SECONDS and folder.name.startswith(BUILDING)
            if abandoned or (total > MOST_BYTES and folder != opened_now and not folder.name.startswith(BUILDING)):
                shutil.rmtree(folder, ignore_errors=True)
