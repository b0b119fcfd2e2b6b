"""Pools of `placement:` on a real Ray cluster of two "nodes" on this machine, which equal all models in one process."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from rlkit.cli.main import main
from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.ray_cluster import end_machine, started_cluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

APART = {"critic": "values", "reference": "frozen", "reward": "judge"}
POOL = {"accelerator": "cpu", "devices": 1}
OWN = ("time/", "memory/", "placement/", "update/tflop")
"""The metrics that depend on where models are."""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    options = ("--train.steps=2", "--validation=null", "--save.optimizer=false")
    assert main(["fit", "--recipe=quick_rm", *options, f"--out={folder / 'rm'}"]) == 0
    return folder / "rm"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started_cluster(tmp_path_factory.mktemp("site"), nodes=2, cpus=2) as cluster:
        yield cluster


@pytest.fixture
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes a test may kill, with one more than a run needs."""
    with started_cluster(tmp_path_factory.mktemp("site"), nodes=3, cpus=2) as cluster:
        yield cluster


def words(folder: Path, reward_model: Path, roles: dict[str, str], *options: str, devices: int = 1) -> tuple[str, ...]:
    """Return the words of a run of PPO, with a recipe file for the placement."""
    pools = {name: {**POOL, "devices": devices} for name in roles.values()}
    section = {"placement": {"roles": roles, "pools": pools}} if roles else {}
    (folder / f"placement-{len(roles)}.yaml").write_text(yaml.safe_dump(section))
    recipes = ("--recipe=quick_ppo_rm", f"--recipe=placement-{len(roles)}.yaml", "--fabric.accelerator=cpu")
    models = (f"--reward.rewards.proxy.path={reward_model}", f"--critic.path={reward_model}")
    sizes = ("--train.prompts_per_step=8", "--train.minibatches=2", "--critic.policy_delay_steps=1")
    return ("fit", *recipes, *models, *sizes, "--validation=null", "--task.max_operand=9", *options)


def on_ray(cluster: Cluster) -> tuple[str, ...]:
    return ("--launcher=Ray", f"--launcher.address={cluster.address}", "--launcher.grace_seconds=20")


def learned(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps that do not depend on where models are."""
    lines = read_jsonl(run / "metrics.jsonl")
    return [{name: x for name, x in line.items() if not name.startswith(OWN)} for line in lines]


def weights(run: Path) -> bytes:
    return (run / "final/model.safetensors").read_bytes()


def test_each_role_in_a_pool_of_its_own(cluster: Cluster, tmp_path: Path, reward_model: Path) -> None:
    steps = "--train.steps=3"
    here = rlkit(*words(tmp_path, reward_model, {}, steps, "--fabric.devices=1", "--out=here"), cwd=tmp_path)
    assert here.returncode == 0, here.stdout + here.stderr
    options = (steps, *on_ray(cluster), "--fabric.devices=1", "--out=apart")
    done = rlkit(*words(tmp_path, reward_model, APART, *options), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = learned(tmp_path / "apart"), learned(tmp_path / "here")
    assert len(ours) == 3
    assert all("critic/loss" in line for line in ours)
    assert ours == [pytest.approx(line, rel=1e-6, abs=1e-9) for line in theirs]
    assert weights(tmp_path / "apart") == weights(tmp_path / "here")
    assert "serves reference" in (tmp_path / "apart/pools/frozen-0.log").read_text()
