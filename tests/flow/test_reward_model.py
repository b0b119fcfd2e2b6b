"""A reward model from beginning to end: trained on recorded pairs, validated, resumed, saved, and read elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlkit.cli.main import main
from rlkit.rewards import ModelReward
from rlkit.testing import example_trajectory
from tests.conftest import read_jsonl, rlkit
from tests.stubs import classifier_runtime

pytestmark = pytest.mark.slow

RECIPE = """
model: {path: tiny, head: score}
task: {class_path: Arithmetic, init_args: {mistakes: 2}}
rollout: {engine: Recorded}
loss: {class_path: BradleyTerry, init_args: {centre: 0.01}}
train: {steps: 4, prompts_per_step: 16, lr: 1.0e-3}
validation: {limit: 20}
save: {every: 2}
fabric: {accelerator: cpu, devices: 1}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "rm.yaml"
    path.write_text(RECIPE)
    return f"--recipe={path}"


@pytest.fixture(scope="module")
def run(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rm") / "run"
    assert main(["fit", recipe, f"--out={out}"]) == 0
    return out


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]


def rewards(path: Path, rows: list[dict[str, Any]]) -> list[float | None]:
    """Return what ModelReward scores recorded conversations with."""
    reward = ModelReward(str(path))
    reward.bind(classifier_runtime())
    trajectories = [example_trajectory(row["text"]) for row in rows]
    for trajectory, row in zip(trajectories, rows, strict=True):
        trajectory.messages = [*row["messages"], {"role": "assistant", "content": row["text"]}]
    found = [score.reward for score in reward._score(trajectories)]
    reward.close()
    return found


def test_validation_of_recorded_pairs_equals_model_reward(run: Path) -> None:
    before, after = (result(run)["validation"][when] for when in ("before", "after"))
    assert (before["accuracy"], before["margin"]) == (0.5, 0.0)  # a head of zeros orders nothing
    assert after["accuracy_low"] <= after["accuracy"] <= after["accuracy_high"]
    rows = read_jsonl(run / "rollouts" / "validation-after.jsonl.gz")
    assert len(rows) == 20 * 3
    scores = [row["reward"] for row in rows]
    assert len(set(scores)) > 20
    assert rewards(run, rows) == pytest.approx(scores, abs=1e-4)
    [first, *_, last] = read_jsonl(run / "metrics.jsonl")
    assert first["policy/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert {"policy/margin", "policy/preference_accuracy", "policy/score"} <= last.keys()
    assert not {name for name in last if name.startswith(("engine/", "mismatch/", "advantage/"))}


@pytest.mark.parametrize("place", ["", "final", "checkpoints/step-000004"])
def test_validate_and_export_read_what_was_trained(
    run: Path, tmp_path: Path, place: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", recipe, f"--checkpoint={run / place}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    after = result(run)["validation"]["after"]
    assert found == pytest.approx({name: after[name] for name in found})
    assert {name for name in after if "_p_" not in name} - found.keys() == {"loss", "preference_accuracy", "score"}
    assert main(["export", f"--checkpoint={run / place}", f"--out={tmp_path / 'out'}"]) == 0
    rows = read_jsonl(run / "rollouts" / "validation-after.jsonl.gz")[:3]
    assert rewards(tmp_path / "out", rows) == pytest.approx([row["reward"] for row in rows], abs=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(run: Path, recipe: str, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'run'}"
    assert main(["fit", recipe, out, "--train.steps=2"]) == 0
    assert main(["fit", recipe, out, "--resume=auto"]) == 0
    expected, found = (load_file(folder / "final" / "model.safetensors") for folder in (run, tmp_path / "run"))
    assert expected.keys() == found.keys()
    assert "score.weight" in found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_the_same_reward_model(run: Path, recipe: str, tmp_path: Path, strategy: str) -> None:
    done = rlkit("fit", recipe, "--out=run", "--fabric.devices=2", f"--fabric.strategy={strategy}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["validation"]["after"] == pytest.approx(
        result(run)["validation"]["after"], abs=1e-4
    )
    for mine, theirs in zip(
        read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_jsonl(run / "metrics.jsonl"), strict=True
    ):
        assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_reward_model_adapters_are_merged_and_trained_on(recipe: str, tmp_path: Path) -> None:
    lora = ("--model.lora.rank=4", "--model.lora.alpha=8", "--train.lr=1e-2", "--train.ema=0.5")
    assert main(["fit", recipe, *lora, f"--out={tmp_path / 'run'}"]) == 0
    assert main(["export", f"--checkpoint={tmp_path / 'run'}", "--merge-lora", f"--out={tmp_path / 'out'}"]) == 0
    rows = read_jsonl(tmp_path / "run" / "rollouts" / "validation-after.jsonl.gz")
    assert rewards(tmp_path / "out", rows) == pytest.approx([row["reward"] for row in rows], abs=1e-4)
    further = ("--train.steps=1", f"--model.path={tmp_path / 'run'}", f"--out={tmp_path / 'further'}")
    assert main(["fit", recipe, *lora, *further]) == 0
    after, before = (result(tmp_path / name)["validation"] for name in ("run", "further"))
    assert before["before"] == pytest.approx({n: x for n, x in after["after"].items() if "_p_" not in n}, abs=1e-5)


def test_it_neither_generates_nor_becomes_a_policy(run: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", recipe, f"--checkpoint={run}"]) == 2
    assert "a reward model, which generates nothing" in capsys.readouterr().err
    assert main(["generate", "--recipe=quickstart", f"--checkpoint={run}"]) == 2
    assert "a reward model, which predicts no tokens" in capsys.readouterr().err
