"""Distillation by the divergence from a teacher's distributions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlkit.base.ranges import Count, NonNegativeFloat, Share
from rlkit.interfaces.loss import ForwardOptions, Inputs, TokenLoss
from rlkit.ops.kl import jensen_shannon, sorted_distance, with_rest
from rlkit.ops.masked import masked_mean, span_sums
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

    A teacher with another tokenizer (`teacher.retokenize`) is compared over spans, the shortest texts at whose ends
    tokens of both models end (GOLD: Patiño et al. 2025). If a span is one token of each, D is over the teacher's
    `top_k` most likely of the tokens that both vocabularies have, and all others as one; and `unmatched` times the ULD
    loss (Boizard et al. 2024, arXiv:2402.12030) is added, which compares the `top_k` most likely of the other tokens of
    each by their rank. If not, D is over two outcomes, the span's text and all others: a text's probability is the
    product of its tokens'. The loss of a span is divided among the policy's tokens in it.

    Metrics: `divergence` is the mean of D, `teacher_mass` that of the teacher's mass on its `top_k` tokens, `uld` that
    of the ULD loss.

    Args:
        beta: Which divergence.
        top_k: How many tokens; no more are read than the vocabulary has.
        unmatched: Weight of the ULD loss beside D; only with `teacher.retokenize`.
    """

    inputs: ClassVar[Inputs] = Inputs.NOTHING

    def __init__(self, beta: Share = 0.5, top_k: Count = 64, unmatched: NonNegativeFloat = 1.0) -> None:
        self.beta = beta
        self.unmatched = unmatched
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
        if batch.teacher_spans is not None:
            return self._over_spans(teacher, policy, out.logps, batch)
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

    def _over_spans(self, teacher: Tensor, policy: Tensor, logps: Tensor, batch: TrainBatch) -> LossOutput:
        """Return the loss where tokens of the teacher and the policy differ.

        Args:
            teacher: [B,T,K+L+1] log-probs of shared tokens, of others, and of what remains; NaN in spans of several.
            policy: [B,T,K+M+1] likewise.
            logps: [B,T] the policy's of its own tokens.
            batch: With spans, and the teacher's log-probs of their texts.
        """
        spans, texts = batch.required("teacher_spans"), batch.required("teacher_logps")
        count = batch.required("teacher_top_ids").shape[-1]
        is_read, is_single = batch.mask & ~texts.isnan(), batch.mask & ~teacher.isnan().any(-1)
        top = teacher.nan_to_num().clamp(min=LOWEST)
        tokens = jensen_shannon(_merged(top, count), _merged(policy, count), self.beta)
        distance = torch.where(is_single, sorted_distance(top[..., count:-1], policy[..., count:-1]), 0.0)
        texts, policy_texts = texts.nan_to_num().clamp(min=LOWEST), span_sums(logps, spans).clamp(min=LOWEST)
        outcomes = jensen_shannon(with_rest(texts[..., None]), with_rest(policy_texts[..., None]), self.beta)
        divergence = torch.where(is_single, tokens, outcomes / span_sums(torch.ones_like(logps), spans))
        divergence = torch.where(is_read, divergence, 0.0)
        return LossOutput(
            divergence + self.unmatched * distance,
            {
                "divergence": masked_mean(divergence.detach(), is_read),
                "teacher_mass": masked_mean(top[..., :count].exp().sum(-1), is_single),
                "uld": masked_mean(distance.detach(), is_single),
            },
        )


def _merged(logps: Tensor, count: int) -> Tensor:
    """Return the first of log-probs [...,K], and that of all others together; [...,count+1]."""
    return torch.cat((logps[..., :count], logps[..., count:].logsumexp(-1, keepdim=True)), -1)
