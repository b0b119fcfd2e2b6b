"""Fields that plugins declare, from those who fill them to the batch, and rewards by token."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rlkit.advantages import GAE, GPG, GRPO, OPO, RAE, RLOO, MaxRL, OptimalTokenBaseline, PassK, ReinforcePP, ReMax
from rlkit.base.errors import PartError, RecipeError
from rlkit.engines import Recorded
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.fields import Field, Filled, assemble, declaration_problem
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Reply
from rlkit.interfaces.reward import RewardFunction
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.losses import CrossEntropy
from rlkit.ops.routes import Routers
from rlkit.recipe import Mixture, checks
from rlkit.recipe.check_sources import check_mixtures
from rlkit.records import fields
from rlkit.records.rows import as_row, read_rows
from rlkit.rewards import Composite, ExactReward, Router
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.collect import collect
from rlkit.rollout.conversation import Limits
from rlkit.rollout.participants import Participants
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.run.kept import KeptRollouts
from rlkit.testing import FakeEngine, example_trajectory
from rlkit.train.metrics import Meter, describe_rollouts
from rlkit.train.rollouts import Rollouts, select_scored, with_branches
from rlkit.types import AgentSpan, Batch, Completion, JsonObject, Prompt, Request, Score, StopReason, Trajectory
from tests.unit.phases import LocalRanks, recipe
from tests.unit.rollout.test_conversation import call, hold, tools
from tests.unit.rollout.test_rollout import PROMPTS, nothing, setup_of

ROUTES = Field("routes", "int16", "token", (2,), padding=-1)
EFFORT = Field("effort", by="turn")
LEVEL = Field("level", "uint8", "row")
BY_NAME = {field.name: field for field in (ROUTES, EFFORT, LEVEL)}


@pytest.mark.parametrize("options", [{"name": "a b"}, {"name": "X"}, {"dtype": "float64"}, {"by": "step"}], ids=str)
def test_a_wrong_declaration_says_what_is_expected(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(RecipeError, match=rf"declares Field\(.*{name}={value!r}.*, expected a name of lower-case"):
        Field(**{"name": "x", **options})


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (Field("x"), [1.0, 2.0], r"shape \(2,\), expected 3 of shape \(\) by token"),
        (Field("x"), [[1.0], [2.0], [3.0]], r"shape \(3, 1\), expected 3 of shape \(\)"),
        (Field("x"), [0.0, nan, 1.0], "with nan, expected finite numbers of float32"),
        (Field("x"), [0.0, 1e39, 1.0], "expected finite numbers of float32"),
        (Field("x", "uint8"), [0, 256, 1], "with 256, expected finite numbers of uint8"),
        (Field("x", "int64"), [0, 0.5, 1], "with 0.5, expected finite numbers of int64"),
        (Field("x", "int64"), [0, 1 << 70, 1], "expected numbers"),
        (Field("x"), "abc", "with 'abc', expected numbers"),
        (Field("x"), None, "with None, expected numbers"),
        (Field("x"), 5, r"shape \(\), expected 3 of shape"),
    ],
)
def test_wrong_values_are_refused(field: Field, values: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"filled the field 'x' {message}|filled the field 'x' with .*{message}"):
        field.tensor(values, (3,))


def test_a_shape_may_be_a_list() -> None:
    assert Field("x", shape=[2, 3]) == Field("x", shape=(2, 3))  # type: ignore[arg-type]


def test_a_tensor_has_memory_of_its_own() -> None:
    """A view would be sent to other ranks with all that it is a view of."""
    routes = torch.arange(1000, dtype=torch.int16).reshape(500, 2)
    tensor = ROUTES.tensor(routes[3:5], (2,))
    assert (tensor.tolist(), tensor.dtype) == ([[6, 7], [8, 9]], torch.int16)
    assert tensor.untyped_storage().nbytes() == 8


def short(values: list[int]) -> torch.Tensor:
    """Return each value twice, as a row of routes."""
    return torch.tensor([[value, value] for value in values], dtype=torch.int16)


def test_a_token_keeps_what_was_filled_first() -> None:
    """The engine routes a prompt of 2 and samples 2 tokens, the last of which it has not read: its row is padding.

    The next turn's request, of 5 tokens, routes all of them again, with other weights, and one sampled token.
    """
    first = Filled({"routes": short([1, 2, 3, -1])}, tokens=4)
    second = Filled({"routes": short([7, 8, 9, 4, 5, -1])}, tokens=6)
    routes = assemble(BY_NAME, [first, second], tokens=7, turns=2)["routes"]
    assert routes[:, 0].tolist() == [1, 2, 3, 4, 5, -1, -1]


def test_a_turn_and_the_row_keep_what_was_filled_last() -> None:
    moments = [Filled({"effort": torch.tensor(value), "level": torch.tensor(value)}, 9, 2) for value in (1.0, 2.0)]
    assembled = assemble(BY_NAME, moments, tokens=9, turns=3)
    assert {name: tensor.tolist() for name, tensor in assembled.items()} == {"effort": [0.0, 2.0, 0.0], "level": 2.0}


def test_an_interrupted_turn_keeps_the_values_of_each_part() -> None:
    parts = [
        Completion(
            [1, 2], [0.0] * 2, [0] * 2, StopReason.INTERRUPTED, filled=[Filled({"routes": short([1, 1, 1])}, 2)]
        ),
        Completion([3], [0.0], [1], StopReason.STOP, filled=[Filled({"routes": short([5, 5])}, 1)]),
    ]
    whole = parts[0].followed_by(parts[1])
    assert [moment.tokens for moment in whole.filled] == [2, 3]
    filled = [moment.after(4) for moment in whole.filled]  # four tokens of the prompt, the last of which has a value
    assert assemble(BY_NAME, filled, 7, 1)["routes"][:, 0].tolist() == [-1, -1, -1, 1, 1, 1, 5]
    cut = [moment.after(4) for moment in whole.first(1).filled]
    assert assemble(BY_NAME, cut, 5, 1)["routes"][:, 0].tolist() == [-1, -1, -1, 1, 1]


class RoutingEngine(FakeEngine):
    """Fills the number of each token, those of the prompt included."""

    fills: Sequence[Field] = (ROUTES,)

    async def generate(self, request: Request) -> Completion:
        answer = await super().generate(request)
        count = len(request.tokens) + len(answer.tokens)
        return replace(answer, fields={"routes": [[i, i] for i in range(count)]})


class Expert(FakeEngine):
    """Fills one route for each sampled token; nothing if there is none."""

    route: int | None = None

    async def generate(self, request: Request) -> Completion:
        answer = await super().generate(request)
        fields = {} if self.route is None else {"expert_routes": [[[self.route]]] * len(answer.tokens)}
        return replace(answer, fields=fields)


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        (8, None),
        (9, "'expert_routes' with 9, expected 0 to 8"),
        (None, "did not fill the field 'expert_routes'"),
    ],
)
def test_an_engine_fills_routes_of_experts_that_exist(route: int | None, problem: str | None) -> None:
    engine = Expert(["one"])
    engine.return_routes(Routers((0,), 1, 8, 1))
    engine.route = route
    setup = replace(setup_of(engine, samples=1), fields={spec.name: spec for spec in engine.fills})
    if problem is None:
        [trajectory] = asyncio.run(collect(setup, PROMPTS[:1], nothing))
        assert trajectory.fields["expert_routes"].max() == 8
        return
    with pytest.raises(PartError, match=f"Expert of tests: `generate` .*{problem}"):
        asyncio.run(collect(setup, PROMPTS[:1], nothing))


def test_recorded_completions_declare_what_validation_fills() -> None:
    assert Recorded(RoutingEngine()).fills == (ROUTES,)


class Levels(Environment):
    """Plays two turns; fills the number of each, and of all."""

    fills: Sequence[Field] = (EFFORT, LEVEL)

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return "begin"

    async def step(self, action: str, state: State) -> Observation:
        state["turn"] = state.get("turn", 0) + 1
        filled = {"effort": 0.5 * state["turn"], "level": state["turn"]}
        return Observation("go on", done=state["turn"] == 2, fields=filled)


def test_a_conversation_collects_the_fields_of_its_engine_and_environment() -> None:
    setup = replace(
        setup_of(RoutingEngine(["one", "two"]), samples=1),
        participants=Participants(environment=Levels()), limits=Limits(turns=2), fields=BY_NAME,
    )  # fmt: skip
    [trajectory] = asyncio.run(collect(setup, PROMPTS[:1], nothing))
    assert trajectory.error is None
    assert trajectory.fields["routes"][:, 1].tolist() == list(range(len(trajectory.tokens)))
    assert trajectory.fields["effort"].tolist() == [0.5, 1.0]
    assert int(trajectory.fields["level"]) == 2


class Measured(Levels):
    """Measures what it is told."""

    measured: object = MappingProxyType({"score": 0.5})

    async def step(self, action: str, state: State) -> Observation:
        return (await super().step(action, state))._replace(metrics=self.measured)  # type: ignore[arg-type]


def test_metrics_of_replies_are_means(tmp_path: Path) -> None:
    setup = replace(
        setup_of(FakeEngine(["one", "two"]), samples=2),
        participants=Participants(environment=Measured()), limits=Limits(turns=2), fields=BY_NAME,
    )  # fmt: skip
    trajectories = asyncio.run(collect(setup, PROMPTS[:1], nothing))
    trajectories[1].metrics = {"environment/score": [1.0]}
    meter = Meter()
    describe_rollouts(trajectories, rewarded=False, meter=meter)
    assert meter.result(LocalRanks())["environment/score"] == pytest.approx(2 / 3)  # type: ignore[arg-type]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(as_row(trajectories[0])))
    [row] = read_rows(file)
    assert row.trajectory.metrics == {"environment/score": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("measured", "message"),
    [({"score": nan}, "added the metric 'score' as nan"), ({"a b": 1.0}, "a metric named 'a b'"), (5, "the metrics 5")],
)
def test_wrong_metrics_fail_the_conversation_by_name(measured: object, message: str) -> None:
    environment = Measured()
    environment.measured = measured
    setup = replace(setup_of(FakeEngine(["a"])), participants=Participants(environment=environment), fields=BY_NAME)
    trajectories = asyncio.run(collect(replace(setup, limits=Limits(turns=2)), PROMPTS[:1], nothing))
    errors = [str(trajectory.error) for trajectory in trajectories]
    assert all("Measured of tests: `step` added" in error and message in error for error in errors), errors


class Counting(Tool):
    """Counts calls; returns what it is told besides."""

    name, description, parameters = "count", "Counts.", {"type": "object"}
    fills = (EFFORT,)

    def __init__(self, effort: float) -> None:
        self.effort = effort

    async def call(self, arguments: JsonObject, state: State, **kwargs: object) -> ToolReply:
        return ToolReply("done", 0.25, {"effort": self.effort}, {"calls": 1})


@pytest.mark.parametrize("effort", [2.0, nan])
def test_a_tools_wrong_value_is_counted_and_its_reward_stays(effort: float) -> None:
    [done] = hold(lambda request, turn: [call("count"), "7"][turn], tools(count=Counting(effort)), fields=BY_NAME)
    assert done.error is None
    assert done.turn_rewards == [0.25, 0.0]
    if effort == 2.0:
        assert done.fields["effort"].tolist() == [2.0, 0.0]
        assert done.metrics == {"tool/count/calls": [1.0]}
    else:
        assert (done.counts["tool_errors"], done.fields, done.metrics) == (1, {}, {})


class UndeclaredEngine(RoutingEngine):
    fills = ()


class UndeclaredEnvironment(Levels):
    fills = (EFFORT,)


def test_an_undeclared_field_ends_the_run(workers: Workers) -> None:
    """It is an error of code, whatever the policy says."""
    for engine, environment, message in (
        (
            UndeclaredEngine(["a", "b"]),
            Levels(),
            "UndeclaredEngine.*the field 'routes', expected .*: none",
        ),
        (
            RoutingEngine(["a", "b"]),
            UndeclaredEnvironment(),
            "UndeclaredEnv.*`step` filled the field 'level', .*: effort",
        ),
    ):
        setup = replace(setup_of(engine), participants=Participants(environment=environment), fields=BY_NAME)
        with pytest.raises(PartError, match=message):
            asyncio.run(collect(replace(setup, limits=Limits(turns=2)), PROMPTS[:1], nothing))
    with pytest.raises(PartError, match="Graded.*: `grade` filled the field 'progres', expected .*: progress, effort"):
        asyncio.run(score(Graded(progres=[1.0]), [example_trajectory("four")], workers))
    reward = Composite({"a": Graded(progres=[1.0])})
    reward.runtime = SimpleNamespace(score=lambda part, rows: score(part, rows, workers))  # type: ignore[assignment]
    with pytest.raises(PartError, match="Graded.*: `grade` filled the field 'progres'"):
        asyncio.run(score(reward, [example_trajectory("four")], workers))


class Graded(RewardFunction):
    """Fills what the class says, in a worker."""

    fills: Sequence[Field] = (Field("progress"), EFFORT, LEVEL)
    values: Mapping[str, object] = {}

    def __init__(self, **values: object) -> None:
        self.values = values

    def grade(self, trajectory: Trajectory) -> Score:
        return Score(1.0, token_rewards=[0.0, 0.25, 0.0, 0.5][: trajectory.response_length], fields=self.values)


def test_a_reward_fills_fields_for_all_tokens_or_for_those_of_the_policy(workers: Workers) -> None:
    """`four` is two tokens that are read and four that are sampled."""
    given = example_trajectory("four")
    for values, expected in (([1, 2, 3, 4], [0, 0, 1, 2, 3, 4]), ([9, 8, 1, 2, 3, 4], [9, 8, 1, 2, 3, 4])):
        [made] = asyncio.run(score(Graded(progress=torch.tensor(values), effort=[0.5], level=3), [given], workers))
        assert made.error is None
        assert {name: tensor.tolist() for name, tensor in made.fields.items()} == {
            "progress": expected,
            "effort": [0.5],
            "level": 3,
        }
    assert made.token_rewards == [0.0, 0.25, 0.0, 0.5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"progress": [1.0] * 5}, r"'progress' with shape \(5,\), expected 4 or 6 of"),
        ({"effort": [1.0, 2.0]}, r"'effort' with shape \(2,\), expected 1 of shape \(\) by turn"),
        ({"level": 256}, "'level' with 256, expected finite numbers of uint8"),
    ],
)
def test_wrong_fields_of_a_score_name_the_reward(workers: Workers, values: dict[str, object], message: str) -> None:
    [made] = asyncio.run(score(Graded(**values), [example_trajectory("four")], workers))
    assert made.reward is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(made.error)


class Reads(GRPO):
    reads_fields = ("progress",)


class Other(Graded):
    fills = (Field("progress", "int64"), Field("level", by="row"))


class FillsByToken(Levels):
    fills = (ROUTES,)


class Undeclarable(Levels):
    fills = (Field("level", "uint8", "row", padding=-1),)


class FilledFilter(GroupFilter):
    fills = (LEVEL,)

    def keep(self, group: Sequence[Trajectory]) -> bool:
        return True


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"Reads.* reads the field 'progress', which no part of the recipe fills; filled: none"),
        ({"reward": Graded()}, None),
        ({"reward": Composite({"a": Graded(), "b": ExactReward()})}, None),
        ({"reward": Router({"a": Graded(), "b": Other()})}, "Router.* declares Field.*float32.* but Router.*int64"),
        (
            {"reward": Graded(), "environment": FillsByToken()},
            "FillsByToken.* declares .*, but such a part fills fields by turn or row",
        ),
        ({"reward": Graded(), "environment": Undeclarable()}, "Undeclarable.* declares .*padding=-1.*without overflow"),
        ({"reward": Graded(), "filter": FilledFilter()}, "FilledFilter.*, but such a part fills no fields"),
    ],
)
def test_fields_are_checked_before_the_run(parts: dict[str, Any], message: str | None) -> None:
    made = recipe(advantage=Reads(), **{name: part for name, part in parts.items() if name != "filter"})
    made.rollout.filter = parts.get("filter")
    problems = "\n".join(checks._check_fields(made))
    assert problems == "" if message is None else re.search(message, problems), problems


class ReadingLoss(CrossEntropy):
    reads_fields = ("progress",)


def test_rows_of_the_data_have_no_fields() -> None:
    """A reward of supervised training scores in validation alone; a mixture's rows are never scored."""
    made = recipe(loss=ReadingLoss(), reward=Graded(), advantage=None)
    made.rollout.engine = Recorded()
    assert "loss ReadingLoss reads the field 'progress', which rollouts fill" in "\n".join(made.method.problems(made))
    mixed = recipe(reward=Graded(), mix={"sft": Mixture(weight=0.5, loss=ReadingLoss())})
    assert "mix.sft.loss ReadingLoss reads the field 'progress'" in "\n".join(check_mixtures(mixed))


class Reader(RewardFunction):
    """Names the fields that it receives."""

    reads_fields = ("routes",)

    def grade(self, trajectory: Trajectory) -> Score:
        return Score(1.0, answer=f"{sorted(trajectory.fields)} {sorted(trajectory.span.branches[0].fields)}")


def test_a_worker_receives_the_fields_that_the_reward_reads(workers: Workers) -> None:
    """Others would be pickled for nothing, and import torch there."""
    sample, branch = example_trajectory("4"), example_trajectory("4")
    for trajectory in (sample, branch):
        trajectory.fields = {"routes": short([1, 2, 3]), "effort": torch.ones(1)}
    sample.span = AgentSpan(branches=[branch])
    [made] = asyncio.run(score(Reader(), [sample], workers))
    assert made.answer == "['routes'] ['routes']"
    assert sorted(sample.fields) == ["effort", "routes"]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"routes": short([1, 2, 3])}, None),
        ({"routes": short([1, 2])}, r"line 1 does not fit the recipe: .*'routes' with shape \(2, 2\), expected 3 of"),
        ({"expert_routes": torch.full((3, 1, 1), 9)}, "line 1 does not fit .* with 9, expected 0 to 8"),
        ({"effort": torch.ones(1)}, "line 1 has a field 'effort' that no part fills; leave out"),
    ],
)
def test_kept_rollouts_have_the_fields_of_the_recipe(
    tmp_path: Path, stored: dict[str, torch.Tensor], message: str | None
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/samples": 1}')
    (tmp_path / "rollouts").mkdir()
    sample = example_trajectory("4")
    sample.fields = stored
    with gzip.open(tmp_path / "rollouts" / "step-00001.jsonl.gz", "wt") as file:
        file.write(json.dumps(as_row(sample)))
    made = recipe()
    made.rollout.engine = RoutingEngine()
    made.engine.return_routes(Routers((0,), 1, 8, 1))
    if message is None:
        [trajectory] = KeptRollouts(tmp_path)._read(1, 0, 100, made)
        assert torch.equal(trajectory.fields["routes"], stored["routes"])
        return
    with pytest.raises(RecipeError, match=message):
        KeptRollouts(tmp_path)._read(1, 0, 100, made)


def scored(text: str, **values: Any) -> Trajectory:
    return replace(example_trajectory(text), score=Score(1.0, **values))


def rewarded() -> Batch:
    """Return a row of four tokens, rewarded by 0.5, 0, 0 and -1, and by 2 as a whole, and one that earns nothing."""
    rows = [scored("four", token_rewards=[0.5, 0.0, 0.0, -1.0]), scored("none")]
    for row, reward in zip(rows, (2.0, 0.0), strict=True):
        row.score = replace(row.score or Score(0.0), reward=reward)
    batch = add_rewards(collate(rows), rows)
    assert rows[0].reward == 1.5
    assert batch.token_rewards.tolist() == [[0, 0, 0.5, 0, 0, 1], [0] * 6]
    assert batch.rewards.tolist() == [1.5, 0]
    batch.values, batch.greedy_rewards = 0.25 * batch.mask, torch.tensor([0.5, 0.5])
    batch.role, batch.role_names = torch.tensor([0, 0]), ("agent",)
    batch.old_logps, batch.sum_pi_squared = torch.zeros_like(batch.rewards)[:, None] * batch.mask, 0.0 * batch.mask
    return batch


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # returns of the last token on, discounted by 1/2: 1, 1/2, 1/4, and 0.5 + 1/8
        (ReMax(gamma=0.5), [0.625 - 0.5, 0.25 - 0.5, 0.5 - 0.5, 1 - 0.5]),
        (ReMax(gamma=0.0), [0.5 - 0.5, -0.5, -0.5, 0.5]),
        # what compares whole rewards counts those of the tokens: 1.5 and 0, with the mean 0.75
        (GRPO(scale_by_std=False), [0.75] * 4),
        (RLOO(), [1.5] * 4),
        (RAE(), [1.5] * 4),
        (PassK(scale_by_std=False), [1.5] * 4),
        (MaxRL(), [1.0] * 4),
        (OPO(), [0.75] * 4),
        (GPG(), [1.5] * 4),
        # returns 1.5, 1, 1, 1 less their group's means by energy: of two rows with equal weights, half of each
        (OptimalTokenBaseline(), [0.75, 0.5, 0.5, 0.5]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_estimators_count_rewards_by_token(estimator: AdvantageEstimator, expected: list[float]) -> None:
    batch = rewarded()
    estimator.estimate(batch)
    assert batch.advantages is not None
    assert batch.advantages[0, 2:].tolist() == pytest.approx(expected)


def test_the_critic_learns_the_rewards_of_tokens() -> None:
    """With lambda 0, A_t = r_t + V_(t+1) - V_t: 0.5, 0, 0 and 1 - 0.25; the returns are A + V."""
    batch = rewarded()
    GAE(lam=0.0).estimate(batch)
    assert batch.returns is not None
    assert batch.returns[0, 2:].tolist() == [0.75, 0.25, 0.25, 1.0]
    batch = rewarded()
    ReinforcePP(gamma=0.5).estimate(batch)
    assert batch.returns is not None
    assert batch.returns[0, 2:].tolist() == [0.625, 0.25, 0.5, 1.0]


def test_a_composite_weighs_rewards_by_token(workers: Workers) -> None:
    reward = Composite({"a": Graded(level=1), "b": Graded(level=2), "c": ExactReward()}, {"b": 3.0})
    reward.runtime = SimpleNamespace(score=lambda part, rows: score(part, rows, workers))  # type: ignore[assignment]
    [made] = asyncio.run(score(reward, [example_trajectory("four")], workers))
    assert made.token_rewards == [0.0, 0.25 + 0.75, 0.0, 0.5 + 1.5]
    assert made.fields["level"].tolist() == 1  # of the first that fills it


def test_a_batch_pads_fields_as_declared_and_follows_its_rows() -> None:
    rows = [example_trajectory("four"), example_trajectory("4")]
    rows[0].fields = {"routes": torch.arange(12, dtype=torch.int16).reshape(6, 2), "level": torch.tensor(7)}
    for row in rows:
        row.score = Score(0.0)
    rows[1].score = Score(0.0, fields={"effort": torch.tensor([0.5])})
    sampled = collate(rows, [ROUTES, LEVEL])
    batch = add_rewards(sampled, rows, [EFFORT])
    assert batch.fields["routes"].shape == (2, 6, 2)
    assert batch.fields["routes"][1].eq(-1).all()
    assert batch.fields["level"].tolist() == [7, 0]
    assert batch.fields["effort"].tolist() == [[0.0], [0.5]]
    short = batch.rows(torch.tensor([1]))
    assert {name: tuple(x.shape) for name, x in short.fields.items()} == {
        "routes": (1, 3, 2), "level": (1,), "effort": (1, 1),
    }  # fmt: skip
    assert batch.to(torch.device("meta")).fields["routes"].is_meta
    empty = add_rewards(collate([], [ROUTES]), [], [EFFORT, LEVEL])
    assert [tuple(x.shape) for x in empty.fields.values()] == [(0, 0, 2), (0, 0), (0,)]
    with pytest.raises(ValueError, match=r"batch.fields\['routes'\] has shape \(2, 5, 2\), expected \(2, 6, 2\)"):
        replace(batch, fields={**batch.fields, "routes": batch.fields["routes"][:, :5]})


def test_further_samples_of_a_rollout_have_its_fields_by_row() -> None:
    """A reward's values by token and by turn are those of the conversation that it has read."""
    branch = example_trajectory("4")
    main = scored("four", fields={"level": torch.tensor(3), "effort": torch.tensor([0.5])})
    main.span = AgentSpan(branches=[branch])
    main.turn_rewards = branch.turn_rewards = [0.0]
    rollouts = Rollouts(train_on=[main])
    batch, _ = select_scored(rollouts, collate(with_branches([main])), [0], [LEVEL, EFFORT])
    assert batch.fields["level"].tolist() == [3, 3]
    assert batch.fields["effort"].tolist() == [[0.5], [0.0]]


def test_fields_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    given = scored("four", token_rewards=[0.0, 0.1, 0.0, 0.0], fields={"effort": torch.tensor([0.1])})
    given.fields = {
        "routes": torch.arange(12, dtype=torch.int16).reshape(6, 2), "level": torch.tensor(7, dtype=torch.uint8),
        "half": torch.tensor([[0.1], [nan]], dtype=torch.bfloat16), "none": torch.zeros(0, 2),
    }  # fmt: skip
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        json.dump(as_row(given), opened, allow_nan=False)
    [row] = read_rows(file)
    back = row.trajectory
    for name, tensor in given.fields.items():
        assert (back.fields[name].dtype, back.fields[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.fields[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert back.score is not None
    assert back.score.token_rewards == [0.0, 0.1, 0.0, 0.0]
    assert torch.equal(back.score.fields["effort"], torch.tensor([0.1]))
    assert back.reward == pytest.approx(1.1)


@pytest.mark.parametrize("entry", [5, "!", "AAAA", {"a": 1}, base64.b64encode(save({"y": torch.ones(1)})).decode()])
def test_hostile_fields_of_a_file_are_refused(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(as_row(example_trajectory("4")) | {"fields": {"x": entry}}))
    with pytest.raises(RecipeError, match="rows.jsonl, line 1: 'fields' is .*, expected safetensors in base64 by name"):
        list(read_rows(file))


def test_a_large_field_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MOST_BYTES", 4)
    given = example_trajectory("4")
    given.fields = {"small": torch.ones(1), "large": torch.ones(3)}
    row = as_row(given)
    assert (list(row["fields"]), row["fields_left_out"]) == (["small"], ["large"])


def test_replies_can_be_sent_to_other_processes() -> None:
    for reply in (ToolReply("42"), Observation("42"), Reply([], done=True)):
        assert pickle.loads(pickle.dumps(reply)) == reply


def test_the_padding_is_of_the_fields_type() -> None:
    assert declaration_problem(Graded(), Field("x", padding=0.1)) is None
    assert "whose padding is no int32" in str(declaration_problem(Graded(), Field("x", "int32", padding=0.5)))
    assert "expected a rlkit.interfaces.fields.Field" in str(declaration_problem(Graded(), "x"))  # type: ignore[arg-type]
