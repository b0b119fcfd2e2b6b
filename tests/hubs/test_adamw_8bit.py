"""Moments in 8 bits and weights in bfloat16, with bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bitsandbytes.optim import AdamW8bit as Bitsandbytes
from rlkit_optimizers import blockwise
from rlkit_optimizers.blockwise import BlockwiseAdamW
from safetensors.torch import load_file
from torch import Tensor, nn

from rlkit.cli.main import main
from tests.conftest import read_jsonl

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}


def own(weights: list[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.1) -> BlockwiseAdamW:
    groups: list[dict[str, object]] = [{"params": weights, "weight_decay": weight_decay}]
    return BlockwiseAdamW(groups, lr, (0.9, 0.99), 1e-8)


def weights_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes]


def gradients(weights: list[nn.Parameter], steps: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(weight.shape, generator=generator) for weight in weights]


def train(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int) -> None:
    for step_gradients in gradients(weights, steps):
        for weight, gradient in zip(weights, step_gradients, strict=True):
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def test_large_weights_are_those_of_bitsandbytes() -> None:
    """Weights of whole blocks, and of blocks and a rest."""
    shapes = (64, 128), (100, 51), (70, 70)
    ours, theirs = weights_of(*shapes), weights_of(*shapes)
    train(own(ours), ours, 5)
    train(Bitsandbytes(theirs, weight_decay=0.1, **OPTIONS), theirs, 5)
    assert all(map(torch.equal, ours, theirs))


def test_small_weights_are_those_of_torch() -> None:
    ours, theirs = weights_of((63, 65), (7,)), weights_of((63, 65), (7,))
    train(own(ours), ours, 5)
    train(torch.optim.AdamW(theirs, weight_decay=0.1, **OPTIONS), theirs, 5)
    for weight, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (weights_of((100, 51), (64, 128), dtype=dtype) for _ in range(2))
    train(own(whole), whole, 3)
    monkeypatch.setattr(blockwise, "CHUNK", 1024)
    train(own(chunked), chunked, 3)
    assert all(map(torch.equal, whole, chunked))


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    through, parts = (weights_of((64, 128), (7,), dtype=torch.bfloat16) for _ in range(2))
    optimizer = own(through)
    train(optimizer, through, 1)
    first = own(parts)
    train(first, parts, 1)
    second = own(parts)
    second.load_state_dict(first.state_dict())
    train(optimizer, through, 1)
    train(second, parts, 1)
    assert all(map(torch.equal, through, parts))


def test_a_number_has_two_bytes_of_state() -> None:
    weights = weights_of((512, 256), dtype=torch.bfloat16)
    optimizer = own(weights)
    train(optimizer, weights, 1)
    numbers, scales = 512 * 256, 512
    assert sum(value.nbytes for value in optimizer.state[weights[0]].values()) == 2 * numbers + 2 * 4 * scales + 4
    assert weights[0].dtype == torch.bfloat16


def test_weights_in_bfloat16_follow_small_updates_in_the_mean() -> None:
    """A step of 1e-6 is far below bfloat16's precision of 0.02, 6e-5: rounded to the nearest it moves nothing."""
    [weight], [plain] = weights_of((256, 256), dtype=torch.bfloat16), weights_of((256, 256), dtype=torch.bfloat16)
    start = weight.detach().float()
    gradient = torch.ones_like(weight)
    optimizers = own([weight], 1e-6, 0.0), torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        weight.grad, plain.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (weight.detach().float() - start).mean().item()
    assert moved == pytest.approx(-200 * 1e-6, rel=0.05)  # of 65,536 weights, each a walk of 200 steps
    large = start.abs() > 2.0**-6
    assert torch.equal(plain.detach().float()[large], start[large])


FIT = (
    "fit", "--recipe=quick_grpo", "--train.optimizer=AdamW8bit", "--fabric.precision=bf16-true", "--validation=null",
    "--train.schedule=Constant", "--save.every=1",
)  # fmt: skip


def test_a_run_learns_in_bfloat16_and_exports_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main([*FIT, f"--out={run}", "--train.steps=30"]) == 0
    rows = read_jsonl(run / "metrics.jsonl")
    assert max(row["mismatch/k3"] for row in rows) < 0.01
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.15
    exported = tmp_path / "exported"
    assert main(["export", f"--checkpoint={run}", f"--out={exported}"]) == 0
    saved, final = (load_file(folder / "model.safetensors") for folder in (exported, run / "final"))
    assert saved.keys() == final.keys()
    assert all(torch.equal(saved[name], final[name]) for name in saved)
    assert all(torch.equal(weight.bfloat16().to(weight.dtype), weight) for weight in saved.values())


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    through, parts = tmp_path / "through", tmp_path / "parts"
    assert main([*FIT, f"--out={through}", "--train.steps=3"]) == 0
    for steps in (1, 3):
        assert main([*FIT, f"--out={parts}", "--resume=auto", f"--train.steps={steps}"]) == 0
    expected, resumed = (load_file(out / "final" / "model.safetensors") for out in (through, parts))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize(
    ("model", "gpu", "gib"), [("Qwen/Qwen2.5-1.5B-Instruct", "24000", 23), ("Qwen/Qwen2.5-7B-Instruct", "h100", 79)]
)
def test_twice_the_model_fits_a_gpu(model: str, gpu: str, gib: int, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["recipe", "check", "grpo_gsm8k", "--gpu", gpu, f"--model.path={model}"]
    check.append("--train.checkpoint_activations=true")
    main(check)
    assert f"{gib} GiB: no" in capsys.readouterr().out
    main([*check, "--train.optimizer=AdamW8bit", "--fabric.precision=bf16-true"])
    assert f"{gib} GiB: yes" in capsys.readouterr().out
