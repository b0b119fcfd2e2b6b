"""A corpus and its BM25 index: built once, kept beside the corpus, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.base.errors import RecipeError

if TYPE_CHECKING:
    from numpy import ndarray

OFFSETS = "offsets.npy"


class Passage(NamedTuple):
    """What a search finds; a larger score is a better match."""

    id: str
    title: str
    text: str
    score: float = 0.0


class Index:
    """Searches a corpus by BM25, with what `open_index` has made of it. Any number of threads may search at once.

    Memory holds the vocabulary; passages, their places and scores are read from the mapped files.
    """

    def __init__(self, corpus: Path, folder: Path) -> None:
        import bm25s
        import numpy as np

        with corpus.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")  # [N] i64: where each passage's line begins
        self._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False, verbosity=0)

    def __len__(self) -> int:
        return len(self._offsets)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return the passages that share a word with the query, the best first, equals in the order of the corpus."""
        [words] = _tokenize([query], return_ids=False)
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        return [self[i]._replace(score=float(scores[i])) for i in _best(scores, top_k)]

    def __getitem__(self, i: int) -> Passage:
        start = int(self._offsets[i])
        end = self._lines.find(b"\n", start)
        return parse_passage(self._lines[start : end if end >= 0 else None])

    def close(self) -> None:
        """Unmap the corpus."""
        self._lines.close()


def open_index(corpus: Path) -> Index:
    """Open the corpus's index; build it first if the corpus has none or has changed since.

    The folder beside the corpus is named by the corpus's content and the version of bm25s. Processes that build it at
    the same time do not disturb one another.

    Raises:
        RecipeError: There is no such corpus, it is not of the expected form, or its folder cannot be written to.
    """
    import bm25s

    try:
        with corpus.open("rb") as file:
            digest = hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:16]
    except OSError as error:
        raise RecipeError(
            f"cannot read the corpus {str(corpus)!r} ({error.strerror}), expected a file with one "
            "JSON object a line: id, title, text"
        ) from error
    folder = corpus.with_name(f"{corpus.name}.{digest}.bm25s-{bm25s.__version__}")
    if not os.path.exists(folder):
        try:
            _build_beside(corpus, folder)
        except OSError as error:
            raise RecipeError(
                f"cannot write the index {str(folder)!r} ({error.strerror}); copy the corpus to a folder with room "
                "that can be written to"
            ) from error
    return Index(corpus, folder)


def read_corpus(corpus: Path) -> Iterator[tuple[int, Passage]]:
    """Return each passage with the offset of its line in bytes; empty lines are left out.

    Raises:
        RecipeError: A line is no passage; the message says which.
    """
    offset = 0
    with corpus.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield offset, parse_passage(line)
                except ValueError as error:
                    raise RecipeError(f"corpus {str(corpus)!r}, line {number}: {error}") from error
            offset += len(line)


def parse_passage(line: bytes) -> Passage:
    """Read one line of a corpus: `text` is needed, `id` and `title` may be left out.

    Raises:
        ValueError: It is not JSON of this form.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"expected an object with the text `text`, got {str(row)[:80]}")
    return Passage(str(row.get("id", "")), str(row.get("title") or ""), row["text"])


def _build_beside(corpus: Path, folder: Path) -> None:
    """Build under a name of its own and rename: a folder with the final name is always complete."""
    unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir()
    try:
        _build(corpus, unfinished)
        os.rename(unfinished, folder)
    except OSError:
        if not os.path.exists(folder):  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _build(corpus: Path, folder: Path) -> None:
    import bm25s
    import numpy as np

    offsets: list[int] = []

    def texts() -> Iterator[str]:
        for offset, passage in read_corpus(corpus):
            offsets.append(offset)
            yield f"{passage.title}\n{passage.text}"

    words = _tokenize(texts())
    if not words.vocab:
        raise RecipeError(f"corpus {str(corpus)!r} has no words to search for in {len(offsets)} passages")
    bm25 = bm25s.BM25()
    bm25.index(words, show_progress=False)
    bm25.save(folder, show_progress=False)
    np.save(folder / OFFSETS, np.array(offsets, dtype=np.int64))


def _tokenize(texts: Any, **options: Any) -> Any:
    """Split into lower-case words of two letters or more, without English stop words."""
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False, **options)


def _best(scores: ndarray[Any, Any], top_k: int) -> list[int]:
    """Return the indices of the largest scores above 0, largest first, ties by index."""
    import numpy as np

    found = np.flatnonzero(scores > 0)
    if len(found) > top_k:
        found = found[scores[found] >= np.partition(scores[found], -top_k)[-top_k]]
    return [int(i) for i in found[np.lexsort((found, -scores[found]))][:top_k]]
