"""Tasks in folders, done by one shell command each: rows, recorded conversations of which most are wrong, a reward."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rlkit.types import Trajectory

TASKS = {
    "Sort the lines.": "sort data > out",
    "Reverse the lines.": "tac data > out",
    "Keep the first line.": "head -1 data > out",
    "Keep the last line.": "tail -1 data > out",
}
SUBMIT = "sh submit"


def write_rows(path: Path, count: int, rng: random.Random) -> None:
    """Write rows with a text of 4 lines in a folder, and what the file `out` should hold."""
    rows = []
    for _ in range(count):
        lines = rng.sample(["ant\n", "bee\n", "cat\n", "dog\n", "elk\n", "fox\n"], 4)
        answers = (sorted(lines), lines[::-1], lines[:1], lines[-1:])
        question, answer = rng.choice(list(zip(TASKS, answers, strict=True)))
        files = {"data": "".join(lines), "submit": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
        rows.append({"prompt": question, "answer": "".join(answer), "files": files})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def conversation(rng: random.Random) -> list[tuple[str, str]]:
    """Draw roles and texts: the right command in 40%, another task's in 50%, a command that is not permitted in 10%."""
    commands, draw = list(TASKS.values()), rng.random()
    index = rng.randrange(len(commands))
    command, result = commands[index if draw < 0.4 else index - 1], "exit status 0\n"
    if draw > 0.9:
        command, result = command[: rng.randint(1, 9)], "exit status 126\nnot permitted\n"
    asked = [("system", "Use the shell."), ("user", list(TASKS)[index])]
    return [*asked, ("assistant", f"$ {command}"), ("user", result), ("assistant", f"$ {SUBMIT}")]


def grade(trajectory: Trajectory, agent: dict[str, Any]) -> float:
    """Return 1 if the agent has submitted the right file, else 0."""
    out = Path(agent["folder"]) / "out"
    submitted = agent["output"] == "Submitted" and out.is_file()
    return float(submitted and out.read_text(encoding="utf-8") == trajectory.prompt.answer)
