"""A process that has imported what runs import, and forks for each of them: they begin without 4 s of imports.

Commands that need a fresh interpreter, such as one with other variables of its environment, are run in one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlkit.base.garbage import KERNELS
from rlkit.base.imports import import_lazily

ROOT = Path(__file__).parents[1]

IMPORTS = (
    "torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "peft", "rlkit.cli.fit", "rlkit.cli.display", "rlkit.engines",
    "rlkit.losses", "rlkit.run.launch", "rlkit_engine_torch",
)  # fmt: skip
"""Modules that most runs import."""

CHANGED = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", *KERNELS}
"""Variables that pytest, Lightning, Inductor and runs set in their process; no import depends on them."""


def run(
    words: Sequence[str], cwd: Path, ranks: int = 1, timeout: float = 500, site: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a fork, or in one for each rank as torchrun does.

    Args:
        site: Folders of plugins, as PYTHONPATH has them, which come before those of the environment.

    Raises:
        subprocess.TimeoutExpired: It took longer; its processes are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        request = {"words": words, "cwd": str(cwd), "env": with_site(site), "out": str(out), "err": str(err)}
        status = _ask(_start()[0], {**request, "site": site, "ranks": ranks, "timeout": timeout})
        written = out.read_text(), err.read_text()
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *written)
    return subprocess.CompletedProcess(words, status, *written)


def start(words: Sequence[str], cwd: Path, site: str = "", **variables: str) -> Started:
    """Start `python WORDS` in a process group of its own: a fork if it can be one.

    Args:
        words: Its command line.
        cwd: Its folder.
        site: Folders of plugins, as PYTHONPATH has them, which come before those of the environment.
        variables: Other variables of its environment; no import depends on them.
    """
    env = {**with_site(site), **variables}
    if can_run():
        return Process({"words": words, "cwd": str(cwd), "env": env, "site": site, "ranks": 1})
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen((sys.executable, *words), cwd=cwd, env=env, start_new_session=True, **pipes)


class _Fork:
    """As much of a `Popen` as is used of a fork."""

    pid: int
    returncode: int | None = None

    def _status(self) -> int | None:
        return _status(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._status()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Process(_Fork):
    """A fork that `start` has started, and that is a child of the process that forks."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._printed = tempfile.NamedTemporaryFile()  # noqa: SIM115  (it goes with this object)
        self.pid = _ask(_start()[0], {**request, "out": self._printed.name, "err": self._printed.name})

    def _status(self) -> int | None:
        status: int | None = _ask(_start()[0], {"child": self.pid})
        return status

    def wait(self, timeout: float = 500) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout, self._read())
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 500) -> tuple[str, None]:
        """Wait until it has ended; return what it has written to both streams."""
        self.wait(timeout)
        return self._read(), None

    def _read(self) -> str:
        return Path(self._printed.name).read_text()


Started = Process | subprocess.Popen[str]


def with_site(site: str) -> dict[str, str]:
    """Return the environment, with folders before those of PYTHONPATH."""
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path} if site else dict(os.environ)


def can_run() -> bool:
    """Whether the environment is the one in which the modules were imported: some read it only then."""
    return _start()[1] == _environment()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in CHANGED}


@cache
def _start() -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start the process; return it with its environment."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        (sys.executable, __file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    atexit.register(process.kill)
    return process, _environment()


def _ask(process: subprocess.Popen[str], request: dict[str, Any]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _serve() -> None:
    """Answer each line of the standard input with a status; return only in a fork, which then is the run."""
    import_lazily()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "child" in request:
            print(json.dumps(_status(request["child"])), file=answers, flush=True)
            continue
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                answers.close()
                _become(request, rank, port)
                return
            children.append(child)
        timeout = request.get("timeout")
        print(json.dumps(children[0] if timeout is None else _wait(children, timeout)), file=answers, flush=True)


def _status(child: int) -> int | None:
    """Return the status with which a child has ended; None if it has not."""
    ended, code = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(code) if ended else None


def _wait(children: list[int], timeout: float) -> int | None:
    """Return the first status that is not 0, of processes that end the others then; None if they take too long."""
    end, status = time.monotonic() + timeout, 0
    while children and time.monotonic() < end and status == 0:
        for child in list(children):
            ended = _status(child)
            if ended is not None:
                children.remove(child)
                status = status or ended
        time.sleep(0.01)
    late = bool(children) and status == 0
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if late else status


class _Rank(_Fork):
    """A fork that waits to become a rank which Fabric starts as a process of its own.

    Args:
        waiting: Those that were made before it.
    """

    def __init__(self, waiting: Sequence[_Rank]) -> None:
        received, self._sent = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for rank in (self, *waiting):
                os.close(rank._sent)
            with os.fdopen(received) as start:
                text = start.read()
            if text:
                request = json.loads(text)
                os.environ.clear()
                os.environ.update(request["env"])
                _run(request["words"])
            sys.exit()
        os.close(received)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: None) -> _Rank:
        with os.fdopen(self._sent, "w") as start:
            json.dump({"words": command[1:], "env": dict(env)}, start)
        return self


def _become(request: dict[str, Any], rank: int, port: int) -> None:
    """Make this fork the process that `python WORDS` starts."""
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = filter(None, request["site"].split(os.pathsep))
    if request["ranks"] > 1:
        count = str(request["ranks"])
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    waiting: list[_Rank] = []
    for word in request["words"]:
        if re.fullmatch(r"--fabric\.devices=\d", word):
            for _ in range(1, int(word[-1])):
                waiting.append(_Rank(waiting))
    if waiting:
        launcher: Any = importlib.import_module("lightning.fabric.strategies.launchers.subprocess_script")
        launcher.subprocess = SimpleNamespace(Popen=lambda *args, **options: waiting.pop().start(*args, **options))
    _run(request["words"])


def _run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
