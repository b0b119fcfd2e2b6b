"""Files of folders that others may have written: regular ones inside the folder, never through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from rlkit.base.errors import RecipeError
from rlkit.base.names import RUN_FILES

KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
"""Kinds of what is no regular file; reading one would lead elsewhere, or never end."""

MANIFEST = "manifest.json"
"""The file of a checkpoint that lists its files."""

MAX_JSON_BYTES = 1 << 26
"""Of a file that is read whole."""


UNWRITABLE = {
    errno.EROFS: "the disk is read-only; choose a folder on another disk",
    errno.ENOSPC: "the disk is full; free space on it, or choose a folder on another disk",
    errno.EACCES: "you have no permission to write there; choose a folder of your own",
    errno.ENOTDIR: "a part of the path is a file, expected folders; choose another path",
    errno.ENOENT: "its folder does not exist; create that, or choose another",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}
"""What is wrong and what to do, by the error of the system."""


def unwritable(error: OSError) -> str:
    """Explain why a file or a folder cannot be written, and what to do."""
    return UNWRITABLE.get(error.errno or 0, str(error))


def is_url(name: str) -> bool:
    """Whether a name is a URL, which fsspec opens, instead of a path."""
    return "://" in name


class ForeignFileError(OSError):
    """A file is outside of its folder, no regular file, or too large; the message says which."""


def cache_folder() -> Path:
    """Return the user's folder for what can be computed again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkit"


recipe_folders: set[Path] = set()
"""Those of the recipe files that this process has read, for hints alone."""


def no_such(path: str) -> str:
    """Return a clause on a path that does not exist: where it was looked for, and what to write instead."""
    expanded = Path(os.path.expanduser(path))
    folder, hint = str(expanded.absolute().parent), nearby(expanded)
    is_named = expanded.is_absolute() or hint.startswith(folder)
    return f"which does not exist{'' if is_named else f' in {folder}'}; {hint}"


def looks_local(path: str) -> bool:
    """Whether a model's path can be no name on the hub, by its form."""
    return path.startswith((".", "/", "~")) or (path.count("/") > 1 and not is_url(path))


def nearby(path: Path) -> str:
    """Return a hint for a path that does not exist.

    It is the path beside a recipe, the most similar name in its folder, or what is there instead.
    """
    for folder in sorted(recipe_folders):
        beside = os.path.relpath(folder / path)
        if not path.is_absolute() and os.path.exists(beside):
            return f"beside the recipe there is one: write {beside!r}, since paths begin in the working folder"
    parent = path.absolute().parent
    while not os.path.isdir(parent):
        parent = parent.parent
    try:
        names = sorted(os.listdir(parent))
    except OSError as error:
        return f"{parent} cannot be listed: {error.strerror}"
    near = get_close_matches(path.name, names, 1) if parent == path.absolute().parent else []
    if near:
        return f"did you mean {str(path.parent / near[0])!r}?"
    return f"{parent} holds: {', '.join(names[:8]) or 'nothing'}"


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


def list_inside(folder: Path, name: str) -> Iterator[str]:
    """Yield the names, relative to a folder, of all files below one of its folders, in order; none if it is missing.

    Raises:
        ForeignFileError: There is something besides regular files and folders.
        OSError: A folder cannot be read.
    """
    names = [name]
    while names:
        name = names.pop()
        try:
            entries = os.listdir(folder / name) if _is_folder(folder / name) else None
        except FileNotFoundError:  # of a run in progress, which renames files
            continue
        if entries is None:
            yield name
        else:
            names += sorted((f"{name}/{entry}" for entry in entries), reverse=True)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder, and no regular file.

    Raises:
        ForeignFileError: It is neither.
    """
    kind = stat.S_IFMT(os.stat(path, follow_symlinks=False).st_mode)
    if kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise ForeignFileError(f"{path} is {KINDS.get(kind, 'of an unknown kind')}, expected files and folders alone")
    return kind == stat.S_IFDIR


def check_run_folder(folder: Path) -> None:
    """Check that a run folder, which may be a stranger's, leads nowhere else, neither to read nor to write.

    Raises:
        RecipeError: It has a link, a pipe, a socket or a device, or cannot be read.
    """
    try:
        for name in sorted(os.listdir(folder)):
            is_own = name.removesuffix(".partial") in RUN_FILES and name != "wandb"  # which links its last run
            with suppress(FileNotFoundError):  # of a run in progress
                if _is_folder(folder / name) and is_own:
                    deque(list_inside(folder, name), maxlen=0)
    except OSError as error:
        reason = error if isinstance(error, ForeignFileError) else f"{folder} cannot be read: {error}"
        raise RecipeError(
            f"{reason}; a run folder that leads elsewhere is not used: remove this, or copy what it leads to"
        ) from error
