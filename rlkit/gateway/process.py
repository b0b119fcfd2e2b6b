"""The process of an agent: started under a supervisor, and killed with all its descendants."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlkit.gateway import supervisor
from rlkit.interfaces.agent import AgentResult

SUPERVISOR = Path(supervisor.__file__)
KILL_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessLimits:
    """What an agent's processes may use.

    Args:
        memory_mb: Memory of all processes together.
        processes: Processes at once.
        file_mb: Size of a file.
        output_bytes: The end of the output that is kept.
    """

    memory_mb: int
    processes: int
    file_mb: int
    output_bytes: int


async def run_command(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limits: ProcessLimits
) -> AgentResult:
    """Run a command in a folder until it ends; cancelled, it is killed with all that it has started.

    Returns:
        Its exit status, negative for a kill, and the end of its output.
    """
    spec = json.dumps({"command": list(command), **asdict(limits)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-E", str(SUPERVISOR), spec),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
        limit=2**20,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading = asyncio.ensure_future(process.stdout.read())
    try:
        written = await asyncio.shield(reading)
        await process.wait()
    finally:
        process.stdin.close()  # the supervisor kills what is left
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
        reading.cancel()
    try:
        report = json.loads(written)
    except ValueError:  # the supervisor itself was killed
        return AgentResult(-9, "the agent's supervisor was killed")
    return AgentResult(int(report["status"]), str(report["output"]))
