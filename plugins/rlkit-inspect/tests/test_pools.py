"""What `recipe check` and `explain` say of the pools of `placement:`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rlkit_inspect import estimate, footprint
from rlkit_inspect.gpus import H100, gpu_named
from rlkit_inspect.pools import PoolMemory, memory_of_pools, process_counts

from rlkit.cli.main import main
from rlkit.commands import parse

BASE, HEAD = 494_032_768, 896
"""Parameters of Qwen2.5-0.5B, and of the head of its critic."""
PLACEMENT = {
    "fabric": {"accelerator": "gpu", "devices": 2},
    "placement": {
        "roles": {"critic": "values", "reference": "frozen"},
        "pools": {"values": {"devices": 4, "strategy": "fsdp2"}, "frozen": {"devices": 2}},
    },
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "placed.yaml"
    path.write_text(yaml.safe_dump(PLACEMENT, sort_keys=False))
    return f"--recipe={path}"


def setting_of(*words: str) -> estimate.Setting:
    made = parse("recipe check", ["--recipe=ppo_gsm8k", *words]).recipe
    return replace(estimate.setting(made, 100, 200, ranks=2), gpu=H100)


def pools_of(setting: estimate.Setting) -> dict[str, PoolMemory]:
    return {pool.name: pool for pool in memory_of_pools(setting)}


def test_memory_of_pools_by_hand(recipe: str) -> None:
    """The critic: weights and two moments in float32, a quarter on each rank. The reference: its weights, whole."""
    setting = setting_of(recipe)
    pools = pools_of(setting)
    assert pools["values"].weights == {"critic": pytest.approx(12 * (BASE + HEAD) / 4 / 2**20)}
    assert pools["frozen"].weights == {"reference": pytest.approx(4 * BASE / 2**20)}
    assert footprint.memory(setting)[footprint.STATES] == pytest.approx(12 * BASE / 2**20)  # the trainer has neither
    together = replace(setting, recipe=replace(setting.recipe, placement=None))
    assert footprint.memory(together)[footprint.STATES] == pytest.approx(16 * BASE / 2**20)  # with the reference
    assert pools["values"].computing > 4 * (BASE + HEAD) / 4 / 2**20  # gradients, and activations
    assert 0 < pools["frozen"].computing < footprint.memory(setting)[footprint.LEARNING]
    assert process_counts(setting) == {"the trainer": 2, "pool values": 4, "pool frozen": 2}


def test_a_reference_in_a_pool_is_no_work_of_the_trainer(recipe: str) -> None:
    setting = setting_of(recipe)
    together = replace(setting, recipe=replace(setting.recipe, placement=None))
    tokens = estimate.work(setting)["tokens"]
    assert estimate.work(together)["learn"] - estimate.work(setting)["learn"] == tokens * BASE * 2


def test_models_that_share_a_pool_add_up(recipe: str) -> None:
    """A teacher in bfloat16 is divided among the ranks, and reward models are not; one path is loaded once."""
    reward = "{a: {class_path: ModelReward, init_args: {path: Qwen/Qwen2.5-0.5B, dtype: bfloat16}}, "
    reward += "b: {class_path: ModelReward, init_args: {path: Qwen/Qwen2.5-0.5B, dtype: bfloat16}}}"
    scored = ("--reward=Composite", f"--reward.rewards={reward}", "--placement.roles.reference=values")
    pools = pools_of(setting_of(recipe, *scored, "--placement.roles.reward=frozen"))
    assert pools["values"].weights["reference"] == pytest.approx(4 * BASE / 4 / 2**20)
    assert pools["values"].weights["critic"] == pytest.approx(12 * (BASE + HEAD) / 4 / 2**20)
    assert pools["frozen"].weights == {"reward": pytest.approx(2 * (BASE + HEAD) / 2**20)}
    teacher = ("--teacher.path=Qwen/Qwen2.5-0.5B", "--teacher.dtype=bfloat16", "--placement.roles.teacher=values")
    assert pools_of(setting_of(recipe, *teacher))["values"].weights["teacher"] == pytest.approx(2 * BASE / 4 / 2**20)


def test_check_names_pools_gpus_and_cost(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe", "check", "--recipe=ppo_gsm8k", recipe, "--train.steps=1000", "--gpu=h100")
    assert main([*words, "--price=2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory of each rank of pool values (critic), estimated" in printed
    assert "GPUs in all: 8, of which 2 for the trainer, 4 for pool values, 2 for pool frozen" in printed
    step, hours = re.search(r"= (\d+) s a step", printed), re.search(r"cost, estimated: ([\d.]+) GPU hours", printed)
    assert step is not None
    assert hours is not None
    assert float(hours[1]) == pytest.approx(8 * int(step[1]) * 1000 / 3600, rel=0.2)  # the step is rounded
    assert main([*words, "--placement.pools.frozen.accelerator=cpu"]) == 0
    assert "GPUs in all: 6, of which 2 for the trainer, 4 for pool values" in capsys.readouterr().out
    assert main(["explain", "--recipe=ppo_gsm8k", recipe]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"pool values +critic, on 4 devices in 32-true, sharded\n", printed)
    assert re.search(r"pool frozen +reference, on 2 devices in 32-true\n", printed)


def test_a_pool_that_does_not_fit_is_an_error(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The critic alone has 12 bytes a parameter: 5.5 GiB without shards."""
    words = ("recipe", "check", "--recipe=ppo_gsm8k", recipe, "--gpu=5GB", "--placement.pools.values.strategy=ddp")
    assert main(words) == 1
    error = capsys.readouterr().err
    assert re.search(r"pool values does not fit a GPU of 5 GB: \d\.\d GiB too much; to make it fit: ", error)
    assert "placement.pools.values.strategy: fsdp2 on more GPUs" in error
    assert "pool frozen does not fit" not in error
    pool = pools_of(replace(setting_of(recipe, "--placement.pools.values.strategy=ddp"), gpu=gpu_named("5GB")))[
        "values"
    ]
    assert pool.peak > 12 * (BASE + HEAD) / 2**20
