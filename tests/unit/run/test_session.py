"""A run in progress: when it ends, what it shows, and which checkpoint counts as its best."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.base.errors import RankError
from rlkit.cli.main import main
from rlkit.interfaces.callback import RunEnd
from rlkit.models.store import Store
from rlkit.run.ending import end_session
from rlkit.run.folder import RunFolder
from rlkit.run.record import RunRecord
from rlkit.run.session import Session
from rlkit.run.signals import Signals
from tests.conftest import read_jsonl

SHORT = (
    "fit", "--recipe=quickstart", "--train.steps=2", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation=null", "--fabric.accelerator=cpu", "--save.every=1",
)  # fmt: skip


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def session(tmp_path: Path, notes: list[str]) -> Session:
    record = RunRecord(RunFolder(tmp_path, ""), SimpleNamespace(note=notes.append), first=True)  # type: ignore[arg-type]
    record.outcome.steps = 4
    session = Session(record)
    progress: Any = SimpleNamespace(
        exhausted=lambda: None,
        failed=lambda metrics: False,
        see=lambda *_: (),
        diagnosed=False,
        diagnosis=lambda: None,
        rewards=SimpleNamespace(change=lambda: None),
    )
    session.progress = progress
    return session


def context(*asked: str | None, stopper: str | None = None) -> Any:
    """What ranks that were asked to end by these signals agree on."""
    ranks = SimpleNamespace(gather_world=lambda _: list(asked), fabric=SimpleNamespace(world_size=len(asked)))
    return SimpleNamespace(ranks=ranks, callbacks=SimpleNamespace(stopper=lambda: stopper))


def test_a_signal_to_another_rank_ends_the_run_and_is_shown_once(session: Session, notes: list[str]) -> None:
    session._agree_on_end(context(None, None))
    assert not session.stop_requested
    for _ in range(2):
        session._agree_on_end(context(None, "SIGTERM"))
        assert session.stop_requested
        assert notes == ["the run ends after 4 steps (rank 1: SIGTERM)"]


def test_a_signal_to_the_only_rank_was_shown_when_it_came(session: Session, notes: list[str]) -> None:
    session.signals = Signals(notes.append, notes.append)
    session.signals.asked = "SIGINT"
    session._agree_on_end(context("SIGINT"))
    assert session.stop_requested
    assert notes == []


def test_a_callback_ends_the_training_but_does_not_interrupt_it(session: Session, notes: list[str]) -> None:
    for _ in range(2):
        session._agree_on_end(context(None, stopper="Enough of tests"))
        assert (session.ended_early, session.stop_requested) == (True, False)
        assert notes == ["callback Enough of tests ended the training after step 4"]


@pytest.mark.parametrize(
    ("failure", "at_once", "status"),
    [(None, False, "ok"), (ValueError("bad"), False, "failed"), (None, True, "interrupted")],
)
def test_the_end_is_written_and_all_is_closed_whatever_fails(
    failure: Exception | None, at_once: bool, status: str, session: Session, notes: list[str]
) -> None:
    """Callbacks learn of it, unless the run is interrupted in the middle of something."""
    ended: list[RunEnd] = []
    finished: list[str] = []
    session.record.reporter.finish = lambda result, advice: finished.append(advice)  # type: ignore[method-assign]
    session.record.outcome.status = "ok"
    session.record.outcome.steps = 0

    def close() -> None:
        raise OSError("no disk")

    session.log = SimpleNamespace(close=lambda status: finished.append(status))  # type: ignore[assignment]
    train_context: Any = SimpleNamespace(
        callbacks=SimpleNamespace(end=ended.append), service=SimpleNamespace(close=close)
    )
    session.context = train_context
    assert end_session(session, failure, at_once) is failure
    assert ended == ([] if at_once else [RunEnd(status, 0, None if failure is None else "bad")])
    assert notes == ["warning: the rollouts: OSError: no disk"]
    assert finished == [status, f"the run is in {session.record.folder.path}"]
    result = json.loads((session.record.folder.path / "result.json").read_text())
    assert (result["status"], result["steps"]) == (status, 0)
    assert result["error"] == (None if failure is None else {"type": "ValueError", "message": "bad"})


def test_ranks_that_cannot_meet_leave_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(*_: object) -> None:
        raise RankError("rank 1 cannot write")

    monkeypatch.setattr(importlib.import_module("rlkit.run.fit"), "Peers", peers)
    assert main([*SHORT, f"--out={tmp_path / 'out'}"]) == 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", {"type": "RankError", "message": "rank 1 cannot write"})


def test_memory_that_runs_out_is_warned_of_once(session: Session, notes: list[str]) -> None:
    result: Any = SimpleNamespace(rollouts=SimpleNamespace(errors=Counter()))
    for share in (0.9, 0.91, 0.95):  # up to nine tenths are fine
        session._check_step(context(None), result, {"memory/share": share})
    [warning] = notes
    assert warning.startswith("warning: 91% of the memory is in use; lower train.max_tokens_per_micro_batch")


def test_a_resumed_run_knows_its_best_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step has four samples, none of which failed: the first step is the best, and stays it."""
    out = tmp_path / "out"
    fit = [*SHORT, f"--out={out}"]
    assert main([*fit, "--save.keep_best=rollout/samples"]) == 0
    assert "2 steps of 2 prompts x 2 samples = 4 trajectories" in capsys.readouterr().out
    store, resume = Store(str(out / "checkpoints")), f"--resume={out}/checkpoints/step-000001"
    assert store.state("step-000001").best == store.state("step-000002").best == (4.0, 1)
    for metric, best in (("rollout/samples", (4.0, 1)), ("rollout/failed", (0.0, 2))):
        assert main([*fit, resume, f"--save.keep_best={metric}"]) == 0
        assert f"resumed from {out}/checkpoints/step-000001: step 1 is done" in capsys.readouterr().out
        assert store.state("step-000002").best == best


VALIDATED = (
    *(word for word in SHORT if "validation" not in word), "--validation.limit=6", "--validation.samples=0",
    "--validation.every=1", "--save.keep_last=9",
)  # fmt: skip


def test_the_last_validation_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    """A run that goes on knows it: for the best step, for patience and for comparisons."""
    options = ("--save.keep_best=validation/stopped", "--validation.watch=stopped", "--validation.patience=9")
    assert main([*VALIDATED, *options, "--train.steps=2", f"--out={tmp_path}"]) == 0
    after = json.loads((tmp_path / "result.json").read_text())["validation"]["after"]
    state = Store(str(tmp_path / "checkpoints")).state("step-000002")
    assert state.waited is not None
    assert max(state.waited[0], after["stopped"]) == state.waited[0]
    assert state.waited[1] <= 2
    assert state.best is not None
    assert state.earlier["last"][""] is not None
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["validation/stopped"] for line in lines][-1] == after["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compared", "waits"),
    [
        ((), True, True),
        (("--validation.watch=stopped",), True, False),
        (("--validation.tasks={small: {class_path: Arithmetic, init_args: {max_operand: 9}}}",), False, False),
    ],
)
def test_a_resume_compares_what_is_validated_alike(
    tmp_path: Path, options: tuple[str, ...], compared: bool, waits: bool
) -> None:
    fit = (*VALIDATED, "--validation.patience=9")
    assert main([*fit, "--train.steps=1", f"--out={tmp_path}"]) == 0
    before = json.loads((tmp_path / "result.json").read_text())["validation"]["before"]
    assert main([*fit, "--train.steps=2", *options, f"--resume={tmp_path}"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["validation"]["before"] == (before if compared else None)
    assert (result["verdict"] is not None) == compared
    waited = Store(str(tmp_path / "checkpoints")).state("step-000002").waited
    assert waited is not None
    assert waited[1] in ((0, 1, 2) if waits else (0,))


def test_the_card_of_averaged_weights_has_no_validation(tmp_path: Path) -> None:
    """They were not validated; those of `final/` were."""
    few = (*VALIDATED, "--train.steps=1", "--train.ema=0.9", f"--out={tmp_path / 'run'}")
    assert main([*few]) == 0
    for source, averaged in (("final", False), ("ema", True)):
        assert main(["export", f"--checkpoint={tmp_path / 'run' / source}", f"--out={tmp_path / source}"]) == 0
        for folder, row in (
            (tmp_path / "run" / source, "\n| accuracy |"),
            (tmp_path / source, "\n| greedy accuracy |"),
        ):
            card = (folder / "README.md").read_text()
            assert ("averages" in card) == averaged
            assert (row in card) != averaged


def test_a_resumed_run_keeps_its_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--save.optimizer=false", f"--out={tmp_path}"]) == 0
    resume = f"--resume={tmp_path}/checkpoints/step-000001"
    assert main([*SHORT, "--save.optimizer=false", resume]) == 0
    assert "the checkpoint has no optimizer state" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 2)
    assert any("the checkpoint has no optimizer state" in warning for warning in result["warnings"])


def test_a_resume_from_an_older_step_drops_later_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = ("--validation.limit=2", "--validation.samples=0", "--validation.every=1", "--validation.after=false")
    fit = [*(word for word in SHORT if "validation" not in word), *validation, "--save.keep_last=9"]
    assert main([*fit, "--train.steps=3", f"--out={tmp_path}"]) == 0
    assert main([*fit, "--train.steps=2", f"--resume={tmp_path}/checkpoints/step-000001"]) == 0
    assert "warning: rollouts" not in capsys.readouterr().out
    rollouts = {path.name for path in (tmp_path / "rollouts").glob("*.jsonl.gz")}
    assert rollouts == {
        f"{name}.jsonl.gz"
        for name in ("step-00001", "step-00002", "validation-before", "validation-00001", "validation-00002")
    }
