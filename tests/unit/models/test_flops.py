"""The operations of learning, worked out by hand, and what is logged of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.models.actor import ValueModel
from rlkit.models.flops import LearningWork, peak_flops
from rlkit.models.lora import add_lora, base_model
from rlkit.recipe import Critic, Fabric, Lora
from rlkit.testing import random_model
from rlkit.train.metrics import Meter
from rlkit.train.models import TrainableModule
from rlkit.train.phases import speeds
from rlkit.train.update import count_work
from tests.unit.phases import LocalRanks, Trained, Values, context, ready, recipe

SHAPE = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip
LENGTHS = torch.tensor([3, 5])


def learning_flops(model: Any, lengths: torch.Tensor, chosen: int) -> float | None:
    work = LearningWork.of(model)
    return None if work is None else work.flops(lengths, chosen)


def test_the_operations_of_learning_by_hand() -> None:
    """A block: queries and outputs 8 * 8 each, a key and a value 8 * 4 each, three matrices 8 * 12: 480 weights.

    8 tokens * 3 blocks * 480 weights * 6, 4 chosen tokens * 512 * 8 weights of the output layer * 6, and
    (9 + 25) / 2 pairs * 3 layers * 2 heads * 4 channels * 12.
    """
    expected = 8 * 3 * 480 * 6 + 4 * 4096 * 6 + 17 * 3 * 8 * 12
    assert learning_flops(random_model("qwen2", **SHAPE), LENGTHS, 4) == expected


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    """Adapters of rank 1 have as many weights as a layer has inputs and outputs: 2 * 16 + 2 * 12 + 3 * 20 a block."""
    policy = add_lora(random_model("qwen2", **SHAPE), Lora(rank=1))
    expected = 8 * 3 * (480 * 4 + 116 * 6) + 4 * 4096 * 4 + 17 * 3 * 8 * 12
    assert learning_flops(base_model(policy), LENGTHS, 4) == expected


def test_a_critic_has_no_output_layer() -> None:
    critic = ValueModel(random_model("qwen2", **SHAPE).get_decoder())
    trained: Any = TrainableModule(critic, critic, None, 1.0, None, 1)  # type: ignore[arg-type]
    assert trained.flops(LENGTHS, 4) == 8 * 3 * 480 * 6 + 17 * 3 * 8 * 12


def test_the_operations_of_experts_are_unknown() -> None:
    assert learning_flops(random_model("qwen3_moe"), LENGTHS, 4) is None


@pytest.mark.parametrize(
    ("name", "whole", "half"),
    [
        ("NVIDIA H100 80GB HBM3", 66.9e12, 989.4e12),
        ("NVIDIA H100 PCIe", 51.2e12, 756e12),
        ("NVIDIA H100 NVL", 60e12, 835.5e12),
        ("NVIDIA H200", 66.9e12, 989.4e12),
        ("NVIDIA GH200 480GB", 67e12, 989.4e12),
        ("NVIDIA B200", 75e12, 2250e12),
        ("NVIDIA A100-SXM4-80GB", 19.5e12, 311.9e12),
        ("NVIDIA L40S", 91.6e12, 362.1e12),
        ("NVIDIA L4", 30.3e12, 121e12),
        ("NVIDIA GeForce RTX 4090", 82.6e12, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("", None, None),
    ],
)
def test_peaks_are_found_by_name(name: str, whole: float | None, half: float | None) -> None:
    assert (peak_flops(name, False), peak_flops(name, True)) == (pytest.approx(whole), pytest.approx(half))


def metrics_of(made: Any, number: int = 1) -> dict[str, float]:
    meter = Meter()
    section = made.recipe.critic
    waits = section is not None and number <= section.policy_delay_steps
    trained = [*([] if waits else [made.models.policy]), *([] if section is None else [made.models.critic])]
    count_work(made.recipe, trained, ready(), meter)
    return (
        meter.result(made.ranks)
        | {"time/sample": 2.0, "time/score": 2.0, "time/update": 4.0, "time/engine_idle_share": 0.5}
        | {"rollout/tokens": 30.0}
    )


def test_what_is_logged_of_the_work() -> None:
    """12 tokens, 8 of them chosen, on each of 3 ranks: 36 tokens, and 3 * (12 + 800) TFLOP an epoch."""
    made = context(recipe(train={"epochs": 2}), LocalRanks(count=3))
    found = metrics_of(made)
    assert (found["update/tokens"], found["update/tflop"]) == (36, 3 * 812 * 2)
    assert speeds(made.recipe, made.ranks.fabric, found, {"sample": "rollout/tokens"}) == {
        "time/trainer_idle_share": 0.5,  # 2 s and 2 s of 8
        "time/tokens_per_second": 15,
        "time/tokens_per_second_per_device": 0.75,  # 36 tokens in 8 s on 6 devices
        "time/sample_ms_per_token": 1000 * 2 / 30,
        "time/update_ms_per_token": 1000 * 4 / 36,
        "time/tflops_per_device": 3 * 812 * 2 / 4 / 6,
    }


def test_the_share_of_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    found = {"update/tokens": 8.0, "update/tflop": 312.0, "time/sample": 1.0, "time/score": 0.0, "time/update": 2.0}
    for precision, peak in (("bf16-mixed", 311.9), ("32-true", 19.5)):
        made = recipe(fabric=Fabric(precision=precision))  # type: ignore[arg-type]
        assert speeds(made, gpu, found, {"sample": "rollout/tokens"})["time/mfu"] == pytest.approx(78 / peak)


def test_a_policy_that_waits_does_no_work() -> None:
    made = context(recipe(critic=Critic(policy_delay_steps=1)), critic=Trained(Values()))
    assert (metrics_of(made)["update/tflop"], metrics_of(made, 2)["update/tflop"]) == (812, 2 * 812)


def test_unknown_work_is_not_logged() -> None:
    made = context(recipe())
    made = replace(made, models=SimpleNamespace(policy=SimpleNamespace(flops=lambda *_: None), critic=None))
    found = metrics_of(made)
    assert "update/tflop" not in found
    assert not {"time/tflops_per_device", "time/mfu"} & set(
        speeds(made.recipe, made.ranks.fabric, found, {"sample": "rollout/tokens"})
    )
