"""A tool that runs the policy's Python code in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlkit_code import attempts, sandbox
from rlkit_code.command import ROOT, machine, next_user

from rlkit.base.errors import RecipeError, RolloutError
from rlkit.base.folders import REMOVE
from rlkit.base.ranges import Count, PositiveInt, Seconds
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.tool import State, Tool

HERE = Path(__file__).parent
SANDBOX = (sys.executable, "-I", "-B", "-X", "utf8", str(HERE / "sandbox.py"), str(ROOT))
GRACE = 5.0
"""Seconds that the sandbox has, beyond those of the code, to start and to say what happened."""


class PythonTool(Tool):
    """Runs Python code in a process of its own; answers with what it prints and the value of a last expression.

    Nothing is kept between calls but the files of a folder that each conversation has. The code has no network, reaches
    no process of the machine, may read this Python with its packages and the system's libraries, and may write to the
    folder only. `bind` tries out whether the machine enforces that.

    Args:
        timeout: Seconds that the code may take, and CPU seconds for each of its processes.
        memory_mb: Address space of each process.
        processes: How many processes and threads there may be at once.
        file_mb: Size of each file that the code writes.
        output_chars: Length of an answer; a longer one loses its middle.
        concurrency: Calls that may run at once; null for the number of CPUs.
        strict: Refuse a machine on which a protection is missing, rather than warn.
    """

    name = "python"
    description = (
        "Runs Python code in a new process, without a network. Answers with what it prints and with the value of a "
        "last expression. Files in the working folder are kept from call to call, variables are not."
    )

    def __init__(
        self,
        *,
        timeout: Seconds = 10.0,
        memory_mb: PositiveInt = 1024,
        processes: Count = 16,
        file_mb: PositiveInt = 64,
        output_chars: PositiveInt = 4000,
        concurrency: Count | None = None,
        strict: bool = True,
    ) -> None:
        self.parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
            "additionalProperties": False,
        }
        self.limits = {"memory_mb": memory_mb, "processes": processes, "file_mb": file_mb, "output_chars": output_chars}
        self.concurrency = (os.cpu_count() or 1) if concurrency is None else concurrency
        self.seconds = timeout
        self.timeout = timeout + GRACE
        self.strict = strict
        self.folder: Path | None = None
        self.layers: list[str] | None = None

    def bind(self, runtime: Runtime) -> None:
        if sys.platform != "linux" or platform.machine() not in sandbox.MACHINES:
            machines = " or ".join(sandbox.MACHINES)
            raise RecipeError(
                f"PythonTool needs Linux on {machines}, but this is {sys.platform} on {platform.machine()}"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-python-")).resolve()
        self.folder.chmod(0o711)  # the code's user must get to its own folder
        (self.folder / "view").mkdir()
        try:
            reply, missing = self._attempt()
            self._judge(missing, reply["failed"])
        except BaseException:
            self.close()
            raise
        self.layers = reply["layers"]

    def _attempt(self) -> tuple[dict[str, Any], list[str]]:
        """Run `attempts.py` as the policy's code is run; return the reply and the protections that are missing."""
        state: State = {}
        self._prepare(state)
        attempts_code = Path(attempts.__file__).read_text(encoding="utf-8")
        with machine() as (_, marker, port, pid):
            victims = (marker, port, pid, self.limits["memory_mb"], self.limits["processes"])
            code = f"{attempts_code}\nreport{victims}\n"
            request = self._request(code, state, seconds=GRACE, output_chars=10_000)
            done = subprocess.run(SANDBOX, input=request, capture_output=True, check=False, **self._process(state))
        told = (done.stdout + done.stderr).decode()
        with suppress(ValueError):
            reply = json.loads(done.stdout)
            told = f"{reply['output']} {reply['failed']}"
            return reply, json.loads(reply["output"])
        raise RecipeError(f"PythonTool cannot run {sys.executable} in its sandbox, which says: {told.strip()}")

    def _judge(self, missing: list[str], failed: dict[str, str]) -> None:
        """Refuse a machine on which protections are missing, or warn of it."""
        if not missing:
            return
        reasons = "".join(f"; {layer}: {reason}" for layer, reason in failed.items())
        message = f"PythonTool cannot protect {', '.join(missing)} from the policy's code on this machine{reasons}"
        if self.strict:
            remedy = "Allow user namespaces, or Landlock (Linux 6.2) and seccomp; or accept it with strict: false."
            raise RecipeError(f"{message}. {remedy}")
        warnings.warn(message, stacklevel=3)

    def _prepare(self, state: State) -> None:
        """Make a conversation's folder and, where rlkit runs as root, choose the user that the code becomes."""
        state["folder"] = tempfile.mkdtemp(dir=self.folder)
        state["user"] = next_user()
        if state["user"] is not None:
            os.chown(state["folder"], state["user"], state["user"])

    def _request(self, code: str, state: State, **changes: Any) -> bytes:
        """Return the sandbox's input."""
        own = {name: state[name] for name in ("folder", "user")}
        request = {"code": code, "layers": self.layers, "view": f"{self.folder}/view", "seconds": self.seconds}
        return json.dumps({**request, **own, **self.limits, **changes}).encode()

    def _process(self, state: State) -> dict[str, Any]:
        """Return the sandbox's launch options: a session of its own, with nothing of the trainer's environment."""
        home = dict.fromkeys(("HOME", "TMPDIR"), state["folder"])
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {"start_new_session": True, "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **home, **one_thread}}

    async def create(self, state: State, **kwargs: Any) -> None:
        self._prepare(state)

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> str:
        process = await asyncio.create_subprocess_exec(
            *SANDBOX, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **self._process(state)
        )
        try:
            told, errors = await process.communicate(self._request(arguments["code"], state))
        finally:
            if process.returncode is None:
                await _end(process)
        if not told:
            raise RolloutError(f"PythonTool's sandbox died: {errors.decode(errors='replace')[-500:]}")
        reply = json.loads(told)
        if reply["layers"] != self.layers:
            raise RolloutError(f"PythonTool ran nothing: its sandbox needs {self.layers}, but {reply['failed']}")
        return self._answer(reply["output"].rstrip("\n"), reply["ended"])

    def _answer(self, output: str, ended: int | None) -> str:
        """Add to the output how the code ended, unless that was in the ordinary way or with a traceback."""
        note = ""
        if ended is None:
            note = f"[stopped after {self.seconds:g} seconds]"
        elif ended > 128:
            note = f"[killed by signal {ended - 128}]"
        elif not output:
            note = "[no output]"
        return "\n".join(filter(None, (output, note)))

    async def release(self, state: State, **kwargs: Any) -> None:
        if folder := state.pop("folder", None):
            process = await asyncio.create_subprocess_exec(*REMOVE, folder)
            await process.wait()

    def close(self) -> None:
        if self.folder:
            subprocess.run((*REMOVE, str(self.folder)), check=False)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the sandbox to kill all that it started; kill the sandbox if it does not."""
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), GRACE)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)


@hookimpl
def rlkit_register(register: Register) -> None:
    register(PythonTool)
