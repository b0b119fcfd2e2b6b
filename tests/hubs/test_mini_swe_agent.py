"""mini-swe-agent from `rlkit fit`: an agent that somebody else wrote learns to do tasks in a folder by its shell."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path

import torch

from rlkit.models.load import load_policy, load_tokenizer
from rlkit.recipe import Model
from tests.conftest import read_jsonl
from tests.flow.test_conversations import fit
from tests.hubs.folders import conversation, write_rows
from tests.pretrain.arithmetic import train
from tests.pretrain.tools import encode

RECIPE = """
model: {path: warm}
task: {class_path: Jsonl, init_args: {path: train.jsonl, validation_path: validation.jsonl}}
agent: {class_path: PythonAgent, init_args: {function: "tests.hubs.mini_agent:run", allow_code: true}}
rollout: {group_size: 8, sampling: {max_tokens: 32}}
reward: {class_path: PythonReward, init_args: {function: "tests.hubs.folders:grade", allow_code: true}}
advantage: GRPO
loss: ClipLoss
train: {steps: 12, prompts_per_step: 8, lr: 3.0e-4}
log: {rollouts: {limit: null}}
validation: {samples: 0}
fabric: {accelerator: cpu, devices: 1}
"""


def save_warm_model(folder: Path) -> None:
    """Save the shipped model of several turns, after 100 steps on conversations of which most are wrong."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer, model = load_tokenizer(Model("tiny-tools")), load_policy(Model("tiny-tools")).train()
    args = Namespace(steps=100, lr=3e-3)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (1 - step / args.steps)

    train(model, args, scale, lambda: encode(tokenizer, [conversation(rng) for _ in range(16)]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_mini_swe_agent_learns(tmp_path: Path) -> None:
    """It appends to its history, but leaves out a turn without a command: only such a turn is a sample of its own.

    Greedy reward rises from 0.00 to 1.00 (seed 0) and 0.75 (seed 1).
    """
    save_warm_model(tmp_path / "warm")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rng = random.Random(0)
    write_rows(tmp_path / "train.jsonl", 200, rng)
    write_rows(tmp_path / "validation.jsonl", 40, rng)
    rows, validation = fit("--recipe=recipe.yaml", cwd=tmp_path)
    assert validation["after"]["reward"] > validation["before"]["reward"] + 0.4
    assert validation["before"]["unscored"] == validation["after"]["unscored"] == 0
    for step, row in enumerate(rows, 1):
        assert row["rollout/failed"] == row["reward/failed"] == row["conversation/agent_failed"] == 0
        assert row["mismatch/max"] < 1e-3
        for saved in read_jsonl(tmp_path / "run" / "rollouts" / f"step-{step:05d}.jsonl.gz"):
            for branch in saved["branches"]:
                turn = branch["conversation"][-1]["content"]
                assert not turn.startswith("$ ") or branch["stop"] == "length"
