"""The check that a policy sees its pictures, in runs of a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.cli.main import main
from rlkit.models import vision
from tests.vision_models import save_random_vision_model

REWARD = "def score(text):\n    return sum(letter in 'aeiou' for letter in text) / 8\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a model, rows with and without pictures, and a reward; return the arguments of `fit`."""
    monkeypatch.chdir(tmp_path)
    save_random_vision_model(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "reward.py").write_text(REWARD)
    drawn = np.random.default_rng(0)
    rows = []
    for number in range(12):
        row: dict[str, Any] = {"prompt": "No picture.", "answer": "a"}
        if number % 3:
            pixels = drawn.integers(0, 256, (28, 56, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            row = {"prompt": "<image>What is it?", "answer": "a", "images": [f"{number}.png"]}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return [
        "--recipe=quick_image", "--model.path=model", "--task=Jsonl", "--task.path=rows.jsonl", "--reward=PythonReward",
        "--reward.function=reward.py:score", "--reward.allow_code=true", "--advantage=GRPO", "--loss=ClipLoss",
        "--rollout.group_size=2", "--rollout.sampling.max_tokens=4", "--train.steps=1", "--train.prompts_per_step=4",
        "--train.lr=1e-3", "--validation=null", "--fabric.accelerator=cpu", "--fabric.devices=1", "--out=run",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_with_pictures_keeps_them_beside_its_rollouts(recipe: list[str], tmp_path: Path) -> None:
    assert main(["fit", *recipe]) == 0
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["mismatch/max"] < 1e-4
    kept = {path.name for path in (tmp_path / "run/rollouts/media").iterdir()}
    assert kept
    assert {"preprocessor_config.json", "config.json"} <= {path.name for path in (tmp_path / "run/final").iterdir()}
    assert main(["report", "run"]) == 0
    assert main(["fit", *recipe[:-1], "--model.path=run", "--out=second"]) == 0


def test_a_policy_that_is_blind_is_refused(
    recipe: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The features of all pictures are 0, in the engine and the trainer alike."""
    joined = vision.join_media

    def dark(parts: Any) -> dict[str, torch.Tensor]:
        return {name: x * 0 if x.is_floating_point() else x for name, x in joined(parts).items()}

    monkeypatch.setattr(vision, "join_media", dark)
    assert main(["fit", *recipe]) == 2
    assert "the policy does not see its pictures" in capsys.readouterr().err


def test_a_text_model_is_refused_before_it_is_loaded(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.models.load._Loader.load", lambda *_: pytest.fail("a model was loaded"))
    assert main(["fit", *recipe, "--model.path=tiny"]) == 2
    error = capsys.readouterr().err
    assert "column 'images'" in error
    assert "choose a vision-language model" in error


def test_servers_are_refused_for_other_vision_models(
    recipe: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = ["--rollout.engine=SGLangServer", '--rollout.engine.urls=["http://127.0.0.1:9"]']
    adapters = ["--model.lora={}", "--rollout.engine.launch.adapter_only=true"]
    assert main(["fit", *recipe, *engine, *adapters]) != 0
    assert "adapters of a model that reads pictures are only sent merged" in capsys.readouterr().err
    save_random_vision_model(tmp_path / "gemma", "gemma3")
    assert main(["fit", *recipe, *engine, "--model.path=gemma"]) != 0
    assert "serves pictures of qwen2_vl, qwen2_5_vl, qwen3_vl alone" in capsys.readouterr().err
