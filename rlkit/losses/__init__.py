"""Policy losses, one per file.

What belongs here: a loss's formula with its source, and the options in it. What does not: aggregation over tokens
(`rlkit.ops.aggregate`), KL and entropy terms and the update itself (`rlkit.train.objective`, `rlkit.train.update`).
"""

from rlkit.losses.cispo import CISPO
from rlkit.losses.clip import ClipLoss
from rlkit.losses.cross_entropy import CrossEntropy
from rlkit.losses.distillation import Distillation
from rlkit.losses.dpo import DPO
from rlkit.losses.gspo import GSPO
from rlkit.losses.policy_gradient import PolicyGradient
from rlkit.losses.reward_models import BinaryCrossEntropy, BradleyTerry
from rlkit.registry.shelf import attribute_of

__all__ = [
    "BinaryCrossEntropy", "BradleyTerry", "CISPO", "ClipLoss", "CrossEntropy", "DPO", "Distillation", "GSPO",
    "PolicyGradient",
]  # fmt: skip

__getattr__ = attribute_of("losses")
