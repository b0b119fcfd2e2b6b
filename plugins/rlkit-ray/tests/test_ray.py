"""Runs on a real Ray cluster of three "nodes" on this machine: equal losses, dead nodes, no orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import rlkit_ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from rlkit_ray.agent import NodeAgent, RankProcess

from rlkit.base.errors import LaunchError, RecipeError
from rlkit.commands import parse
from rlkit.interfaces.launcher import LaunchedRun
from rlkit.testing import check_plugin
from tests.conftest import ROOT, write_metadata
from tests.ray_cluster import PACKAGES, end_machine, started_cluster, wait_until

SIZES = ("--fabric.accelerator=cpu", "--fabric.num_nodes=2", "--fabric.devices=1")
SHORT = ("--recipe=quickstart", "--validation=null", "--train.prompts_per_step=8", "--rollout.group_size=4")


def test_it_is_registered() -> None:
    assert {(f.part, f.state) for f in check_plugin("rlkit-ray", rlkit_ray)} == {("Ray", "ok")}


def rlkit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "rlkit", *words)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=480, check=False)


def begin(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "rlkit", *words)
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(run: subprocess.Popen[str], out: Path, steps: int) -> None:
    """Wait until a run has made a number of steps."""
    assert wait_until(lambda: len(metrics(out)) >= steps or run.poll() is not None, 120)
    assert run.poll() is None, run.communicate()[0]


def metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rank_pids(out: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in (out / "ranks").glob("*.json")]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# one node, without Ray


def test_a_rank_ends_with_its_status_or_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)):
        process = RankProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
        assert wait_until(lambda process=process: process.status() is not None)  # type: ignore[misc]
        assert process.status() == expected
    code = "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)"
    monkeypatch.chdir(tmp_path)
    process = RankProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    assert wait_until(Path("up").exists)
    process.signal(signal.SIGTERM)
    assert wait_until(lambda: process.status() == -signal.SIGTERM)
    process.signal(signal.SIGTERM)  # nobody is left
    process.kill()


def test_a_node_without_the_folders_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    _, problem = NodeAgent(str(tmp_path / "missing"), str(tmp_path / "run")).inspect("file")
    assert problem.startswith(f"it has no folder {tmp_path}/missing")
    (tmp_path / "file").touch()
    _, problem = NodeAgent(str(tmp_path), str(tmp_path / "file")).inspect("file")
    assert problem.startswith(f"it cannot write into {tmp_path}/file")
    agent = NodeAgent(str(tmp_path), str(tmp_path / "run"))
    assert agent.inspect("node-0")[1] == ""
    assert agent.missing(["node-0", "node-1"]) == ["node-1"]
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_only_the_user_chooses_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metadata(PACKAGES[0], tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    recipe, words = tmp_path / "ray.yaml", ["--recipe=quickstart", f"--recipe={tmp_path}/ray.yaml"]
    launcher = {"class_path": "Ray", "init_args": {"address": "10.0.0.1:6379", "restarts": 1}}
    recipe.write_text(json.dumps({"launcher": launcher}))
    with pytest.raises(RecipeError, match=r"launcher\.address is '10\.0\.0\.1:6379', which no recipe file may set"):
        parse("fit", words, trains=True)
    by_user = parse("fit", [*words, "--launcher.address=local"], trains=True).recipe.launcher
    assert vars(by_user) | {"address": "local", "restarts": 1} == vars(by_user)
    recipe.write_text(json.dumps({"launcher": {**launcher, "init_args": {"address": "auto"}}}))  # as runs write it
    assert parse("fit", words, trains=True).recipe.launcher.address == "auto"  # type: ignore[union-attr]


def test_ray_is_imported_where_a_run_is_launched() -> None:
    code = "import sys, rlkit_ray; rlkit_ray.Ray(); print('ray' in sys.modules)"
    source = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(PACKAGES[0] / "src")))}
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, env=os.environ | source, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_a_cluster_of_this_machine_is_no_remedy_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("rlkit_ray.driver._init", fail)
    with pytest.raises(LaunchError, match="but Ray cannot start on this machine: .*no space") as error:
        rlkit_ray.Ray(address="local").launch(cast(LaunchedRun, None))
    assert "--launcher.address=local" not in str(error.value)


@pytest.mark.slow
def test_a_listener_that_is_no_cluster_is_left_alone(tmp_path: Path) -> None:
    """Ray waits for 100 s for one that accepts and says nothing; the command ends soon after its own limit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code = (
            f"import sys; sys.path.append({str(PACKAGES[0] / 'src')!r})\n"
            "import rlkit_ray; from rlkit_ray import driver; driver.INIT_SECONDS = 2.0\n"
            f"driver.ClusterDriver(rlkit_ray.Ray(address={address!r}))._connect()"
        )
        command = (sys.executable, "-c", code)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        f"launcher.address is '{address}', where no Ray cluster answers: TimeoutError: it has not let this"
        in done.stderr
    )


# a cluster


@pytest.fixture
def new_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes a test may kill; its parameter is their number, and whether it notices that soon."""
    nodes, quick = request.param if isinstance(request.param, tuple) else (request.param, True)
    with started_cluster(tmp_path_factory.mktemp("site"), nodes, quick) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that several tests use, one after another."""
    with started_cluster(tmp_path_factory.mktemp("site")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "engine"), [("ddp", "HttpEngine"), ("fsdp2", "TorchEngine")])
def test_two_nodes_have_the_losses_of_one_machine(cluster: Cluster, tmp_path: Path, strategy: str, engine: str) -> None:
    """The engine's server is on the third node."""
    options = ("fit", *SHORT, "--train.steps=3", f"--fabric.strategy={strategy}", f"--rollout.engine={engine}")
    on_ray = ("--launcher=Ray", f"--launcher.address={cluster.address}", *SIZES, "--out=ray")
    done = rlkit(*options, *on_ray, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    assert rlkit(*options, "--fabric.devices=2", "--out=local", cwd=tmp_path).returncode == 0
    for name in ("policy/loss", "grad_norm", "reward/mean"):
        ours, theirs = ([row[name] for row in metrics(tmp_path / out)] for out in ("ray", "local"))
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9), name
    assert len({json.loads(path.read_text())["pid"] for path in (tmp_path / "ray/ranks").glob("*.json")}) == 2


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    on_ray = ("--launcher=Ray", f"--launcher.address={cluster.address}", "--fabric.num_nodes=4", "--out=run")
    done = rlkit("fit", *SHORT, *on_ray, cwd=tmp_path)
    assert done.returncode == 2
    assert "the Ray cluster has room for 3 of the run's 4 nodes of 1 CPU; its nodes have" in done.stderr
    assert done.stderr.count("\n  ") >= 5  # a table of four nodes
    assert not (tmp_path / "run").exists()
    servers = ("--fabric.num_nodes=2", "--rollout.engine=HttpEngine", "--rollout.engine.servers=2")
    done = rlkit("fit", *SHORT, *on_ray, *servers, cwd=tmp_path)
    assert done.returncode == 2
    assert "room for 2 of the run's 2 nodes of 1 CPU, and 1 of its 2 servers of 1 CPU; its nodes have" in done.stderr
    done = rlkit("fit", *SHORT, "--launcher=Ray", "--launcher.address=127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 1
    assert "launcher.address is '127.0.0.1:1', where no Ray cluster answers" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("new_cluster", [2], indirect=True)
def test_a_run_goes_on_after_a_node_has_died(new_cluster: Cluster, tmp_path: Path) -> None:
    """On the node that is left; its weights equal those of a run that is resumed there from the same checkpoint."""
    options = ("fit", *SHORT, "--train.steps=30", "--save.every=4", "--save.keep_last=20", "--fabric.strategy=ddp")
    on_ray = ("--launcher=Ray", f"--launcher.address={new_cluster.address}", "--launcher.grace_seconds=5", *SIZES)
    run = begin(*options, *on_ray, "--out=run", cwd=tmp_path)
    wait_for_steps(run, tmp_path / "run", 6)
    end_machine(next(iter(new_cluster.worker_nodes)))
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "1 of 2 nodes died" in output
    assert "going on with 1 of 2 nodes" in output
    [step] = [int(line.split("step ")[1].split()[0]) for line in output.splitlines() if "resumed from" in line]
    resumed = ("fit", f"--resume=run/checkpoints/step-{step:06d}", "--out=again", "--fabric.num_nodes=1")
    assert rlkit(*resumed, "--launcher=null", cwd=tmp_path).returncode == 0
    rows = {row["step"]: row for row in metrics(tmp_path / "run")}
    assert sorted(rows) == list(range(1, 31))
    for row in metrics(tmp_path / "again"):
        if row["step"] > step:
            assert row["policy/loss"] == rows[row["step"]]["policy/loss"]
    weights = [(tmp_path / out / "final/model.safetensors").read_bytes() for out in ("run", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("new_cluster", [4, pytest.param((4, False), marks=pytest.mark.stress)], indirect=True)
def test_a_server_is_moved_when_its_node_dies(new_cluster: Cluster, tmp_path: Path) -> None:
    """Both ranks reach it again, and the losses are those without a fault: no sample is lost or sampled twice."""
    engine = ("--rollout.engine=HttpEngine", "--rollout.engine.retry.hang_seconds=5", "--fabric.strategy=ddp")
    options = ("fit", *SHORT, "--train.steps=12", *engine)
    on_ray = ("--launcher=Ray", f"--launcher.address={new_cluster.address}", *SIZES)
    run = begin(*options, *on_ray, "--out=run", cwd=tmp_path)
    wait_for_steps(run, tmp_path / "run", 3)
    end_machine(node_of_bundle(new_cluster, 0))
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "going on with" not in output
    assert max(row["engine/restarts"] for row in metrics(tmp_path / "run")) == 1
    assert rlkit(*options, "--fabric.devices=2", "--out=local", cwd=tmp_path).returncode == 0
    for name in ("policy/loss", "reward/mean"):
        ours, theirs = ([row[name] for row in metrics(tmp_path / out)] for out in ("run", "local"))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(1800)  # Ray notices each death within a minute
@pytest.mark.parametrize("new_cluster", [(8, False)], indirect=True)
def test_a_run_outlives_five_nodes(new_cluster: Cluster, tmp_path: Path) -> None:
    """With Ray's default health checks: three under a server, then one in the server's next start, one under a rank."""
    engine = ("--rollout.engine=HttpEngine", "--rollout.engine.retry.hang_seconds=5", "--fabric.strategy=ddp")
    on_ray = ("--launcher=Ray", f"--launcher.address={new_cluster.address}", "--launcher.grace_seconds=5", *SIZES)
    words = ("fit", *SHORT, "--train.steps=100000", "--save.every=1", *engine, *on_ray, "--out=run")
    out, log = tmp_path / "run", tmp_path / "log"
    with open(log, "w", encoding="utf-8") as file:
        run = subprocess.Popen((sys.executable, "-m", "rlkit", *words), cwd=tmp_path, stdout=file, stderr=file)
    try:
        assert wait_until(lambda: len(metrics(out)) >= 2, 240), log.read_text()
        for restarts in (1, 2, 3):
            end_machine(node_of_bundle(new_cluster, 0))
            wait_for_restarts(run, out, restarts)
        first = node_of_bundle(new_cluster, 0)
        end_machine(first)
        end_machine(node_of_bundle(new_cluster, 0, other_than=first))
        wait_for_restarts(run, out, 4)
        steps = len(metrics(out))
        end_machine(node_of_bundle(new_cluster, 1))
        assert wait_until(lambda: "of 2 nodes died" in log.read_text() and len(metrics(out)) > steps + 2, 300)
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, log.read_text()
    finally:
        run.kill()
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["rollout/failed"] == 0 and row["mismatch/max"] < 1e-4 for row in rows)


def wait_for_restarts(run: subprocess.Popen[bytes], out: Path, restarts: int) -> None:
    """Wait until a run has restarted its server so often, and made a step with it."""

    def restarted() -> bool:
        rows = metrics(out)
        return bool(rows) and rows[-1]["engine/restarts"] >= restarts and not rows[-1]["engine/servers_down"]

    assert wait_until(lambda: restarted() or run.poll() is not None, 300)
    assert run.poll() is None


def node_of_bundle(cluster: Cluster, bundle: int, other_than: Any = None) -> Any:
    """Return the node that has a bundle of the run's placement group, once that is another one than a dead one."""
    nodes = {node.node_id: node for node in cluster.worker_nodes if node is not other_than}
    ray.init(address=cluster.address, log_to_driver=False)
    try:

        def placed() -> list[Any]:
            groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            return [nodes[i] for group in groups if (i := group["bundles_to_node_id"][bundle]) in nodes]

        assert wait_until(lambda: bool(placed()), 400)
        [node] = placed()
        return node
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_run_whose_command_ends(cluster: Cluster, tmp_path: Path, number: int) -> None:
    on_ray = ("--launcher=Ray", f"--launcher.address={cluster.address}", *SIZES, "--fabric.strategy=ddp", "--out=run")
    run = begin("fit", *SHORT, "--train.steps=2000", *on_ray, cwd=tmp_path)
    wait_for_steps(run, tmp_path / "run", 2)
    pids = rank_pids(tmp_path / "run")
    assert len(pids) == 2
    assert not any(map(is_gone, pids))
    os.kill(run.pid, number)
    output, _ = run.communicate(timeout=60)
    assert wait_until(lambda: all(map(is_gone, pids)), 30)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        assert wait_until(lambda: ray.available_resources().get("CPU") == 3.0, 30)
    finally:
        ray.shutdown()
    if number != signal.SIGKILL:
        assert run.returncode == 130, output
        assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"
        assert "interrupted: " in output


@pytest.mark.slow
@pytest.mark.parametrize("new_cluster", [3], indirect=True)
def test_nothing_is_left_of_a_run_when_the_head_dies(new_cluster: Cluster, tmp_path: Path) -> None:
    """Its checkpoints stay, from which another cluster can resume it."""
    on_ray = ("--launcher=Ray", f"--launcher.address={new_cluster.address}", *SIZES, "--fabric.strategy=ddp")
    options = ("--train.steps=2000", "--save.every=2", "--rollout.engine=HttpEngine", "--out=run")
    run = begin("fit", *SHORT, *on_ray, *options, cwd=tmp_path)
    wait_for_steps(run, tmp_path / "run", 3)
    pids = rank_pids(tmp_path / "run")
    end_machine(new_cluster.head_node)
    output, _ = run.communicate(timeout=120)
    assert run.returncode not in (0, None)
    assert "Failed to connect to GCS" in output, output
    assert wait_until(lambda: all(map(is_gone, pids)), 60)
    assert list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [True, False])
def test_devices_that_others_use_are_waited_for(cluster: Cluster, tmp_path: Path, interrupted: bool) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        actor = ray.remote(NodeAgent).options(num_cpus=1)
        others = [actor.remote(str(tmp_path), str(tmp_path / "other")) for _ in range(2)]
        ray.get([other.statuses.remote() for other in others])
        seconds = "600" if interrupted else "2"
        on_ray = (f"--launcher.address={cluster.address}", f"--launcher.wait_seconds={seconds}", "--out=run")
        run = begin("fit", *SHORT, "--launcher=Ray", *on_ray, *SIZES, "--fabric.strategy=ddp", cwd=tmp_path)
        if interrupted:
            assert not wait_until(lambda: run.poll() is not None, 15)
            os.kill(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=60)
        assert run.returncode == (130 if interrupted else 1), output
        assert interrupted or "needs 2 CPU for 2 nodes, but for 2 s only 1 CPU were free" in output
        assert not (tmp_path / "run").exists()
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_the_error_of_a_run_is_shown_and_not_repeated(cluster: Cluster, tmp_path: Path) -> None:
    on_ray = ("--launcher=Ray", f"--launcher.address={cluster.address}", "--out=run", "--model.path=nowhere")
    done = rlkit("fit", *SHORT, *on_ray, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stdout
    assert "nowhere" in done.stdout
    assert "restarts" not in done.stdout
