"""Rubrics: weighted criteria of a row, judged by a server of our own or by code, in numbers worked by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rlkit_judges.server import JudgeServer

from rlkit.base.errors import RecipeError
from rlkit.rewards import ExactReward, MathReward, RubricReward
from rlkit.rollout.workers import Workers
from rlkit.testing import example_trajectory
from rlkit.types import Prompt, Trajectory
from tests.judge_stand_in import Body, responses, serving
from tests.unit.rewards.test_rewards import scored

RUBRIC = [
    {"criterion": "contains a", "weight": 3},
    {"criterion": "contains b", "points": 1, "reward": None},
    {"criterion": "contains c", "weight": -2},
]


def of_row(text: str, rubric: object) -> Trajectory:
    trajectory = example_trajectory(text)
    trajectory.prompt.meta = {"rubric": rubric}
    return trajectory


def letters(body: Body) -> str:
    """Whether a response contains the letter that each criterion ends in."""
    prompt = body["messages"][0]["content"]
    criteria = [line for line in prompt.splitlines() if " contains " in f" {line}"]
    return json.dumps({"reasoning": "", "met": [line[-1] in responses(body)[0] for line in criteria]})


def test_a_rubric_by_hand(workers: Workers) -> None:
    """Of 3 + 1 points: abc has 3 + 1 - 2, b 1, ac 3 - 2, c -2, which is 0, and ab all 4; a call each."""
    with serving(letters) as stand_in:
        reward = RubricReward(JudgeServer(stand_in.url, "m"))
        scores = scored(reward, [of_row(text, RUBRIC) for text in ("abc", "b", "ac", "c", "ab")], workers)
        reward.close()
    assert [s.reward for s in scores] == [0.5, 0.25, 0.25, 0.0, 1.0]
    assert scores[0].components == {"judged": 1.0}
    assert scores[1].components == {"judged": pytest.approx(1 / 3)}
    assert reward.counts()["judge_calls"] == 5
    assert "2. contains b" in stand_in.bodies[0]["messages"][0]["content"]


def test_judged_and_coded_items_add_up(workers: Workers) -> None:
    """2 points for exactly 4, 1 for the letter a, 1 for the number; 2 of `math` for `#### 4` count as 1."""
    rubric = [{"reward": "exact", "weight": 2}, {"criterion": "contains a"}, {"reward": "math"}]
    with serving(letters) as stand_in:
        rewards = {"exact": ExactReward(), "math": MathReward(format_weight=1.0)}
        reward = RubricReward(JudgeServer(stand_in.url, "m"), rewards={**rewards})
        scores = scored(reward, [of_row(text, rubric) for text in ("4", "a 4.0", "#### 4")], workers)
        reward.close()
    assert [s.reward for s in scores] == [0.75, 0.5, 0.25]
    assert scores[2].components == {"exact": 0.0, "math": 1.0, "judged": 0.0}


def test_a_rubric_of_code_needs_no_server(workers: Workers) -> None:
    reward = RubricReward(rewards={"exact": ExactReward()})
    [score] = scored(reward, [of_row("4", [{"reward": "exact"}])], workers)
    reward.close()
    assert (score.reward, reward.counts()) == (1.0, {})
    [failed] = scored(reward, [of_row_without_answer()], workers)
    assert "reward exact of the rubric: prompt 'example' has no answer" in (failed.error or "")


def of_row_without_answer() -> Trajectory:
    trajectory = example_trajectory("4", None)
    trajectory.prompt.meta = {"rubric": [{"reward": "exact"}]}
    return trajectory


@pytest.mark.parametrize(
    ("rubric", "problem"),
    [
        (None, "has the rubric None, expected a list of {criterion: text, weight: number}"),
        ("be kind", "has the rubric 'be kind', expected a list"),
        ([], "without a positive weight"),
        ([{"criterion": "x", "weight": -1}], "without a positive weight"),
        ([{"weight": 1}], "has the item {'weight': 1}"),
        ([{"criterion": "x", "weight": "3"}], "has the item"),
        ([{"criterion": "x", "weight": True}], "has the item"),
        ([{"criterion": "x", "weight": float("inf")}], "has the item"),
        (["x"], "has the item 'x'"),
        ([{"reward": "exact"}], "names the reward 'exact', expected any of: none"),
        ([{"criterion": "x"}], None),
    ],
)
def test_a_row_whose_rubric_cannot_be_scored_is_refused(rubric: object, problem: str | None) -> None:
    reward = RubricReward(JudgeServer("http://h/v1", "m"))
    shown = reward.unscorable(Prompt("p", [], meta={"rubric": rubric}))
    assert shown is None if problem is None else problem in (shown or "")
    assert "no column 'rubric'" in (reward.unscorable(Prompt("p", [])) or "")
    nested = RubricReward(JudgeServer("http://h/v1", "m"), "extra_info.rubric")
    assert (nested.unscorable(Prompt("p", [], meta={"extra_info": {"rubric": rubric}})) is None) == (problem is None)


def test_a_judged_criterion_without_a_judge_is_refused() -> None:
    reward = RubricReward(rewards={"exact": ExactReward()})
    assert "but RubricReward has no server" in (
        reward.unscorable(Prompt("p", [], meta={"rubric": [{"criterion": "x"}]})) or ""
    )
    with pytest.raises(RecipeError, match="neither a server nor rewards"):
        RubricReward()


@pytest.mark.parametrize("met", [[True], [True, 1, False], "yes", None])
def test_verdicts_of_another_form_fail_the_sample(workers: Workers, met: Any) -> None:
    with serving(lambda body: json.dumps({"met": met})) as stand_in:
        reward = RubricReward(JudgeServer(stand_in.url, "m", corrections=0))
        [score] = scored(reward, [of_row("a", RUBRIC)], workers)
        reward.close()
    assert "expected a list of 3 booleans" in (score.error or "")


def test_beyond_the_budget_a_sample_has_the_fallback(workers: Workers) -> None:
    with serving(letters) as stand_in:
        reward = RubricReward(JudgeServer(stand_in.url, "m", max_calls=1, concurrency=1, beyond_budget=0.1))
        scores = scored(reward, [of_row(text, RUBRIC) for text in ("ab", "b")], workers)
        reward.close()
    assert [s.reward for s in scores] == [1.0, 0.1]
