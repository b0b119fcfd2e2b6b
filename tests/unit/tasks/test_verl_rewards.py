"""verl's rewards by `data_source`: the Router of `rlkit docs from-verl`, on rows as verl writes them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from rlkit.commands import parse
from rlkit.interfaces.reward import RewardManager
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.tasks import Verl
from rlkit.testing import example_trajectory
from tests.pages import blocks

CASES: list[tuple[str, Any, str, str]] = [
    ("openai/gsm8k", "72", "48 + 24 = 72\n#### 72", "#### 71"),
    ("lighteval/MATH", "\\frac{1}{2}", "so \\boxed{0.5}", "\\boxed{2}"),
    ("DigitalLearningGmbH/MATH-lighteval", "2\\sqrt{2}", "\\boxed{\\sqrt{8}}", "\\boxed{\\sqrt{2}}"),
    ("HuggingFaceH4/MATH-500", "(1, 2)", "\\boxed{(1, 2)}", "\\boxed{(2, 1)}"),
    ("math_dapo", "34", "Answer: 34", "Answer: 43"),
    ("math_dapo_reasoning", "34", "Answer: $34$", "Answer: 34 or 35, 35"),
    ("aime2024", "204", "\\boxed{204}", "\\boxed{024}"),
    ("numina_olympiads", "x=3", "\\boxed{x = 3}", "\\boxed{x = 4}"),
    ("hiyouga/geometry3k", "9", "<think>3 * 3</think> \\boxed{9}", "eight"),
    ("searchR1_nq", {"target": ["The Beatles", "Beatles"]}, "<answer>the beatles.</answer>", "Beatles"),
    ("searchR1_hotpotqa", {"target": ["Paris"]}, "<answer>Paris</answer>", "<answer>Paris, France</answer>"),
]
"""A source, its ground truth, and a right and a wrong completion."""


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> RewardManager:
    """The reward of the page's last block of YAML."""
    path = tmp_path_factory.mktemp("page") / "reward.yaml"
    path.write_text([block.text for block in blocks("from-verl") if block.language == "yaml"][-1])
    return parse("fit", ["--recipe=quickstart", f"--recipe={path}"]).recipe.scorer


@pytest.mark.parametrize("case", CASES)
def test_rows_of_verl_are_scored_by_their_source(
    tmp_path: Path, reward: RewardManager, workers: Workers, case: tuple[str, Any, str, str]
) -> None:
    source, truth, right, wrong = case
    row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": "?"}],
        "ability": "any",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([row]).to_parquet(path)
    task = Verl(str(path))
    prompt = task.prompt(task.rows("train")[0], 0)
    assert reward.unscorable(prompt) is None
    reward.bind(SimpleNamespace(score=lambda part, group: score(part, group, workers)))  # type: ignore[arg-type]
    trajectories = [replace(example_trajectory(text), prompt=prompt, messages=[]) for text in (right, wrong)]
    scores = asyncio.run(score(reward, trajectories, workers))
    assert [s.components["accuracy"] for s in scores] == [1.0, 0.0], scores
    assert (scores[0].reward or 0) >= 1 > (scores[1].reward or 0)


def test_an_unknown_source_is_an_error(reward: RewardManager) -> None:
    trajectory = example_trajectory("4")
    trajectory.prompt.meta = {"data_source": "chess"}
    [failed] = asyncio.run(reward.score([trajectory]))
    assert "no reward for data_source 'chess'" in (failed.error or "")
