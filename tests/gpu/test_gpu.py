"""What only a GPU shows: `pytest -m gpu`, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkit.distributed.offload import HostOffload
from rlkit.models.flops import peak_flops
from rlkit.models.reference import WeightAverage
from tests.conftest import read_jsonl, rlkit

pytestmark = pytest.mark.gpu

FIT = (
    "fit", "--recipe=quickstart", "--train.steps=3", "--train.prompts_per_step=8", "--validation.limit=16",
    "--fabric.accelerator=gpu", "--out=run",
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ("--fabric.precision=32-true",),
        ("--fabric.precision=bf16-mixed", "--train.offload_during_rollout=true"),
        ("--fabric.precision=bf16-mixed", "--fabric.strategy=fsdp2"),
        ("--fabric.strategy=fsdp2", "--save.every=1", "--train.checkpoint_activations=true"),
    ],
)
def test_a_run_on_one_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    done = rlkit(*FIT, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(row["memory/peak_device_mb"] > 0 and row["engine/slow_path"] == 0 for row in rows)
    assert all(row["engine/fused"] == row["update/packed"] == 1 and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["engine/recorded"] > 0
    assert max(row["mismatch/mean"] for row in rows) < (0.05 if "bf16-mixed" in options[0] else 1e-4)
    assert "CUDA graphs" not in done.stdout + done.stderr  # as where steps cannot be recorded
    known = peak_flops(torch.cuda.get_device_name(), half=True) is not None
    assert all(("time/mfu" in row) is known and row["time/tflops_per_device"] > 0 for row in rows)


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """The counts of steps of a fused optimizer are on the device, where its step reads them."""
    half = ("--fabric.precision=bf16-mixed", "--save.every=2", "--validation=null")
    for extra in (("--train.steps=2",), ("--train.steps=4", "--resume=run", "--force")):
        done = rlkit(*FIT, *half, *extra, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [row["update/steps"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1] * 4


def test_averaged_weights_leave_the_device() -> None:
    average = WeightAverage(torch.nn.Linear(1024, 1024, device="cuda"), 0.5)
    before = [x.cpu() for x in average.tensors]
    resting = HostOffload([average], [], torch.device("cuda"))
    with resting.off_device():
        assert not any(x.is_cuda for x in average.tensors)
    assert all(x.is_cuda and torch.equal(x.cpu(), y) for x, y in zip(average.tensors, before, strict=True))


def test_what_rests_leaves_the_device_and_comes_back() -> None:
    module = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = module.weight.detach().clone().cpu()
    held = torch.cuda.memory_allocated()
    resting = HostOffload([module], [optimizer], torch.device("cuda"))
    with resting.off_device():
        assert torch.cuda.memory_allocated() < held - 3 * 4 * 1024 * 1024
        with resting.back(module):
            assert module.weight.is_cuda
        assert not module.weight.is_cuda
        assert all(chunk.is_pinned() for memory in resting.hosts.values() for chunk in memory.chunks)
    assert torch.equal(module.weight.detach().cpu(), before)
    assert all(v.is_cuda for state in optimizer.state.values() for v in state.values() if v.dim())
