"""Supervised fine-tuning, a reward model, and PPO against it: the true reward rises, which nothing is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())["validation"]  # type: ignore[no-any-return]


def test_a_policy_learns_from_a_reward_model_of_pairs(tmp_path: Path) -> None:
    sft, rm, ppo = (tmp_path / name for name in ("sft", "rm", "ppo"))
    assert main(["fit", "--recipe=quick_sft", "--train.steps=10", "--validation=null", f"--out={sft}"]) == 0
    assert main(["fit", "--recipe=quick_rm", f"--model.path={sft}", "--train.steps=200", f"--out={rm}"]) == 0
    assert result(rm)["after"]["accuracy_low"] > 0.8
    options = (f"--model.path={sft}", f"--critic.path={rm}", f"--reward.rewards.proxy.path={rm}")
    assert main(["fit", "--recipe=quick_ppo_rm", *options, "--train.steps=30", f"--out={ppo}"]) == 0
    before, after = result(ppo)["before"], result(ppo)["after"]
    assert after["sampled_accuracy"] > before["sampled_accuracy"] + 0.1  # the true reward
    assert after["sampled_accuracy_p_start"] < 0.01
    assert after["sampled_reward"] > before["sampled_reward"] + 0.5  # the reward model's
    steps = read_jsonl(ppo / "metrics.jsonl")
    assert {"reward/proxy", "reward/math", "accuracy", "reward/kl_reward"} <= steps[-1].keys()
    assert all(line["reward/mean"] == pytest.approx(line["reward/proxy"]) for line in steps)
