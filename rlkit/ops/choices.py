"""The values of options that operators have: without torch, so that recipes and help do not wait for it."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal[
    "token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm",
    "prompt_mean_token_mean",
]  # fmt: skip
"""How tokens and sequences are weighted."""

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
"""The estimator; a `+` keeps its value but takes the gradient of k2 (straight-through)."""

WeightLevel = Literal["token", "sequence"]
Statistic = Literal["k1", "k2", "k3", "binary_kl"]
RejectLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]
