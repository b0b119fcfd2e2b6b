"""The process of a server that rlkit starts, with its environment and its log."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.base.errors import EngineError
from rlkit.interfaces.launcher import HostedServer, ServerCommand, ServerSite
from rlkit_servers import supervisor

SUPERVISOR = Path(supervisor.__file__)
TAIL_LINES = 25
GRACE_SECONDS = 5.0
"""A server's time between SIGTERM and SIGKILL, in which it removes its shared memory and sockets."""
LONGEST_FOLDER = 64
"""Characters of a folder for sockets, whose paths may have 107; some servers end them with a UUID."""
KILL_SECONDS = 20.0
"""A supervisor's time to end what it has started."""
PORTS = range(20000, 30000)
SIGNALLED = 192
"""A larger exit status of a supervisor is 256 minus the number of the signal that ended its command."""

TRAINER_VARIABLES = re.compile(
    "(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|NODE_RANK|(GROUP|ROLE)_.*|TORCHELASTIC_.*|TORCH_NCCL_.*|PYTORCH_.*ALLOC_CONF"
)
"""Environment variables of the trainer's process group, launcher, watchdog and allocator, which servers do not inherit.

With torchrun's `TORCHELASTIC_USE_AGENT_STORE`, a server would wait for a store that does not exist.
"""

CONNECT_SECONDS = 1.0
LITTLE_BYTES = 1 << 20
"""Free space of a disk that counts as full."""

LOCAL_HOST = "127.0.0.1"
LOCAL_HOSTS = f"{LOCAL_HOST},localhost"


def free_port(host: str = LOCAL_HOST) -> int:
    """Return a free port of an address of this machine.

    It is below the ports that the kernel assigns: a server's own sockets may take one of those before it listens.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise EngineError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {host}")


def write_model(folder: Path, policy: Any, stop_ids: frozenset[int]) -> None:
    """Write the configuration that a server builds the model from; the trainer sends the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.config)
    config.architectures = config.architectures or [type(policy).__name__]
    config.save_pretrained(folder)
    if stop_ids and policy.generation_config is not None:
        ends = type(policy.generation_config)(eos_token_id=sorted(stop_ids))
        ends.save_pretrained(folder)


def server_environment() -> dict[str, str]:
    """Return this process's environment without the variables of a trainer."""
    environment = {name: value for name, value in os.environ.items() if not TRAINER_VARIABLES.fullmatch(name)}
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, (environment.get(name), LOCAL_HOSTS)))
    return environment


def start_supervised(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    grace_seconds: float = 0.0,
    folder: Path | str = "",
) -> subprocess.Popen[bytes]:
    """Start a command under a supervisor, which ends it and its children once this process ends; return that.

    The exit status of the supervisor is the command's, or 256 minus the number of the signal that ended it.

    Args:
        command: The command.
        environment: Its environment variables.
        log: The file to which its output is appended.
        grace_seconds: How long it may take to end after SIGTERM, before it is killed; with 0 it is killed at once.
        folder: A folder that the supervisor removes if this process dies first; none if empty.
    """
    return subprocess.Popen(
        (sys.executable, "-S", "-E", str(SUPERVISOR), str(log), str(grace_seconds), str(folder), *command),
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def kill_supervised(process: subprocess.Popen[bytes]) -> None:
    """End what a supervisor has started, and wait until it has ended; its folder stays."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"\0")
        process.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a supervisor's command, negative for a signal; None while it runs."""
    code = process.poll()
    return code if code is None or code < SIGNALLED else code - 256


class TemporaryFolder:
    """A folder that is removed when this process ends, even if it is killed.

    Args:
        prefix: How its name begins.
        parent: The folder in which it is; None for that of temporary files.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        idle = ("tail", "-f", os.devnull)
        try:
            self._supervisor = start_supervised(idle, os.environ, Path(os.devnull), folder=self.path)
        except OSError:  # as without memory for another process
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove it now."""
        kill_supervised(self._supervisor)
        shutil.rmtree(self.path, ignore_errors=True)


def _full_disk(folder: Path, free: int) -> str:
    left = f"({free:,} bytes are left)"
    return f"the disk of {folder} is full {left}; free some space, or set TMPDIR to a folder of another disk"


class SupervisedProcess:
    """A process of this machine under its supervisor, with a folder of its own for its log and temporary files.

    Args:
        product: Part of the folder's name.
        log: The file of its output; None for one in the folder.
    """

    def __init__(self, product: str, log: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"rlkit-{product}-"))
        self.log_file = log or self.folder / "server.log"
        self.supervisor: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start or restart the process."""
        self.kill()
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # serves later servers too
        environment = {"TORCHINDUCTOR_CACHE_DIR": compiled, **environment}
        if len(str(self.folder)) <= LONGEST_FOLDER:
            environment["TMPDIR"] = str(self.folder)
        self.supervisor = start_supervised(command, environment, self.log_file, GRACE_SECONDS, self.folder)

    def running(self) -> bool:
        """Check whether the process runs."""
        return self.supervisor is not None and self.supervisor.poll() is None

    def exit_status(self) -> int | None:
        """Return the exit status of the process, negative for a signal; None if it has not ended."""
        return None if self.supervisor is None else exit_status(self.supervisor)

    def tail(self) -> str:
        """Return the end of the log, after the last exceptions that were logged before it."""
        if not os.path.exists(self.folder):
            return ""
        text = self.log_file.read_text(encoding="utf-8", errors="replace") if os.path.exists(self.log_file) else ""
        lines = text.splitlines()
        raised = [line for line in lines[-1000:-TAIL_LINES] if re.match(r"[\w.]*(Error|Exception)\b", line)]
        free = shutil.disk_usage(self.folder).free
        full = [f"[rlkit] {_full_disk(self.folder, free)}"] if free < LITTLE_BYTES else []
        return "\n".join([*raised[-3:], *lines[-TAIL_LINES:], *full])

    def kill(self) -> None:
        """Kill the process and all its children."""
        if self.supervisor is not None:
            kill_supervised(self.supervisor)
        self.supervisor = None

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ServerProcess(HostedServer):
    """A server under its supervisor, which listens on this machine only.

    Args:
        command: How the server is started.

    Raises:
        EngineError: Its files cannot be written.
    """

    def __init__(self, command: ServerCommand) -> None:
        self.supervised = SupervisedProcess(command.product, command.log)
        self.log = str(self.supervised.log_file)
        self.environment = {**server_environment(), **command.environment}
        self._command = command
        self._port = 0
        try:
            command.write_files(self.supervised.folder)
        except OSError as error:
            free = shutil.disk_usage(self.supervised.folder).free
            self.close()
            full = (
                f"; {_full_disk(self.supervised.folder, free)}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            )
            raise EngineError(f"the files of the {command.product} server cannot be written: {error}{full}") from error

    def start(self) -> None:
        if not self._port or self.is_lost():
            self._port = free_port()
            self.url = f"http://{LOCAL_HOST}:{self._port}"
        site = ServerSite(self.supervised.folder, LOCAL_HOST, self._port, first_gpu=self._command.first_gpu)
        self.supervised.run(self._command.words(site), self.environment)

    @property
    def alive(self) -> bool:
        return self.supervised.running()

    def exit_status(self) -> int | None:
        return self.supervised.exit_status()

    def is_lost(self) -> bool:
        """Whether the server has ended and another process listens on its port, so that `start` takes another port."""
        if self.alive:
            return False
        with contextlib.suppress(OSError), socket.create_connection((LOCAL_HOST, self._port), timeout=CONNECT_SECONDS):
            return True
        return False

    def tail(self) -> str:
        return self.supervised.tail()

    def close(self) -> None:
        self.supervised.close()
