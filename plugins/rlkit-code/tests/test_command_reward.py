"""A command as a reward, in its real sandbox: what passes, what fails, and what a completion cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlkit_code.command_reward import read_number

from rlkit.base.deadlines import deadline
from rlkit.base.errors import RecipeError
from rlkit.rewards import CommandReward
from rlkit.testing import example_trajectory
from rlkit.types import AgentSpan, Score, Trajectory
from tests.events import until
from tests.unit.clock import SkippingLoop

PYTHON = sys.executable


def graded(reward: CommandReward, text: str, folder: Path | None = None, **row: Any) -> Score:
    trajectory = example_trajectory(text)
    trajectory.prompt = replace(trajectory.prompt, meta=row)
    if folder is not None:
        trajectory.span.result = {"folder": str(folder)}

    async def score() -> Score:
        reward.bind(None)  # type: ignore[arg-type]
        return (await reward.score([trajectory]))[0]

    return asyncio.run(score())


CHECK = "import sys; sys.exit(open('COMPLETION.txt').read() != open('expected.txt').read())"


def test_the_exit_status_is_the_reward_of_a_completion(tmp_path: Path) -> None:
    reward = CommandReward(f"{PYTHON} check.py", allow_code=True)
    files = {"files": {"expected.txt": "7"}, "tests": {"check.py": CHECK}}
    assert graded(reward, "7", **files) == Score(1.0, {"accuracy": 1.0})
    assert graded(reward, "8", **files) == Score(0.0, {"accuracy": 0.0})


def test_tests_replace_what_an_agent_left_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "COMPLETION.txt").write_text("8")
    (tmp_path / "expected.txt").symlink_to("COMPLETION.txt")
    (tmp_path / "check.py").write_text("")  # passes anything
    reward = CommandReward(f"{PYTHON} check.py", allow_code=True)
    assert graded(reward, "", tmp_path, tests={"check.py": CHECK, "expected.txt": "7"}).reward == 0
    assert (tmp_path / "COMPLETION.txt").read_text() == "8"


@pytest.mark.parametrize(
    ("written", "reward"),
    [("0.25", 0.25), ("-1\n", -1.0), ("", 0.0), ("nan", 0.0), ("1e99", 0.0), ("one", 0.0), ("1" * 101, 0.0)],
)
def test_a_number_is_read_from_a_file(tmp_path: Path, written: str, reward: float) -> None:
    command = f"{PYTHON} -c \"open('reward.txt', 'w').write({json.dumps(written)[1:-1]!r})\""
    if "\n" in written:
        command = f"{PYTHON} -c \"open('reward.txt', 'w').write('-1' + chr(10))\""
    assert graded(CommandReward(command, allow_code=True, number="reward.txt"), "").reward == reward


def test_an_agents_number_does_not_count_nor_a_link_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    assert graded(CommandReward("true", allow_code=True, number="reward.txt"), "", tmp_path).reward == 0
    (tmp_path / "answer").write_text("1")
    link = CommandReward("ln -sf answer reward.txt", allow_code=True, number="reward.txt")
    assert graded(link, "", tmp_path).reward == 0


def in_folder(folder: Path) -> Trajectory:
    return replace(example_trajectory(""), span=AgentSpan({"folder": str(folder)}))


def test_a_hanging_command_earns_nothing_and_is_killed(tmp_path: Path) -> None:
    """Its time ends when it has begun."""
    loop, mark = SkippingLoop(), f"4711.{os.getpid()}"
    reward = CommandReward(f"sh -c 'touch began; sleep {mark}'", allow_code=True, seconds=100.0)

    async def hang() -> list[Score]:
        reward.bind(None)  # type: ignore[arg-type]
        scoring = asyncio.create_task(reward.score([in_folder(tmp_path)]))
        await until((tmp_path / "began").exists)
        loop.skip(100.0)
        return await scoring

    assert loop.run(hang()) == [Score(0.0, {"accuracy": 0.0})]
    assert not [process for process in Path("/proc").glob("[0-9]*") if mark.encode() in command_line(process)]


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_the_wait_for_other_commands_counts_in_no_deadline(tmp_path: Path) -> None:
    """One command at a time: the second waits for longer than its deadline until the first has ended."""
    loop, command = SkippingLoop(), "sh -c 'touch began; until [ -e end ]; do sleep 0.05; done'"
    reward = CommandReward(command, allow_code=True, seconds=1000.0, concurrency=1, sandbox=False)

    async def timed() -> list[Score]:
        async with deadline(100.0):
            return await reward.score([in_folder(tmp_path)])

    async def both() -> list[Score]:
        reward.bind(None)  # type: ignore[arg-type]
        scoring = [asyncio.create_task(work) for work in (reward.score([in_folder(tmp_path)]), timed())]
        await until((tmp_path / "began").exists)
        loop.skip(200.0)
        (tmp_path / "end").touch()
        return [score for scores in await asyncio.gather(*scoring) for score in scores]

    assert loop.run(both()) == [Score(1.0, {"accuracy": 1.0})] * 2


def test_a_completion_reaches_neither_network_nor_other_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    code = (
        "import os, socket, sys\n"
        f"try: open({str(secret)!r}); sys.exit(0)\n"
        "except OSError: pass\n"
        "try: socket.create_connection(('127.0.0.1', 9), 1)\n"
        "except ConnectionRefusedError: sys.exit(3)\n"
    )
    assert graded(CommandReward(f"{PYTHON} run.py", allow_code=True), "", tests={"run.py": code}).reward == 0


def test_rows_that_cannot_be_verified_are_named() -> None:
    reward = CommandReward("true", allow_code=True)
    prompt = replace(example_trajectory("").prompt, meta={"tests": {"../check.py": ""}})
    assert "cannot be verified" in str(reward.unscorable(prompt))
    score = graded(reward, "", tests=["check.py"])
    assert score.reward is None
    assert "tests are" in str(score.error)


def test_it_needs_allow_code() -> None:
    with pytest.raises(RecipeError, match="set allow_code: true"):
        CommandReward("true")


def test_tests_at_absolute_paths_are_out_of_the_agents_reach(tmp_path: Path) -> None:
    """The command begins in the folder at its `workdir`; what the agent left as `tests` is another folder."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    script = 'echo "$(ls /tests) $PWD $(cat /app/sum.txt) $(cat sum.txt)" > saw; echo 0.5 > /logs/verifier/reward.txt'
    row = {"tests": {"/tests/test.sh": script}, "workdir": "/app"}
    (tmp_path / "sum.txt").write_text("3")
    reward = CommandReward("bash /tests/test.sh", allow_code=True, number="/logs/verifier/reward.txt")
    assert graded(reward, "", tmp_path, **row) == Score(0.5)
    assert (tmp_path / "saw").read_text() == "test.sh /app 3 3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saw", "sum.txt", "tests"]
    assert graded(reward, "", tmp_path, **row | {"tests": {"/tests/test.sh": "true"}}) == Score(0.0)


@pytest.mark.parametrize("path", ["/usr", "/usr/lib/x", "/", "/tmp/x", "/proc", "app", "/app/../usr", "/app\n"])
def test_no_row_covers_what_is_the_systems(tmp_path: Path, path: str) -> None:
    score = graded(CommandReward("true", allow_code=True), "", tmp_path, workdir=path)
    assert score.reward is None
    assert "cannot have a folder at" in str(score.error)


def test_absolute_paths_need_the_sandbox(tmp_path: Path) -> None:
    reward = CommandReward("true", allow_code=True, sandbox=False)
    assert "has no sandbox, in which" in str(graded(reward, "", tmp_path, tests={"/tests/test.sh": ""}).error)


def test_disk_is_limited_at_absolute_paths_too(tmp_path: Path) -> None:
    reward = CommandReward("bash /tests/test.sh", allow_code=True, disk_mb=4)
    script = "head -c 2M /dev/zero > a; head -c 3M /dev/zero > /tests/b; sleep 30"
    assert graded(reward, "", tmp_path, tests={"/tests/test.sh": script}).reward == 0


def test_a_number_is_read_through_no_link_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reward.txt").write_text("1")
    (tmp_path / "root" / "logs").mkdir(parents=True)
    (tmp_path / "root" / "logs" / "verifier").symlink_to(tmp_path / "elsewhere")
    assert read_number(tmp_path, "elsewhere/reward.txt") == Score(1.0)
    assert read_number(tmp_path / "root", "logs/verifier/reward.txt") == Score(0.0)
