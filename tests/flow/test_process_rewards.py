"""A process reward model from beginning to end: trained on turns, validated, and the reward of turns of PPO."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl

pytestmark = pytest.mark.slow

RECIPE = """
model: {{path: tiny, head: score}}
task: {{class_path: Jsonl, init_args: {{path: {path}, answer_field: null, validation_split: 0.05}}}}
rollout: {{engine: Recorded}}
loss: BinaryCrossEntropy
train: {{steps: 50, prompts_per_step: 64, lr: 1.0e-3, schedule: Linear, warmup_steps: 5}}
fabric: {{accelerator: cpu, devices: 1}}
"""


def row(number: int, draws: random.Random) -> str:
    """Return a conversation of up to three turns, each of which repeats the user's digit, or says another."""
    messages, right = [], []
    for _ in range(draws.randint(1, 3)):
        asked, right = draws.randrange(10), [*right, draws.random() < 0.5]
        said = asked if right[-1] else (asked + draws.randint(1, 9)) % 10
        messages += [{"role": "user", "content": str(asked)}, {"role": "assistant", "content": str(said)}]
    return json.dumps({"id": str(number), "messages": messages, "turn_rewards": right})


def test_turns_are_told_apart_and_rewarded(tmp_path: Path) -> None:
    draws, run, ppo = random.Random(0), tmp_path / "run", tmp_path / "ppo"
    (tmp_path / "rows.jsonl").write_text("\n".join(row(i, draws) for i in range(3200)))
    (tmp_path / "prm.yaml").write_text(RECIPE.format(path=tmp_path / "rows.jsonl"))
    assert main(["fit", f"--recipe={tmp_path / 'prm.yaml'}", f"--out={run}"]) == 0
    validation = json.loads((run / "result.json").read_text())["validation"]
    assert validation["before"]["accuracy"] == 0.5  # a head of zeros
    assert validation["after"]["accuracy_low"] > 0.75
    assert read_jsonl(run / "metrics.jsonl")[0]["policy/loss"] == pytest.approx(0.693147, abs=1e-5)
    words = ("--train.steps=1", "--train.prompts_per_step=8", "--train.minibatches=1", "--validation=null")
    talk = ("--interaction=Retry", "--conversation.turns=2", "--log.rollouts.limit=null")
    reward = ("--reward=ModelReward", f"--reward.path={run}", "--reward.per_turn=true")
    assert main(["fit", "--recipe=quick_ppo", *words, *talk, *reward, f"--out={ppo}"]) == 0
    scales = []
    for found in read_jsonl(ppo / "rollouts" / "step-00001.jsonl.gz"):
        rewards = found["score"]["turn_rewards"]
        starts = [start for role, start, _ in found["turns"] if role == "assistant"]
        assert len(rewards) == len(starts)
        assert found["reward"] == pytest.approx(sum(rewards), abs=1e-3)
        if len(starts) == 2:  # advantages are whitened, and the first turn's exceeds the second's by its own reward
            scales.append((found["advantages"][starts[0]] - found["advantages"][starts[1]]) / rewards[0])
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-3)
    assert scales[0] > 0
