"""A lock on a folder: one run at a time writes to it; a second run is refused, and told which process holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import check_run_folder, unwritable
from rlkit.records.folder import make_private

FILE = "lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without locks."""


class Lock:
    """A lock on a folder until it is released or the process ends, in whatever way: the operating system holds it.

    The lock belongs to the process and is not inherited by children, which may outlive a killed run. No other code in
    the process may open the file meanwhile: closing it would release the lock.

    Args:
        folder: Folder to lock; created if it is missing.

    Raises:
        RecipeError: Another process holds the folder, which the message names; or the folder leads elsewhere, or cannot
            be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warning: str | None = None
        """Why the folder is not locked, if its file system has no locks."""
        try:
            make_private(folder)
            check_run_folder(folder)
            self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise RecipeError(f"--out is {str(folder)!r}, which cannot be written: {unwritable(error)}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 4096, 0)
            if error.errno not in UNSUPPORTED:
                os.close(self._file)
                raise RecipeError(
                    f"{str(folder)!r} is in use by {_describe(holder)}; wait until that run has ended, or choose "
                    "another folder"
                ) from error
            self.warning = (
                f"the file system of {folder} has no locks ({error.strerror}): make sure that no other run uses the "
                "folder meanwhile"
            )
            return
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a disk that is full is reported with the first file of the run
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Release the folder for other runs."""
        os.close(self._file)


def _describe(holder: bytes) -> str:
    try:
        owner = json.loads(holder)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has just started"
