"""A sharded policy streams its whole weights, never more of them at once than a bucket and its largest tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import read_jsonl

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "1 32-true 1"), (2, "1 bf16-mixed 1"), (2, "2 32-true 1"), (4, "2 bf16-mixed 1"), (4, "1 32-true 2"),
        (4, "1 bf16-mixed 2"), (4, "2 32-true 2"),
    ],
)  # fmt: skip
def test_weights_are_streamed_whole(ranks: int, words: str, tmp_path: Path) -> None:
    """By tensor parallelism, precision and groups that replicate the shards."""
    script = str(Path(__file__).with_name("sharded.py"))
    done = forks.run((script, *words.split()), tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("streamed") == ranks


def test_event_loops_agree_beside_collectives(tmp_path: Path) -> None:
    done = forks.run((str(Path(__file__).with_name("side_ranks.py")),), tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert "agreed" in done.stdout


def test_no_rank_holds_a_whole_model_while_it_learns_or_is_asked(tmp_path: Path) -> None:
    """Gradients are divided after every micro-batch, as planned; expected log-probs gather a layer at a time."""
    done = forks.run((str(Path(__file__).with_name("sharded_memory.py")),), tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("planned; asked:") == 2


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """As on several nodes: somebody else starts the processes, Fabric finds them."""
    words = (
        "fit", "--recipe=quickstart", "--out=run", "--train.steps=2", "--train.prompts_per_step=4",
        "--validation.limit=4", "--fabric.accelerator=cpu", "--fabric.devices=2", "--fabric.strategy=fsdp2",
    )  # fmt: skip
    done = subprocess.run(
        (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rlkit", *words),
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
