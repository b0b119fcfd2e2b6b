"""Distillation by the divergence from a teacher's distributions."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.base.ranges import Count, Share
from rlkit.interfaces.loss import ForwardOptions, Inputs, TokenLoss
from rlkit.ops.kl import jensen_shannon
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch

LOWEST = -1e4
"""The log-prob in place of minus infinity, as of columns that a model masks."""


class Distillation(TokenLoss):
    """D(teacher, policy) at each token, over the teacher's `top_k` most likely tokens and all others as one more.

    `beta` chooses D: 0 is forward KL, KL(teacher || policy), 1 reverse KL, KL(policy || teacher), and between them it
    is the generalised Jensen-Shannon divergence (GKD: Agarwal et al. 2024, arXiv:2306.13649, equation 1), on the
    policy's own samples or on recorded answers. The gradient is that of the tokens' distributions, not of what is
    sampled.

    Both distributions keep the mass outside of the teacher's `top_k` tokens, in one outcome of its own, instead of
    being renormalised over them: so D never exceeds that of the whole vocabulary, is 0 only where both agree on all of
    the `top_k` tokens, and equals it where they are the vocabulary; and the policy learns how much mass the others have
    in the teacher, though not how it is divided.

    Metrics: `divergence` is the mean of D, `teacher_mass` that of the teacher's mass on its `top_k` tokens.

    Args:
        beta: Which divergence.
        top_k: How many tokens; no more are read than the vocabulary has.
    """

    inputs: ClassVar[Inputs] = Inputs.NOTHING

    def __init__(self, beta: Share = 0.5, top_k: Count = 64) -> None:
        self.beta = beta
        self.top_k = top_k
        self.forward = ForwardOptions(teacher_top=top_k)

    def explain(self) -> str:
        forward, reverse, beta = "KL(teacher || {})", "KL(policy || {})", self.beta
        objective = {0.0: forward.format("policy"), 1.0: reverse.format("teacher")}.get(
            beta,
            f"{beta:g} {forward.format('m')} + {1 - beta:g} {reverse.format('m')}, "
            f"m = {beta:g} teacher + {1 - beta:g} policy",
        )
        return f"{objective}, over the teacher's {self.top_k} most likely tokens and all others as one"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        assert out.top_logps is not None  # requested by `forward.teacher_top`
        teacher, policy = batch.required("teacher_top_logps"), out.top_logps.clamp(min=LOWEST)
        is_read = ~teacher.isnan().any(-1)
        divergence = jensen_shannon(teacher.nan_to_num().clamp(min=LOWEST), policy, self.beta)
        divergence = torch.where(is_read, divergence, 0.0)
        mass = 1 - teacher[..., -1].exp()
        return LossOutput(
            divergence,
            {
                "divergence": masked_mean(divergence.detach(), batch.mask & is_read),
                "teacher_mass": masked_mean(mass, batch.mask & is_read),
            },
        )
