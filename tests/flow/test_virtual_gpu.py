"""A run on a GPU that is none: nothing mixes devices, threads choose theirs, and the host seldom reads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, read_jsonl
from tests.flow.virtual_gpu import Functions, Operators, VirtualGpu

FIT = (
    "fit", "--recipe=quickstart", "--train.steps=2", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--validation.limit=4", "--validation.samples=0", "--fabric.precision=bf16-mixed",
)  # fmt: skip


def run(folder: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return what was seen of a run, and its metrics."""
    words = (sys.executable, "-m", "tests.flow.virtual_gpu", str(folder / "report.json"), *FIT, *options)
    done = subprocess.run((*words, f"--out={folder}/run"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "report.json").read_text()), read_jsonl(folder / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--train.offload_during_rollout=true", "--train.ema=0.9", "--kl_loss.coef=0.1"),
        ("--model.lora.rank=4", "--model.dtype=bfloat16"),
        ("--advantage=GAE", "--critic.lr=1e-3", "--train.offload_during_rollout=true"),
        ("--rollout.max_staleness=2", "--train.old_logps=rollout", "--train.minibatches=2"),
    ],
)
def test_a_run_on_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    seen, metrics = run(tmp_path, *options)
    assert seen["mixed"] == {}
    assert seen["threads"] == {}
    assert all(row["update/packed"] == row["engine/fused"] == 1 for row in metrics)
    assert metrics[-1]["mismatch/mean"] < 0.05
    assert seen["reads"]["rlkit_engine_torch/batch.py:sample"] <= 2 * (seen["steps"] + 12)  # which rows have ended


def test_a_tensor_of_the_host_among_those_of_a_gpu_is_seen() -> None:
    gpu = VirtualGpu()
    with Functions(gpu), Operators(gpu):
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert (there.device.type, here.device.type, (there * 2).is_cuda) == ("cuda", "cpu", True)
        assert there.cpu().device.type == "cpu"
        assert not gpu.mixed
        there + here
    assert list(gpu.mixed.values()) == [1]


def test_host_reads_and_threads_without_a_device_are_seen() -> None:
    gpu = VirtualGpu()

    def use() -> None:
        with Functions(gpu), Operators(gpu):
            torch.ones(3, device="cuda").sum().item()

    use()
    assert not gpu.threads
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(gpu.threads) > 0
    assert sum(gpu.reads.values()) == 2
