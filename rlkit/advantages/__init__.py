"""Advantage estimators, one per file.

What belongs here: an estimator's formula with its source, and the options in it. What does not: the shaping and
correction of rewards before it (`rlkit.train.credit`), and the mathematics that several share (`rlkit.ops`).
"""

from rlkit.advantages.gae import GAE
from rlkit.advantages.gdpo import GDPO
from rlkit.advantages.gpg import GPG
from rlkit.advantages.grpo import GRPO
from rlkit.advantages.max_rl import MaxRL
from rlkit.advantages.opo import OPO
from rlkit.advantages.optimal_advantage import OptimalAdvantage
from rlkit.advantages.optimal_token_baseline import OptimalTokenBaseline
from rlkit.advantages.pass_k import PassK
from rlkit.advantages.rae import RAE
from rlkit.advantages.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlkit.advantages.remax import ReMax
from rlkit.advantages.rloo import RLOO

__all__ = [
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "MaxRL",
    "OPO",
    "OptimalAdvantage",
    "OptimalTokenBaseline",
    "PassK",
    "RAE",
    "RLOO",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
]
