"""Tasks: prompts from files, data sets of the hub, several tasks and generators; curricula, which order them."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_tasks.arithmetic import Arithmetic
from rlkit_tasks.curricula import Difficulty, SuccessRate
from rlkit_tasks.files import HFDataset, Jsonl
from rlkit_tasks.gsm8k import GSM8K
from rlkit_tasks.mix import Mix
from rlkit_tasks.pictures import Pictures
from rlkit_tasks.python import PythonTask
from rlkit_tasks.rows import Rows, Tables
from rlkit_tasks.trl import TRL
from rlkit_tasks.verl import Verl

__all__ = [
    "GSM8K", "TRL", "Arithmetic", "Difficulty", "HFDataset", "Jsonl", "Mix", "Pictures", "PythonTask", "Rows",
    "SuccessRate", "Verl",
]  # fmt: skip


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (GSM8K, TRL, Arithmetic, HFDataset, Jsonl, Mix, Pictures, PythonTask, Tables, Verl):
        register(part)
    for curriculum in (Difficulty, SuccessRate):
        register(curriculum)
