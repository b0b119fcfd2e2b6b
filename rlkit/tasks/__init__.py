"""Tasks: where prompts come from.

What belongs here: a built-in task per file, and how files and data sets become rows. What does not: which rows a run
trains on and in which order (`rlkit.data`), and conversations about them (`rlkit.rollout`).
"""

from rlkit.registry.shelf import attribute_of
from rlkit.tasks.arithmetic import Arithmetic
from rlkit.tasks.files import HFDataset, Jsonl
from rlkit.tasks.gsm8k import GSM8K
from rlkit.tasks.mix import Mix
from rlkit.tasks.pictures import Pictures
from rlkit.tasks.trl import TRL
from rlkit.tasks.verl import Verl

__all__ = ["GSM8K", "TRL", "Arithmetic", "HFDataset", "Jsonl", "Mix", "Pictures", "Verl"]

__getattr__ = attribute_of("tasks")
