"""A sharded policy streams its whole weights, never more of them at once than a bucket and its largest tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_jsonl

pytestmark = pytest.mark.slow


def torchrun(*args: str, cwd: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *args),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


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
    done = torchrun(script, *words.split(), cwd=tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("streamed") == ranks


def test_event_loops_agree_beside_collectives(tmp_path: Path) -> None:
    done = torchrun(str(Path(__file__).with_name("side_ranks.py")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "agreed" in done.stdout


def test_no_rank_holds_a_whole_model_while_it_learns_or_is_asked(tmp_path: Path) -> None:
    """Gradients are divided after every micro-batch, as planned; expected log-probs gather a layer at a time."""
    done = torchrun(str(Path(__file__).with_name("sharded_memory.py")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("planned; asked:") == 2


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """As on several nodes: somebody else starts the processes, Fabric finds them."""
    done = torchrun(
        "-m", "rlkit", "fit", "--recipe=quickstart", "--out=run", "--train.steps=2", "--train.prompts_per_step=4",
        "--validation.limit=4", "--fabric.accelerator=cpu", "--fabric.devices=2", "--fabric.strategy=fsdp2",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
