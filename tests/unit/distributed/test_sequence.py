"""Which models' tokens ranks can divide, and how a group of ranks divides them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import random_model, save_random_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.distributed import sequence as module
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.sequence import SequenceGroup, causal_attention, division_problem
from rlkit.recipe import FSDP2, Fabric


def config(kind: str = "qwen2", **changes: Any) -> Any:
    return random_model(kind, **changes).config


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("mistral", {"sliding_window": 512}),  # as long as the context
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_tokens_of_these_models_are_divided(kind: str, changes: dict[str, Any]) -> None:
    assert division_problem(config(kind, **changes)) is None


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 64}, "a sliding window of 64 tokens"),
        ("gemma2", {"sliding_window": 64, "head_dim": 8}, "a sliding window of 64 tokens"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "its rotary embedding is dynamic",
        ),
    ],
)
def test_tokens_of_other_models_are_not(kind: str, changes: dict[str, Any], problem: str) -> None:
    assert problem in str(division_problem(config(kind, **changes)))


def test_layers_without_full_attention_are_named() -> None:
    text = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    mixed = SimpleNamespace(get_text_config=lambda: text)
    assert "layers of linear_attention" in str(division_problem(mixed))


def test_recipes_are_refused_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windowed = save_random_model(tmp_path / "windowed", "mistral", sliding_window=64)
    for recipe, ranks, words, expected in (
        ("quickstart", 2, [f"--model.path={windowed}"], f"model.path '{windowed}' cannot be divided: its attention"),
        ("quickstart", 2, [f"--model.path={windowed}", "--gpu=h100"], "cannot be divided: its attention"),
        ("quick_ppo", 2, [f"--critic.path={windowed}"], f"critic.path '{windowed}' cannot be divided: its attention"),
        ("quick_image", 2, [], "it reads pictures"),
        ("quickstart", 2, ["--model.attention=eager"], "divides sdpa alone"),
    ):
        fabric = ("--fabric.strategy=FSDP2", "--fabric.devices=6", f"--fabric.strategy.sequence_parallel={ranks}")
        few = () if recipe == "quick_image" else ("--task.max_operand=9",)
        assert main(["recipe", "check", recipe, *few, *fabric, *words]) == 2
        assert expected in capsys.readouterr().err


def test_models_that_cannot_be_divided_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of other kinds and shapes than the policy, too."""
    mamba = save_random_model(tmp_path / "mamba", "mamba", state_size=4)
    four = ("--fabric.strategy=FSDP2", "--fabric.devices=4", "--rollout.engine=SGLangServer")
    for size, words, expected in (
        (2, [f"--model.path={mamba}"], "transformers has no plan for model.path, a 'mamba'; set tensor_parallel: 1"),
        (2, [f"--critic.path={mamba}"], "transformers has no plan for critic.path, a 'mamba'; set tensor_parallel: 1"),
        (4, [], "model.path has num_key_value_heads=2; choose a divisor of it"),
    ):
        parallel = (*four, f"--fabric.strategy.tensor_parallel={size}")
        assert main(["recipe", "check", "quick_ppo", "--task.max_operand=9", *parallel, *words]) == 2
        assert f"FSDP2 has tensor_parallel={size}, but {expected}" in capsys.readouterr().err


def test_models_whose_experts_cannot_be_distributed_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = save_random_model(tmp_path / "mixture", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    for size, words, expected in (
        (2, [], "transformers has no plan for experts of model.path 'tiny', a 'qwen2'; set expert_parallel: 1"),
        (
            4,
            [f"--model.path={mixture}", "--rollout.engine=TorchEngine"],
            "TorchEngine cannot sample from a policy under",
        ),
        (8, [f"--model.path={mixture}"], "model.path has num_local_experts=4; choose a divisor of it"),
        (
            2,
            ["--fabric.strategy.tensor_parallel=2"],
            "expert_parallel=2 and tensor_parallel=2, which do not go together",
        ),
        (2, ["--fabric.strategy.replicate=2"], "expert_parallel=2 and replicate=2, which do not go together"),
    ):
        parallel = ("--fabric.strategy=FSDP2", "--fabric.devices=8", f"--fabric.strategy.expert_parallel={size}")
        sampled = ("--rollout.engine=SGLangServer", "--task.max_operand=9")
        assert main(["recipe", "check", "quickstart", *sampled, *parallel, *words]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tensor", "sequence", "problem"),
    [
        (1, 3, "sequence_parallel=3, which does not divide the 4 ranks; choose one of [1, 2, 4]"),
        (2, 4, "sequence_parallel=4, which does not divide the 2 ranks that tensor_parallel=2 leaves"),
        (3, 1, "tensor_parallel=3, which does not divide the 4 ranks"),
    ],
)
def test_degrees_divide_the_ranks(tensor: int, sequence: int, problem: str) -> None:
    with pytest.raises(RecipeError) as raised:
        make_fabric(Fabric("cpu", 4, strategy=FSDP2(tensor, sequence)))
    assert problem in str(raised.value)


def group_of(size: int, index: int = 0) -> SequenceGroup:
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: index)
    return SequenceGroup(group)


def test_slices_are_equal_and_padded() -> None:
    tokens = torch.arange(1, 15).view(2, 7)
    slices = [group_of(3, index).slice(tokens) for index in range(3)]
    assert torch.cat(slices, 1).tolist() == [[*range(1, 8), 0, 0], [*range(8, 15), 0, 0]]
    assert group_of(4, 3).slice(torch.ones(1, 2, dtype=torch.bool)).tolist() == [[False]]


DIVIDED = [(8, 8, 4), (8, 2, 4), (8, 1, 8), (12, 4, 3), (12, 2, 6)]
PADDED = [(3, 3, 2), (6, 2, 4), (14, 2, 4), (28, 4, 8), (2, 1, 4), (5, 5, 3), (6, 3, 4)]
"""Query heads, key heads, and ranks that divide them or not."""


@pytest.mark.parametrize(("heads", "key_heads", "size"), DIVIDED + PADDED)
def test_each_rank_has_the_keys_of_its_queries(
    monkeypatch: pytest.MonkeyPatch, heads: int, key_heads: int, size: int
) -> None:
    """Without processes: what rank r is sent is the r-th part of the heads of all slices, padded ones included."""
    query, key, value = (torch.randn(2, n, 6 * size, 4) for n in (heads, key_heads, key_heads))
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    outputs = []
    for rank in range(size):

        def joined(x: Tensor, _: object, divided: int, __: int, rank: int = rank) -> Tensor:
            return x.chunk(size, divided)[rank]

        monkeypatch.setattr(module, "_exchange", joined)
        own = group_of(size, rank).gather_tokens(query, key, value)
        assert own[0].shape[1] == -(-heads // size)
        assert own[0].shape[1] % own[1].shape[1] == 0
        outputs.append(causal_attention(*own, None))
    monkeypatch.setattr(module, "_exchange", lambda x, *_: x)
    output = group_of(size).gather_heads(torch.cat(outputs, 2), heads, key_heads)
    torch.testing.assert_close(output, expected)
