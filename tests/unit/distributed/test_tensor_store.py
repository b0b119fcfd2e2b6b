"""Tensors of a single rank, which are written and read without a process group."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from rlkit.distributed.tensor_store import load_tensors, save_tensors


def test_a_single_rank_writes_and_reads_without_a_warning(tmp_path: Path) -> None:
    read = {"a": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.distributed")
        save_tensors({"a": torch.tensor([3.0, 4.0])}, FileSystemWriter(tmp_path), None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.distributed")
        load_tensors(read, FileSystemReader(tmp_path))
    assert read["a"].tolist() == [3, 4]
