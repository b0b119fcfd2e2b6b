"""Policy losses, one per file.

What belongs here: a loss's formula with its source, and the options in it. What does not: aggregation over tokens
(`rlkit.ops.aggregate`), KL and entropy terms and the update itself (`rlkit.train.objective`, `rlkit.train.update`).
"""

from rlkit.losses.advantage_regression import AdvantageRegression
from rlkit.losses.cispo import CISPO
from rlkit.losses.clip import ClipLoss
from rlkit.losses.covariance import ClipCov, KLCov
from rlkit.losses.cross_entropy import CrossEntropy
from rlkit.losses.distillation import Distillation
from rlkit.losses.dpo import DPO
from rlkit.losses.dppo import DPPO
from rlkit.losses.dro import DRO
from rlkit.losses.gmpo import GMPO
from rlkit.losses.gspo import GSPO
from rlkit.losses.kto import KTO
from rlkit.losses.m2po import M2PO
from rlkit.losses.orpo import ORPO
from rlkit.losses.policy_gradient import PolicyGradient
from rlkit.losses.reward_models import BinaryCrossEntropy, BradleyTerry
from rlkit.losses.sapo import SAPO
from rlkit.losses.sequence_weights import TOPR, VESPO
from rlkit.losses.simpo import SimPO

__all__ = [
    "AdvantageRegression", "BinaryCrossEntropy", "BradleyTerry", "CISPO", "ClipCov", "ClipLoss", "CrossEntropy", "DPO",
    "DPPO", "DRO", "Distillation", "GMPO", "GSPO", "KLCov", "KTO", "M2PO", "ORPO", "PolicyGradient", "SAPO", "SimPO",
    "TOPR", "VESPO",
]  # fmt: skip
