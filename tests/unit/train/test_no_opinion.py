"""A reward without an opinion on a completion (None): others decide, and what none of them scores is left out."""

from __future__ import annotations

import asyncio
import json
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_rewards.remote import _parse

from rlkit.advantages import GDPO
from rlkit.base.errors import RecipeError
from rlkit.filters import ZeroSignal
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.reward import as_score
from rlkit.rewards import BatchReward, Composite, PythonReward, RubricReward
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.run.preflight.plan import try_reward
from rlkit.run.progress import Progress
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.metrics import Meter, describe_rollouts
from rlkit.train.rollouts import Rollouts, exchange_scores
from rlkit.types import Prompt, Score, Trajectory
from tests.conftest import read_jsonl, rlkit_in_process
from tests.unit.advantages.test_advantages import batch_of, per_row
from tests.unit.phases import LocalRanks
from tests.unit.rewards.test_rewards import scored
from tests.unit.train.test_step import metrics, trajectory

CODE = """
def even(text):
    return None if len(text) % 2 else 1.0

def long(text):
    return {"reward": 0.5 if len(text) > 2 else None, "length": len(text), "spare": None}

def listed(completions):
    return [None if len(c[-1]["content"]) % 2 else 1.0 for c in completions]

def broken(text):
    return float("nan")
"""


@pytest.fixture
def reward(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(CODE)
    return lambda name: PythonReward(f"{tmp_path}/mine.py:{name}", allow_code=True)


def texts(*lengths: int) -> list[Trajectory]:
    return [trajectory(0, length) for length in lengths]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (None, {}, None)),
        (Score(None, {"a": 1.0, "b": None}), (None, {"a": 1.0}, None)),  # type: ignore[dict-item]
        (Score(2.0, {"b": None}), (2.0, {}, None)),  # type: ignore[dict-item]
        (nan, (None, {}, "the reward returned nan, expected finite numbers up to 1e+30")),
        (Score(None, {"a": nan}), (None, {}, "the reward returned Score(reward=None, components={'a': nan}")),
    ],
)
def test_none_is_no_opinion_and_nan_an_error(value: Any, expected: tuple[object, object, str | None]) -> None:
    found = as_score(value)
    assert (found.reward, found.components) == expected[:2]
    assert (found.error or "").startswith(expected[2] or "")
    assert found.abstains == (found.reward is None and expected[2] is None)


def test_the_others_of_a_composite_decide(reward: Any, workers: Workers) -> None:
    """1 letter: nobody; 2: `even` alone; 3: `long` alone, of weight 2; 4: both."""
    composite = Composite({"even": reward("even"), "long": reward("long")}, {"long": 2.0})
    found = scored(composite, texts(1, 2, 3, 4), workers)
    assert [(s.reward, s.error) for s in found] == [(None, None), (1.0, None), (1.0, None), (2.0, None)]
    assert [s.components for s in found] == [
        {"length": 1},
        {"length": 2, "even": 1.0},
        {"length": 3, "long": 0.5},
        {"length": 4, "even": 1.0, "long": 0.5},
    ]
    [failed] = scored(Composite({"even": reward("even"), "broken": reward("broken")}), texts(2), workers)
    assert "component broken: " in (failed.error or "")


def test_lists_and_services_may_have_none(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    batch = scored(BatchReward(f"{tmp_path}/mine.py:listed", allow_code=True), texts(1, 2), workers)
    assert [(s.reward, s.error) for s in batch] == [(None, None), (1.0, None)]
    asked = _parse({"scores": [{"reward": None}, None, {"score": 1}]}, 3)
    assert [score.abstains for score in map(as_score, asked)] == [True, True, False]
    assert "the service answered {'score': 1}, expected a number under `reward`" in (asked[2].error or "")


def test_a_rubric_leaves_out_what_its_reward_does_not_score(reward: Any, workers: Workers) -> None:
    """Weights 3 for `even` and 1 for `long`, which is half met: 3 letters have only the latter."""
    rubric = RubricReward(rewards={"even": reward("even"), "long": reward("long")})
    rows = texts(1, 3, 4)
    for row in rows:
        row.prompt.meta = {"rubric": [{"reward": "even", "weight": 3}, {"reward": "long", "weight": 1}]}
    assert [s.reward for s in scored(rubric, rows, workers)] == [None, 0.5, (3 + 0.5) / 4]


def no_opinion(group: int) -> Trajectory:
    sample = trajectory(group)
    sample.score = Score(None, {"form": 0.5})
    return sample


def test_a_sample_without_opinion_is_left_out_of_its_group() -> None:
    """Group 1 keeps one of two samples, group 2 none; group 3 has a failed reward, and is left out as before."""
    samples = [trajectory(0), trajectory(0), trajectory(1), no_opinion(1), no_opinion(2), trajectory(3, 1, None)]
    rollouts = Rollouts(list(samples), list(samples), list(samples), [list(range(6))])
    assert exchange_scores(LocalRanks(), rollouts) == [0, 1, 2]  # type: ignore[arg-type]
    meter = Meter()
    describe_rollouts(samples, True, meter)
    found = metrics(meter)
    assert (found["reward/no_opinion"], found["reward/failed"], found["reward/groups_dropped"]) == (2, 1, 1)
    assert found["reward/mean"] == 1
    ahead = PromptGroup(1, Prompt("a", []), 0, samples[2:4])
    assert (ahead.complete, ahead.scored) == (samples[2:3], True)


def test_a_mean_says_over_how_many_samples_it_is_taken() -> None:
    """Of three scored samples two have `form`, with 0.5 and 0.25; all have the accuracy."""
    samples = [trajectory(0), trajectory(0), trajectory(0), no_opinion(0)]
    for sample, components in zip(samples, ({"form": 0.5}, {"form": 0.25}, {}), strict=False):
        assert sample.score is not None
        sample.score.components = {"accuracy": 1.0, **components}
    here, there = Meter(), Meter()
    describe_rollouts(samples[:2], True, here)
    describe_rollouts(samples[2:], True, there)
    ranks = LocalRanks(2)
    ranks.gather_dp = lambda value: [value, there]  # type: ignore[method-assign]
    found = metrics(here, ranks)
    assert (found["reward/form"], found["reward/form/samples"]) == (0.375, 2)
    assert "accuracy/samples" not in found


def test_components_that_a_sample_lacks_are_compared_nowhere() -> None:
    """Of the first three, two have `b`: 1 and 0, so +-0.7071; `a` is 0, 0 and 1 there: -0.5774, -0.5774, 1.1547."""
    components = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, nan]])
    batch = batch_of([0, 0, 0], [0, 0, 0], [1, 1, 1], components=components, component_names=("a", "b"))
    raw = torch.tensor([-0.57735 + 0.70711, -0.57735 - 0.70711, 1.15470])
    expected = (raw / (raw.var() + 1e-8).sqrt()).tolist()
    assert per_row(GDPO({"a": 1.0, "b": 1.0}), batch) == pytest.approx(expected, abs=1e-4)
    samples = [trajectory(0), trajectory(0)]
    assert samples[1].score is not None
    samples[1].score.components = {"form": 0.25}
    table = add_rewards(collate(samples), samples).components
    assert table[:, 1].tolist() == [0.25, 0.25]
    assert table[:, 0].isnan().tolist() == [False, True]
    assert not ZeroSignal(component="accuracy").keep(samples)


def test_a_component_that_only_another_rank_has_is_fine() -> None:
    """This rank's samples have `a` alone, which is 0 and 1; of `b` the other rank has two samples."""
    batch = batch_of([0, 0], [0, 0], [1, 1], components=torch.tensor([[0.0], [1.0]]), component_names=("a",))
    other, estimator = torch.tensor([2.0, 2.0, 2.0]), GDPO({"a": 1.0, "b": 1.0})
    estimator.reduce = lambda x: x + other if len(x) == 3 else x  # type: ignore[method-assign]
    assert per_row(estimator, batch) == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    resumed = GDPO({"a": 1.0, "b": 1.0})
    resumed.load_state_dict(estimator.state_dict())  # a later step without `b` on any rank, in a resumed run
    assert per_row(resumed, batch) == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    with pytest.raises(RecipeError, match="weighs the component 'b', which the reward does not report; it reports: a"):
        GDPO({"a": 1.0, "b": 1.0}).estimate(batch)


def test_a_reward_without_any_opinion_is_warned_of(reward: Any, workers: Workers) -> None:
    async def trial(name: str) -> list[str]:
        made = reward(name)
        return (await try_reward(lambda pair: score(made, pair, workers), [Prompt("p", [], "abc")])).lines

    assert asyncio.run(trial("even"))[0].startswith("reward: no opinion (None) on an answer to")
    assert len(asyncio.run(trial("even"))) == 1  # 'I do not know.' has 14 letters
    assert len(asyncio.run(trial("long"))) == 1


def test_steps_without_any_opinion_do_not_end_a_run() -> None:
    """Unless something failed as well, they are steps without a signal."""
    recipe: Any = SimpleNamespace(
        critic=None, train=SimpleNamespace(epochs=1, minibatches=1), loss=SimpleNamespace(inputs=Inputs.REWARDS)
    )
    progress = Progress(recipe)
    assert progress.quiet(1, {"reward/no_opinion": 16.0})
    assert not progress.stalls(1, {"reward/no_opinion": 16.0})
    assert progress.stalls(1, {"reward/no_opinion": 15.0, "reward/failed": 1.0})


RUN = (
    "fit", "--recipe=quickstart", "--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--rollout.sampling.max_tokens=12", "--recipe=own.yaml", "--out=run",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_with_rewards_that_abstain(tmp_path: Path) -> None:
    """Training and validation leave the samples out, and count them; keys of some samples have a mean of these."""
    (tmp_path / "mine.py").write_text(
        "def score(text):\n"
        "    if text[-1:] in '02468':\n"
        "        return {'reward': None, 'odd': 1.0}\n"
        "    return {'reward': len(text) / 10, 'maybe': None if len(text) % 4 else 2.0}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "reward: {class_path: PythonReward, init_args: {function: 'mine.py:score', allow_code: true}}\n"
        "validation: {limit: 8, samples: 2}\n"
    )
    done = rlkit_in_process(*RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rows = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    rewards = [row["reward"] for row in rows]
    scored_rows = [reward for reward in rewards if reward is not None]
    assert line["reward/no_opinion"] == len(rewards) - len(scored_rows) > 0
    assert line["reward/mean"] == pytest.approx(sum(scored_rows) / len(scored_rows))
    assert line["reward/failed"] == 0
    assert "odd" not in json.dumps(list(line))
    assert {row["error"] for row in rows} == {None}
