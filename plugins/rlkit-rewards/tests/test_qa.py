"""Short answers to questions, as Search-R1 and SQuAD score them, in numbers worked by hand."""

from __future__ import annotations

import json

import pytest
from rlkit_rewards.qa import normalized, references_of, word_f1

from rlkit.rewards import QAReward
from rlkit.testing import check_reward, example_trajectory
from rlkit.types import Prompt

TARGETS = json.dumps({"target": ["The Beatles", "Beatles, the band"]})


@pytest.mark.parametrize(
    ("text", "em", "f1"),
    [
        ("<answer>the beatles</answer>", 1, 1.0),
        ("<answer> A Beatles! </answer>", 1, 1.0),
        ("<answer>Rolling Stones</answer> no: <answer>Beatles</answer>", 1, 1.0),
        ("<answer>Beatles</answer> no: <answer>Rolling Stones</answer>", 0, 0.0),
        ("<answer>the Beatles of Liverpool</answer>", 0, 0.5),  # 1 common of 3 words and 1: 2 / 4
        ("<answer>a band: Beatles in the 60s</answer>", 0, 4 / 6),  # 2 common of 4 words and 2
        ("Beatles", 0, 0.0),
        ("<answer></answer>", 0, 0.0),
        ("", 0, 0.0),
    ],
)
def test_exact_match_and_f1_by_hand(text: str, em: int, f1: float) -> None:
    trajectory = example_trajectory(text, TARGETS)
    score = QAReward().grade(trajectory)
    assert score.reward == score.components["accuracy"] == em
    assert score.components["f1"] == pytest.approx(f1)
    assert QAReward("f1").grade(trajectory).reward == pytest.approx(f1)


def test_variants_of_the_score() -> None:
    wrong = example_trajectory("<answer>the Beatles of Liverpool</answer>", TARGETS)
    assert QAReward(format_score=0.1).grade(wrong).reward == 0.1
    assert QAReward("subem").grade(wrong).reward == 1.0
    assert QAReward(format_score=0.1).grade(example_trajectory("Beatles", TARGETS)).reward == 0.0
    assert QAReward(tag=False).grade(example_trajectory("Beatles.", TARGETS)).reward == 1.0
    flood = example_trajectory("<answer>" * 11 + "Beatles</answer>", TARGETS)
    assert QAReward().grade(flood).reward == 0.0  # the first tag begins the answer
    flood = example_trajectory("</answer>" * 10 + "<answer>Beatles</answer>", TARGETS)
    assert QAReward().grade(flood).reward == 0.25


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("Paris", ["Paris"]), ('["a b", "Paris", 7]', ["a b", "Paris", "7"]), ('{"target": "Paris"}', ["Paris"]),
        ("{x} and y", ["{x} and y"]), (None, []), ("the", []), ("[]", []), ('{"other": 1}', []), ("[" * 9999, []),
    ],
)  # fmt: skip
def test_references(answer: str | None, references: list[str]) -> None:
    assert references_of(answer) == references
    assert (QAReward().unscorable(Prompt("p", [], answer)) is None) == bool(references)


def test_normalisation_is_that_of_squad() -> None:
    assert normalized("The  U.S.A.'s  an-swer, a") == "usas answer"
    assert normalized("Theatre an") == "theatre"
    assert word_f1("a b b", "b b c") == pytest.approx(2 * 2 / 6)


def test_qa_reward_keeps_the_contract() -> None:
    scores = check_reward(QAReward(), ["<answer>4</answer>", "4", "<answer>5</answer>"])
    assert [s.reward for s in scores] == [1, 0, 0]
