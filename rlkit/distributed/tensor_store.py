"""Sharded tensors written to files by all ranks, and read from them."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


class TensorFilesError(Exception):
    """Tensors could not be written or read: the text is that of the first rank's error."""


def save_tensors(tensors: dict[str, Tensor], writer: StorageWriter, group: ProcessGroup | None) -> None:
    """Write tensors, each rank its own shards; all ranks of the group must call this, one rank alone has no group.

    Raises:
        TensorFilesError: Some rank could not.
    """
    _expect_no_ranks()
    try:
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # no Exception, as torch has it
        raise TensorFilesError(str(_first_cause(error))) from error


def load_tensors(into: dict[str, Tensor], reader: StorageReader, alone: bool = False) -> None:
    """Read tensors in place, resharded where the ranks have changed; all ranks must call this, unless one is `alone`.

    Raises:
        TensorFilesError: Some rank could not.
    """
    _expect_no_ranks()
    try:
        load(into, storage_reader=reader, no_dist=alone or not dist.is_initialized())
    except CheckpointException as error:
        raise TensorFilesError(str(_first_cause(error))) from error


def _expect_no_ranks() -> None:
    """Silence torch's warning of a process without a group: it is the rule with one device."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _first_cause(error: CheckpointException) -> BaseException:
    return next(cause for cause, _ in error.failures.values())
