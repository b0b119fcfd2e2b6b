"""Tasks: where prompts come from."""

from rlkit.tasks.arithmetic import Arithmetic
from rlkit.tasks.files import HFDataset, Jsonl
from rlkit.tasks.gsm8k import GSM8K
from rlkit.tasks.mix import Mix
from rlkit.tasks.trl import TRL
from rlkit.tasks.verl import Verl

__all__ = ["GSM8K", "TRL", "Arithmetic", "HFDataset", "Jsonl", "Mix", "Verl"]
