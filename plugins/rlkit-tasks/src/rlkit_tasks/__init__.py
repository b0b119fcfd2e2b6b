"""Tasks: prompts from files, from data sets of the hub, from several tasks, and from generators."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_tasks.arithmetic import Arithmetic
from rlkit_tasks.files import HFDataset, Jsonl
from rlkit_tasks.gsm8k import GSM8K
from rlkit_tasks.mix import Mix
from rlkit_tasks.pictures import Pictures
from rlkit_tasks.rows import Rows, Tables
from rlkit_tasks.trl import TRL
from rlkit_tasks.verl import Verl

__all__ = ["GSM8K", "TRL", "Arithmetic", "HFDataset", "Jsonl", "Mix", "Pictures", "Rows", "Verl"]


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (GSM8K, TRL, Arithmetic, HFDataset, Jsonl, Mix, Pictures, Tables, Verl):
        register(part)
