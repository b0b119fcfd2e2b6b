"""The interfaces of losses: of tokens, of sequences, of pairs of sequences, and of the scores of reward models.

A loss subclasses one of `TokenLoss`, `SequenceLoss`, `PairLoss` and `ScoreLoss` and overrides its one abstract method.
Each class fixes what such a loss reads by default; `inputs` adds to it or takes away.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Flag, auto
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rlkit.interfaces.runtime import ReducingPart
from rlkit.types import LossOutput, PolicyOutput, Reads, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.ops.aggregate import Aggregation


class Inputs(Flag):
    """What a loss reads besides `out.logps` and `batch.mask`. The recipe must provide it."""

    NOTHING = 0
    ADVANTAGES = auto()
    """`batch.advantages`, for which the recipe needs an estimator."""
    REWARDS = auto()
    """Rewards, directly or through the advantages: the recipe needs a reward, and its metrics are logged."""
    OLD_LOGPS = auto()
    """`batch.old_logps`: the loss compares with them, so it can correct for samples of another policy."""
    REFERENCE = auto()
    """`batch.ref_logps`."""
    GROUPS = auto()
    """All rows of a group in one micro-batch, however large the group is."""
    SCORES = auto()
    """`out.scores` of a reward model, whose `out.logps` are 0."""
    TURN_REWARDS = auto()
    """A reward from 0 to 1 for each recorded turn, in `batch.token_rewards` at the turn's last token."""
    CORRECTION = auto()
    """`batch.correction_weights`, which the training loop otherwise multiplies the loss of each token by."""


class ForwardOptions(NamedTuple):
    """What a loss asks of the policy's forward pass.

    Args:
        statistics: Statistics of each token's distribution to compute besides its log-prob.
        teacher_top: Number of the teacher's most likely tokens at each position. They arrive as `batch.teacher_top_ids`
            and `batch.teacher_top_logps`, and the policy's log-probs of the same tokens as `out.top_logps`.
        embedding_noise: Scale alpha of NEFTune's noise on the input embeddings, in passes with a gradient.
    """

    statistics: Reads = Reads()
    teacher_top: int = 0
    embedding_noise: float = 0.0


FORMER = {
    **dict.fromkeys(
        ("reads_advantages", "reads_rewards", "reads_reference", "reads_groups", "reads_scores", "reads_turn_rewards"),
        "list it in `inputs`",
    ),
    "compares": "list Inputs.OLD_LOGPS in `inputs`",
    "applies_correction": "list Inputs.CORRECTION in `inputs`",
    "zero_without_advantage": "subclass AdvantageLoss",
    "per_row": "subclass SequenceLoss",
    "of_pairs": "call it per_pair",
}
"""Attributes that losses had before `Inputs`, and what says the same now."""


class PolicyLoss(ReducingPart):
    """Returns a loss for every token, not reduced: the training loop weights tokens by global counts.

    Subclass one of the four kinds below, not this class.
    """

    aggregation: ClassVar[Aggregation] = "token_mean"
    """The mode of `rlkit.ops.aggregate.weights` of the publication; a recipe's `train.aggregation` overrides it."""
    inputs: ClassVar[Inputs] = Inputs.ADVANTAGES | Inputs.REWARDS | Inputs.OLD_LOGPS
    """What the loss reads."""
    forward: ForwardOptions = ForwardOptions()
    """What the loss asks of the forward pass; a constructor may set it from its options."""

    def __init_subclass__(cls) -> None:
        """Refuse an attribute that would be ignored, or fail in the first step.

        Raises:
            TypeError: The class has one of `FORMER`, or `inputs` or `forward` of another type.
        """
        super().__init_subclass__()
        if not isinstance(cls.inputs, Inputs):
            raise TypeError(f"{cls.__name__}.inputs is {cls.inputs!r}, expected TokenLoss.inputs | Inputs.REFERENCE")
        if isinstance(cls.forward, tuple) and not isinstance(getattr(cls.forward, "statistics", None), Reads):
            raise TypeError(
                f"{cls.__name__}.forward is {cls.forward!r}, expected ForwardOptions(statistics=Reads(mean=True))"
            )
        for name, remedy in FORMER.items():
            if name in vars(cls):
                raise TypeError(f"{cls.__name__} has the attribute `{name}`, which losses no longer have; {remedy}")

    @abstractmethod
    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        """Return the loss [B,T] f32 of a micro-batch, with a gradient, and metrics without one."""

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        """Select the rows [B] bool over which the loss is a mean; other rows count nowhere and need no backward pass.

        Called with complete groups.
        """
        return batch.mask.any(-1)

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        """Select the tokens [B,T] bool of this rank's mini-batch that the loss treats apart, as `batch.selected`.

        A loss that overrides this is called once a mini-batch, on every rank, with the current log-probs [B,T] without
        a gradient. It may keep statistics of the mini-batch for the calls that follow.
        """
        raise NotImplementedError(f"{type(self).__name__} does not select tokens")

    @property
    def selects(self) -> bool:
        """Whether the loss overrides `select`."""
        return type(self).select is not PolicyLoss.select


class TokenLoss(PolicyLoss):
    """A loss for each token. Override `__call__`.

    By default it reads advantages, rewards and old log-probs, as policy gradients with a ratio do.
    """


class AdvantageLoss(TokenLoss):
    """A loss for each token that is 0, with its gradient, where the advantage is 0. Override `__call__`.

    Rows whose advantages are all 0 then need no backward pass.
    """


class SequenceOutput(NamedTuple):
    """The loss of each sequence.

    Args:
        loss: [B] f32, with a gradient.
        metrics: Scalars by name, without a gradient, logged as `policy/NAME`: means over rows.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class SequenceLoss(PolicyLoss):
    """A loss for each sequence. Override `per_sequence`.

    The loss is on the last token of the row, so no option may weight or leave out single tokens: `aggregation` is
    fixed. By default it reads rewards.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"
    inputs: ClassVar[Inputs] = Inputs.REWARDS

    @abstractmethod
    def per_sequence(self, out: PolicyOutput, batch: TrainBatch) -> SequenceOutput:
        """Return the loss [B] of each row, and metrics."""

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        from rlkit.ops.masked import at_last

        loss, metrics = self.per_sequence(out, batch)
        if loss.shape != batch.mask.shape[:1]:
            expected = f"expected one number for each of the {len(batch.mask)} rows"
            raise ValueError(f"the loss of the sequences has shape {tuple(loss.shape)}, {expected}")
        return LossOutput(at_last(loss, batch.mask), metrics)


class PairLoss(SequenceLoss):
    """A loss for each pair of rows of one group with unequal rewards. Override `per_pair`.

    The loss compares how much the policy prefers each row: its implicit reward, `scores`. The pairs of a group are
    averaged, then the groups, as the comparisons of a prompt are in Ouyang et al. 2022 (arXiv:2203.02155, equation 1);
    with two samples that is the loss of a chosen and a rejected completion. A group's loss is on all of its rows.
    Groups of equal rewards have no pair and count nowhere.

    Metrics: `margin` of the scores of the better and the worse row, `preference_accuracy`, the share of pairs with a
    positive one, and `chosen_logps` and `rejected_logps`, the sums over the tokens of each.
    """

    inputs: ClassVar[Inputs] = Inputs.REWARDS | Inputs.GROUPS

    @abstractmethod
    def per_pair(self, better: Tensor, worse: Tensor) -> Tensor:
        """Return the loss [N] of pairs, from the scores [N] of the better and of the worse rows."""

    def scores(self, out: PolicyOutput, batch: TrainBatch) -> Tensor:
        """Return the implicit reward [B] f32 of each row: the sum of its log-probs."""
        from rlkit.ops.masked import masked_sum

        return masked_sum(out.logps, batch.mask, -1)

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        from rlkit.ops.groups import group_stats

        return ~group_stats(batch.rewards, batch.group).equal

    def per_sequence(self, out: PolicyOutput, batch: TrainBatch) -> SequenceOutput:
        from rlkit.ops.groups import mean_over_pairs, pairs
        from rlkit.ops.masked import masked_sum

        pair_rows = pairs(batch.rewards, batch.group)
        scores = self.scores(out, batch)
        logps = masked_sum(out.logps.detach(), batch.mask, -1)
        better, worse = scores[pair_rows.better], scores[pair_rows.worse]
        loss = mean_over_pairs(self.per_pair(better, worse), pair_rows, batch.group)
        usable = self.usable_rows(batch)
        if not bool(usable.any()):
            return SequenceOutput(loss, {})
        margin = (better - worse).detach()
        by_pair = {
            "margin": margin,
            "preference_accuracy": (margin > 0).float(),
            "chosen_logps": logps[pair_rows.better],
            "rejected_logps": logps[pair_rows.worse],
        }
        metrics = {name: mean_over_pairs(x, pair_rows, batch.group)[usable].mean() for name, x in by_pair.items()}
        return SequenceOutput(loss, metrics)


class ScoreLoss(SequenceLoss):
    """A loss of the scores of a reward model (`model.head: score`). Override `from_scores`."""

    inputs: ClassVar[Inputs] = Inputs.REWARDS | Inputs.SCORES

    @abstractmethod
    def from_scores(self, scores: Tensor, batch: TrainBatch) -> SequenceOutput:
        """Return the loss [B] of each row, and metrics, from the scores [B,T] f32 of the row up to each token."""

    def per_sequence(self, out: PolicyOutput, batch: TrainBatch) -> SequenceOutput:
        assert out.scores is not None  # a recipe may combine these losses with reward models alone
        return self.from_scores(out.scores, batch)
