"""How a server is started, on which GPUs, and how it is called; SGLang is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from rlkit_servers.engine import trainer_gpus
from rlkit_servers.http import Client, Fault
from rlkit_servers.process import TAIL_LINES, ServerProcess, SupervisedProcess, server_environment
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.sglang.launch import Launch, adapter_arguments, command, environment

from rlkit.commands import parse
from rlkit.engines import SGLangEngine, SGLangServer
from rlkit.interfaces.launcher import ServerSite
from rlkit.models.load import load_policy
from rlkit.recipe import Lora, Model
from rlkit.train.setup import fabric_for
from tests.conftest import ROOT
from tests.stubs import Stub, serving

TORCHRUN = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "NODE_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "0",
    "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}  # fmt: skip


def test_a_servers_environment_has_nothing_of_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for name, value in {"CUDA_VISIBLE_DEVICES": "2,3", "NCCL_CUMEM_ENABLE": "0", "RANKING": "kept"}.items():
        monkeypatch.setenv(name, value)
    variables = server_environment()
    assert not variables.keys() & TORCHRUN.keys()
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["NCCL_CUMEM_ENABLE"], variables["RANKING"]) == (
        "2,3",
        "0",
        "kept",
    )
    assert "SGLANG_USE_CPU_ENGINE" not in environment(0, 60.0)
    assert environment(None, 60.0)["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_probe_may_take_as_long_as_a_server_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own limit is 20 s, after which it answers 503 in the middle of a long prefill."""
    monkeypatch.delenv("SGLANG_HEALTH_CHECK_TIMEOUT", raising=False)
    assert environment(0, 61.5)["SGLANG_HEALTH_CHECK_TIMEOUT"] == "62"
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "5")
    assert environment(0, 61.5)["SGLANG_HEALTH_CHECK_TIMEOUT"] == "5"


def test_calls_within_the_machine_pass_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Server(Stub):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.answer(status=200 if self.path == "/well" else 500)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "internal.example")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(Server) as url:
        client = Client(url)
        client.post_now("/well", {}, 10.0)
        with pytest.raises(Fault, match="500"):
            client.post_now("/ill", {}, 10.0)
    assert asked == ["/well", "/ill"]
    assert server_environment()["no_proxy"] == "internal.example,127.0.0.1,localhost"
    assert server_environment()["NO_PROXY"] == "127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("dtype", "gpu", "backend"),
    [("float32", 0, "torch_native"), ("bfloat16", 0, None), ("float32", None, "torch_native")],
)
def test_float32_has_an_attention_that_takes_it(dtype: str, gpu: int | None, backend: str | None) -> None:
    words = command(ServerSite(Path("folder"), "127.0.0.1", 20000, first_gpu=gpu), Launch(), dtype)
    assert words.count("--attention-backend") == (backend is not None)
    if backend is not None:
        assert words[words.index("--attention-backend") + 1] == backend


def test_there_is_room_for_a_probe_without_adapters() -> None:
    words = adapter_arguments(load_policy(Model("tiny", lora=Lora(rank=4))), None)
    assert words[words.index("--max-loras-per-batch") + 1] == "2"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, int | None]]:
    """The options and the GPU of each server that would have been started."""
    launches: list[tuple[Launch, int | None]] = []

    def words(site: ServerSite, launch: Launch, dtype: str) -> list[str]:
        launches.append((launch, site.first_gpu))
        return []

    monkeypatch.setattr("rlkit_servers.sglang.engine.command", words)
    monkeypatch.setattr("rlkit_servers.sglang.engine.write_model", lambda folder, *_: None)
    monkeypatch.setattr("rlkit_servers.sglang.engine.require_sglang", lambda: None)
    monkeypatch.setattr("rlkit_servers.process.SupervisedProcess.run", lambda *_: None)
    return launches


def start(engine: SGLangServer | SGLangEngine, device: str) -> None:
    runtime: Any = SimpleNamespace(
        policy=None,
        device=torch.device(device),
        stop_ids=frozenset(),
        tensor_parallel=1,
        sequence_parallel=1,
        gather_world=lambda x: [x],
        host_server=lambda command: None,
    )
    engine.runtime, engine.weight_dtype = runtime, torch.bfloat16
    engine._trainer_gpus = trainer_gpus(runtime)
    for server in engine.start(0):
        server.close()


def test_an_engine_beside_the_trainer_leaves_it_room(started: list[tuple[Launch, int | None]]) -> None:
    start(SGLangEngine(), "cuda:3")
    start(SGLangEngine(Launch(memory_fraction=0.6)), "cuda:3")
    start(SGLangServer(first_gpu=1), "cuda:0")
    start(SGLangEngine(), "cpu")
    assert [(launch.memory_fraction, gpu) for launch, gpu in started] == [(0.4, 3), (0.6, 3), (None, 1), (None, None)]


def test_servers_on_the_trainers_gpus_are_warned_of(started: list[tuple[Launch, int | None]]) -> None:
    with pytest.warns(UserWarning, match=r"servers on GPUs \[2\], which the trainer uses too; set first_gpu"):
        start(SGLangServer(servers=2, launch=Launch(tensor_parallel=2)), "cuda:2")
    assert [(launch.memory_fraction, gpu) for launch, gpu in started] == [(None, 0), (0.4, 2)]


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ([], False),
        (["--rollout.engine.urls=[http://127.0.0.1:1]"], False),
        (["--rollout.engine.urls=[http://10.0.0.7:1]"], True),
        (["--rollout.engine.urls=[http://10.0.0.7:1]", "--rollout.engine.transport=disk"], False),
        (["--rollout.engine.transport=group"], True),
    ],
)  # fmt: skip
def test_nccl_is_set_alike_on_both_sides_of_a_group(
    options: list[str], zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL reads its variables once, when the trainer makes its own group; values set by the user are kept."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "remembered by pytest, so that it is undone")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    words = ["--recipe=quickstart", "--rollout.engine=SGLangServer", "--fabric.accelerator=cpu", *options]
    fabric_for(parse("fit", words).recipe)
    assert os.environ.get("NCCL_CUMEM_ENABLE") == ("0" if zero else None)
    assert server_environment()["NCCL_NVLS_ENABLE"] == os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_a_process_is_told_how_long_it_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HEALTH_CHECK_TIMEOUT", raising=False)
    engine = SGLangEngine(retry=ServerRetryPolicy(hang_seconds=7.0))
    policy = load_policy(Model("tiny"))
    runtime: Any = SimpleNamespace(policy=policy, device=torch.device("cpu"), stop_ids=frozenset())
    engine.runtime, engine.weight_dtype, engine._trainer_gpus = runtime, torch.float32, set()
    process = ServerProcess(engine.command(None))
    assert process.environment["SGLANG_HEALTH_CHECK_TIMEOUT"] == "7"
    process.close()


def test_the_end_of_a_log_has_the_last_errors_before_it() -> None:
    process = SupervisedProcess("a server")
    assert process.tail() == ""
    early = [f"ValueError: {number}" for number in range(4)]
    last = [f"line {number}" for number in range(TAIL_LINES)]
    process.log_file.write_text("\n".join([*early, "an Error in a sentence", *last]))
    assert process.tail().splitlines() == [*early[1:], *last]
    process.close()


def test_the_end_of_a_log_says_that_its_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SupervisedProcess("a server")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=8192))
    process.log_file.write_text("Loading\n")
    assert process.tail().splitlines() == [
        "Loading",
        f"[rlkit] the disk of {process.folder} is full (8,192 bytes are left); free some space, or set TMPDIR to a "
        "folder of another disk",
    ]
    process.close()


@pytest.mark.parametrize(("name", "version"), [("torch", "2.13.0"), ("transformers", "5.12.1")])
def test_rlkit_takes_what_the_release_of_its_extra_pins(name: str, version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [release] = [Requirement(line) for line in project["optional-dependencies"]["sglang"] if "sglang" in line]
    assert str(release.specifier) == "==0.5.21"  # with another one, the versions above change
    [ours] = [requirement for requirement in map(Requirement, project["dependencies"]) if requirement.name == name]
    assert ours.specifier.contains(version)


@pytest.mark.slow
def test_without_a_gpu_the_command_for_one_says_so() -> None:
    words = ("bash", str(ROOT / "tests" / "gpu" / "all.sh"))
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    process = subprocess.run(words, env=hidden, capture_output=True, text=True, timeout=100, check=False)
    assert (process.returncode, process.stdout) == (2, "no GPU: nothing was run\n")
    lost = subprocess.run(words, env={**hidden, "PYTHON": "false"}, capture_output=True, text=True, check=False)
    assert (lost.returncode, lost.stdout[:18]) == (2, "false has no rlkit")
