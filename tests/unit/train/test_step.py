"""What surrounds the update: learning rates, averages, the reference, metrics, and who waits for which scores."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.advantages import ReMax
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.interfaces.loss import Inputs
from rlkit.models.reference import Reference, WeightAverage
from rlkit.ops.statistics import Moments
from rlkit.recipe import VALIDATION_METRICS, Correction, Critic, KLReward
from rlkit.run import evaluate as evaluation
from rlkit.run.evaluate import evaluate_completions
from rlkit.testing import example_trajectory
from rlkit.train import metrics as metrics_module
from rlkit.train import phases, rl
from rlkit.train.metrics import Meter, describe_advantages, describe_rewards, describe_rollouts
from rlkit.train.models import Models, Placer, load_actor
from rlkit.train.phases import set_learning_rates, shape_rewards
from rlkit.train.rollouts import Rollouts, assign_groups, await_scores
from rlkit.types import Prompt, Sampling, Score, StopReason, Trajectory
from tests.unit.phases import Line, LocalRanks, Trained, Values, context, ready, recipe, scored


def metrics(meter: Meter, ranks: LocalRanks | None = None) -> dict[str, float]:
    return meter.result(ranks or LocalRanks())  # type: ignore[arg-type]


def test_metrics_are_combined_over_all_ranks() -> None:
    here, there = Meter(), Meter()
    here.mean("mean", 1.0, weight=3)
    there.mean("mean", torch.tensor(5.0))
    here.mean("nothing", 7.0, weight=0)
    here.means("many", [1.0, 2.0])
    there.means("many", [6.0])
    here.count("count", 2)
    here.count("count", 0.5)
    there.count("count", 1)
    here.max("max", -3.0)
    here.max("max", -5.0)
    there.max("max", torch.tensor(-4.0))
    here.correlate("pairs", Moments.from_pairs([1, 2], [4, 2]))
    there.correlate("pairs", Moments.from_pairs([3], [0]))
    there.correlate("constant", Moments.from_pairs([3, 3], [0, 1]))
    ranks = LocalRanks(2)
    ranks.gather_dp = lambda value: [value, there]  # type: ignore[method-assign]
    found = metrics(here, ranks)
    assert list(found.items()) == [("count", 3.5), ("many", 3), ("max", -3), ("mean", 2), ("pairs", pytest.approx(-1))]
    assert metrics(here)["mean"] == 1


def test_the_learning_rates_of_a_step() -> None:
    """Three steps of warm-up to 0.5: the second has two quarters of it."""
    critic = Trained(Values())
    made = context(recipe(train={"warmup_steps": 3}, critic=Critic(lr=0.1)), critic=critic)
    meter = Meter()
    set_learning_rates(made.recipe, made.models, 2, 1.0, meter)
    assert metrics(meter) == {"lr": 0.25, "critic/lr": 0.1}
    assert [group["lr"] for group in made.models.policy.optimizer.param_groups] == [0.25]
    assert [group["lr"] for group in critic.optimizer.param_groups] == [0.1]
    meter = Meter()
    made = context(recipe())
    set_learning_rates(made.recipe, made.models, 2, 1.0, meter)
    assert metrics(meter) == {"lr": 0.5}


def test_rewards_are_corrected_and_transformed() -> None:
    batch = scored(trainer_logps=-1.0 * scored().mask, ref_logps=-3.0 * scored().mask)
    meter = Meter()
    made = context(recipe(correction=Correction(), kl_reward=KLReward(coef=0.5)))
    shape_rewards(made.recipe, made.transforms, made.ranks, batch, meter)
    found = metrics(meter)
    assert set(found) == {"correction/weight_mean", "reward/kl_reward", "reward/kl_coef"}
    assert found["correction/weight_mean"] == pytest.approx(0.606531)  # exp(-0.5)
    assert batch.outcomes().tolist() == pytest.approx([1 - 2, -1, -3, 1 - 2])


def test_what_is_logged_of_a_batch() -> None:
    """Groups of 1, 0 and 0, 1: a deviation of sqrt(1/2). Advantages 1, -1, 2, -2 on 2, 1, 3 and 2 tokens."""
    meter = Meter()
    values, returns = torch.zeros(4, 4), ready().tokens.float()
    batch = ready(values=values, returns=returns)
    batch.advantages[0, 1] = torch.nan
    batch.rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    describe_rewards(batch, meter)
    describe_advantages(batch, meter)
    found = metrics(meter)
    assert found["reward/std"] == pytest.approx(0.5**0.5 / 2)
    assert found["groups/no_signal"] == 0.5
    alone = Meter()
    describe_rewards(batch.rows(torch.tensor([0, 2])), alone)
    assert "groups/no_signal" not in metrics(alone)  # one answer to a prompt is equal to no other
    assert found["advantage/not_finite"] == 1
    assert found["critic/explained_variance"] == pytest.approx(0, abs=1e-4)
    plain = Meter()
    describe_advantages(ready(), plain)
    found = metrics(plain)
    assert (found["advantage/max"], found["advantage/not_finite"]) == (2, 0)
    assert found["advantage/abs_mean"] == pytest.approx((2 * 1 + 1 * 1 + 3 * 2 + 2 * 2) / 8)
    assert "critic/explained_variance" not in found
    empty = Meter()
    describe_advantages(ready().rows(torch.arange(0)), empty)
    assert "advantage/max" not in metrics(empty)
    single = Meter()
    describe_advantages(ready(values=values, returns=returns).rows(torch.tensor([1])), single)
    assert "critic/explained_variance" not in metrics(single)  # of one token there is no variance


def test_metrics_of_advantages_do_not_depend_on_the_ranks() -> None:
    """One rank with all rows, or two: one with a row, whose returns are equal, and one with the others."""
    returns = ready().tokens.float()
    returns[0] = 7.0
    batch = ready(values=torch.arange(16.0).view(4, 4), returns=returns)
    whole, first, rest = Meter(), Meter(), Meter()
    describe_advantages(batch, whole)
    describe_advantages(batch.rows(torch.tensor([0])), first)
    describe_advantages(batch.rows(torch.tensor([1, 2, 3])), rest)
    ranks = LocalRanks()
    ranks.gather_dp = lambda value: [value, rest]  # type: ignore[method-assign]
    assert metrics(first, ranks) == pytest.approx(metrics(whole))


def test_a_phase_is_timed_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=iter([10.0, 12.5]).__next__))
    meter = Meter()
    with meter.timed("sample"):
        pass
    assert metrics(meter) == {"time/sample": 2.5}


def test_the_variance_that_a_critic_explains() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert Moments.from_tensors(returns + 5, returns).explained_variance == pytest.approx(1)
    assert Moments.from_tensors(torch.zeros(3), returns).explained_variance == pytest.approx(0, abs=1e-4)
    assert Moments.from_tensors(-returns, returns).explained_variance == pytest.approx(-3, abs=1e-3)
    constant = torch.ones(2)  # without variance, which is taken as 1e-5
    assert Moments.from_tensors(torch.tensor([0.0, 1.0]), constant).explained_variance == pytest.approx(1 - 0.5 / 1e-5)


def test_the_average_and_the_reference_follow_the_policy() -> None:
    """0.75 * 1 + 0.25 * 5 = 2; the reference moves every second step: 1 + 0.5 * (5 - 1) = 3."""
    actor, kept = Line(1.0), Line(1.0)
    models: Any = Models.__new__(Models)
    models.policy, models.average = Trained(actor), WeightAverage(actor, 0.75)
    models.reference = Reference.__new__(Reference)
    models.reference.actor = kept
    models._recipe = SimpleNamespace(reference=SimpleNamespace(refresh_every=2, mix=0.5))
    with torch.no_grad():
        actor.weight.fill_(5.0)
    models.update_ema_and_reference(1)
    assert (float(models.average.tensors[0]), float(kept.weight.detach())) == (2, 1)
    models.update_ema_and_reference(2)
    assert (float(models.average.tensors[0]), float(kept.weight.detach())) == (2.75, 3)
    with models.average.applied():
        assert float(actor.weight.detach()) == 2.75
    assert float(actor.weight.detach()) == 5
    models.average, models._recipe.reference = None, None
    models.update_ema_and_reference(4)
    assert float(kept.weight.detach()) == 3


def test_what_no_rollout_needs_leaves_the_device() -> None:
    models: Any = Models.__new__(Models)
    models.teachers = {}
    policy, critic = Trained(Line()), Trained(Values())
    reference: Any = Reference.__new__(Reference)
    reference.shared, reference.actor = False, Line()
    for trained in (policy, critic):
        trained.optimizer.optimizer = trained.optimizer  # type: ignore[attr-defined]
    models.policy, models.critic, models.reference = policy, critic, reference
    models.average = average = WeightAverage(policy.inner, 0.75)
    device = torch.device("cpu")
    found = models.offload(device, keep_policy=False)
    assert list(found.modules) == [critic.inner, reference.actor, average, policy.inner]
    assert list(found.optimizers) == [policy.optimizer, critic.optimizer]
    assert list(models.offload(device, keep_policy=True).modules) == [critic.inner, reference.actor, average]
    average.to("meta")  # as a module is moved
    assert [x.device.type for x in average.tensors] == ["meta"]
    reference.shared, models.critic, models.average = True, None, None  # the reference is the policy without adapters
    found = models.offload(device, keep_policy=True)
    assert (list(found.modules), list(found.optimizers)) == ([], [policy.optimizer])


@pytest.mark.parametrize(
    ("strategy", "rank", "empty"), [(FSDP2Strategy, 0, False), (FSDP2Strategy, 1, True), (object, 1, False)]
)
def test_weights_are_loaded_once_where_they_are_sharded(strategy: Any, rank: int, empty: bool) -> None:
    fabric: Any = SimpleNamespace(strategy=strategy(), global_rank=rank)
    assert Placer(fabric, LocalRanks()).empty is empty  # type: ignore[arg-type]


def test_a_policy_for_rollouts_alone_is_placed() -> None:
    placed: list[Any] = []
    placer: Any = SimpleNamespace(empty=False, frozen=placed.append)
    assert [load_actor(recipe(), placer)] == placed


def test_a_step_computes_scores_updates_and_syncs_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three answers the second has no score; the others differ, so that there is something to learn."""
    events: list[str] = []
    sampled = [trajectory(0, 2, 1.0), trajectory(1, 1, None), trajectory(0, 3, 0.0)]
    made = context(recipe(advantage=ReMax()))
    made.models.update_ema_and_reference = lambda step: events.append(f"follow {step}")
    made.service.sync_weights = lambda: events.append(f"sync {made.service.version}")
    made.service.engine = SimpleNamespace(health=lambda: {"queue": 3.0})
    logps, update = rl.compute_logps, phases.update_models

    def noted(name: str, function: Any) -> Any:
        return lambda *args: (events.append(name), function(*args))[1]

    rollouts = Rollouts(sampled, sampled, sampled, [[0, 1, 2]], greedy={0: 0.25})
    monkeypatch.setattr(rl, "compute_logps", noted("log-probs", logps))
    monkeypatch.setattr(rl, "await_scores", noted("scores", lambda *_: [0, 2]))
    monkeypatch.setattr(rl, "record_outcome", noted("outcome", lambda *_: None))
    monkeypatch.setattr(phases, "update_models", noted("update", update))
    result = rl.rl_step(made, 4, noted("sample 4", lambda data, service, number, meter: rollouts))
    assert events == ["sample 4", "log-probs", "scores", "outcome", "update", "follow 4", "sync 2"]
    assert result.rollouts is rollouts
    assert result.batch.rewards.tolist() == [1, 0]
    assert result.batch.greedy_rewards is not None
    assert result.batch.greedy_rewards.tolist() == [0.25, 0.25]
    assert sampled[2].credit["advantages"] == pytest.approx([0, 0, -0.25, -0.25, -0.25])
    assert sampled[2].credit["entropy"] == [0, 0, 1, 1, 1]  # before the update
    assert sampled[2].credit["trainer_logps"] == [0, 0, *sampled[2].tokens[2:]]
    assert [t.credit.get("greedy_reward") for t in sampled] == [0.25, None, 0.25]
    assert sampled[1].credit == {}
    found = result.metrics
    assert {"time/sample", "time/logps", "time/score", "time/update", "time/sync"} <= set(found)
    assert (found["version"], found["engine/queue"], found["lr"], found["update/steps"]) == (2, 3, 0.5, 1)
    assert found["staleness/k3"] > 0  # tokens of version 0, trained on by version 1
    assert found["time/tokens_per_second"] == 0  # nothing was sampled here


def trajectory(group: int, length: int = 1, reward: float | None = 1.0, error: str | None = None) -> Trajectory:
    made = example_trajectory("x" * length)
    made.group, made.error = group, error
    made.turn_rewards = [0.0]
    if error is None:
        made.score = Score(reward, {"accuracy": 0.5, "form": 0.25}, error=None if reward is not None else "away")
    return made


def test_what_is_logged_of_rollouts() -> None:
    cut = trajectory(1, 3, 0.0)
    cut.stop, cut.counts, cut.turn_rewards = StopReason.LENGTH, {"tool_calls": 2}, [0.0, 0.0, 0.0]
    assert cut.score is not None
    cut.score.ungradable = True
    failed, missing = trajectory(0, error="broke"), trajectory(2, 2, None)
    meter = Meter()
    describe_rollouts([trajectory(0), cut, failed, missing, trajectory(2)], True, meter)
    found = metrics(meter)
    assert found == {
        "accuracy": 0.5,
        "conversation/tool_calls": 2,
        "conversation/turns": (1 + 3 + 1 + 1 + 1) / 5,
        "reward/failed": 1,
        "reward/no_opinion": 0,
        "reward/form": 0.25,
        "reward/groups_dropped": 1,
        "reward/max": 1,
        "reward/mean": pytest.approx(2 / 3),
        "reward/min": 0,
        "reward/ungradable": 1,
        "rollout/failed": 1,
        "rollout/length": (1 + 3 + 1 + 2 + 1) / 5,
        "rollout/length_max": 3,
        "rollout/samples": 5,
        "rollout/stopped": 4 / 5,
        "rollout/tokens": 8,
    }


def service(ranks: LocalRanks | None = None) -> Any:
    rollout = SimpleNamespace(group_size=2)
    sampled_in = SimpleNamespace(rollout=rollout, loss=SimpleNamespace(inputs=Inputs.REWARDS), reward=1)
    counts = SimpleNamespace(growth=dict)
    return SimpleNamespace(
        ranks=ranks or LocalRanks(), wait=lambda work: work.close(), recipe=sampled_in, reward_counts=counts
    )


def test_groups_in_which_a_reward_failed_are_left_out() -> None:
    good, bad, worse, broken = trajectory(0), trajectory(1), trajectory(1, 1, None), trajectory(0, error="broke")
    rollouts = Rollouts([good, bad, worse, broken], [good, bad, worse], [good, bad, worse], [[0, 1, 2]])
    meter = Meter()
    assert await_scores(service(), rollouts, meter) == [0]
    assert rollouts.errors == Counter({"away": 1, "broke": 1})
    assert rollouts.all == [broken, good, bad, worse]
    assert metrics(meter)["reward/failed"] == 1


def test_groups_without_a_greedy_reward_are_left_out() -> None:
    both = [trajectory(0), trajectory(1)]
    rollouts = Rollouts(list(both), both, both, [[0, 1]], greedy={1: 0.25})
    assert await_scores(service(), rollouts, Meter()) == [1]
    assert rollouts.greedy == {1: 0.25}


def test_scores_and_greedy_rewards_move_with_their_trajectories() -> None:
    """What this rank samples another trains on, and the other way round."""
    mine, theirs = trajectory(0), trajectory(1)
    theirs.score = None
    ranks = LocalRanks(2)
    sent: list[Any] = []

    def exchange(outgoing: Any) -> list[Any]:
        sent.extend(outgoing)
        return [(Score(0.75), 0.5)]

    ranks.exchange = exchange  # type: ignore[method-assign]
    rollouts = Rollouts([mine], [mine], [theirs], [[], [0]], greedy={0: 1.0})
    assert await_scores(service(ranks), rollouts, Meter()) == [0]
    assert sent == [[], [(mine.score, 1.0)]]
    assert theirs.score == Score(0.75)
    assert rollouts.greedy == {0: 1.0, 1: 0.5}
    assert rollouts.all == [theirs]


def test_whole_groups_are_divided_by_their_tokens() -> None:
    """Here groups 0 (two rows of 3 tokens) and 1 (12); on the other rank 2 (4) and 3 (2): 18 and 6 become 12 and 12."""
    sampled = [trajectory(0), trajectory(1, 10), trajectory(0)]
    ranks = LocalRanks(2)
    ranks.gather_dp = lambda value: [value, {2: 4, 3: 2}]  # type: ignore[method-assign]
    meter = Meter()
    assert assign_groups(ranks, sampled, meter) == [[1], [0, 2]]  # type: ignore[arg-type]
    assert metrics(meter) == {"imbalance/before": 18 * 2 / 24, "imbalance/after": 1}
    alone = Meter()
    assert assign_groups(LocalRanks(), sampled, alone) == [[0, 1, 2]]  # type: ignore[arg-type]
    assert metrics(alone) == {}


def test_validation_answers_greedily_and_by_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sampling, int, int]] = []
    made = recipe()
    assert made.validation is not None
    made.validation.samples = 3

    class Service:
        recipe, ranks, entered = made, LocalRanks(), 0

        def engine_on_device(self) -> Any:
            self.entered += 1
            return torch.no_grad()

        def shard_for_rank(self, items: list[Any]) -> list[Any]:
            return items[:1]

        def conversation_setup(self, sampling: Sampling, samples: int, step: int) -> int:
            asked.append((sampling, samples, step))
            return samples

        def sample(self, work: list[Trajectory]) -> list[Trajectory]:
            return work

    def collect(samples: int, prompts: list[tuple[int, Prompt]], finish: Any) -> list[Trajectory]:
        assert [group for group, _ in prompts] == [0]
        return [trajectory(0, samples, reward=float(samples)) for _ in range(samples)]

    monkeypatch.setattr(evaluation, "collect", collect)
    fake: Any = Service()
    found = evaluate_completions(fake, [Prompt("a", []), Prompt("b", [])])
    measured = found.metrics
    assert [len(t.text) for t in found.trajectories] == [1, 3, 3, 3]
    assert measured["reward"] == 1
    assert measured["sampled_reward"] == 3
    assert measured["sampled_length"] == 3
    assert {name for name in measured if not name.startswith("sampled_")} == {*VALIDATION_METRICS, "reward/form"}
    assert [(s.temperature, s.max_tokens, n, step) for s, n, step in asked] == [(0, 8, 1, 0), (1, 8, 3, 0)]
    assert fake.entered == 1
    made.validation.samples = 0
    assert not any(name.startswith("sampled_") for name in evaluate_completions(fake, [Prompt("a", [])]).metrics)
