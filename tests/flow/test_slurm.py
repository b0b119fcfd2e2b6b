"""A real SLURM on this machine, with two "nodes": what `launcher: Slurm` submits runs, is queued again and goes on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import read_jsonl, rlkit

pytestmark = pytest.mark.slow

CONFIGURATION = """
ClusterName=rlkit
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

JOB = (
    "--recipe=quickstart", "--validation=null", "--train.prompts_per_step=8", "--rollout.group_size=4",
    "--launcher=Slurm", "--launcher.cpus_per_rank=1", "--out=run",
)  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.5)
    return condition()


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller and two nodes."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        assert "RLKIT_REQUIRE_SLURM" not in os.environ, "slurmctld and slurmd are not installed, or not run by root"
        pytest.skip("needs slurmctld and slurmd, as root")
    folder = tmp_path_factory.mktemp("slurm")
    ports = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=host, folder=folder, ports=ports))
    (folder / "state").mkdir()
    monkeypatch.setenv("SLURM_CONF", str(file))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # the names of the nodes are known to SLURM alone
    daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    processes = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in daemons]
    try:
        ready = wait_until(lambda: output("sinfo", "-h", "-o", "%D %t") == "2 idle", 30)
        assert ready, (folder / "controller.log").read_text()
        yield
    finally:
        output("scancel", "-u", "root")
        time.sleep(2.0)
        for process in processes:
            process.kill()
            process.wait()


def output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def submit(folder: Path, *words: str) -> str:
    """Submit a run; return the job's id."""
    done = rlkit("fit", *JOB, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("submitted job ")[1].split()[0]


def log(folder: Path, job: str) -> str:
    path = folder / f"run.slurm-{job}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.usefixtures("slurm")
def test_a_job_of_two_nodes_trains(tmp_path: Path) -> None:
    job = submit(tmp_path, "--fabric.num_nodes=2", "--fabric.strategy=ddp", "--train.steps=3")
    assert wait_until(lambda: job not in output("squeue", "-h", "-o", "%i"), 120), log(tmp_path, job)
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 3, log(tmp_path, job)
    assert "2 ranks: 4 prompts each" in log(tmp_path, job)
    script = str(tmp_path / "run.job.sh")
    assert subprocess.run(["sbatch", "--test-only", script], capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("slurm")
def test_a_job_at_its_time_limit_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    job = submit(tmp_path, "--launcher.time=00:01:00", "--launcher.save_seconds=20", "--train.steps=100000")
    waits = wait_until(lambda: output("squeue", "-h", "-j", job, "-o", "%t %r") == "PD BeginTime", 120)
    assert waits, log(tmp_path, job)
    assert "interrupted: " in log(tmp_path, job)
    done = len(read_jsonl(tmp_path / "run/metrics.jsonl"))

    def has_gone_on() -> bool:
        output("scontrol", "update", f"jobid={job}", "StartTime=now")
        return f"step {done} is done" in log(tmp_path, job)

    time.sleep(3.0)  # SLURM kills a job that starts in the second in which it was revoked; by itself it waits 2 minutes
    assert wait_until(has_gone_on, 120), log(tmp_path, job)
