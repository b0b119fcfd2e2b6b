"""Tasks: where prompts come from."""

from rlkit.tasks.arithmetic import Arithmetic
from rlkit.tasks.files import HFDataset, Jsonl
from rlkit.tasks.gsm8k import GSM8K

__all__ = ["GSM8K", "Arithmetic", "HFDataset", "Jsonl"]
