"""The trajectories of a step as tensors: `RolloutBatch`, then `Batch` with rewards, then `TrainBatch` for updates.

`PolicyOutput` is what the policy's pass returns for a batch, `LossOutput` what a loss returns.

Legend: B trajectories on this rank, T tokens. `x[b,t]` describes `tokens[b,t]`: nothing is shifted, and
`logps[b,t] = log p(tokens[b,t] | tokens[b,:t])`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlkit.interfaces.fields import Field
    from rlkit.types.media import Media

PER_CHOICE = ("teacher_top_ids", "teacher_top_logps", "candidates")
"""Fields of a batch with several numbers for each token."""
PER_ROW = ("group", "rewards", "greedy_rewards", "main", "peers", "role")
"""Fields of a batch with one number for each row."""
NO_TENSORS = ("component_names", "declared", "fields", "media", "metrics", "role_names")
"""Attributes of a batch that are no tensors of its own."""
PROVIDERS = {
    "values": "an estimator that reads it has Needs.VALUES in its `needs`",
    "old_logps": "an estimator that reads it has Needs.OLD_LOGPS in its `needs`",
    "sum_pi_squared": "an estimator that reads it has Needs.SUM_PI_SQUARED in its `needs`",
    "greedy_rewards": "an estimator that reads it has Needs.GREEDY in its `needs`",
    "reference_rewards": "an estimator that reads it has Needs.REFERENCE_REWARDS in its `needs`",
    "ref_logps": "the recipe needs a `kl_loss:` or `kl_reward:` section, or a loss with `Inputs.REFERENCE`",
    "teacher_logps": "the recipe needs a `teacher:` section, and a loss that reads advantages",
    "teacher_spans": "the recipe needs a `teacher:` section with `retokenize: true`",
    "teacher_top_ids": "the recipe needs a `teacher:` section, and a loss with `forward.teacher_top`",
    "teacher_top_logps": "the recipe needs a `teacher:` section, and a loss with `forward.teacher_top`",
    "role": "an estimator that reads it has Needs.ROLES in its `needs`",
    "advantages": "an estimator's `estimate` sets it",
    "returns": "an estimator's `estimate` sets it where a critic is trained",
}
"""What makes a field of a batch available, for error messages."""


@dataclass(kw_only=True)
class RolloutBatch:
    """Trajectories as right-padded tensors, before they have rewards.

    B may be 0 on some ranks; T is the length of the longest row. All rows of a group are on one rank. Optional fields
    are set if the recipe needs them; `required` returns such a field, or raises an error that names its provider.

    Args:
        tokens: [B,T] i64, 0 in the padding.
        attention: [B,T] bool, False in the padding.
        mask: [B,T] bool, True where the policy chose the token.
        rollout_logps: [B,T] f32, the engine's log-probs; 0 outside the mask.
        group: [B] i64, which rows are samples of one prompt.
        versions: [B,T] i64, of the weights that sampled a token; -1 outside the mask.
        trainer_logps: [B,T] f32, the trainer's log-probs before the update; NaN in rows that were not computed.
        old_logps: [B,T] f32, what ratios compare with: the trainer's log-probs before the update, or the engine's; a
            loss sees log-linear ones where the recipe has them.
        ref_logps: [B,T] f32, the reference's.
        teacher_logps: [B,T] f32, the teacher's; NaN under the mask where it has not read a token.
        teacher_spans: [B,T] i64, where the span of each token begins, over which `teacher_logps` are sums; None if they
            are of single tokens.
        teacher_top_ids: [B,T,K] i64, the tokens that the teacher finds most likely in each place.
        teacher_top_logps: [B,T,K+1] f32, its log-probs of them, and last that of all others together; NaN as above.
            With `teacher.retokenize`, [B,T,K+L+1]: after K shared tokens follow L that the policy lacks; NaN in spans
            of several tokens.
        values: [B,T] f32, the critic's value of the state before each token was chosen; 0 outside the mask.
        sum_pi_squared: [B,T] f32, the sum of squared probabilities over the vocabulary, at each token.
        media: [B] the pictures of each row, None for a row without; None if no row has any. They stay on the CPU.
        candidates: [B,T,K] i32, the ids from which the engine sampled a token, then -1; only -1 outside the mask. All
            log-probs of a row with candidates are over these. None if sampling does not truncate.
        fields: What parts filled, by the names of their declared fields: [B,T,*shape] by token, [B,N,*shape] by turn of
            the policy, [B,*shape] by row; padded as declared.
        declared: The declarations of these fields, by name.

    Raises:
        ValueError: A field has the wrong shape; the message names it.
    """

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    rollout_logps: Tensor
    group: Tensor
    versions: Tensor
    trainer_logps: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    teacher_logps: Tensor | None = None
    teacher_spans: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logps: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    media: tuple[Media | None, ...] | None = None
    candidates: Tensor | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    declared: Mapping[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Compare every field's shape with `tokens`."""
        rows, width = self.tokens.shape
        for name, value in self.tensors().items():
            shape = (rows,) if name in PER_ROW else (rows, self.columns(name, width))
            if tuple(value.shape) != shape + tuple(value.shape[2:]) * (name in PER_CHOICE):
                raise ValueError(f"{type(self).__name__}.{name} has shape {tuple(value.shape)}, expected {shape}")
        for name, value in self.fields.items():
            spec = self.declared[name]
            turns = value.shape[1] if value.dim() > 1 else 0
            expected = (rows, *spec.sizes(width, turns), *spec.shape)
            if tuple(value.shape) != expected:
                raise ValueError(f"batch.fields[{name!r}] has shape {tuple(value.shape)}, expected {expected}")
        if self.media is not None and len(self.media) != rows:
            raise ValueError(f"{type(self).__name__}.media has {len(self.media)} rows, expected {rows}")

    def columns(self, name: str, width: int) -> int:
        """Return the number of columns of a field where there are `width` tokens."""
        return width

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are set and are tensors, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NO_TENSORS}
        return {name: value for name, value in values.items() if value is not None}

    def required(self, name: str) -> Tensor:
        """Return a field that may be None.

        Raises:
            ValueError: It is None; the message names what provides it.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"batch.{name} is not computed in this run; {PROVIDERS.get(name, 'set it first')}")
        return value

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def rows(self, index: Tensor) -> Self:
        """Return the chosen rows, cut to the longest of them."""
        chosen = {name: value[index] for name, value in self.tensors().items()}
        width = int(chosen["attention"].sum(-1).max()) if len(index) else 0
        cut = {name: x[:, : self.columns(name, width)] for name, x in chosen.items() if name not in PER_ROW}
        media = None if self.media is None else tuple(self.media[i] for i in index.tolist())
        own = {name: value[index] for name, value in self.fields.items()}
        by_token = {name: x[:, :width] for name, x in own.items() if self.declared[name].by == "token"}
        return replace(self, **{**chosen, **cut}, media=media, fields={**own, **by_token})  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Self:
        """Return the same batch on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved, fields={name: value.to(device) for name, value in self.fields.items()})


@dataclass(kw_only=True)
class Batch(RolloutBatch):
    """A `RolloutBatch` with rewards: what estimators read, and write the advantages into.

    Args:
        token_rewards: [B,T] f32, the COMPLETE signal: the score at the last chosen token, rewards of turns at the ends
            of theirs, those of tokens, shaped where the recipe has `shaping`, less KL where it is in the reward.
        rewards: [B] f32, each row's sum before shaping and KL.
        components: [B,K] f32, the components of the scores, in the order of `component_names`; NaN where a score has
            no such component.
        component_names: The K names.
        greedy_rewards: [B] f32, the reward of a greedy answer to the row's prompt, shaped like `token_rewards`.
        reference_rewards: [B,K] f32, rewards of the reference's samples of the row's prompt, then NaN.
        main: [B] bool, True for the row that stands for its rollout, or its role in it, when advantages are estimated;
            the rows after it, up to the next True, take its advantage. None if every row stands for itself.
        peers: [B] i64, the number of the set of rows that a row is compared with, in place of `group`, where the
            rollouts of an agent have roles: those of a role in one rollout if it has several there, else those of a
            role in all rollouts of a prompt. None without roles.
        role: [B] i64, the role's index in `role_names`; None if the estimator reads no roles.
        role_names: Names of the step's roles on all ranks, `SOURCE/ROLE` where the prompt has a source.
        advantages: [B,T] f32, set by the estimator; 0 outside the mask.
        returns: [B,T] f32, set by the estimator: what the critic learns.
        correction_weights: [B,T] f32, importance weights against the engine's mismatch, which multiply the loss.
        accepted: [B,T] bool, False where a token is rejected or not the policy's.
        metrics: numbers by name, which the estimator adds; the step logs each as `advantage/NAME`, the mean over rows.
    """

    token_rewards: Tensor
    rewards: Tensor
    components: Tensor
    component_names: tuple[str, ...] = ()
    greedy_rewards: Tensor | None = None
    reference_rewards: Tensor | None = None
    main: Tensor | None = None
    peers: Tensor | None = None
    role: Tensor | None = None
    role_names: tuple[str, ...] = ()
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction_weights: Tensor | None = None
    accepted: Tensor | None = None
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)

    def columns(self, name: str, width: int) -> int:
        """Return the number of columns of a field where there are `width` tokens."""
        if name == "reference_rewards":
            return int(self.required(name).shape[1])
        return len(self.component_names) if name == "components" else width

    def rollouts(self) -> Self:
        """Return one row of each rollout, or of each role in it, in groups of those that are compared."""
        main = self if self.main is None else self.rows(self.main.nonzero().flatten())
        return main if main.peers is None else replace(main, group=main.peers)

    def outcomes(self) -> Tensor:
        """Return each trajectory's whole reward [B], KL in the reward included."""
        return self.row_sums(self.token_rewards)

    @staticmethod
    def row_sums(token_rewards: Tensor) -> Tensor:
        """Return the sum [B] of each row, made in float64: exact in any order, so equal rewards have equal sums."""
        return token_rewards.double().sum(-1).float()


@dataclass(kw_only=True)
class TrainBatch(Batch):
    """A `Batch` with all that a policy loss reads; a loss sees a micro-batch: some rows of it.

    Args:
        trainer_logps: [B,T] f32, as in `RolloutBatch`; NaN until the first pass of an update computes them.
        old_logps: [B,T] f32, as in `RolloutBatch`; the same tensor as `trainer_logps` where those are compared with.
        advantages: [B,T] f32, 0 outside the mask.
        accepted: [B,T] bool, the mask, less the tokens that the recipe rejects.
        selected: [B,T] bool, the tokens that the loss chose in `select`; none for a loss that does not.
        entropy: [B,T] f32, of the policy at each token in the first pass over its row; NaN until then.
    """

    trainer_logps: Tensor = field()  # a field without a default: the base's None would be inherited
    old_logps: Tensor = field()
    advantages: Tensor = field()
    accepted: Tensor = field()
    selected: Tensor
    entropy: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> TrainBatch:
        """Return a batch whose advantages are set, ready for updates.

        Log-probs of the trainer that nothing needed so far are NaN: the first pass of an update fills them in.

        Raises:
            ValueError: The advantages are not set.
        """
        values = {f.name: getattr(batch, f.name) for f in fields(Batch)}
        trainer = batch.rollout_logps.new_full(batch.tokens.shape, nan) if batch.trainer_logps is None else None
        values["advantages"] = batch.required("advantages")
        values["trainer_logps"] = batch.trainer_logps if trainer is None else trainer
        values["old_logps"] = values["trainer_logps"] if batch.old_logps is None else batch.old_logps
        values["accepted"] = batch.mask if batch.accepted is None else batch.accepted
        not_computed = batch.rollout_logps.new_full(batch.tokens.shape, nan)
        return cls(**values, selected=batch.mask.new_zeros(batch.mask.shape), entropy=not_computed)


class Reads(NamedTuple):
    """Statistics of each token's distribution to compute besides its log-prob.

    Args:
        entropy: Whether to compute the entropy.
        squares: Whether to compute the sum of squared probabilities.
        mean: Whether to compute the mean log-prob over the vocabulary.
        top: Number of most likely tokens whose ids and log-probs to compute.
        columns: Size of the vocabulary's beginning to which `top` is limited; None for all of it.
        ids: [B,T,K] i64, tokens whose log-probs are `top_logps`; None for the most likely ones.
        split: The ids that another vocabulary shares, and all others, [S] and [V-S] i64: after `ids`, or the `top` of
            the first, `top_logps` are those of the `top` of the others. None for one list.
        candidates: [B,T,K] i32, ids to which each token's distribution is restricted, then -1; None for no restriction.
        router: Whether to compute the router's load-balancing loss.
        expert_routes: [B,T,R,K], the experts that routers select (`rlkit.ops.routes`); None for their own choice.
    """

    entropy: bool = True
    squares: bool = False
    mean: bool = False
    top: int = 0
    columns: int | None = None
    ids: Tensor | None = None
    split: tuple[Tensor, Tensor] | None = None
    candidates: Tensor | None = None
    router: bool = False
    expert_routes: Tensor | None = None


class PolicyOutput(NamedTuple):
    """The output of the policy's forward pass, which a loss reads. Tensors are 0 outside the mask.

    Args:
        logps: [B,T] f32, log-probs of the tokens under the current policy, with a gradient.
        entropy: [B,T] f32, entropy of the distribution at each token.
        sum_pi_squared: [B,T] f32, sum of the distribution's squared probabilities, without a gradient.
        scores: [B,T] f32, of a reward model (`model.head: score`), whose `logps` are 0: the score of the conversation
            up to and including the token, with a gradient.
        mean_logps: [B,T] f32, mean log-prob over the vocabulary, with a gradient.
        top_ids: [B,T,K] i64, the most likely tokens, of the policy or of a teacher.
        top_logps: [B,T,K+1] f32, their log-probs, and last that of all other tokens together, with a gradient.
        router_loss: [] f32, the router's load-balancing loss over the tokens that predict those under the mask,
            with a gradient.
    """

    logps: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None
    scores: Tensor | None = None
    mean_logps: Tensor | None = None
    top_ids: Tensor | None = None
    top_logps: Tensor | None = None
    router_loss: Tensor | None = None


class LossOutput(NamedTuple):
    """A policy loss before aggregation: the training loop weights tokens, adds entropy and KL terms, and divides once.

    Args:
        per_token: [B,T] f32, loss of each token. It is finite also outside the mask, where it is ignored.
        metrics: Scalars by name, without a gradient, usually means over the mask. The run logs `policy/NAME`, the mean
            over all micro-batches, optimizer steps and ranks of a step, weighted by the number of chosen tokens, or of
            rows for a `SequenceLoss`.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]
