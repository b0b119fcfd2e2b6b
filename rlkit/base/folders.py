"""Folders in which code of others works: the texts of a row are written there, and all of it is removed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rlkit.base.errors import show

REMOVE = ("sh", "-c", 'chmod -R u+rwX "$1" 2>/dev/null; rm -rf "$1"', "sh")
"""Removes a folder, whatever its modes and depth."""


def check_files(files: object, column: str, *, rooted: bool = False) -> dict[str, str]:
    """Return files as a row has them: texts by path.

    Args:
        files: The row's value.
        column: Its name, for the message.
        rooted: Whether paths may be absolute.

    Raises:
        ValueError: They are something else, or a path leads out of the folder.
    """
    if not isinstance(files, Mapping | None):
        raise ValueError(f"the row's {column} are {show(files)}, expected texts by path")
    for name, text in (files or {}).items():
        path = PurePosixPath(str(name))
        outside = (path.is_absolute() and not rooted) or ".." in path.parts or not path.name or "\0" in str(name)
        if outside or not isinstance(text, str):
            raise ValueError(f"the row's {column} have {show(name)}: {show(text)}, expected a relative path and a text")
    return dict(files or {})


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into a folder, through no link that is there."""
    for name, text in files.items():
        path = folder
        for part in PurePosixPath(name).parts[:-1]:
            path /= part
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                path.unlink()
            path.mkdir(exist_ok=True)
        path /= PurePosixPath(name).name
        if os.path.isdir(path) and not os.path.islink(path):
            remove(path)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def remove(folder: Path) -> None:
    """Remove a folder, whatever its modes and depth."""
    subprocess.run((*REMOVE, str(folder)), check=False, stderr=subprocess.DEVNULL)
