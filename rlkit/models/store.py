"""Folders of checkpoints, read as untrusted data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

import fsspec  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError

from rlkit.base.errors import CheckpointError
from rlkit.base.files import MANIFEST
from rlkit.models.checkpoint_schema import FORMAT, STATE, FormatVersion, Manifest, RunState
from rlkit.models.tensor_files import first_problem

JSON_LIMIT = 16 * 1024 * 1024
"""Maximum bytes of a checkpoint's JSON files."""

NAME = re.compile(r"step-([0-9]{6,12})")

DIGEST_CHUNK_BYTES = 1 << 22

Content = TypeVar("Content", bound=BaseModel)


class Store:
    """A folder of checkpoints in any file system of fsspec, each named `step-<number>`.

    A checkpoint is written under a temporary name and then renamed. A folder without a manifest is not a checkpoint.

    Args:
        url: A path or an fsspec URL.

    Raises:
        CheckpointError: The URL is invalid, or its file system cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as error:  # a file system's client may raise anything when it is set up
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{url!r} cannot hold checkpoints: {reason}. Use a folder, or a URL whose file system can be reached "
                "from here (packages for object stores: s3fs, gcsfs, adlfs; for hdfs:// pyarrow and Hadoop's libraries)"
            ) from error

    def path(self, name: str, file: str | None = None) -> str:
        return f"{self.root}/{name}" + ("" if file is None else f"/{file}")

    def names(self) -> list[str]:
        """Return the names of the checkpoints, newest first."""
        return [name for name in self.entries() if self.fs.exists(self.path(name, MANIFEST))]

    def entries(self, suffix: str = "") -> list[str]:
        """Return all folders named as a checkpoint plus a suffix, complete or not; the latest step first."""
        self.fs.invalidate_cache()
        try:
            paths = self.fs.ls(self.root, detail=False) if self.fs.isdir(self.root) else []
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be listed: {error}") from error
        folders = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        names = [folder.removesuffix(suffix) for folder in folders if folder.endswith(suffix)]
        return [f"{name}{suffix}" for name in sorted(filter(NAME.fullmatch, names), key=step_of, reverse=True)]

    def manifest(self, name: str) -> Manifest:
        """Read a checkpoint's manifest.

        Raises:
            CheckpointError: The manifest is missing or malformed, has another format, or lists no state or no tensors.
        """
        version = self._read_json(name, MANIFEST, FormatVersion).format
        if version != FORMAT:
            raise CheckpointError(
                f"{self.url}/{name} has format {version}, expected {FORMAT}: another version of rlkit wrote it"
            )
        manifest = self._read_json(name, MANIFEST, Manifest)
        if STATE not in manifest.files or not manifest.tensor_files:
            raise CheckpointError(f"{self.url}/{name} is damaged: {MANIFEST} lists no {STATE} or no tensors")
        return manifest

    def state(self, name: str) -> RunState:
        """Read the state of the run in a checkpoint.

        Raises:
            CheckpointError: The state is missing or malformed, or its step is not that of the name.
        """
        state = self._read_json(name, STATE, RunState)
        if state.step != step_of(name):
            raise CheckpointError(f"{self.url}/{name} is damaged: {STATE} is of step {state.step}")
        return state

    def digest(self, name: str, file: str) -> str:
        """Return a file's checksum (BLAKE2b, 128 bits)."""
        checksum = hashlib.blake2b(digest_size=16)
        with self.open(name, file) as stream:
            while chunk := stream.read(DIGEST_CHUNK_BYTES):
                checksum.update(chunk)
        return checksum.hexdigest()

    def write(self, name: str, file: str, content: BaseModel) -> None:
        """Write a JSON file of a checkpoint."""
        with self.fs.open(self.path(name, file), "w", encoding="utf-8") as stream:
            stream.write(content.model_dump_json())

    def finalize(self, partial: str, name: str) -> None:
        """Rename a partial checkpoint to its final name, replacing a checkpoint of that name."""
        self.remove(name)
        self.fs.mv(self.path(partial), self.path(name), recursive=True)

    def withdraw(self, name: str) -> None:
        """Remove a checkpoint's manifest, so that it is no longer a checkpoint; of a link, remove the link itself."""
        if self.fs.exists(self.path(name, MANIFEST)):
            is_link = self.fs.info(self.path(name)).get("islink")
            self.fs.rm_file(self.path(name) if is_link else self.path(name, MANIFEST))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, complete or not."""
        self.withdraw(name)
        if self.fs.exists(self.path(name)):
            self.fs.rm(self.path(name), recursive=True)

    def _read_json(self, name: str, file: str, schema: type[Content]) -> Content:
        with self.open(name, file) as stream:
            text = stream.read(JSON_LIMIT + 1)
        if len(text) > JSON_LIMIT:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file} has more than {JSON_LIMIT} bytes")
        try:
            return schema.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file}: {first_problem(error)}") from error

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        """Open a checkpoint's file to read bytes.

        Raises:
            CheckpointError: The file cannot be read, or is a link or a device.
        """
        path = self.path(name, file)
        try:
            info = self.fs.info(path)
            if info["type"] != "file" or info.get("islink"):
                raise CheckpointError(f"{self.url}/{name} is damaged: {file} is not a regular file: a link or device")
            with self.fs.open(path, "rb") as stream:
                yield stream
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file} cannot be read: {error}") from error


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    return int(name.removeprefix("step-"))


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:06d}"
