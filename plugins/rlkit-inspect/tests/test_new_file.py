"""Files that verbs write: what is wrong with a folder is said, and nothing half written stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from rlkit_inspect.new_file import new_file

from rlkit.base.errors import RecipeError


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "the disk is read-only; choose a folder on another disk"),
        (errno.ENOSPC, "the disk is full; free space on it, or choose a folder on another disk"),
        (errno.EACCES, "you have no permission to write there; choose a folder of your own"),
    ],
)
def test_a_disk_that_takes_nothing_is_named(number: int, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"

    def write() -> None:
        with new_file(str(path)) as file:
            file.write("half")
            raise OSError(number, os.strerror(number), str(path))

    with pytest.raises(RecipeError) as error:
        write()
    assert str(error.value) == f"{str(path)!r} cannot be written: {remedy}"
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("file/s.csv", "a part of the path is a file, expected folders; choose another path"),
        ("none/s.csv", "its folder does not exist; create that, or choose another"),
        ("a" * 300, "the name is too long; choose a shorter one"),
        ("file", "exists already; name a new file, or remove it first"),
    ],
)
def test_a_path_that_cannot_be_is_named(name: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(RecipeError) as error, new_file(str(tmp_path / name)):
        pass
    assert str(error.value).endswith(remedy)
    assert (tmp_path / "file").read_text() == "kept"
