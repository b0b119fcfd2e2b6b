"""The interface of policy losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import LossOutput, PolicyOutput, Reads, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import Runtime
    from rlkit.ops.aggregate import Aggregation


class PolicyLoss(BoundPart):
    """Returns a loss for every token, not reduced: the training loop weights tokens by global counts.

    `aggregation` is the mode of `rlkit.ops.aggregate.weights` that the loss was published with; a recipe's
    `train.aggregation` overrides it. The training loop multiplies by `batch.correction_weights` unless
    `applies_correction` is set: the loss does so itself. `selects` marks a loss that treats chosen tokens apart.
    `compares` is unset in one that does not compare with `batch.old_logps`, so that it cannot correct for samples of
    another policy. `zero_without_advantage` marks one that has no gradient in a row whose advantages are all 0, which
    then needs no backward pass. `reads_advantages` is unset in one that reads none, so that the recipe needs no
    estimator, and `reads_rewards` in one that reads no rewards either.

    `reads_groups` marks a loss that compares the rows of a group: all of them are in one micro-batch, however large.
    `reads_reference` marks one that reads `batch.ref_logps`. `reads_scores` marks one of a reward model: it reads
    `out.scores`, and no log-probs. `reads_turn_rewards` marks one that reads a reward from 0 to 1 of each recorded
    turn, at its last token in `batch.token_rewards`. `per_row` marks one whose loss is a row's, placed on the row's
    last token, so that nothing may weigh or leave out single tokens: its `aggregation` stands.

    `teacher_top` is how many of the teacher's most likely tokens it reads in each place, as `batch.teacher_top_ids` and
    `batch.teacher_top_logps`; `out.top_logps` are the policy's log-probs of the same tokens. 0 for none.

    `reads` names the statistics of the policy's distributions that are in `out`. `embedding_noise` is NEFTune's alpha:
    noise on the input embeddings in the passes that are learned from; 0 for none.
    """

    aggregation: ClassVar[Aggregation] = "token_mean"
    applies_correction: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = True
    reads_rewards: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = False
    reads_reference: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    reads_turn_rewards: ClassVar[bool] = False
    per_row: ClassVar[bool] = False
    teacher_top: int = 0
    reads: Reads = Reads()
    embedding_noise: float = 0.0
    formula: ClassVar[str] = "see its documentation"
    """The objective as `rlkit explain` shows it, with the constructor's options as `{name}`."""
    reduce: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Sums a tensor over all ranks."""
    gather: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Concatenates a vector of any length over all ranks."""

    def bind(self, runtime: Runtime) -> None:
        """Store what needs the run: called once process group, device and models exist."""
        self.reduce = runtime.reduce
        self.gather = runtime.gather

    def explain(self) -> str:
        """Return the formula with the options filled in."""
        return self.formula.format(**vars(self))

    @abstractmethod
    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        """Compare `out.logps` with `batch.old_logps` under `batch.advantages`; all [B,T] f32."""

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        """Return which rows [B] bool the loss is a mean over; others count nowhere and need no backward pass.

        Called with whole groups.
        """
        return batch.mask.any(-1)

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        """Return which tokens [B,T] bool of this rank's mini-batch are treated apart, as `batch.selected`.

        Called once a mini-batch, on every rank, with the current log-probs [B,T] and no gradient, if `selects`. What
        is measured over the mini-batch may be kept for the calls that follow.
        """
        raise NotImplementedError(f"{type(self).__name__} has `selects = True`, but no `select` method")


class PairLoss(PolicyLoss):
    """Returns a loss for every pair of rows of one group with unequal rewards, by how much the policy prefers each.

    The pairs of a group are averaged, then the groups, as the comparisons of a prompt are in Ouyang et al. 2022
    (arXiv:2203.02155, equation 1); with two samples that is the loss of a chosen and a rejected answer. A group's loss
    is on all of its rows. Groups of equal rewards have no pair and count nowhere.

    Metrics: `margin` of the scores of the better and the worse row, `preference_accuracy`, the share of pairs with a
    positive one, and `chosen_logps` and `rejected_logps`, the sums over the tokens of each.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"
    compares: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False
    reads_groups: ClassVar[bool] = True
    per_row: ClassVar[bool] = True

    @abstractmethod
    def scores(self, out: PolicyOutput, batch: TrainBatch) -> Tensor:
        """Return how much the policy prefers each row, its implicit reward [B] f32."""

    @abstractmethod
    def of_pairs(self, better: Tensor, worse: Tensor) -> Tensor:
        """Return the loss [N] of pairs, from the scores [N] of both rows."""

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        from rlkit.ops.groups import group_stats

        return ~group_stats(batch.rewards, batch.group).equal

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        from rlkit.ops.groups import mean_over_pairs, pairs
        from rlkit.ops.masked import at_last, masked_sum

        of = pairs(batch.rewards, batch.group)
        scores, logps = self.scores(out, batch), masked_sum(out.logps.detach(), batch.mask, -1)
        better, worse = scores[of.better], scores[of.worse]
        loss = mean_over_pairs(self.of_pairs(better, worse), of, batch.group)
        margin, usable = (better - worse).detach(), self.usable_rows(batch)
        metrics = {
            "margin": margin,
            "preference_accuracy": (margin > 0).float(),
            "chosen_logps": logps[of.better],
            "rejected_logps": logps[of.worse],
        }
        metrics = {name: mean_over_pairs(x, of, batch.group)[usable].mean() for name, x in metrics.items()}
        return LossOutput(at_last(loss, batch.mask), metrics if bool(usable.any()) else {})
