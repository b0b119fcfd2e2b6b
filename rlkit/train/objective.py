"""The losses of a micro-batch, as shares of a mini-batch's: no split into micro-batches or ranks changes their sum.

The router's load-balancing loss is the exception: it is no sum over tokens, so that each micro-batch has its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.interfaces import outputs
from rlkit.interfaces.loss import AdvantageLoss, Inputs, PolicyLoss, SequenceLoss
from rlkit.ops import aggregate, kl
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.correction import importance_weights, loglinear_logps, off_policy_tokens
from rlkit.ops.masked import Reducer, masked_mean, masked_sum
from rlkit.recipe import Correction, KLLoss, Recipe
from rlkit.registry import calling, require
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class Counts(NamedTuple):
    """What a mini-batch has over all ranks: the only numbers that a loss is divided by."""

    tokens: Tensor
    sequences: Tensor
    of_prompt: Tensor | None = None
    """[P] the tokens of each prompt, by its group; where the aggregation weights by them."""


class LossShare(NamedTuple):
    """A micro-batch's share of a mini-batch's loss, and metrics to average by its number of tokens."""

    loss: Tensor
    metrics: dict[str, Tensor]
    by_row: Collection[str] = ()
    """Metrics to average by its number of rows instead."""


class LogLinear(NamedTuple):
    """Old log-probs that are approximated at each optimizer step: see `rlkit.ops.correction.loglinear_logps`."""

    version: int  # of the weights before the update
    weigh: Correction | None = None


def count_tokens(mask: Tensor, reduce: Reducer) -> Counts:
    """Count the tokens and the sequences under a mask, over all ranks."""
    tokens, sequences = reduce(torch.stack((mask.sum(), mask.any(-1).sum())).float())
    return Counts(tokens, sequences)


@dataclass(frozen=True)
class Objective:
    """What the policy's updates minimise.

    Args:
        loss: For each token.
        aggregation: How tokens and sequences count.
        budget: The response budget, by which `seq_mean_token_sum_norm` divides.
        entropy_coef: Weight of the policy's entropy, which is maximised.
        kl: Weight and estimator of the divergence from the reference.
        keep_in_denominator: Whether rejected tokens count in what the loss is divided by.
        strict: Whether a loss that is not finite is refused, if all that it reads is.
        loglinear: How old log-probs are approximated, and tokens weighted by them; None for those of the batch.
        off_policy_threshold: See `rlkit.ops.correction.off_policy_tokens`; None leaves none out.
        router_aux_loss_coef: Weight of the router's load-balancing loss.
    """

    loss: PolicyLoss
    aggregation: Aggregation
    budget: int
    entropy_coef: float = 0.0
    kl: KLLoss | None = None
    keep_in_denominator: bool = False
    strict: bool = False
    off_policy_threshold: float | None = None
    loglinear: LogLinear | None = None
    router_aux_loss_coef: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, version: int = 0, strict: bool = False) -> Objective:
        """Return the recipe's objective for an update of weights of this version."""
        approximate = recipe.train.old_logps == "loglinear"
        return cls(
            loss=recipe.loss,
            aggregation=recipe.train.aggregation or recipe.loss.aggregation,
            budget=recipe.rollout.sampling.max_tokens,
            entropy_coef=recipe.train.entropy_coef,
            kl=recipe.kl_loss,
            keep_in_denominator=recipe.rejection is not None and recipe.rejection.keep_in_denominator,
            strict=strict,
            loglinear=LogLinear(version, recipe.correction) if approximate else None,
            off_policy_threshold=recipe.train.off_policy_mask_threshold,
            router_aux_loss_coef=recipe.train.router_aux_loss_coef,
        )

    def denominator(self, batch: TrainBatch) -> Tensor:
        """Return the tokens [B,T] that the loss is divided by."""
        return (batch.mask if self.keep_in_denominator else batch.accepted) & self.usable_rows(batch)[:, None]

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        """Select the rows [B] over which the loss is a mean."""
        with calling(self.loss, "usable_rows"):
            usable = self.loss.usable_rows(batch)
        require(self.loss, "usable_rows", outputs.of_selection(usable, batch.group))
        return usable

    def rows_with_gradient(self, batch: TrainBatch) -> Tensor:
        """Select the rows [B] that have one: all usable ones, unless the advantage is a factor of the objective."""
        other_terms = Inputs.GROUPS in self.loss.inputs or self.kl is not None or bool(self.entropy_coef)
        other_terms = other_terms or bool(self.router_aux_loss_coef)
        advantage_alone = isinstance(self.loss, AdvantageLoss) and not other_terms
        return self.usable_rows(batch) & (((batch.advantages != 0) & batch.mask).any(-1) | (not advantage_alone))

    def count_over_ranks(self, batch: TrainBatch, rows: list[int], prompts: int, reduce: Reducer) -> Counts:
        """Count what the loss of a mini-batch, some rows of this rank's batch, is divided by, over all ranks.

        Args:
            batch: The rows of this rank.
            rows: Indices of the rows of the mini-batch.
            prompts: How many a step has, over all ranks.
            reduce: Sums over ranks.
        """
        mask = self.denominator(batch)[rows]
        counts = count_tokens(mask, reduce)
        if self.aggregation != "prompt_mean_token_mean":
            return counts
        of_prompt = torch.zeros(prompts, device=mask.device).index_add(0, batch.group[rows], mask.sum(-1).float())
        return counts._replace(of_prompt=reduce(of_prompt))

    def with_old_logps(self, logps: Tensor, batch: TrainBatch) -> TrainBatch:
        """Return a batch with old log-probs, and weights by them, approximated from the current ones if they are."""
        if self.loglinear is None:
            return batch
        version, weigh = self.loglinear
        old, engine = loglinear_logps(logps, batch.rollout_logps, batch.versions, version), batch.rollout_logps
        weights = None
        if weigh is not None:
            weights = importance_weights(old, engine, batch.mask, weigh.level, low=weigh.low, high=weigh.high)
        return replace(batch, old_logps=old, correction_weights=weights)

    def share(self, out: PolicyOutput, batch: TrainBatch, counts: Counts) -> LossShare:
        """Return a micro-batch's share of the mini-batch's loss.

        Raises:
            PartError: The loss raised, or its output is not what it must be.
        """
        batch = self.with_old_logps(out.logps, batch)
        result = self._call(out, batch)
        per_token, metrics = self._terms(result, out, batch)
        tokens, of_prompt = counts.tokens, counts.of_prompt
        if of_prompt is not None:
            tokens = (of_prompt[batch.group] * (of_prompt > 0).sum())[:, None]
        weights = aggregate.weights(
            self.denominator(batch),
            self.aggregation,
            tokens=tokens,
            sequences=counts.sequences,
            budget=self.budget,
        )
        loss = masked_sum(per_token * weights, batch.accepted)
        if out.router_loss is not None:
            metrics["router_aux_loss"] = out.router_loss
            part = self.denominator(batch).sum() / counts.tokens
            loss = loss + self.router_aux_loss_coef * part * out.router_loss
        by_row = result.metrics.keys() if isinstance(self.loss, SequenceLoss) else ()
        return LossShare(loss, {name: metric.detach() for name, metric in metrics.items()}, by_row)

    def check_gradient(self, loss: Tensor) -> None:
        """Refuse a loss that nothing can be learned from, in a pass with a gradient.

        Raises:
            PartError: It has no gradient.
        """
        if torch.is_grad_enabled() and not loss.requires_grad:
            problem = "returned a loss without a gradient, expected one that is computed from the policy's output"
            require(self.loss, "__call__", f"{problem}: leave out `.detach()`, `.item()` and `torch.no_grad()`")

    def _call(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        with calling(self.loss, "__call__"):
            result = self.loss(out, batch)
        require(self.loss, "__call__", outputs.of_loss(result, batch.mask))
        if self.strict:
            read = (out.logps, batch.old_logps, batch.advantages, result.per_token)
            *sound, finite = (bool(x[batch.mask].isfinite().all()) for x in read)
            odd = "returned a loss that is not finite, expected a finite one, since all that it reads is"
            require(self.loss, "__call__", odd if all(sound) and not finite else None)
        return result

    def _terms(self, result: LossOutput, out: PolicyOutput, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weigh the policy loss for the engine's mismatch, and add the entropy and KL terms, token by token."""
        per_token, metrics = result.per_token, dict(result.metrics)
        if batch.correction_weights is not None and Inputs.CORRECTION not in self.loss.inputs:
            per_token = per_token * batch.correction_weights
        if batch.correction_weights is not None and self.loglinear is not None:
            metrics["correction_weight"] = masked_mean(batch.correction_weights, batch.mask)
        threshold = self.off_policy_threshold
        if threshold is not None:
            left_out = off_policy_tokens(out.logps, batch.rollout_logps, batch.advantages, batch.mask, threshold)
            metrics["off_policy_masked"] = masked_mean(left_out, batch.mask)
            per_token = per_token.masked_fill(left_out, 0.0)
        if out.entropy is not None:
            metrics["entropy"] = masked_mean(out.entropy.detach(), batch.mask)
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * out.entropy
        if self.kl is not None:
            divergence = kl.estimate(out.logps, batch.required("ref_logps"), self.kl.estimator)
            if self.kl.importance_weighted:
                divergence = kl.importance_weighted(divergence, out.logps, batch.old_logps)
                if batch.correction_weights is not None:
                    divergence = divergence * batch.correction_weights
            metrics["kl_ref"] = masked_mean(divergence.detach(), batch.mask)
            per_token = per_token + self.kl.coef * divergence
        return per_token, metrics


def value_share(values: Tensor, batch: TrainBatch, tokens: Tensor, clip: float | None) -> LossShare:
    """Return a micro-batch's share of 0.5 mean(max((v - R)^2, (clip(v, v_old +- clip) - R)^2)) over `tokens` tokens."""
    old, returns = batch.required("values"), batch.required("returns")
    clipped = error = (values - returns) ** 2
    if clip is not None:
        clipped = (torch.clamp(values, old - clip, old + clip) - returns) ** 2
    loss = 0.5 * masked_sum(torch.maximum(error, clipped), batch.mask) / tokens
    return LossShare(loss, {"clip_fraction": masked_mean(clipped > error, batch.mask)})
