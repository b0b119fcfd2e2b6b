"""Runs whose critic, reference and reward model are in pools of their own: real processes, which equal all in one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.placed import APART, POOL, trained_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

OWN = ("time/", "memory/", "placement/", "update/tflop")
"""The metrics that depend on where models are."""


def section(roles: dict[str, str], **pool: object) -> dict[str, Any]:
    return {"placement": {"roles": roles, "pools": {name: {**POOL, **pool} for name in roles.values()}}}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_reward_model(tmp_path_factory.mktemp("rm"))


def words(reward_model: Path, *options: str) -> tuple[str, ...]:
    models = (f"--reward.rewards.proxy.path={reward_model}", f"--critic.path={reward_model}")
    sizes = ("--train.prompts_per_step=8", "--train.minibatches=2", "--critic.policy_delay_steps=1")
    saved = ("--save.every=1", "--save.keep_last=9", "--validation=null", "--task.max_operand=9")
    return ("fit", "--recipe=quick_ppo_rm", *models, *sizes, *saved, "--train.steps=3", *options)


def fit(folder: Path, name: str, reward_model: Path, placement: dict[str, Any] | None, *options: str) -> Path:
    """Train for three steps in a process of its own; return the run folder."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(placement or {}))
    done = rlkit(*words(reward_model, f"--recipe={name}.yaml", *options, f"--out={name}"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Path:
    return fit(tmp_path_factory.mktemp("together"), "together", reward_model, None)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Path:
    return fit(tmp_path_factory.mktemp("two"), "two", reward_model, None, "--fabric.devices=2")


def tensors(run: Path, step: int = 3) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    return {name: x for file in folder.glob("rank-*.safetensors") for name, x in load_file(file).items()}


ROUNDING = 1e-5
"""Of sums in another order, after optimizer steps: Adam divides by gradients, and a wrong one moves weights by 1e-3."""


def require_equal(run: Path, other: Path, *, rounding: float = 0.0) -> None:
    """Compare the metrics of two runs, and all that they have learned, bit for bit or up to the order of sums."""
    for line, other_line in zip(read_jsonl(run / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl"), strict=True):
        ours = {name: value for name, value in line.items() if not name.startswith(OWN)}
        theirs = {name: value for name, value in other_line.items() if not name.startswith(OWN)}
        assert ours == pytest.approx(theirs, rel=rounding, abs=2 * rounding)
        assert "critic/loss" in ours
    weights, others = tensors(run), tensors(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], rtol=0, atol=10 * rounding), name


def test_each_role_in_a_pool_of_its_own(tmp_path: Path, reward_model: Path, together: Path) -> None:
    run = fit(tmp_path, "apart", reward_model, section(APART))
    require_equal(run, together)
    for line in read_jsonl(run / "metrics.jsonl"):
        assert all(0 <= line[f"placement/{pool}/idle"] <= 1 for pool in APART.values())
    assert "serves reference" in (run / "pools" / "frozen-0.log").read_text()


def test_all_roles_in_one_pool(tmp_path: Path, reward_model: Path, together: Path) -> None:
    run = fit(tmp_path, "shared", reward_model, section(dict.fromkeys(APART, "beside")))
    require_equal(run, together)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_pool_of_two_ranks(tmp_path: Path, reward_model: Path, together: Path, strategy: str) -> None:
    roles = {"critic": "values", "reference": "values"}
    run = fit(tmp_path, strategy, reward_model, section(roles, devices=2, strategy=strategy))
    require_equal(run, together, rounding=ROUNDING)


@pytest.mark.parametrize("devices", [1, 2])
def test_two_ranks_of_the_trainer(tmp_path: Path, reward_model: Path, two_ranks: Path, devices: int) -> None:
    placement = section(dict.fromkeys(APART, "beside"), devices=devices)
    run = fit(tmp_path, "placed", reward_model, placement, "--fabric.devices=2")
    require_equal(run, two_ranks, rounding=ROUNDING)


def test_a_teacher_in_a_pool(tmp_path: Path) -> None:
    (tmp_path / "placed.yaml").write_text(yaml.safe_dump(section({"teacher": "teacher"})))
    options = ("--train.steps=2", "--train.prompts_per_step=4", "--validation=null", "--teacher.path=tiny")
    for name, recipes in (("together", ()), ("placed", ("--recipe=placed.yaml",))):
        done = rlkit("fit", "--recipe=quick_distill", *recipes, *options, f"--out={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("together", "placed")]
    for ours, theirs in zip(*lines, strict=True):
        assert {n: x for n, x in ours.items() if not n.startswith(OWN)}.items() <= theirs.items()


@pytest.mark.parametrize("placed_again", [True, False])
def test_a_run_goes_on_from_the_middle(tmp_path: Path, reward_model: Path, together: Path, placed_again: bool) -> None:
    """Whether the checkpoint is of placed models or of all in one process, and so the run that goes on."""
    placement = section({"critic": "values"})
    first = together if placed_again else fit(tmp_path, "first", reward_model, placement)
    resumed = f"--resume={first}/checkpoints/step-000001"
    run = fit(tmp_path, "resumed", reward_model, placement if placed_again else None, resumed)
    for line, other in zip(read_jsonl(run / "metrics.jsonl"), read_jsonl(together / "metrics.jsonl")[1:], strict=True):
        assert {n: x for n, x in line.items() if n.startswith("critic/")}.items() <= other.items()
    weights, others = tensors(run), tensors(together)
    assert all(torch.equal(weights[name], other) for name, other in others.items())


def processes_of(run: Path) -> dict[str, int]:
    """Return the processes of a run's pools by what follows the run folder in their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(run) in line:
            kind = "supervisor" if any(word.endswith("supervisor.py") for word in line) else "pool"
            found[f"{kind} {line[line.index(str(run)) + 1]}"] = int(folder.name)
    return found


def wait_for(condition: Callable[[], object], process: forks.Started | None = None) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start(tmp_path: Path, reward_model: Path, *options: str) -> forks.Started:
    """Start a long run, each role in a pool of its own, and wait until it has made a step."""
    (tmp_path / "apart.yaml").write_text(yaml.safe_dump(section(APART)))
    long = ("--recipe=apart.yaml", "--train.steps=100000", "--save.every=0", "--out=out", *options)
    return forks.start(("-m", "rlkit", *words(reward_model, *long)), tmp_path)


@pytest.mark.parametrize("role", sorted(APART))
def test_a_pool_that_dies_ends_the_run(tmp_path: Path, reward_model: Path, role: str) -> None:
    process, run, pool = start(tmp_path, reward_model), tmp_path / "out", APART[role]
    wait_for(lambda: os.path.exists(run / "metrics.jsonl") and read_jsonl(run / "metrics.jsonl"), process)
    os.kill(processes_of(run)[f"pool {pool}"], signal.SIGKILL)
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == 1
    named = f"pool {pool} ({role}) has lost its process 0, ended by SIGKILL; its log is out/pools/{pool}-0.log"
    assert named in printed
    assert named in json.loads((run / "result.json").read_text())["error"]["message"]
    wait_for(lambda: not processes_of(run))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_ends_leaves_no_pool(tmp_path: Path, reward_model: Path, number: signal.Signals) -> None:
    process, run = start(tmp_path, reward_model), tmp_path / "out"
    wait_for(lambda: os.path.exists(run / "metrics.jsonl") and read_jsonl(run / "metrics.jsonl"), process)
    process.send_signal(number)
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), printed
    wait_for(lambda: not processes_of(run))


def test_a_pool_that_dies_ends_a_run_that_waits_for_something_else(tmp_path: Path, reward_model: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n\ndef slow(text):\n    pathlib.Path('begun').touch()\n    time.sleep(1000)\n"
    )
    reward = ("--reward=PythonReward", f"--reward.function={tmp_path}/slow.py:slow", "--reward.allow_code=true")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(section({"critic": "values"})))
    options = (*reward, "--reward.timeout=2000", "--train.require_reward=false", "--validation=null", "--out=out")
    recipe = ("--recipe=quick_ppo", "--recipe=values.yaml", "--train.prompts_per_step=2")
    temporary = tmp_path / "t"
    temporary.mkdir()
    process = forks.start(("-m", "rlkit", "fit", *recipe, *options), tmp_path, TMPDIR=str(temporary))
    wait_for(lambda: os.path.exists(tmp_path / "begun"), process)
    os.kill(processes_of(tmp_path / "out")["pool values"], signal.SIGKILL)
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == 1
    assert "error: pool values (critic) has lost its process 0, ended by SIGKILL; its log is " in printed
    wait_for(lambda: not processes_of(tmp_path / "out"))
    assert not list(temporary.iterdir())


def test_a_model_that_a_pool_cannot_load_is_named(tmp_path: Path, reward_model: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(section({"critic": "values"})))
    damaged = shutil.copytree(reward_model, tmp_path / "damaged")
    weights = damaged / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = rlkit(*words(reward_model, "--recipe=values.yaml", f"--critic.path={damaged}", "--out=out"), cwd=tmp_path)
    assert done.returncode == 1
    assert "error: pool values (critic) has lost its process 0, exit status 2: " in done.stderr
    assert "critic.path" in done.stderr
    wait_for(lambda: not processes_of(tmp_path / "out"))
