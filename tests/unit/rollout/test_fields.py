"""Fields that plugins declare, from those who fill them to the batch, and rewards by token."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.advantages import GRPO
from rlkit.base.errors import PartError, RecipeError
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.fields import Field, assemble
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.reward import RewardFunction
from rlkit.interfaces.tool import State
from rlkit.recipe.check_fields import check_fields
from rlkit.records.rows import as_row, read_rows
from rlkit.rewards import Composite, ExactReward, Router
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.collect import collect
from rlkit.rollout.conversation import Limits
from rlkit.rollout.participants import Participants
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.testing import FakeEngine, example_trajectory
from rlkit.train.rollouts import Rollouts, select_scored, with_branches
from rlkit.types import AgentSpan, Completion, Filled, Prompt, Request, Score, StopReason, Trajectory
from tests.unit.phases import recipe
from tests.unit.rollout.test_rollout import PROMPTS, nothing, setup_of

ROUTES = Field("routes", "int16", "token", (2,), padding=-1)
EFFORT = Field("effort", by="turn")
LEVEL = Field("level", "uint8", "row")
BY_NAME = {field.name: field for field in (ROUTES, EFFORT, LEVEL)}


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(1)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a b"}, "the field 'a b' has name='a b', expected up to 64 lower-case letters"),
        ({"dtype": "float64"}, "has dtype='float64', expected one of bool, uint8"),
        ({"by": "step"}, "has by='step', expected token, turn or row"),
        ({"shape": (0,)}, r"has shape=\(0,\), expected a tuple of sizes"),
        ({"shape": (1 << 40, 1 << 40)}, "expected a tuple of sizes"),
        ({"dtype": "uint8", "padding": -1}, "has padding=-1, expected a number of uint8"),
        ({"dtype": "uint8", "padding": nan}, "has padding=nan, expected a number of uint8"),
    ],
)
def test_a_wrong_declaration_names_its_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Field(**{"name": "x", **options})


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (Field("x"), [1.0, 2.0], r"values of shape \(2,\), expected 3 values of shape \(\), one for each token"),
        (Field("x"), [[1.0], [2.0], [3.0]], r"values of shape \(3, 1\), expected 3 values of shape \(\)"),
        (Field("x"), [0.0, nan, 1.0], "with nan, expected finite numbers of float32"),
        (Field("x"), [0.0, 1e39, 1.0], "expected finite numbers of float32"),
        (Field("x", "uint8"), [0, 256, 1], "with 256, expected finite numbers of uint8"),
        (Field("x", "int64"), [0, 0.5, 1], "with 0.5, expected finite numbers of int64"),
        (Field("x", "int64"), [0, 1 << 70, 1], "expected numbers"),
        (Field("x"), "abc", "with 'abc', expected numbers"),
        (Field("x"), None, "with None, expected numbers"),
        (Field("x"), 5, r"values of shape \(\), expected 3 values"),
    ],
)
def test_wrong_values_are_refused(field: Field, values: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"filled the field 'x' {message}|filled the field 'x' with .*{message}"):
        field.tensor(values, (3,))


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
    fields = assemble(BY_NAME, moments, tokens=9, turns=3)
    assert {name: tensor.tolist() for name, tensor in fields.items()} == {"effort": [0.0, 2.0, 0.0], "level": 2.0}


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


class Levels(Environment):
    """Plays two turns; fills the number of each, and of all."""

    fills: Sequence[Field] = (EFFORT, LEVEL)

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return "begin"

    async def step(self, action: str, state: State) -> Observation:
        state["turn"] = state.get("turn", 0) + 1
        fields = {"effort": 0.5 * state["turn"], "level": state["turn"]}
        return Observation("go on", done=state["turn"] == 2, fields=fields)


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


class UndeclaredEngine(RoutingEngine):
    fills = ()


class UndeclaredEnvironment(Levels):
    fills = (EFFORT,)


@pytest.mark.parametrize(
    ("engine", "environment", "message"),
    [
        (UndeclaredEngine(["a", "b"]), Levels(), "UndeclaredEngine.*filled the field 'routes', which its `fills` does"),
        (RoutingEngine(["a", "b"]), UndeclaredEnvironment(), "UndeclaredEnvironment.*the field 'level', .*: effort"),
    ],
)
def test_an_undeclared_field_ends_the_run(engine: FakeEngine, environment: Environment, message: str) -> None:
    setup = replace(setup_of(engine), participants=Participants(environment=environment), fields=BY_NAME)
    with pytest.raises(PartError, match=message):
        asyncio.run(collect(replace(setup, limits=Limits(turns=2)), PROMPTS[:1], nothing))


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
        fields = {name: tensor.tolist() for name, tensor in made.fields.items()}  # type: ignore[attr-defined]
        assert fields == {"progress": expected, "effort": [0.5], "level": 3}
    assert made.token_rewards == [0.0, 0.25, 0.0, 0.5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"progres": [1.0] * 4}, "Graded of tests: filled the field 'progres', which its `fills` does not declare"),
        ({"progress": [1.0] * 5}, r"'progress' with values of shape \(5,\), expected 4 or 6 values"),
        ({"effort": [1.0, 2.0]}, "'effort' with values of shape"),
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
        ({"reward": Router({"a": Graded(), "b": Other()})}, "Router.* declares Field.*float32.*int64"),
        (
            {"reward": Graded(), "environment": FillsByToken()},
            "'routes' by token, but .* by turn or row",
        ),
        ({"reward": Graded(), "filter": FilledFilter()}, "the field 'level' by row, but such a part fills no fields"),
    ],
)
def test_fields_are_checked_before_the_run(parts: dict[str, Any], message: str | None) -> None:
    made = recipe(advantage=Reads(), **{name: part for name, part in parts.items() if name != "filter"})
    made.rollout.filter = parts.get("filter")
    problems = "\n".join(check_fields(made))
    assert problems == "" if message is None else re.search(message, problems), problems


def scored(text: str, **values: Any) -> Trajectory:
    return replace(example_trajectory(text), score=Score(1.0, **values))


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
    assert torch.equal(back.score.fields["effort"], torch.tensor([0.1]))  # type: ignore[arg-type]
    assert back.reward == pytest.approx(1.1)


@pytest.mark.parametrize(
    "entry",
    [
        5, {}, {"dtype": "object", "shape": [1], "values": [1]}, {"dtype": "uint8", "shape": [2], "values": "AA=="},
        {"dtype": "uint8", "shape": [-1], "values": "AA=="}, {"dtype": "uint8", "shape": [1], "values": "!"},
        {"dtype": "uint8", "shape": [1 << 60], "values": [1]}, {"dtype": "uint8", "shape": [1], "values": {"a": 1}},
    ],
)  # fmt: skip
def test_hostile_fields_of_a_file_are_refused(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(as_row(example_trajectory("4")) | {"fields": {"x": entry}}))
    with pytest.raises(RecipeError, match="rows.jsonl, line 1: 'fields' are wrong, expected dtype, shape and values"):
        list(read_rows(file))
