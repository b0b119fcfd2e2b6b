"""Pools of `placement:` on a real Ray cluster of two "nodes" on this machine, which equal all models in one process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.placed import APART, POOL, trained_reward_model
from tests.ray_cluster import end_machine, started_cluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

LONG = ("--train.steps=10", "--save.every=2")
OWN = ("time/", "memory/", "placement/", "update/tflop", "engine/prefilled_tokens")
"""The metrics that depend on where models are, or on what the engine has cached before."""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_reward_model(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started_cluster(tmp_path_factory.mktemp("site"), nodes=2, cpus=3) as cluster:
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


def command_lines(run: Path) -> dict[int, list[str]]:
    """Return the command lines of the processes of a run's pools and of their supervisors, by process id."""
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")[:-1]
            if str(run) in words:
                lines[int(folder.name)] = words
    return lines


def pool_processes(run: Path) -> dict[str, int]:
    """Return the processes of a run's pools, and their supervisors, by the names of pools."""
    processes = {}
    for pid, line in command_lines(run).items():
        kind = "supervisor of " if any(word.endswith("supervisor.py") for word in line) else ""
        processes[kind + line[line.index(str(run)) + 1]] = pid
    return processes


@contextmanager
def other_connections(run: Path) -> Iterator[set[str]]:
    """Keep connecting to a run's pools from their start on, and send nothing or nonsense; collect their addresses."""
    ended, reached = threading.Event(), set[str]()
    open_connections = []

    def disturb() -> None:
        while not ended.wait(0.05):
            for line in command_lines(run).values():
                with suppress(OSError):
                    host, _, port = line[-1].rpartition(":")
                    peer = socket.create_connection((host, int(port)), timeout=5.0)
                    open_connections.append(peer)
                    reached.add(line[-1])
                    peer.sendall((b"", b"\x7f\xff\xff\xff", bytes(64), bytes(4096))[len(open_connections) % 4])

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield reached
    finally:
        ended.set()
        thread.join()
        for peer in open_connections:
            peer.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Path:
    """A run of three steps in one process."""
    folder = tmp_path_factory.mktemp("here")
    options = ("--train.steps=3", "--fabric.devices=1", "--out=run")
    done = rlkit(*words(folder, reward_model, {}, *options), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def fit_apart(cluster: Cluster, folder: Path, reward_model: Path) -> Path:
    """Make three steps on the cluster, each role in a pool of its own; return the run folder."""
    options = ("--train.steps=3", *on_ray(cluster), "--fabric.devices=1", "--out=apart")
    done = rlkit(*words(folder, reward_model, APART, *options), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "apart"


def require_equal(run: Path, other: Path) -> None:
    """Compare all that two runs have learned, bit for bit, and that their pools have ended."""
    ours = learned(run)
    assert all("critic/loss" in line for line in ours)
    assert ours == learned(other)
    assert weights(run) == weights(other)
    assert wait_until(lambda: not pool_processes(run))


def test_each_role_in_a_pool_of_its_own(cluster: Cluster, tmp_path: Path, reward_model: Path, here: Path) -> None:
    run = fit_apart(cluster, tmp_path, reward_model)
    require_equal(run, here)
    assert "serves reference" in (run / "pools/frozen-0.log").read_text()


def test_other_connections_to_pools_change_nothing(
    cluster: Cluster, tmp_path: Path, reward_model: Path, here: Path
) -> None:
    with other_connections(tmp_path / "apart") as reached:
        run = fit_apart(cluster, tmp_path, reward_model)
    assert reached
    require_equal(run, here)


def test_ranks_on_several_nodes_share_a_pool_of_two(cluster: Cluster, tmp_path: Path, reward_model: Path) -> None:
    """Equal up to the order of sums, which Adam makes larger: rows of two ranks are divided among two others."""
    here = ("--train.steps=3", "--fabric.devices=2", "--fabric.strategy=ddp", "--out=here")
    assert rlkit(*words(tmp_path, reward_model, {}, *here), cwd=tmp_path).returncode == 0
    sizes = ("--fabric.num_nodes=2", "--fabric.devices=1", "--fabric.strategy=ddp", "--out=shared")
    roles = dict.fromkeys(APART, "beside")
    options = ("--train.steps=3", *on_ray(cluster), *sizes)
    done = rlkit(*words(tmp_path, reward_model, roles, *options, devices=2), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = learned(tmp_path / "shared"), learned(tmp_path / "here")
    assert ours == [pytest.approx(line, rel=1e-5, abs=2e-5) for line in theirs]


def test_what_the_cluster_has_no_room_for_is_refused(cluster: Cluster, tmp_path: Path, reward_model: Path) -> None:
    options = (*on_ray(cluster), "--fabric.devices=1", "--out=run")
    done = rlkit(*words(tmp_path, reward_model, APART, *options, devices=3), cwd=tmp_path)
    assert done.returncode == 2
    room = "room for 1 of the run's 1 nodes of 1 CPU, and 5 of the 9 processes of its pools of 1 CPU; its nodes have"
    assert room in done.stderr
    assert "the devices of placement.pools" in done.stderr
    assert not os.path.exists(tmp_path / "run")


def test_the_error_of_a_pool_is_shown_and_not_repeated(cluster: Cluster, tmp_path: Path, reward_model: Path) -> None:
    damaged = shutil.copytree(reward_model, tmp_path / "damaged")
    file = damaged / "final" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    options = (f"--critic.path={damaged}", *on_ray(cluster), "--fabric.devices=1", "--out=run")
    done = rlkit(*words(tmp_path, reward_model, {"critic": "values"}, *options), cwd=tmp_path)
    assert done.returncode == 1
    assert "error: pool values (critic) has lost its process 0, exit status 2: " in done.stdout
    assert "critic.path" in done.stdout
    assert "going on" not in done.stdout
    assert wait_until(lambda: not pool_processes(tmp_path / "run"))


# faults


def begin(cwd: Path, reward_model: Path, *options: str) -> forks.Started:
    """Start a run whose roles are each in a pool of its own, and wait until it has made three steps."""
    sizes = ("--fabric.devices=1", "--out=run")
    process = forks.start(("-m", "rlkit", *words(cwd, reward_model, APART, *sizes, *options)), cwd)
    metrics = cwd / "run/metrics.jsonl"

    def has_begun() -> bool:
        return os.path.exists(metrics) and len(read_jsonl(metrics)) >= 3

    assert wait_until(lambda: has_begun() or process.poll() is not None, 400)
    assert process.poll() is None, process.communicate()[0]
    return process


@pytest.fixture(scope="module")
def without_a_fault(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done = rlkit(*words(folder, reward_model, {}, *LONG, "--fabric.devices=1", "--out=run"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "role", ["critic", *(pytest.param(r, marks=pytest.mark.stress) for r in ("reference", "reward"))]
)
def test_a_run_goes_on_after_a_pool_was_killed(
    cluster: Cluster, tmp_path: Path, reward_model: Path, without_a_fault: Path, role: str
) -> None:
    """From its newest checkpoint, with pools that are started anew; and it learns what it would have learned."""
    process = begin(tmp_path, reward_model, *LONG, *on_ray(cluster))
    os.kill(pool_processes(tmp_path / "run")[APART[role]], signal.SIGKILL)
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == 0, printed
    assert f"pool {APART[role]} ({role}) has lost its process 0, ended by SIGKILL" in printed
    assert "launcher: a process of a pool was ended by SIGKILL" in printed
    assert "going on with 1 of 1 nodes (1 of 3 restarts)" in printed
    require_equal(tmp_path / "run", without_a_fault)


def test_a_run_goes_on_after_the_node_of_a_pool_has_died(
    new_cluster: Cluster, tmp_path: Path, reward_model: Path, without_a_fault: Path
) -> None:
    process = begin(tmp_path, reward_model, *LONG, *on_ray(new_cluster))
    ray.init(address=new_cluster.address, log_to_driver=False)
    try:
        [group] = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    finally:
        ray.shutdown()
    placed = group["bundles_to_node_id"]
    dies = next(placed[bundle] for bundle in range(len(APART)) if placed[bundle] != placed[len(APART)])
    end_machine(next(node for node in new_cluster.worker_nodes if node.node_id == dies))
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == 0, printed
    assert "launcher: 1 nodes with processes of pools died" in printed
    assert "going on with 1 of 1 nodes (1 of 3 restarts)" in printed
    require_equal(tmp_path / "run", without_a_fault)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_whose_command_ends(
    cluster: Cluster, tmp_path: Path, reward_model: Path, number: signal.Signals
) -> None:
    """Neither a pool nor a server; meanwhile the key of the pools stands nowhere but in its processes."""
    engine = ("--rollout.engine=HttpEngine",)
    process = begin(tmp_path, reward_model, "--train.steps=100000", *engine, *on_ray(cluster))
    environment = Path(f"/proc/{pool_processes(tmp_path / 'run')['values']}/environ").read_bytes()
    [key] = [line.partition(b"=")[2] for line in environment.split(b"\0") if line.startswith(b"RLKIT_POOL_KEY=")]
    assert len(key) == 64
    logs = Path(cluster.head_node.get_session_dir_path(), "logs")
    for path in (*(tmp_path / "run").rglob("*"), *logs.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline")):
        with suppress(OSError):
            assert os.path.isdir(path) or key not in path.read_bytes(), path
    os.kill(process.pid, number)
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), printed
    assert wait_until(lambda: not pool_processes(tmp_path / "run"))
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        assert wait_until(lambda: ray.available_resources().get("CPU") == 6.0)
    finally:
        ray.shutdown()
