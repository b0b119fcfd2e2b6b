"""Updates by hand: the order of mini-batches, accumulation, counts over ranks, and what is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.base.errors import PartError
from rlkit.interfaces.loss import Inputs, TokenLoss
from rlkit.losses import DPO, ClipLoss, PolicyGradient
from rlkit.models.packing import PackedPasses
from rlkit.ops.random import permutation
from rlkit.recipe import Critic, KLLoss, Rejection, Train
from rlkit.train.metrics import Meter
from rlkit.train.objective import LossShare, Objective
from rlkit.train.update import (
    MiniBatch,
    Term,
    Update,
    accumulate_and_step,
    log_share,
    log_update,
    mini_batches,
    record_logps,
    select_tokens,
)  # fmt: skip
from rlkit.types import LossOutput, PolicyOutput, TrainBatch
from tests.unit.phases import (
    Line,
    LocalRanks,
    Trained,
    Values,
    context,
    ready,
    recipe,
    scored,
    update_critic,
    update_models,
    update_policy,
)

ROWS = [0, 1, 2, 3]
GRADIENT = ((2 + 3) - 4 + 2 * (5 + 1 + 2) - 2 * (3 + 2)) / 8
"""Minus the derivative of the loss -mean(A w token) over all rows: what is added to the weight."""


def train(**changes: Any) -> Train:
    return Train(**{"steps": 9, "prompts_per_step": 6, "minibatches": 2, "epochs": 2, "seed": 3, **changes})


def metrics(meter: Meter) -> dict[str, float]:
    return meter.result(LocalRanks())  # type: ignore[arg-type]


def test_mini_batches_divide_all_groups_in_each_epoch() -> None:
    found = list(mini_batches(train(), 5, train().prompts_per_step))
    assert [len(groups) for groups in found] == [3, 3, 3, 3]
    assert found[0] | found[1] == found[2] | found[3] == set(range(6))
    for epoch in (0, 1):
        order = permutation(f"minibatches/3/5/{epoch}", 6).tolist()
        assert found[2 * epoch : 2 * epoch + 2] == [set(order[:3]), set(order[3:])]
    assert [len(groups) for groups in mini_batches(train(epochs=1), 1, 5)] == [3, 2]


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    many = {"prompts_per_step": 20}
    one = list(mini_batches(train(**many), 5, 20))
    assert one == list(mini_batches(train(**many), 5, 20))
    assert one[:2] != one[2:]
    assert one != list(mini_batches(train(**many), 6, 20))
    assert one != list(mini_batches(train(seed=4, **many), 5, 20))


def test_gradients_are_exchanged_in_the_last_pass() -> None:
    module = Trained(Line(2.0))

    def loss_of(micro: list[int]) -> Tensor:
        return module.module.weight * (len(micro) or 100)

    found = accumulate_and_step(module, [Term("policy", [[0, 1, 2], [3], []], loss_of)])
    one = ["pass", "backward", "end"]
    assert module.events == [*one, *one, "last pass", "backward", "end", "clip"]
    assert found.losses["policy"] == pytest.approx(2 * 4)  # not the dummy row's 200
    assert found.norm.item() == pytest.approx(104)
    assert module.weight == pytest.approx(2 - 104)
    assert module.module.weight.grad is None


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(odd: float) -> None:
    module = Trained(Line(2.0))
    found = accumulate_and_step(module, [Term("policy", [[0]], lambda _: module.module.weight * odd)])
    assert not found.norm.isfinite()
    assert module.weight == 2
    assert module.module.weight.grad is None


def test_an_optimizer_step_is_logged_once_over_all_ranks() -> None:
    meter = Meter()
    log_update(Update(torch.tensor(3.0), {"policy": 0.25}), meter, "policy", ranks=2)
    log_update(Update(torch.tensor(5.0), {"policy": 0.75}), meter, "policy", ranks=2)
    log_update(Update(torch.tensor(torch.inf), {"critic": 1.0}), meter, "critic", ranks=2)
    assert meter.result(LocalRanks(2)) == {  # type: ignore[arg-type]
        "policy/loss": (0.5 + 1.5) / 2,
        "grad_norm": 4,
        "critic/loss": 2,
        "critic/grad_norm": torch.inf,
        "update/not_finite": 1,
        "update/steps": 2,
        "critic/steps": 0,
    }


def test_metrics_count_by_their_tokens() -> None:
    meter, batch = Meter(), ready()
    log_share(LossShare(torch.zeros(()), {"kl": torch.tensor(1.0)}), batch.rows(torch.tensor([0])), meter, "policy")
    log_share(LossShare(torch.zeros(()), {"kl": torch.tensor(5.0)}), batch.rows(torch.tensor([1])), meter, "policy")
    assert metrics(meter) == {"policy/kl": (2 * 1 + 1 * 5) / 3}


@given(limit=st.integers(1, 20), order=st.permutations(ROWS))
def test_accumulation_gives_the_step_of_the_unsplit_batch(limit: int, order: list[int]) -> None:
    made = context(recipe(train={"max_tokens_per_micro_batch": limit}))
    meter = Meter()
    update_policy(made, MiniBatch(ready(), order), meter)
    assert made.models.policy.weight == pytest.approx(1 + GRADIENT)
    found = metrics(meter)
    assert found["policy/loss"] == pytest.approx(-GRADIENT)
    assert found["grad_norm"] == pytest.approx(abs(GRADIENT))
    assert found["policy/entropy"] == pytest.approx(1)
    assert (found["update/steps"], found["update/not_finite"]) == (1, 0)


def paired(**fields: Any) -> TrainBatch:
    """Make the batch with a reference whose log-probs are 0."""
    return ready(ref_logps=torch.zeros(4, 4), **fields)


FIRST, SECOND = 0.1 / (1 + math.exp(0.1)), -0.3 / (1 + math.exp(-0.3))
"""Minus the derivative of -log sigmoid(0.1 w (sum of the better row - sum of the worse)): 5 - 4 and 5 - 8."""


@given(limit=st.integers(1, 20), order=st.permutations(ROWS), packed=st.booleans())
def test_a_loss_of_groups_gives_the_step_of_the_unsplit_batch(limit: int, order: list[int], packed: bool) -> None:
    made = context(recipe(loss=DPO(), train={"max_tokens_per_micro_batch": limit}))
    made.models.policy.inner.passes = PackedPasses(None)
    made.models.policy.inner.passes.packed = packed
    meter = Meter()
    update_policy(made, MiniBatch(paired(), order), meter)
    assert made.models.policy.weight == pytest.approx(1 + (FIRST + SECOND) / 2)
    found = metrics(meter)
    assert found["policy/loss"] == pytest.approx((math.log1p(math.exp(-0.1)) + math.log1p(math.exp(0.3))) / 2)
    assert found["policy/margin"] == pytest.approx((0.1 - 0.3) / 2)
    assert found["policy/preference_accuracy"] == 0.5
    assert found["policy/chosen_logps"] == pytest.approx((5 + 5) / 2)
    assert found["policy/rejected_logps"] == pytest.approx((4 + 8) / 2)


@pytest.mark.parametrize("limit", [1, 100])
def test_groups_of_equal_rewards_count_nowhere(limit: int) -> None:
    made = context(recipe(loss=DPO(), train={"max_tokens_per_micro_batch": limit}))
    batch, meter = paired(rewards=torch.tensor([1.0, 0.0, 1.0, 1.0])), Meter()
    update_policy(made, MiniBatch(batch, ROWS, record=True), meter)
    assert made.models.policy.weight == pytest.approx(1 + FIRST)
    assert metrics(meter)["policy/preference_accuracy"] == 1
    assert not batch.trainer_logps.isnan().any()  # what is logged is of all rows
    unknown = Meter()
    update_policy(made, MiniBatch(paired(rewards=torch.ones(4)), ROWS), unknown)
    assert metrics(unknown) == {"update/empty": 1}


def test_groups_count_over_all_ranks() -> None:
    """A second rank has as many pairs: this one's share of the gradient is half as large."""
    made = context(recipe(loss=DPO()), ranks=LocalRanks(2))
    update_policy(made, MiniBatch(paired(), ROWS), Meter())
    assert made.models.policy.weight == pytest.approx(1 + (FIRST + SECOND) / 4)


class Watched(PolicyGradient):
    """Notes how many rows it is called with, and whether they are differentiated."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        self.calls.append((len(batch), torch.is_grad_enabled()))
        return LossOutput(-batch.advantages * out.logps, {})


class WatchedTokens(TokenLoss):
    """The same loss, whose class does not say that it is 0 without an advantage."""

    inputs = PolicyGradient.inputs

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        self.calls.append((len(batch), torch.is_grad_enabled()))
        return LossOutput(-batch.advantages * out.logps, {})


@pytest.mark.parametrize("zero", [[], [2], [0, 1], ROWS])
def test_rows_without_an_advantage_need_no_backward_pass(zero: list[int]) -> None:
    """The step is the same, and so is what is logged and recorded."""
    found = []
    for skips in (True, False):
        loss: Watched | WatchedTokens = Watched() if skips else WatchedTokens()
        meter, batch = Meter(), ready()
        batch.advantages[zero] = 0.0
        made = context(recipe(loss=loss))
        update_policy(made, MiniBatch(batch, ROWS, record=True), meter)
        seen = {grad: sum(n for n, with_grad in loss.calls if with_grad == grad) for grad in (True, False)}
        assert seen == ({True: 4 - len(zero), False: len(zero)} if skips else {True: 4, False: 0})
        found.append((made.models.policy.weight, metrics(meter), batch.trainer_logps.tolist()))
    assert found[0] == found[1]


def test_a_loss_of_groups_sees_complete_groups() -> None:
    loss, batch = Watched(), ready()
    loss.inputs |= Inputs.GROUPS  # type: ignore[misc]
    batch.advantages[[0, 3]] = 0.0
    update_policy(context(recipe(loss=loss, train={"max_tokens_per_micro_batch": 1})), MiniBatch(batch, ROWS), Meter())
    assert loss.calls == [(2, True), (2, True)]


class Wrong(PolicyGradient):
    def usable_rows(self, batch: TrainBatch) -> Tensor:
        return batch.mask


def test_usable_rows_of_another_shape_name_the_loss() -> None:
    with pytest.raises(PartError, match=r"Wrong.*: `usable_rows` selected torch.bool \(4, 4\), expected bool \(4,\)"):
        update_policy(context(recipe(loss=Wrong())), MiniBatch(ready(), ROWS), Meter())


@pytest.mark.parametrize("more", [{"kl_loss": KLLoss()}, {"train": {"entropy_coef": 0.1}}])
def test_rows_without_advantage_count_if_the_loss_uses_them(more: dict[str, Any]) -> None:
    loss, batch = Watched(), ready()
    batch.advantages[:] = 0.0
    batch.ref_logps = batch.old_logps
    update_policy(context(recipe(loss=loss, **more)), MiniBatch(batch, ROWS), Meter())
    assert loss.calls == [(4, True)]


def test_the_denominator_counts_the_tokens_of_all_ranks() -> None:
    """A second rank has as many tokens: this one's share of the gradient is half as large."""
    made = context(recipe(), ranks=LocalRanks(2))
    update_policy(made, MiniBatch(ready(), ROWS), Meter())
    assert made.models.policy.weight == pytest.approx(1 + GRADIENT / 2)


def test_only_the_mini_batchs_rows_count() -> None:
    made = context(recipe(temperature=2.0))
    batch = ready()
    update_policy(made, MiniBatch(batch, [1, 3]), Meter())  # (-4 - 2 (3 + 2)) / 2 / 3 tokens
    assert batch.trainer_logps.isnan().all()  # no log-probs are recorded unless they are asked for
    assert made.models.policy.weight == pytest.approx(1 - 14 / 2 / 3)
    assert {temperature for _, temperature in made.models.actor.seen} == {2.0}


def test_rejected_tokens_in_and_out_of_the_denominator() -> None:
    """Of row 1 nothing is accepted: 3 of its 4 tokens' worth stays, over 7 or over 8 tokens."""
    accepted = ready().mask.clone()
    accepted[1] = False
    for keep, tokens in ((False, 7), (True, 8)):
        made = context(recipe(rejection=Rejection(keep_in_denominator=keep)))
        update_policy(made, MiniBatch(ready(accepted=accepted), ROWS), Meter())
        assert made.models.policy.weight == pytest.approx(1 + (GRADIENT * 8 + 4) / tokens)


def test_a_mini_batch_without_tokens_is_no_update() -> None:
    made, meter = context(recipe(), ranks=LocalRanks(2)), Meter()
    update_policy(made, MiniBatch(ready(accepted=torch.zeros(4, 4, dtype=torch.bool)), ROWS), meter)
    assert made.models.policy.events == []
    assert meter.result(LocalRanks(2)) == {"update/empty": 1}  # type: ignore[arg-type]


def test_a_rank_without_rows_joins_the_passes_of_others() -> None:
    ranks = LocalRanks()
    ranks.all_reduce_sum = lambda x: x + 8  # type: ignore[method-assign]
    ranks.all_reduce_max = lambda value: value + 2  # type: ignore[method-assign]
    made = context(recipe(), ranks=ranks)
    update_policy(made, MiniBatch(ready(), []), Meter())
    assert made.models.policy.events.count("backward") == 2
    assert [tokens for tokens, _ in made.models.actor.seen] == [[[0, 0]]] * 4  # two of rows without an advantage
    assert made.models.policy.weight == 1


def test_the_first_steps_loss_must_be_finite() -> None:
    made, meter = context(recipe(loss=Broken())), Meter()
    update_policy(made, MiniBatch(ready(), ROWS, record=True), meter)
    assert made.models.policy.weight == 1
    assert metrics(meter)["update/not_finite"] == 1
    made.service.version = 0
    with pytest.raises(PartError, match="Broken.*: `__call__` returned a loss that is not finite"):
        update_policy(made, MiniBatch(ready(), ROWS, record=True), Meter())


class Broken(PolicyGradient):
    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(out.logps * torch.nan, {})


@pytest.mark.parametrize("limit", [2, 100])
def test_a_first_pass_compares_with_itself_without_a_gradient(limit: int) -> None:
    """At a ratio of 1 the clipped loss has the gradient of the plain one."""
    made = context(recipe(loss=ClipLoss(), train={"max_tokens_per_micro_batch": limit}))
    batch = ready()
    update_policy(made, MiniBatch(batch, ROWS, record=True), Meter())
    assert made.models.policy.weight == pytest.approx(1 + GRADIENT)
    assert torch.equal(batch.trainer_logps, (batch.tokens * batch.mask).float())
    assert not batch.trainer_logps.requires_grad


@pytest.mark.parametrize("engine", [False, True])
def test_the_log_probs_of_the_first_pass_are_kept(engine: bool) -> None:
    whole = TrainBatch.of(replace(scored(), advantages=torch.zeros(4, 4)))
    if engine:
        whole.old_logps = whole.rollout_logps
    rows = [2, 0]
    part = whole.rows(torch.tensor(rows))
    logps = torch.arange(8.0).reshape(2, 4)
    record_logps(whole, rows, part, logps)
    assert whole.trainer_logps[2].tolist() == [0, 1, 2, 3]
    assert whole.trainer_logps[0].tolist() == [4, 5, 6, 7]
    assert whole.trainer_logps[[1, 3]].isnan().all()
    assert part.trainer_logps is logps
    assert (part.old_logps is logps) is not engine
    assert torch.equal(whole.old_logps[0], whole.rollout_logps[0] if engine else logps[1])


class Selects(PolicyGradient):
    """Selects tokens above 2; only these count."""

    seen: Any = None

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        assert not logps.requires_grad
        self.seen = (logps, batch)
        return batch.mask & (batch.tokens > 2)

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(-batch.advantages * out.logps * batch.selected, {})


def select(made: Any, mini_batch: MiniBatch) -> None:
    """Have a run's loss select tokens of a mini-batch."""
    objective = Objective.of(made.recipe, made.service.version)
    select_tokens(made.data, made.models.actor, made.ranks, objective, mini_batch)


def test_a_loss_selects_among_the_rows_of_the_mini_batch() -> None:
    loss = Selects()
    made, batch = context(recipe(loss=loss)), ready()
    select(made, MiniBatch(batch, [3, 1], record=True))
    assert batch.selected.tolist() == [
        [False] * 4,
        [False, True, False, False],
        [False] * 4,
        [False, True, False, False],
    ]
    logps, part = loss.seen
    assert logps.tolist() == [[0, 3, 2], [0, 4, 0]]
    assert part.old_logps.tolist() == part.trainer_logps.tolist() == logps.tolist()
    assert batch.old_logps[[3, 1], :3].tolist() == logps.tolist()
    assert batch.trainer_logps[0].isnan().all()
    again = ready(trainer_logps=torch.zeros(4, 4), old_logps=torch.zeros(4, 4))
    select(made, MiniBatch(again, [3, 1]))
    assert not again.trainer_logps.any()


def test_a_loss_selects_by_log_linear_old_log_probs() -> None:
    """Trained from version 1, tokens of version 0 are halfway between the engine's -0.5 and the policy's token."""
    loss = Selects()
    select(context(recipe(loss=loss, train={"old_logps": "loglinear"})), MiniBatch(ready(), [0]))
    assert loss.seen[1].old_logps.tolist() == [[0, 0.75, 1.25]]


def test_what_is_selected_changes_the_update() -> None:
    made = context(recipe(loss=Selects()))
    update_policy(made, MiniBatch(ready(), ROWS), Meter())
    assert made.models.policy.weight == pytest.approx(1 + (3 - 4 + 2 * 5 - 2 * 3) / 8)


def test_a_selection_of_another_type_names_the_loss() -> None:
    class Wrong(Selects):
        def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
            return logps

    with pytest.raises(PartError, match="Wrong.*: `select` selected torch.float32"):
        select(context(recipe(loss=Wrong())), MiniBatch(ready(), ROWS))


@given(limit=st.integers(1, 20))
def test_the_critics_update_by_hand(limit: int) -> None:
    """v = w token with w = 1, R = 0: the loss is 0.5 sum(token^2) / n, its gradient sum(token^2) / n."""
    squares = 4 + 9 + 16 + 25 + 1 + 4 + 9 + 4
    critic, meter = Trained(Values()), Meter()
    made = recipe(critic=Critic(clip=None), train={"max_tokens_per_micro_batch": limit})
    batch = ready(values=ready().tokens.float(), returns=torch.zeros(4, 4))
    update_critic(context(made, critic=critic), batch, ROWS, meter)
    assert critic.weight == pytest.approx(1 - squares / 8, rel=1e-5)
    found = metrics(meter)
    assert found["critic/loss"] == pytest.approx(0.5 * squares / 8)
    assert found["critic/grad_norm"] == pytest.approx(squares / 8)
    assert (found["critic/steps"], found["critic/clip_fraction"]) == (1, 0)
    assert critic.module.valued == 8  # no prompt, no padding


def test_a_clipped_value_has_no_gradient() -> None:
    """Old values of 10 and a clip of 1: all are at 9, worse than what they are, and do not move."""
    critic, meter = Trained(Values()), Meter()
    batch = ready(values=torch.full((4, 4), 10.0), returns=torch.zeros(4, 4))
    update_critic(context(recipe(critic=Critic(clip=1.0)), critic=critic), batch, ROWS, meter)
    assert critic.weight == 1
    assert metrics(meter)["critic/clip_fraction"] == 1


def test_the_critic_skips_steps_without_tokens() -> None:
    critic = Trained(Values())
    batch = ready(values=torch.zeros(4, 4), returns=torch.zeros(4, 4))
    update_critic(context(recipe(critic=Critic()), critic=critic), batch, [], Meter())
    assert critic.events == []
    shared = context(recipe(critic=Critic(clip=None)), ranks=LocalRanks(2), critic=critic)
    update_critic(shared, batch, [1], Meter())
    assert critic.weight == pytest.approx(1 - 16 / 2)  # this rank's share of two tokens


def test_a_step_keeps_the_log_probs_before_its_updates() -> None:
    made = context(recipe(train={"epochs": 2, "minibatches": 2, "old_logps": "rollout"}))
    batch, meter = scored(advantages=ready().advantages, old_logps=scored().rollout_logps), Meter()
    trained = update_models(made, batch, 1, meter)
    assert metrics(meter)["update/steps"] == 4
    [first] = [sorted(groups) for groups in list(mini_batches(made.recipe.train, 1, made.recipe.groups_per_step))[:1]]
    rows = [i for i, group in enumerate([0, 0, 1, 1]) if group in first]
    others = [i for i in range(4) if i not in rows]
    expected = (trained.tokens * trained.mask).float()[rows]
    assert torch.equal(trained.trainer_logps[rows].nan_to_num(), expected)
    assert trained.trainer_logps[others].isnan().all()
    assert torch.equal(trained.old_logps, trained.rollout_logps)


def test_entropies_are_those_of_the_first_pass_over_a_row() -> None:
    """The policy's entropy is its weight, 1 at first; a second epoch changes nothing of what is kept."""
    kept = []
    for epochs in (1, 2):
        made = context(recipe(train={"epochs": epochs, "minibatches": 2}))
        trained = update_models(made, scored(advantages=ready().advantages), 1, Meter())
        assert trained.entropy is not None
        kept.append(trained.entropy.where(trained.mask, torch.zeros(())))
    [first, second] = [
        sorted(groups) for groups in list(mini_batches(made.recipe.train, 1, made.recipe.groups_per_step))[:2]
    ]
    of_group = {group: kept[0][trained.mask & (trained.group == group)[:, None]] for group in (0, 1)}
    assert (of_group[first[0]] == 1).all()
    assert len(of_group[second[0]].unique()) == 1
    assert (of_group[second[0]] != 1).all()
    assert torch.equal(*kept)


def test_known_log_probs_stay_as_they_are() -> None:
    known = torch.full((4, 4), -7.0)
    batch = scored(advantages=ready().advantages, trainer_logps=known, old_logps=known)
    assert update_models(context(recipe()), batch, 1, Meter()).trainer_logps is known
    assert (known == -7).all()


@pytest.mark.parametrize(("step", "policy_steps"), [(1, 0), (2, 0), (3, 1)])
def test_the_policy_waits_for_the_critic(step: int, policy_steps: int) -> None:
    critic = Trained(Values(0.5))
    made = context(recipe(critic=Critic(policy_delay_steps=2)), critic=critic)
    batch = scored(advantages=ready().advantages, values=torch.zeros(4, 4), returns=torch.ones(4, 4))
    meter = Meter()
    update_models(made, batch, step, meter)
    found = metrics(meter)
    assert found["critic/steps"] == 1
    assert found.get("update/steps", 0) == policy_steps
