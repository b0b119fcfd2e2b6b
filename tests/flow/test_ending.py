"""How a run ends: by signals, without a reader, on a full disk, and where nothing can be learned."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlkit.advantages import GRPO
from rlkit.cli.main import main
from rlkit.run import ending, signals
from rlkit.run.record import RunRecord
from rlkit.train.setup import TrainContext
from rlkit.types import Batch
from tests import forks
from tests.conftest import FAST, ROOT, read_jsonl
from tests.events import gone

FIT = ("fit", "--recipe=quickstart", *FAST, "--validation.limit=2", "--validation.samples=0")


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is slow to end, on a busy machine, does not end this process."""
    monkeypatch.setattr(signals, "PATIENCE", 600.0)


@pytest.fixture
def bad(tmp_path: Path) -> tuple[str, ...]:
    """Options for a reward that always raises, with a text that would be markup."""
    (tmp_path / "bad.py").write_text("def bad(text):\n    raise ValueError('bad [/bold] \\x1b[31m' + 'x' * 10**7)\n")
    return ("--reward=PythonReward", f"--reward.function={tmp_path}/bad.py:bad", "--reward.allow_code=true")


def test_a_reward_that_fails_beforehand_refuses_the_run(
    tmp_path: Path, bad: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FIT, *bad, f"--out={tmp_path}/out"]) == 2
    printed = capsys.readouterr()
    assert "PythonReward: ValueError: bad [/bold] \\x1b[31m" in printed.err
    assert "require_reward" not in printed.err  # a function that fails now fails later, too
    assert len(printed.err) < 4000
    assert result(tmp_path / "out")["status"] == "failed"
    assert not list((tmp_path / "out" / "rollouts").iterdir())
    good = [*FIT, f"--out={tmp_path}/out"]
    assert main([*good, "--train.steps=1"]) == 0
    assert result(tmp_path / "out")["status"] == "ok"
    assert main(good) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "made"), [(9, 3), (2, 2)])
def test_a_run_that_can_learn_nothing_fails(
    steps: int, made: int, tmp_path: Path, bad: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """After three steps in a row, or at the end of a shorter run; the checkpoints stay."""
    more = ("--train.require_reward=false", f"--train.steps={steps}", "--save.every=1")
    assert main([*FIT, *bad, *more, f"--out={tmp_path}/out"]) == 1
    printed = capsys.readouterr()
    assert f"{made} steps in a row, up to step {made}, taught nothing: reward PythonReward failed" in printed.err
    assert "16 times: PythonReward: ValueError: bad [/bold]" in printed.err
    outcome = result(tmp_path / "out")
    assert (outcome["status"], outcome["error"]["type"]) == ("failed", "TrainingError")
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == made
    assert (tmp_path / "out" / "checkpoints" / "step-000001").is_dir()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_advantages_that_are_nan_are_blamed_on_their_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("nan", float("nan")), ("unset", None)):

        def estimate(self: GRPO, batch: Batch, value: float | None = value) -> None:
            batch.advantages = None if value is None else batch.mask * value

        monkeypatch.setattr(GRPO, "estimate", estimate)
        assert main([*FIT, "--train.steps=1", f"--out={tmp_path / name}"]) == 1
        error = capsys.readouterr().err
        assert "GRPO" in error
        assert "not finite" in error or "unset" in error
        assert "lr" not in error


def test_prompts_that_are_all_too_long_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, length in (("train", 5000), ("held_out", 5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "x" * length, "answer": "1"}) + "\n")
    task = ("--task=Jsonl", f"--task.path={tmp_path}/train.jsonl", f"--task.validation_path={tmp_path}/held_out.jsonl")
    assert main([*FIT, *task, "--rollout.overlong=drop", f"--out={tmp_path}/out"]) == 2
    assert "no training prompt has at most 4095 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_loss_is_a_mean_over_the_updates_of_a_rollout(tmp_path: Path) -> None:
    """With a learning rate of nearly 0, four epochs have the loss of one, and so has the critic."""
    options = (
        "--recipe=quick_ppo", "--train.steps=1", "--train.lr=1e-12", "--critic.lr=1e-12", "--train.minibatches=1",
        "--critic.policy_delay_steps=0", "--train.entropy_coef=0.1",
    )  # fmt: skip
    losses = []
    for epochs in (1, 4):
        out = tmp_path / str(epochs)
        assert main([*FIT, *options, f"--train.epochs={epochs}", f"--out={out}"]) == 0
        [row] = read_jsonl(out / "metrics.jsonl")
        losses.append((row["policy/loss"], row["critic/loss"]))
        assert row["update/steps"] == row["critic/steps"] == epochs
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert min(map(abs, losses[0])) > 1e-6


@pytest.mark.slow
def test_the_rollouts_that_are_kept_can_be_chosen(tmp_path: Path) -> None:
    """Every second step, two groups of four of the four; no file at all where `every` is 0."""
    for every, files in ((2, {"step-00002", "validation-before", "validation-after"}), (0, set())):
        out = tmp_path / str(every)
        assert main([*FIT, f"--log.rollouts.every={every}", "--log.rollouts.limit=9", f"--out={out}"]) == 0
        assert {path.name.partition(".")[0] for path in (out / "rollouts").iterdir()} == files
    rows = read_jsonl(tmp_path / "2" / "rollouts" / "step-00002.jsonl.gz")
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("reader", ["gone", "full", "ascii"])
def test_a_run_whose_output_nobody_takes_is_finished(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / ("öut [red]" if sys.getfilesystemencoding() == "utf-8" else "?ut [red]")
    if reader == "ascii":
        raw = io.BytesIO()
        stream: Any = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    elif reader == "full":
        stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    else:
        reading, writing = os.pipe()
        os.close(reading)
        stream = os.fdopen(writing, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    status = main([*FIT, f"--out={out}"])
    monkeypatch.undo()
    assert status == 0
    assert result(out)["status"] == "ok"
    assert (out / "final" / "model.safetensors").exists()
    if reader == "ascii":
        assert f"run folder: {tmp_path}/?ut [red]\n" in raw.getvalue().decode()


@contextmanager
def in_step(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Do something in the middle of a step of a run."""
    estimate, steps = GRPO.estimate, count(1)

    def acting(self: GRPO, batch: Batch) -> None:
        if next(steps) == number:
            action()
        estimate(self, batch)

    with patch.object(GRPO, "estimate", acting):
        yield


ENDLESS = (*FIT, "--train.steps=100000", "--train.schedule=Constant")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [(signal.SIGHUP, 2), (signal.SIGTERM, 1)])
def test_a_signal_leaves_a_run_that_can_be_resumed(
    number: int, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    out = tmp_path / "out"
    with in_step(3, lambda: [os.kill(os.getpid(), number) for _ in range(times)]):
        assert main([*ENDLESS, f"--out={out}"]) == 130
    outcome = result(out)
    assert (outcome["status"], outcome["error"]) == ("interrupted", None)
    assert (out / "checkpoints" / f"step-{outcome['steps']:06d}").is_dir()
    printed = capsys.readouterr().out
    assert f"{signal.Signals(number).name}: finishing this step" in printed
    assert f"the run is in {out}\nto continue: rlkit fit --resume {out}\n" in printed
    assert main(["fit", f"--resume={out}", f"--train.steps={outcome['steps'] + 1}"]) == 0
    assert result(out)["steps"] == outcome["steps"] + 1
    assert f"to use the model: rlkit export --checkpoint {out} --out MODEL" in capsys.readouterr().out
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with in_step(1, lambda: os.kill(os.getpid(), signal.SIGHUP)):
            assert main([*FIT, f"--out={tmp_path}/out"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def interrupt_twice() -> None:
    """Send this process two signals, the second of which ends what it waits for."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    for _ in range(30_000):
        time.sleep(0.01)  # a signal that comes just before one long sleep would not end it


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with in_step(3, interrupt_twice):
        assert main([*ENDLESS, f"--out={tmp_path}/out"]) == 130
    outcome = result(tmp_path / "out")
    assert (outcome["status"], outcome["steps"]) == ("interrupted", 2)
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


TRIALS = int(os.environ.get("RLKIT_TRIALS", "1"))
"""Trials of each kind of the following tests; the moments of each follow from its number."""

TWO = {
    "ddp": ("--fabric.devices=2", "--fabric.strategy=ddp"),
    "fsdp2": ("--fabric.devices=2", "--fabric.strategy=fsdp2"),
}


def wait_for(condition: Callable[[], bool], process: forks.Started) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [json.loads((folder / "out" / "ranks" / f"{rank}.json").read_text())["pid"] for rank in (0, 1)]


def ended(process: forks.Started, ranks: list[int], seconds: float = 300) -> str:
    """Wait until all ranks have ended; whatever is left is killed."""
    try:
        printed = process.communicate(timeout=seconds)[0]
        deadline = time.monotonic() + 120
        while not all(map(gone, ranks)):
            assert time.monotonic() < deadline, f"a rank is left\n{printed}"
            time.sleep(0.1)
        return printed
    finally:
        if not all(map(gone, [process.pid, *ranks])):
            os.killpg(process.pid, signal.SIGKILL)


STAGES = ("sample", "logps", "score", "update", "sync", "save", "validate")


def faulty(folder: Path, fault: dict[str, object], *options: str) -> forks.Started:
    """Start a run with a fault; see `staged.py`."""
    more = ("--save.every=1", "--validation.every=1", "--train.minibatches=2", "--out=out")
    words = (str(Path(__file__).with_name("staged.py")), *FIT, *more, *options)
    return forks.start(words, folder, RLKIT_FAULT=json.dumps(fault))


def fault_of(folder: Path) -> str:
    """Return what was going on when the fault came; nothing if it did not."""
    record = folder / "fault"
    return record.read_text() if record.exists() else ""


def both_ended(folder: Path, process: forks.Started) -> str:
    """Wait until both ranks have ended; return what they printed."""
    try:
        printed = process.communicate(timeout=400)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    ranks = [json.loads(note.read_text())["pid"] for note in (folder / "out" / "ranks").glob("*.json")]
    deadline = time.monotonic() + 120
    while not all(map(gone, ranks)):
        assert time.monotonic() < deadline, f"a rank is left\n{printed}"
        time.sleep(0.1)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.parametrize("strategy", TWO)
def test_a_signal_to_one_rank_ends_all_alike(strategy: str, trial: int, tmp_path: Path) -> None:
    """At every stage, of some step and at some moment of it; the first and the last validation included."""
    stage = STAGES[(2 * trial + (strategy == "ddp")) % len(STAGES)]
    chance = random.Random(f"{strategy} {trial}")
    fault = {
        "rank": chance.randrange(2),
        "stage": stage,
        "entry": chance.randint(1, 4),
        "delay": chance.uniform(0, 0.1),
    }
    print(fault)
    process = faulty(tmp_path, fault, *TWO[strategy], "--train.steps=4", "--validation.limit=16")
    printed = both_ended(tmp_path, process)
    assert fault_of(tmp_path) == stage, printed
    outcome = result(tmp_path / "out")
    assert (outcome["status"], process.returncode) in (("interrupted", 130), ("ok", 0)), printed
    if outcome["status"] == "interrupted":
        assert f"rank {fault['rank']}: SIGTERM" in printed, printed
    assert outcome["error"] is None
    assert outcome["steps"] == len(read_jsonl(tmp_path / "out" / "metrics.jsonl"))
    if outcome["steps"]:
        assert (tmp_path / "out" / "final" / "model.safetensors").exists()
    assert "Traceback" not in printed, printed


FOLDERS = [(1, 1), *((0, call) for call in range(1, 11))]
"""A rank and the first call of it that fails: rank 1 makes only `ranks`; rank 0 the run's own folder (twice),
`rollouts`, `ranks`, `checkpoints`, four checkpoints and the model's."""


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(2 * TRIALS))
def test_a_folder_error_of_one_rank_ends_all_with_the_cause(trial: int, tmp_path: Path) -> None:
    """From one of its calls on: what the run cannot do without ends it, and a missing checkpoint is a warning."""
    rank, call = FOLDERS[5 * trial % len(FOLDERS)]
    process = faulty(tmp_path, {"rank": rank, "mkdir": call}, *TWO["fsdp2"], "--train.steps=4", "--validation.limit=4")
    printed = both_ended(tmp_path, process)
    refused = fault_of(tmp_path)
    print(f"rank {rank}: {refused}: exit {process.returncode}")
    assert refused, printed
    assert "denied by the test" in printed, printed
    assert process.returncode in (1, 2), printed
    assert "Traceback" not in printed, printed
    if rank == 1:
        assert "rank 1 cannot write into " in printed
    elif call > 3:
        outcome = result(tmp_path / "out")
        assert outcome["status"] == "failed"
        assert "denied by the test" in outcome["error"]["message"]


@pytest.mark.parametrize("times", [1, 2])
def test_signals_while_a_run_is_being_saved_leave_a_result(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One changes nothing, since the run ends anyway; a second one interrupts the saving, which is made again."""
    save = ending.save
    calls = []

    def interrupted(record: RunRecord, context: TrainContext, name: str) -> None:
        calls.append(name)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT) if times == 1 else interrupt_twice()
        save(record, context, name)

    monkeypatch.setattr(ending, "save", interrupted)
    assert main([*FIT, f"--out={tmp_path}/out"]) == (0 if times == 1 else 130)
    assert result(tmp_path / "out")["status"] == ("ok" if times == 1 else "interrupted")
    assert calls == ["final"] * times
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.parametrize("strategy", TWO)
def test_a_second_ctrl_c_ends_all_ranks_at_once(strategy: str, trial: int, tmp_path: Path) -> None:
    options = ("--train.steps=100000", "--train.prompts_per_step=64", "--save.every=1", "--train.schedule=Constant")
    process = forks.start(("-m", "rlkit", *FIT, "--out=out", *TWO[strategy], *options), tmp_path)
    wait_for((tmp_path / "out" / "rollouts" / "validation-before.jsonl.gz").exists, process)
    ranks = pids(tmp_path)
    chance = random.Random(f"{strategy} {trial}")
    pauses = chance.uniform(0, 2.5), chance.uniform(0, 0.3)
    print(pauses)
    for pause in pauses:
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGINT)
    printed = ended(process, ranks)
    assert process.returncode == 130, printed
    assert result(tmp_path / "out")["status"] == "interrupted", printed
    assert "Traceback" not in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_two_signals_to_one_rank_end_the_other(rank: int, tmp_path: Path) -> None:
    fault: dict[str, object] = {"rank": rank, "stage": "sample", "entry": 2, "delay": 0.1, "signals": 2}
    process = faulty(tmp_path, fault, *TWO["fsdp2"], "--train.steps=4", "--validation.limit=16")
    printed = both_ended(tmp_path, process)
    outcome = result(tmp_path / "out")
    if rank == 0:
        assert (outcome["status"], process.returncode) == ("interrupted", 130), printed
    else:
        assert (outcome["status"], process.returncode) == ("failed", 1), printed
        assert "rank 1 (process " in outcome["error"]["message"]
        assert "was ended at once by SIGTERM" in printed


def test_a_signal_after_the_end_does_not_change_the_exit_status() -> None:
    """While Python exits, which takes a while where torch was loaded."""
    script = "import atexit, os, sys\nfrom rlkit.cli.main import main\n"
    script += "for number in (1, 2, 15):\n    atexit.register(os.kill, os.getpid(), number)\nsys.exit(main())"
    done = subprocess.run((sys.executable, "-c", script, "no-verb"), capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_the_ranks_are_starting_ends_them(number: signal.Signals, tmp_path: Path) -> None:
    """To the one that starts the other, at once after it has, when that one may wait for it for long."""
    process = subprocess.Popen(
        (sys.executable, "-m", "rlkit", *FIT, "--out=out", *TWO["ddp"]),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: bool(children.read_text().split()), process)
    ranks = [int(pid) for pid in children.read_text().split()]
    process.send_signal(number)
    printed = ended(process, ranks)
    assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_full_disk_keeps_the_result(tmp_path: Path) -> None:
    """No file may grow beyond 20 kB: metrics and the result fit, checkpoints and models do not."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    script = limited + "from rlkit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    options = (*FIT, "--train.steps=3", "--train.prompts_per_step=32", "--log.rollouts.limit=null", "--out=out")
    done = subprocess.run(
        (sys.executable, "-c", script, *options, "--rollout.group_size=32"),
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "warning: rollouts/step-00001: OSError: [Errno 27] File too large" in done.stdout
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    outcome = result(tmp_path / "out")
    assert (outcome["status"], outcome["steps"], outcome["error"]["type"]) == ("failed", 3, "CheckpointError")
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == 3
    assert not list((tmp_path / "out").glob("final*"))
    assert not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.slow
def test_what_one_rank_cannot_write_is_removed(tmp_path: Path) -> None:
    """Of two ranks with shards of their own the second may write no more than 20 kB."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, resource\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    )
    done = subprocess.run(
        (sys.executable, "-m", "rlkit", *FIT, *TWO["fsdp2"], "--train.steps=2", "--save.every=1", "--out=out"),
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step-000001 cannot be written: [Errno 27] File too large" in done.stdout
    outcome = result(tmp_path / "out")
    assert (outcome["status"], outcome["steps"], outcome["error"]["type"]) == ("failed", 2, "CheckpointError")
    assert not list((tmp_path / "out").rglob("*.partial"))
