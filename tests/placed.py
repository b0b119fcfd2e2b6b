"""What tests of pools share: where roles are placed, and a reward model."""

from __future__ import annotations

from pathlib import Path

from rlkit.cli.main import main

APART = {"critic": "values", "reference": "frozen", "reward": "judge"}
POOL = {"accelerator": "cpu", "devices": 1}


def trained_reward_model(folder: Path) -> Path:
    """Train a reward model for two steps; return its run folder."""
    options = ("--train.steps=2", "--validation=null", "--save.optimizer=false")
    assert main(["fit", "--recipe=quick_rm", *options, f"--out={folder / 'rm'}"]) == 0
    return folder / "rm"
