"""A checkpoint's tensors: one safetensors file per rank, written and read by torch's distributed checkpoints.

torch's own storage pickles its metadata and tensors. These files hold a JSON header and raw bytes, so reading them
cannot run code. Their layout is that of torch's `HuggingFaceStorageReader`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import UnsupportedOperation
from math import prod
from typing import Annotated, Any, BinaryIO, Protocol

import torch
from annotated_types import Ge, Le, Len, MaxLen
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rlkit.base.errors import CheckpointError

HEADER_LIMIT = 100_000_000
"""Maximum bytes of a header, as in the safetensors library."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FURTHER_CHUNK = re.compile(r"@\d+$")
"""What follows the name of a tensor in that of a rank's further chunk of it."""

Extent = Annotated[int, Ge(0), Le(1 << 48)]
Extents = Annotated[list[Extent], MaxLen(16)]


class HeaderEntry(BaseModel, strict=True):
    """The header's entry for one tensor."""

    dtype: str
    shape: Extents
    data_offsets: Annotated[list[Extent], Len(2, 2)]


class ShardPosition(BaseModel, strict=True):
    """The position of a rank's shard in the full tensor."""

    saved_offsets: Extents


HEADER_ENTRIES = TypeAdapter(dict[str, HeaderEntry])
SHARD_POSITIONS = TypeAdapter(dict[str, ShardPosition])


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor: `shape` elements at `offsets` in the tensor, `length` bytes from `start` in `file`."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    length: int

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(offset + extent for offset, extent in zip(self.offsets, self.shape, strict=True))


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


class FileSystem(Protocol):
    """The methods used of an fsspec file system, which is untyped."""

    def open(self, path: str, mode: str) -> BinaryIO: ...

    def size(self, path: str) -> int: ...


class TensorWriter(StorageWriter):
    """Writes a rank's tensors into an existing folder.

    Args:
        fs: An fsspec file system.
        folder: Path of the folder in it.
    """

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self.fs = fs
        self.folder = folder

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the header with the sizes of the plan, then the tensors in order."""
        header: dict[str, object] = {}
        positions: dict[str, object] = {}
        offset = 0
        for number, item in enumerate(plan.items):
            name = item.index.fqn
            tensor_data = item.tensor_data
            if tensor_data is None or tensor_data.properties.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name} cannot be saved: expected a tensor of a supported type")
            if name in header:  # a rank may have several chunks of a tensor
                name += f"@{number}"
            dtype = tensor_data.properties.dtype
            length = prod(tensor_data.chunk.sizes) * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": [*tensor_data.chunk.sizes],
                "data_offsets": [offset, offset + length],
            }
            positions[name] = {"saved_offsets": [*tensor_data.chunk.offsets]}
            offset += length
        header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(positions)}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        if plan.items:
            with self.fs.open(f"{self.folder}/{file_of(plan.storage_data)}", "wb") as stream:
                stream.write(struct.pack("<Q", len(encoded)) + encoded)
                for item in plan.items:
                    tensor: Any = planner.resolve_data(item)
                    stream.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
                _sync(stream)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write nothing: all metadata is in the headers."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 (torch's interface)
        return True


class TensorReader(StorageReader):
    """Reads tensors from untrusted files.

    Args:
        fs: An fsspec file system.
        folder: Path of the folder in it.
        files: Names of the files of all ranks.
    """

    def __init__(self, fs: FileSystem, folder: str, files: Sequence[str]) -> None:
        self.fs = fs
        self.folder = folder
        self.files = files
        self._chunks: dict[MetadataIndex, Chunk] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """Read the metadata of all tensors.

        Raises:
            CheckpointError: A header is malformed or contradicts its file or the other headers.
        """
        chunks_by_name: dict[str, list[Chunk]] = {}
        for file in self.files:
            for name, chunk in read_header(self.fs, self.folder, file).items():
                chunks_by_name.setdefault(FURTHER_CHUNK.sub("", name), []).append(chunk)
        self._chunks = {}
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, chunks in chunks_by_name.items():
            tensors[name] = self._join(name, chunks)
        return Metadata(tensors)

    def _join(self, name: str, chunks: list[Chunk]) -> TensorStorageMetadata:
        first = chunks[0]
        filled = [chunk for chunk in chunks if chunk.length] or [first]  # ranks beyond the last row have empty chunks
        same_type = {(len(chunk.shape), chunk.dtype) for chunk in chunks} == {(len(first.shape), first.dtype)}
        size = [max(ends) for ends in zip(*(chunk.end for chunk in filled), strict=True)] if same_type else []
        offsets = {chunk.offsets for chunk in filled}
        if not same_type or len(offsets) < len(filled) or prod(size) != sum(prod(chunk.shape) for chunk in filled):
            raise CheckpointError(f"{self.folder} is damaged: the chunks of {name} in its files make no full tensor")
        for chunk in filled:
            self._chunks[MetadataIndex(name, chunk.offsets)] = chunk
        return TensorStorageMetadata(
            TensorProperties(dtype=first.dtype),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in filled],
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's chunks, file by file in order of their offsets."""
        items = sorted(
            ((self._chunks[item.storage_index], item) for item in plan.items),
            key=lambda pair: (pair[0].file, pair[0].start),
        )
        for file in sorted({chunk.file for chunk, _ in items}):
            with self.fs.open(f"{self.folder}/{file}", "rb") as stream:
                for chunk, item in items:
                    if chunk.file == file:
                        part = _read_chunk(stream, chunk)
                        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                            part = part.narrow(dim, offset, length)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(part)
                        planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 (torch's interface)
        return True


def read_header(fs: FileSystem, folder: str, file: str) -> dict[str, Chunk]:
    """Read the header of a file.

    Raises:
        CheckpointError: The header is malformed or contradicts the file's size.
    """
    path = f"{folder}/{file}"
    try:
        size = fs.size(path)
        with fs.open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, HEADER_LIMIT):
                raise ValueError(f"its header would have {length} bytes")
            header = from_json(stream.read(length), allow_inf_nan=False)
        metadata = header.pop("__metadata__")
        positions = SHARD_POSITIONS.validate_json(metadata["DCP_SHARDING_INFO"])
        entries = HEADER_ENTRIES.validate_python(header)
        return {name: _chunk(file, entry, positions[name], 8 + length, size) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise CheckpointError(f"{path} is damaged: it is not a file of tensors: {problem}") from error


def first_problem(error: ValidationError) -> str:
    """Describe the first invalid field."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".removeprefix(": ")


def _chunk(file: str, entry: HeaderEntry, position: ShardPosition, start: int, size: int) -> Chunk:
    dtype = DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    if end - begin != prod(entry.shape) * dtype.itemsize or start + end > size:
        raise ValueError(f"bytes {begin} to {end} of {size} cannot hold {entry.dtype} of the shape {entry.shape}")
    if len(position.saved_offsets) != len(entry.shape):
        raise ValueError(f"a chunk of the shape {entry.shape} cannot be at {position.saved_offsets}")
    return Chunk(file, dtype, tuple(entry.shape), tuple(position.saved_offsets), start + begin, end - begin)


def _read_chunk(stream: BinaryIO, chunk: Chunk) -> Tensor:
    if not chunk.length:
        return torch.empty(chunk.shape, dtype=chunk.dtype)
    buffer = bytearray(chunk.length)
    stream.seek(chunk.start)
    if stream.readinto(buffer) != chunk.length:  # type: ignore[attr-defined]
        raise CheckpointError(f"{chunk.file} is damaged: it ends within a tensor")
    return torch.frombuffer(buffer, dtype=chunk.dtype).reshape(chunk.shape)


def _sync(stream: BinaryIO) -> None:
    """Flush a local file to the disk."""
    try:
        stream.flush()
        os.fsync(stream.fileno())
    except (AttributeError, UnsupportedOperation):  # a file of an object store, which is written when it is closed
        pass
