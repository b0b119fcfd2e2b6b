"""The script that a command runs, which is looked for before a run."""

from __future__ import annotations

import pytest
from rlkit_code.command import Command, CommandLimits

LIMITS = CommandLimits(memory_mb=256, processes=16, file_mb=8, disk_mb=16)


@pytest.mark.parametrize("line", ["python agent.py", "python3.12 -u agent.py --out x", "bash agent.sh", "./agent.sh"])
def test_a_missing_script_is_named(line: str) -> None:
    command = Command("Agent", line, LIMITS, confined=False)
    script = next(word for word in line.split() if "agent" in word)
    assert command.missing(()) == script
    assert command.missing([script.removeprefix("./")]) is None


@pytest.mark.parametrize(
    "line",
    [
        "codex exec 'Read TASK.md and write solution.py'",
        "sh -c 'python generated.py'",
        "bash -c generated.sh",
        "python -m pytest test_it.py",
        "tool --out=result.py",
        "git diff -- main.py",
        "python {folder}/agent.py",
        "python ~/agent.py",
    ],
)
def test_files_that_a_command_may_write_itself_are_not_missing(line: str) -> None:
    assert Command("Agent", line, LIMITS, confined=False).missing(()) is None
