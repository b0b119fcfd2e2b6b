"""Files of folders that others may have written: regular ones inside the folder, never through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
"""Kinds of what is no regular file; reading one would lead elsewhere, or never end."""


class ForeignFileError(OSError):
    """A file is outside of its folder, no regular file, or too large; the message says which."""


def relative_to(folder: Path, path: Path) -> str | None:
    """Return a path's name inside a folder; None if it is outside by its name or leads upwards."""
    for base in (folder, folder.absolute(), Path(os.path.realpath(folder))):
        with suppress(ValueError):
            name = path.relative_to(base)
            return None if ".." in name.parts else name.as_posix()
    return None


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file inside a folder to read bytes; only the folder itself may be a link.

    Args:
        folder: The folder, which the user has named.
        name: Relative to it; from data.

    Raises:
        ForeignFileError: It is outside, behind a link, or no regular file.
        OSError: It is missing, or cannot be read.
    """
    parts = Path(name).parts
    if not parts and name:
        raise ForeignFileError(f"{folder} is a folder, expected a regular file")
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise ForeignFileError(f"{name!r} is outside of {folder}")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts, 1):
            expected = stat.S_IFREG if depth == len(parts) else stat.S_IFDIR
            parent, descriptor = descriptor, -1
            try:
                descriptor = _open_part(parent, part, expected, folder.joinpath(*parts[:depth]))
            finally:
                os.close(parent)
        return open(descriptor, "rb")
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise


def _open_part(parent: int, part: str, expected: int, path: Path) -> int:
    """Return a descriptor of a file, or of a folder, in an open folder."""
    _check_kind(os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode, expected, path)  # opening may block
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(part, flags, dir_fd=parent)
    try:
        _check_kind(os.fstat(descriptor).st_mode, expected, path)
    except ForeignFileError:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(mode: int, expected: int, path: Path) -> None:
    kind = stat.S_IFMT(mode)
    if kind == expected:
        return
    if expected == stat.S_IFDIR and kind == stat.S_IFREG:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    wanted = "a folder" if expected == stat.S_IFDIR else "a regular file"
    raise ForeignFileError(f"{path} is {KINDS.get(kind, 'of an unknown kind')}, expected {wanted}")


def read_inside(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a regular file inside a folder; see `open_inside`.

    Raises:
        ForeignFileError: It is too large, too.
    """
    with open_inside(folder, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ForeignFileError(f"{folder / name} has more than {max_bytes:,} bytes")
    return content


def list_inside(folder: Path, name: str = "") -> Iterator[str]:
    """Yield the names, relative to a folder, of all files below one of its folders, in order.

    Raises:
        ForeignFileError: There is something besides regular files and folders.
        OSError: A folder cannot be read.
    """
    names = [name]
    while names:
        name = names.pop()
        path = folder / name
        kind = stat.S_IFMT(os.stat(path, follow_symlinks=not name).st_mode)
        if kind == stat.S_IFDIR:
            names += sorted((f"{name}/{entry}".lstrip("/") for entry in os.listdir(path)), reverse=True)
        elif kind == stat.S_IFREG:
            yield name
        else:
            raise ForeignFileError(
                f"{path} is {KINDS.get(kind, 'of an unknown kind')}, expected files and folders alone"
            )
