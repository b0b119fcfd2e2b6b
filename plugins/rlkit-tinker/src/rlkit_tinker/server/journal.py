"""The journal: a file of records that outlives the process; what is in it has happened."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from rlkit.base.errors import RlkitError
from rlkit.types import JsonObject

SIZES = Struct("<III")
"""Before each record: the bytes of its header, those of its payload, and the checksum of both."""


class JournalError(RlkitError):
    """The journal cannot be read or written; the message has the remedy."""


class JournalRecord(NamedTuple):
    """What has happened.

    Args:
        header: Its kind and its fields.
        payload: Bytes, such as the body of a request.
    """

    header: JsonObject
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes of the record in the file."""
        header = json.dumps(self.header).encode()
        content = header + self.payload
        return SIZES.pack(len(header), len(self.payload), crc32(content)) + content


class Journal:
    """Appends records to the file `journal` of a folder, which one process may use at a time.

    Args:
        folder: The folder, made if it is not there.

    Raises:
        JournalError: Another process uses it, or it is damaged elsewhere than in its last record.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise JournalError(f"another server uses {folder}; stop it, or choose another folder") from error
        self._path = folder / "journal"
        self.records = self._read()
        """The records at the start."""
        self._syncing: asyncio.Task[None] | None = None

    def _read(self) -> list[JournalRecord]:
        """Open the file and return its records; a last one that a kill has cut off is removed."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        content = self._path.read_bytes()
        records, self.size = [], 0
        while self.size + SIZES.size <= len(content):
            header, payload, checksum = SIZES.unpack_from(content, self.size)
            start, end = self.size + SIZES.size, self.size + SIZES.size + header + payload
            if end > len(content):
                break
            if crc32(content[start:end]) != checksum:
                raise JournalError(f"{self._path} is damaged at byte {self.size}; move it away to start without it")
            records.append(JournalRecord(json.loads(content[start : start + header]), content[start + header : end]))
            self.size = end
        os.ftruncate(self._file, self.size)
        os.lseek(self._file, self.size, os.SEEK_SET)
        return records

    def append(self, record: JournalRecord) -> None:
        """Write a record, which outlives a kill of this process from now on.

        Raises:
            JournalError: It cannot be written, and nothing of it was.
        """
        content = memoryview(record.encode())
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            raise JournalError(f"{self._path} cannot be written: {error}; free space on its disk") from error
        self.size = os.lseek(self._file, 0, os.SEEK_CUR)

    async def sync(self) -> None:
        """Wait until all records are on the disk; calls that come together share a sync."""
        if self._syncing is not None:  # it may have begun before the last record
            await asyncio.shield(self._syncing)
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(asyncio.to_thread(os.fsync, self._file))
        await asyncio.shield(self._syncing)

    async def replace(self, records: Iterable[JournalRecord]) -> None:
        """Replace all records, at once or not at all.

        Raises:
            JournalError: They cannot be written; the journal is as it was.
        """
        while self._syncing is not None and not self._syncing.done():
            await asyncio.shield(self._syncing)
        partial = self._path.with_name("journal.partial")
        try:
            with partial.open("wb") as file:
                for record in records:
                    file.write(record.encode())
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.rename(self._path)
        except OSError as error:
            raise JournalError(f"{partial} cannot be written: {error}; free space on its disk") from error
        os.close(self._file)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self.size = size

    def close(self) -> None:
        """Close the file; another process may use the folder."""
        os.close(self._file)
        os.close(self._lock)
