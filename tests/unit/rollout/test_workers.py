"""Workers and what rewards do to them: it costs the call that did it, the next one is right, and nothing is left."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkit.rewards import Composite, MathReward
from rlkit.rollout import workers as workers_module
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import WorkerError, Workers
from rlkit.testing import example_trajectory
from rlkit.train.metrics import Meter, describe_rollouts
from rlkit.types import Score
from tests.events import wait_until
from tests.unit.hostile import (
    Fragile,
    Helped,
    Moody,
    Named,
    Unreadable,
    double,
    meet,
    obey,
    sleep,
    start,
    start_and_hang,
    times,
)


@pytest.fixture(scope="module")
def one() -> Iterator[Workers]:
    """A single worker, so that the next call meets what the last one left."""
    pool = Workers(1)
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(folder: Path, count: int) -> list[int]:
    """Wait until so many processes have left their numbers."""
    wait_until(lambda: len(os.listdir(folder)) >= count)
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture
def hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: for a call that leaves a file there, and nothing to read, an hour passes on the clock of deadlines."""
    folder, passed = tmp_path / "hours", [0]
    folder.mkdir()

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            files = len(os.listdir(folder))
            ready = self._poll.poll(milliseconds)
            passed[0] = passed[0] if ready else files
            return ready

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * passed[0])
    monkeypatch.setattr(workers_module, "time", clock)
    monkeypatch.setattr(workers_module, "select", SimpleNamespace(**{**vars(select), "poll": Poll}))
    monkeypatch.setattr(workers_module, "STALL_SECONDS", math.inf)
    return folder


def test_a_worker_answers_and_is_kept(one: Workers) -> None:
    pids = [asyncio.run(one.call(obey, "pid", 30)) for _ in range(3)]
    assert os.getpid() not in pids
    assert len(set(pids)) == 1


def test_a_worker_has_the_trainers_paths_and_folder(
    one: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both have changed since the worker started."""
    asyncio.run(one.call(obey, "pid", 30))
    (tmp_path / "added_later.py").write_text("def triple(n):\n    return 3 * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    triple = importlib.import_module("added_later").triple
    assert asyncio.run(one.call(triple, 2, 30)) == 6
    assert asyncio.run(one.call(os.path.abspath, ".", 30)) == str(tmp_path)


KILLED = r"^did not finish within 0.5 s and was killed(; it printed last: \[this worker has killed processes .*\])?$"
"""After a call that left processes running, the worker has printed that."""
COSTS = {
    "raise": r"^ValueError: of the reward \(.*hostile.py, line \d+: raise ValueError\(.of the reward.\)\)$",
    "raise at length": r"^ValueError: x+ \[… \d+ characters …\] .*hostile.py, line \d+: .*\)$",
    "raise silently": r"^Silent: its text cannot be read \(RuntimeError\) \(",
    "raise a surrogate": r"^ValueError: \\udc80 \(",
    "exit": r"^SystemExit: 3 \(",
    "_exit": r"took its worker process down \(exit code 0\)",
    "die": r"took its worker process down \(exit code -9\)",
    "segfault": r"took its worker process down \(exit code -11\); it printed last: (.|\n)*Segmentation fault",
    "hang": KILLED,
    "stop": KILLED,
    "unserialisable": "object is not JSON serializable",
    "trap": "Trap is not JSON serializable",
    "endless": "ValueError: Circular reference",
    "large": "takes 17000013 bytes, expected at most 16777216",
    "garbage": "wrote into the pipe of its worker process, which was killed",
    "garbage in part": "did not finish within 0.5 s and was killed",
    "zeros": "wrote into the pipe",
    "forged id": "wrote into the pipe",
    "forged nonsense": "wrote into the pipe",
    "forged twice started": "wrote into the pipe",
    "deep": "wrote into the pipe",
    "close": "took its worker process down",
}


@pytest.mark.parametrize(("what", "message"), COSTS.items(), ids=COSTS)
def test_what_goes_wrong_costs_its_own_call(
    one: Workers, what: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "GRACE_SECONDS", 60.0)
    brief = what in ("hang", "stop", "garbage in part")
    with pytest.raises(WorkerError, match=message):
        asyncio.run(one.call(obey, what, 0.5 if brief else 30))
    assert not Path("unpickled").exists()
    assert [asyncio.run(one.call(double, n, 30)) for n in (4, 5)] == [8, 10]


@pytest.mark.parametrize("what", ["garbage afterwards", "exit afterwards"])
def test_what_a_call_leaves_does_not_cost_the_next(one: Workers, what: str) -> None:
    assert asyncio.run(one.call(obey, what, 30)) == "done"
    assert select.select((one._idle[0]._answers,), (), (), 60)[0]
    assert asyncio.run(one.call(double, 4, 30)) == 8


def test_a_forged_answer_is_at_most_that_of_its_own_call(one: Workers) -> None:
    assert asyncio.run(one.call(obey, "forged answer", 30)) == -1  # it could have returned that
    assert [asyncio.run(one.call(double, n, 30)) for n in (4, 5)] == [8, 10]


def test_a_hundred_megabytes_of_output_are_cut(one: Workers, capfd: pytest.CaptureFixture) -> None:
    one.close_idle()  # whose standard error is that of another test
    assert asyncio.run(one.call(obey, "print", 60)) == "printed"
    one.close_idle()
    shown = capfd.readouterr().err
    assert 60_000 < len(shown) < 70_000
    assert shown.endswith("[this worker has printed 64 KiB; what follows is not shown]\n")


def test_what_a_reward_prints_is_shown(one: Workers, capfd: pytest.CaptureFixture[str]) -> None:
    one.close_idle()  # whose standard error is that of another test
    assert asyncio.run(one.call(print, "to be\x1b\rseen", 30)) is None
    one.close_idle()
    assert capfd.readouterr().err == "to beseen\n"


@pytest.mark.parametrize("how", ["fork", "subprocess", "daemon", "closing daemon"])
def test_what_a_call_starts_and_does_not_end_ends_with_it(
    tmp_path: Path, one: Workers, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    one.close_idle()  # whose standard error is that of another test
    worker = asyncio.run(one.call(obey, "pid", 30))
    for number in "12":
        folder = tmp_path / number
        folder.mkdir()
        assert asyncio.run(one.call(start, (how, str(folder)), 30)) == "started"
        assert asyncio.run(one.call(obey, "pid", 30)) == worker
        assert [pid for pid in started(folder, 2) if alive(pid)] == [worker]
    one.close_idle()
    assert capfd.readouterr().err == "[this worker has killed processes that a call had left running]\n"


def test_what_a_reward_starts_serves_all_that_is_sent_together(one: Workers) -> None:
    """A process that the reward holds is there for each answer of its batch, and gone after it."""
    one._seconds[Helped] = 0.001  # as if it had been measured
    pids = asyncio.run(one.call_each(Helped.ask, Helped(), range(3), 30))
    assert len(set(pids)) == 1
    assert asyncio.run(one.call(double, 4, 30)) == 8
    assert not alive(pids[0])


@pytest.mark.parametrize("what", ["patch the encoder", "patch the system", "replace the output", "close the output"])
def test_what_a_call_patches_does_not_cost_the_next(one: Workers, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    one.close_idle()  # whose standard error is that of another test
    worker = asyncio.run(one.call(obey, "pid", 30))
    assert asyncio.run(one.call(obey, what, 30)) == "done"
    assert asyncio.run(one.call(double, 4, 30)) == 8
    assert asyncio.run(one.call(print, "seen", 30)) is None
    with pytest.raises(WorkerError, match="of the reward"):
        asyncio.run(one.call(obey, "raise", 30))
    if what != "patch the system":  # which leaves it without `os.getpid`
        assert asyncio.run(one.call(obey, "pid", 30)) == worker
    one.close_idle()
    assert capfd.readouterr().err == "seen\n"


@pytest.mark.parametrize("how", ["fork", "subprocess", "daemon", "closing daemon", "stopped watcher"])
def test_no_process_outlives_the_workers(tmp_path: Path, how: str) -> None:
    pool = Workers(1)

    async def close_meanwhile() -> None:
        call = asyncio.create_task(pool.call(start_and_hang, (how, str(tmp_path)), 600))
        pids = await asyncio.to_thread(started, tmp_path, 2)
        assert all(map(alive, pids))
        await asyncio.to_thread(pool.close)
        assert not any(map(alive, pids))
        with pytest.raises(WorkerError, match="the run is over"):
            await call

    asyncio.run(close_meanwhile())


@pytest.mark.parametrize("how", ["fork", "subprocess", "closing daemon"])
def test_no_process_outlives_the_deadline_of_its_call(tmp_path: Path, hours: Path, one: Workers, how: str) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    with pytest.raises(WorkerError, match="did not finish within 600 s and was killed"):
        asyncio.run(one.call(start_and_hang, (how, str(folder), str(hours)), 600))
    pids = started(folder, 2)
    wait_until(lambda: not any(map(alive, pids)))
    assert asyncio.run(one.call(double, 4, 30)) == 8


def test_no_process_outlives_a_watcher_that_is_killed(tmp_path: Path, one: Workers) -> None:
    with pytest.raises(WorkerError, match=r"took its worker process down \(exit code -9\)"):
        asyncio.run(one.call(start_and_hang, ("orphan of a killed watcher", str(tmp_path)), 600))
    pids = started(tmp_path, 1)
    wait_until(lambda: not any(map(alive, pids)))
    assert asyncio.run(one.call(double, 4, 30)) == 8


TRAINER = """
import asyncio, sys
from rlkit.rollout.workers import Workers
from tests.unit.hostile import start_and_hang

print("imported as", __name__, file=sys.stderr)
STEP = 1
def own(number):
    return number + STEP

pool = Workers(1)
assert asyncio.run(pool.call(own, 1, 30)) == 2
print("ready", flush=True)
asyncio.run(pool.call(start_and_hang, (sys.argv[1], sys.argv[2]), 600))
"""


def test_no_process_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """And a function of the trainer's main module can be called, which the worker does not run for it."""
    script, folder = tmp_path / "trainer.py", tmp_path / "pids"
    script.write_text(TRAINER)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = (sys.executable, str(script), "daemon", str(folder))
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        pids = started(folder, 2)
        trainer.send_signal(signal.SIGKILL)
        _, printed = trainer.communicate()
    wait_until(lambda: not any(map(alive, pids)))
    assert printed.splitlines() == ["imported as __main__"]


def test_the_deadline_starts_with_the_work_and_not_in_the_queue(
    one: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six calls wait for each other, with deadlines of an hour and a half; an hour passes with each."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * len(os.listdir(tmp_path)))
    monkeypatch.setattr(workers_module, "time", clock)
    monkeypatch.setattr(workers_module, "STALL_SECONDS", math.inf)

    async def queue() -> list[object]:
        return await asyncio.gather(*(one.call(os.mkdir, tmp_path / str(number), 5400) for number in range(6)))

    assert asyncio.run(queue()) == [None] * 6


def test_a_function_inside_of_a_function_is_sent_by_value(one: Workers) -> None:
    step = 3
    assert asyncio.run(one.call(lambda x: x + step, 1, 30)) == 4


def test_what_cannot_be_sent_to_a_worker_says_so(one: Workers) -> None:
    with pytest.raises(WorkerError, match="cannot be sent to a worker"):
        asyncio.run(one.call(threading.Lock().acquire, True, 5))
    with pytest.raises(WorkerError, match=r"^ModuleNotFoundError: No module named 'nowhere'"):
        asyncio.run(one.call(Named("nowhere", "f"), 1, 5))  # type: ignore[arg-type]


def test_a_request_of_many_megabytes_arrives(one: Workers) -> None:
    assert asyncio.run(one.call(len, b"x" * 30_000_000, 30)) == 30_000_000


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = Workers(1)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(WorkerError, match=r"its process cannot be started: .*No such file or directory"):
        asyncio.run(pool.call(double, 1, 5))
    (tmp_path / "python").write_text("#!/bin/sh\necho no Python here >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o700)
    with pytest.raises(WorkerError, match=r"\(exit code 3\); it printed last: no Python here"):
        asyncio.run(pool.call(double, 1, 5))
    pool.close()
    with pytest.raises(RuntimeError):
        asyncio.run(pool.call(double, 1, 5))


def test_a_worker_that_does_not_get_ready_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "START_SECONDS", 0.01)
    pool = Workers(1)
    with pytest.raises(WorkerError, match="did not start within 0.01 s and was killed"):
        asyncio.run(pool.call(double, 1, 5))
    pool.close()


def test_a_wait_checks_regularly_for_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes for 0.625 s: it looks after 0.25, 0.5 and 0.625 s."""
    clock, waits = [100.0], list[float]()

    class Silent:
        def register(self, end: int, event: int) -> None: ...

        def poll(self, milliseconds: float) -> list[int]:
            assert len(waits) < 9
            waits.append(milliseconds)
            clock[0] += milliseconds / 1000
            return []

    process = object.__new__(workers_module._Process)
    process._closing = threading.Event()
    monkeypatch.setattr(process, "_failed", WorkerError)
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.25)
    monkeypatch.setattr(workers_module, "select", SimpleNamespace(poll=Silent))
    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    process._limit(0.625, "finish")
    with pytest.raises(WorkerError, match=r"^did not finish within 0.625 s and was killed$"):
        process._wait(0, 1)
    assert waits == [250, 250, 125]
    process._limit(0.625, "finish")
    process._closing.set()
    with pytest.raises(WorkerError, match="was not finished: the run is over"):
        process._wait(0, 1)
    assert waits == [250, 250, 125, 250]


def test_time_in_which_a_run_is_stopped_counts_in_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes an hour, of which a second counts: of 2.5 s, three looks are needed."""
    clock, looks = [100.0], [0]

    class Stopped:
        def register(self, end: int, event: int) -> None: ...

        def poll(self, milliseconds: float) -> list[int]:
            looks[0] += 1
            clock[0] += 3600
            return []

    process = object.__new__(workers_module._Process)
    process._closing = threading.Event()
    monkeypatch.setattr(process, "_failed", WorkerError)
    monkeypatch.setattr(workers_module, "select", SimpleNamespace(poll=Stopped))
    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    process._limit(2.5, "finish")
    with pytest.raises(WorkerError, match=r"^did not finish within 2.5 s and was killed$"):
        process._wait(0, 1)
    assert looks == [3]


def test_closing_ends_calls_in_progress(tmp_path: Path) -> None:
    pool = Workers(2)

    async def close() -> list[object]:
        calls = [asyncio.create_task(pool.call(sleep, str(tmp_path), 600)) for _ in range(4)]
        await asyncio.to_thread(started, tmp_path, 2)
        await asyncio.to_thread(pool.close)
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(close())
    assert [str(error) for error in found[:2]] == ["was not finished: the run is over"] * 2
    assert all(isinstance(error, asyncio.CancelledError | WorkerError) for error in found[2:])


SCORES = {
    "fine": None,
    "raise": "Moody of tests: ValueError: of the reward",
    "nan": "Moody of tests returned nan, expected finite numbers",
    "huge": "Moody of tests returned 1000000",
    "infinite in float32": r"Moody of tests returned 1e\+31, expected finite numbers up to 1e\+30",
    "longer than Python shows": r"Moody of tests returned a int that cannot be shown \(ValueError\), expected finite",
    "text": "Moody of tests returned '0.5', expected finite numbers",
    "unserialisable": r"Moody of tests returned a Unserialisable that cannot be shown \(RuntimeError\)",
    "numpy": None,
    "array": None,
    "vector": r"Moody of tests returned array\(\[0.5, 1. \]\)",
    "components": "Moody of tests returned Score",
    "no components": "Moody of tests returned Score",
    "die": r"exit code -9",
}


def test_a_score_is_finite_numbers_or_an_error_and_never_zero(one: Workers) -> None:
    scores = asyncio.run(score(Moody(timeout=60.0), [example_trajectory(text) for text in SCORES], one))
    for found, (text, error) in zip(scores, SCORES.items(), strict=True):
        assert found.reward == (0.5 if error is None else None), text
        if error is not None:
            with pytest.raises(AssertionError, match=error):
                raise AssertionError(found.error)
    numpy = scores[list(SCORES).index("numpy")]
    assert (numpy.components, numpy.turn_rewards) == ({"n": 3.0, "right": 1.0}, [1.0])


@pytest.mark.parametrize("what", ["raise", "segfault", "hang", "garbage"])
def test_a_text_that_breaks_its_grader_is_wrong_and_counted(hours: Path, one: Workers, what: str) -> None:
    """A grader that fails on the reference's answer too is at fault itself."""
    reward = Fragile(str(hours))
    reward.timeout = 600.0
    hostile, grader = (example_trajectory(what, answer) for answer in ("fine", what))
    assert asyncio.run(score(reward, [hostile], one)) == [Score(0.0, ungradable=True)]
    [found] = asyncio.run(score(reward, [grader], one))
    assert (found.reward, found.ungradable) == (None, False)
    assert found.error is not None
    meter = Meter()
    hostile.score = Score(0.0, ungradable=True)
    describe_rollouts([hostile, example_trajectory("x")], True, meter)
    assert meter._sums["reward/ungradable"][0] == 1


def test_a_policy_cannot_evade_its_score_with_a_tower_of_powers(one: Workers) -> None:
    reward = Composite({"math": MathReward(format_weight=0.1)})
    reward.bind(SimpleNamespace(score=lambda r, t: score(r, t, one)))  # type: ignore[arg-type]
    texts = (r"\boxed{10^{10^{10}}}", r"\boxed{4}")
    found = asyncio.run(score(reward, [example_trajectory(text) for text in texts], one))
    assert [(s.reward, s.ungradable) for s in found] == [(0.0, True), (1.1, False)]


def test_each_of_what_is_sent_together_has_its_own_outcome(hours: Path, one: Workers) -> None:
    """Calls that were fast are sent together; what one of them does costs none of the others."""
    one._seconds[int] = 0.001  # as if it had been measured
    assert asyncio.run(one.call_each(times, 3, [1, 2, 3, 4, 5], 30)) == [3, 6, 9, 12, 15]
    one._seconds[int] = 0.001
    one.close_idle()
    hang = ("hang", str(hours))
    found = asyncio.run(one.call_each(times, 3, [1, "raise", "_exit", 4, "garbage", 6, hang, 8], 600))
    assert [found[i] for i in (0, 3, 5, 7)] == [3, 12, 18, 24]
    assert str(found[1]).startswith("ValueError: of the reward (")
    assert "exit code 0" in str(found[2])
    assert "wrote into the pipe" in str(found[4])
    assert str(found[6]) == "did not finish within 600 s and was killed"
    assert all(isinstance(found[i], WorkerError) for i in (1, 2, 4, 6))


def test_what_cannot_be_sent_or_read_costs_no_other(one: Workers) -> None:
    one._seconds[int] = 0.001
    unsendable = threading.Lock()
    found = asyncio.run(one.call_each(times, 3, [1, unsendable, 3, Unreadable(), 5], 30))
    assert [found[i] for i in (0, 2, 4)] == [3, 9, 15]
    assert "cannot be sent to a worker" in str(found[1])
    assert str(found[3]).startswith("RuntimeError: cannot be read (")


def test_slow_calls_are_sent_to_all_workers(tmp_path: Path) -> None:
    with closing(Workers(2)) as pool:
        pool._seconds[str] = 0.1  # as if it had been measured
        pids = asyncio.run(pool.call_each(meet, str(tmp_path), range(6), 60))
    assert len(set(pids)) == 2
