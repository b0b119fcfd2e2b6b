"""Writing and reading of sharded tensors by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlkit.distributed.tensor_parallel import PACKED, STACKED


class TensorFilesError(Exception):
    """Tensors could not be written or read; the message is that of the first rank's error."""


def save_tensors(tensors: dict[str, Tensor], writer: StorageWriter, group: ProcessGroup | None) -> None:
    """Write each rank's shards of tensors; all ranks of the group must call this. The group of a single rank is None.

    Raises:
        TensorFilesError: A rank could not write.
    """
    with _torch_files():
        save(_in_chunks(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def load_tensors(into: dict[str, Tensor], reader: StorageReader) -> None:
    """Read tensors in place, resharded if the ranks have changed; all ranks must call this.

    Raises:
        TensorFilesError: A rank could not read.
    """
    with _torch_files():
        load(_in_chunks(into), storage_reader=reader, no_dist=not dist.is_initialized())


def load_tensors_alone(into: dict[str, Tensor], reader: StorageReader) -> None:
    """Read full tensors in place, on this rank alone.

    Raises:
        TensorFilesError: They could not be read.
    """
    with _torch_files():
        load(_in_chunks(into), storage_reader=reader, no_dist=True)


@contextmanager
def _torch_files() -> Iterator[None]:
    """Raise the first rank's error, and silence torch's warning that there is no process group: one device has none."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as error:  # it is a BaseException
        raise TensorFilesError(str(next(cause for cause, _ in error.failures.values()))) from error


def _in_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, those whose shard is a part of each of several stacked matrices as these parts."""
    return {n: _parts(t) if isinstance(t, DTensor) and PACKED in t.placements else t for n, t in tensors.items()}


def _parts(tensor: DTensor) -> Tensor:
    """Return a tensor of the same memory, whose shard is a list of contiguous ones.

    Args:
        tensor: [experts, 2 * out, in], divided along the first dimension, or copied, and packed along the second.
    """
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, [Shard(PACKED.dim) if p == PACKED else p for p in tensor.placements]
    )
    parts = tensor.to_local().chunk(STACKED, PACKED.dim)
    rows, offset = tensor.shape[PACKED.dim], offsets[PACKED.dim]
    starts = [(offsets[0], (part * rows + offset) // STACKED, *offsets[2:]) for part in range(len(parts))]
    return DTensor(LocalShardsWrapper([*parts], starts), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
