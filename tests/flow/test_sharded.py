"""A sharded policy streams its whole weights, never more of them at once than a bucket and its largest tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlkit.testing import save_random_model
from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.flow.test_architectures import KINDS

pytestmark = pytest.mark.slow

MIXTURES = [
    "qwen3_moe", "glm4_moe", "mixtral", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "gpt_oss", "deepseek_v3",
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("ranks", "option", "kinds"),
    [
        (2, "tensor_parallel", ["qwen3", "gemma3_text", "phi3", "olmo3", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss"]),
        (4, "tensor_parallel", ["qwen3", "deepseek_v3"]),
        pytest.param(2, "tensor_parallel", list(KINDS), marks=pytest.mark.stress),
        (4, "expert_parallel", ["qwen3_moe", "gpt_oss"]),
        pytest.param(2, "expert_parallel", MIXTURES, marks=pytest.mark.stress),
    ],
    ids=["styles", "sharded", "all", "experts", "all experts"],
)
def test_kinds_of_models_are_divided_as_they_say(ranks: int, option: str, kinds: list[str], tmp_path: Path) -> None:
    """Gradients and weights that are sent equal those of the undivided model."""
    done = forks.run((str(Path(__file__).with_name("divided.py")), option, "2", *kinds), tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("divided") == ranks


def test_supervised_training_divides_a_mixture(tmp_path: Path) -> None:
    """A checkpoint of divided experts goes on undivided, and that of distributed ones alike.

    Nothing samples: the embedded engine need not be able to.
    """
    save_random_model(tmp_path / "base", "qwen3_moe", **KINDS["qwen3_moe"])
    words = (
        "fit", "--recipe=quick_sft", "--model.path=base", "--train.lr=1e-2", "--train.schedule=Constant",
        "--validation=null", "--save.every=1", "--fabric.strategy=FSDP2",
    )  # fmt: skip
    runs = (
        ("alone", 1, "tensor", "--train.steps=4"),
        ("divided", 2, "tensor", "--train.steps=2"),
        ("resumed", 1, "tensor", "--train.steps=4", "--resume=divided"),
        ("redivided", 2, "tensor", "--train.steps=4", "--resume=resumed/checkpoints/step-000003"),
        ("distributed", 2, "expert", "--train.steps=3", "--resume=divided"),
        ("gathered", 1, "expert", "--train.steps=4", "--resume=distributed"),
    )
    for name, ranks, kind, *options in runs:
        parallel = (f"--fabric.devices={ranks}", f"--fabric.strategy.{kind}_parallel={ranks}")
        done = rlkit(*words, *parallel, *options, f"--out={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    weights = {name: load_file(tmp_path / name / "final" / "model.safetensors") for name, *_ in runs}
    for name in ("resumed", "redivided", "gathered"):
        for key, tensor in weights["alone"].items():
            torch.testing.assert_close(weights[name][key], tensor, atol=1e-4, rtol=1e-3, msg=f"{name}: {key}")


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
