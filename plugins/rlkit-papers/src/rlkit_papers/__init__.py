"""Losses and advantage estimators of papers, besides those of the algorithms with a recipe, each with its source."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_papers.advantages.gdpo import GDPO
from rlkit_papers.advantages.gpg import GPG
from rlkit_papers.advantages.max_rl import MaxRL
from rlkit_papers.advantages.opo import OPO
from rlkit_papers.advantages.optimal_advantage import OptimalAdvantage
from rlkit_papers.advantages.optimal_token_baseline import OptimalTokenBaseline
from rlkit_papers.advantages.pass_k import PassK
from rlkit_papers.advantages.rae import RAE
from rlkit_papers.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from rlkit_papers.losses.advantage_regression import AdvantageRegression
from rlkit_papers.losses.covariance import ClipCov, KLCov
from rlkit_papers.losses.dppo import DPPO
from rlkit_papers.losses.dro import DRO
from rlkit_papers.losses.gmpo import GMPO
from rlkit_papers.losses.kto import KTO
from rlkit_papers.losses.m2po import M2PO
from rlkit_papers.losses.orpo import ORPO
from rlkit_papers.losses.sapo import SAPO
from rlkit_papers.losses.sequence_weights import TOPR, VESPO
from rlkit_papers.losses.simpo import SimPO

__all__ = [
    "AdvantageRegression", "ClipCov", "DPPO", "DRO", "GDPO", "GMPO", "GPG", "KLCov", "KTO", "M2PO", "MaxRL", "OPO",
    "ORPO", "OptimalAdvantage", "OptimalTokenBaseline", "PassK", "RAE", "ReinforcePPBaseline", "SAPO", "SimPO",
    "TOPR", "VESPO",
]  # fmt: skip


@hookimpl
def rlkit_register(register: Register) -> None:
    for name in __all__:
        register(globals()[name])
