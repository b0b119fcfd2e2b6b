"""Ranks that share the tokens of rows compute what one rank computes of all tokens: statistics, losses, gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_authors.models import save_random_model
from torch import Tensor

from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.flow.ddp_gradients import LENGTHS
from tests.flow.sequence import count_embedded, make_run, measure

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "llama", "num_key_value_heads": 4},
    "grouped": {"kind": "qwen2"},
    "unchunked": {"kind": "hyperclovax", "logits_scaling": 2.0},
    "three": {"kind": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
    "six": {"kind": "qwen2", "hidden_size": 48, "num_attention_heads": 6},
}
"""Of 4 query heads and 4 or 2 key/value heads, then of 3 and 6; the logits of `unchunked` are no plain product."""

LORA = "--model.lora.rank=4"

Measured = dict[str, Tensor | float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        save_random_model(made / name, **options)
    return made


@cache
def of_one_rank(model: str, *options: str) -> tuple[list[Measured], list[int]]:
    """Return what one rank measures without sharding, and the tokens of each of its passes."""
    run = make_run(model, *options)
    counts = count_embedded(run)
    results = [measure(run, packed) for packed in modes(model)]
    run.service.close()
    return results, counts


def modes(model: str) -> tuple[bool, ...]:
    """Return whether passes are packed, for each measurement; a model whose logits are unchunked pads its rows."""
    return (False,) if model.endswith("unchunked") else (True, False)


def assert_alike(name: str, actual: Tensor | float, expected: Tensor | float) -> None:
    one, other = (torch.as_tensor(x).double() for x in (actual, expected))
    if name.endswith("gradient"):
        assert other.norm() > 1e-3, name
        assert (one - other).norm() / other.norm() < 1e-5, name
    else:
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize(
    ("model", "sizes", "options"),
    [
        ("dense", (2, 2, 1), ()),
        ("dense", (4, 4, 1), ()),
        ("grouped", (2, 2, 1), ("--train.checkpoint_activations=true",)),
        ("grouped", (4, 4, 1), ()),  # fewer key/value heads than ranks
        ("grouped", (4, 2, 1), ()),  # with two data-parallel groups
        ("grouped", (4, 2, 2), ()),  # one key/value head for each tensor-parallel rank
        ("grouped", (2, 2, 1), (LORA,)),
        ("unchunked", (2, 2, 1), ()),
        ("grouped", (2, 2, 1), ("--train.offload_activations=true", LORA)),
        ("three", (2, 2, 1), ()),  # a head of zeros is added to each of these
        ("grouped", (3, 3, 1), ()),
        ("six", (4, 4, 1), ()),
    ],
)
def test_divided_tokens_have_the_same_gradients(
    folder: Path, tmp_path: Path, model: str, sizes: tuple[int, int, int], options: tuple[str, ...]
) -> None:
    """Log-probs, distributions, values, losses, KL to the reference and full gradients, packed and padded.

    The sizes are the numbers of ranks, of those that share tokens, and of those that share matrix products.
    """
    ranks, sequence, tensor = sizes
    path = str(folder / model)
    expected, undivided = of_one_rank(path, *(o for o in options if o == LORA))
    script = str(Path(__file__).with_name("sequence.py"))
    fabric = ("--fabric.strategy=FSDP2", f"--fabric.devices={ranks}", f"--fabric.strategy.sequence_parallel={sequence}")
    words = (str(tmp_path / "out.pt"), path, *fabric, f"--fabric.strategy.tensor_parallel={tensor}", *options)
    done = forks.run((script, *words), tmp_path, ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    results, embedded = torch.load(tmp_path / "out.pt")
    assert len(results) == len(expected)
    for found, one in zip(results, expected, strict=True):
        assert found.keys() == one.keys()
        for name in one:
            assert_alike(name, found[name], one[name])
    assert len(embedded) == ranks
    assert all(max(counts) <= -(-max(undivided) // sequence) for counts in embedded), "a rank computes others' tokens"


@pytest.mark.parametrize("recipe", [("quickstart", "--kl_loss.coef=0.1"), ("quick_rm",)])
def test_runs_that_divide_tokens_have_the_same_metrics(recipe: tuple[str, ...], tmp_path: Path) -> None:
    """A policy that samples, and a reward model; mismatches are rounding errors, which differ."""
    options = (
        "fit", "--recipe", *recipe, "--train.steps=2", "--train.prompts_per_step=8", "--validation.limit=8",
        "--fabric.strategy=FSDP2",
    )  # fmt: skip
    for ranks in (1, 2):
        sizes = (f"--out=run{ranks}", f"--fabric.devices={ranks}", f"--fabric.strategy.sequence_parallel={ranks}")
        done = rlkit(*options, *sizes, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (read_jsonl(tmp_path / f"run{ranks}" / "metrics.jsonl") for ranks in (1, 2))
    assert len(one) == 2
    measured = ("time/", "memory/")
    for expected, found in zip(one, two, strict=True):
        assert found.keys() == expected.keys()
        for name in (name for name in expected if not name.startswith(measured)):
            rounding = 1e-4 if name.startswith("mismatch/") else 1e-6
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=rounding), name


@pytest.mark.parametrize("kind", ["bloom", "stablelm"])
def test_attention_that_cannot_be_hooked_is_refused(kind: str, tmp_path: Path) -> None:
    """One computes attention by itself, the other passes no arguments on; a probe of the loaded model shows both."""
    save_random_model(tmp_path / kind, kind)
    done = rlkit(
        "fit", "--recipe=quickstart", f"--model.path={tmp_path / kind}", "--fabric.strategy=FSDP2", "--out=run",
        "--fabric.devices=2", "--fabric.strategy.sequence_parallel=2", "--train.steps=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "sequence_parallel, but the tokens of a model cannot be divided: " in done.stderr


def test_rows_are_long_enough_to_be_divided() -> None:
    """Or a test above would compare slices without tokens."""
    assert max(LENGTHS) > 4 * 4
