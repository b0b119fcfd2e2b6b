"""Callbacks: what they are shown and when, what their failures cost, and what they keep."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from rlkit import commands
from rlkit.base.errors import CallbackError
from rlkit.cli.main import main
from rlkit.interfaces.callback import Callback, RunEnd, RunStart, StepEnd
from rlkit.registry import load_plugins
from rlkit.train.callbacks import LONGEST_STATE, Callbacks
from tests.conftest import read_jsonl


class OneRank:
    """The only rank of a run."""

    def gather_world(self, value: Any) -> list[Any]:
        return [value]


class TwoRanks:
    """Rank 0 of two, where rank 1 has something to say."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather_world(self, value: Any) -> list[Any]:
        return [value, self.other]


def callbacks(*parts: Callback, ranks: Any = None) -> tuple[Callbacks, list[str]]:
    notes: list[str] = []
    return Callbacks(parts, ranks or OneRank(), notes.append), notes


class Raises(Callback):
    def on_step_end(self, event: StepEnd) -> None:
        raise ValueError("no")

    def on_run_end(self, event: RunEnd) -> None:
        raise ValueError("late")


class Exits(Callback):
    def on_step_end(self, event: StepEnd) -> None:
        raise SystemExit(3)


class Slow(Callback):
    budgets: ClassVar = {"on_step_end": 0.0, "on_run_end": 0.05}

    def on_step_end(self, event: StepEnd) -> None:
        pass

    def on_run_end(self, event: RunEnd) -> None:
        time.sleep(60)


class Keeps(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_a_callback_raises_names_it() -> None:
    made, _ = callbacks(Raises())
    with pytest.raises(
        CallbackError, match=r"^Raises of tests: `on_step_end` raised ValueError: no \(.*test_callbacks"
    ):
        made.emit("on_step_end", StepEnd(1, {}))
    made, _ = callbacks(Exits())
    with pytest.raises(CallbackError, match="^Exits of tests: `on_step_end` raised SystemExit: 3"):
        made.emit("on_step_end", StepEnd(1, {}))


def test_what_another_rank_raises_ends_this_one_too() -> None:
    made, _ = callbacks(Slow(), ranks=TwoRanks("Slow of tests: `on_step_end` raised ValueError: no"))
    with pytest.raises(CallbackError, match="^rank 1: Slow of tests: `on_step_end` raised ValueError: no$"):
        made.emit("on_step_end", StepEnd(1, {}))
    assert callbacks(Slow(), ranks=TwoRanks("Slow of tests"))[0].stopper() == "Slow of tests"


def test_a_slow_callback_is_named_once() -> None:
    made, notes = callbacks(Slow())
    made.emit("on_step_end", StepEnd(1, {}))
    made.emit("on_step_end", StepEnd(2, {}))
    [note] = notes
    assert note.startswith("warning: Slow of tests: `on_step_end` took 0.0 s, its budget is 0 s; the run waits for it")


def test_the_end_of_a_run_waits_for_no_slow_callback() -> None:
    made, notes = callbacks(Raises(), Slow())
    made.end(RunEnd("failed", 0, "before the start"))
    assert notes == []
    made.emit("on_run_start", RunStart(Path(), {}, 3, 0, 0, 1))
    made.end(RunEnd("ok", 3, None))
    assert notes[0].startswith("warning: Raises of tests: `on_run_end` raised ValueError: late")
    assert notes[1:] == ["warning: Slow of tests: `on_run_end` has not ended after 0.05 s, its budget"]


def test_states_are_kept_by_class_and_come_back() -> None:
    made, _ = callbacks(Keeps({"a": [1, None]}), Raises(), Keeps({"b": {"c": 0.5}}), Keeps({}))
    states = made.states()
    assert states == {"Keeps": {"a": [1, None]}, "Keeps.2": {"b": {"c": 0.5}}}
    again, _ = callbacks(Keeps({}), Keeps({}))
    again.load(json.loads(json.dumps(states)))
    assert again.states() == states


@pytest.mark.parametrize(
    "state", [None, [1], {"a": {1}}, {"a": float("nan")}, {1: 2}, {"a": (1,)}, {"a": "x" * LONGEST_STATE}]
)
def test_a_state_that_json_does_not_hold_is_refused(state: Any) -> None:
    made, _ = callbacks(Keeps(state))
    with pytest.raises(CallbackError, match="^Keeps of tests: `state_dict` returned "):
        made.states()


def test_a_state_is_that_of_its_step_while_it_is_written() -> None:
    """Another thread writes it while the callback goes on to the next steps."""
    keeps = Keeps({"steps": [1, 2], "by": {"a": [3]}})
    states = callbacks(keeps)[0].states()
    keeps.state["steps"].append(3)
    keeps.state["by"]["a"].append(4)
    assert states["Keeps"] == {"steps": [1, 2], "by": {"a": [3]}}


def test_a_state_of_a_mebibyte_is_kept_and_no_longer_one() -> None:
    room = 2**20 - len('{"a": ""}')
    assert callbacks(Keeps({"a": "x" * room}))[0].states()["Keeps"] == {"a": "x" * room}
    with pytest.raises(CallbackError, match="returned 1048577 characters, at most 1048576 are kept"):
        callbacks(Keeps({"a": "x" * (room + 1)}))[0].states()


def test_what_hangs_at_the_end_does_not_keep_the_process() -> None:
    """The interpreter waits for every thread that is no daemon."""
    seen: list[bool] = []

    class Ends(Callback):
        def on_run_end(self, event: RunEnd) -> None:
            seen.append(threading.current_thread().daemon)

    made, notes = callbacks(Ends())
    made.emit("on_run_start", RunStart(Path(), {}, 3, 0, 0, 1))
    made.end(RunEnd("ok", 3, None))
    assert (seen, notes) == ([True], [])


class Adds(Callback):
    def __init__(self, **metrics: Any) -> None:
        self.metrics = metrics

    def on_step_end(self, event: StepEnd) -> None:
        event.metrics.update(self.metrics)


def test_callback_metrics_are_means_over_ranks() -> None:
    assert callbacks(Adds(a=1))[0].end_step(1, {"lr": 0.1}) == {"a": 1.0}
    made, _ = callbacks(Adds(a=1.0), Adds(b=torch.tensor(2.0)))
    answers = [[None, None], [{"a": 1.0, "b": 2.0}, {"a": 3.0}]]
    made.ranks = SimpleNamespace(gather_world=lambda value: answers.pop(0))  # type: ignore[assignment]
    assert made.end_step(1, {"lr": 0.1}) == {"a": 2.0, "b": 2.0}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"lr": 0.2}, "changed the metric 'lr'"),
        ({"step": 2}, "the metric 'step', which the step has"),
        ({"a": float("nan")}, "the metric 'a' as nan"),
        ({"a": "high"}, "the metric 'a' as 'high'"),
        ({"a b\n": 1.0}, "a metric named 'a b"),
    ],
)
def test_a_callbacks_metric_must_be_a_new_number(metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(CallbackError, match=f"^Adds of tests: `on_step_end` .*{message}"):
        callbacks(Adds(**metrics))[0].end_step(1, {"lr": 0.1})


def test_callbacks_scale_the_learning_rate_and_resume_with_it() -> None:
    slower = Keeps({"a": 1})
    slower.lr_factor = 0.5
    made, _ = callbacks(slower, Raises())
    assert made.lr_factor() == 0.5
    again, _ = callbacks(Keeps({}), Raises())
    again.load(json.loads(json.dumps(made.states())))
    assert again.lr_factor() == 0.5
    assert again.states() == made.states()
    slower.lr_factor = float("nan")
    with pytest.raises(CallbackError, match="^Keeps of tests: `lr_factor` is nan"):
        made.lr_factor()


class Recorder(Callback):
    """Writes down what it is called with.

    Args:
        file: Where to.
        stop_after: The last step.
        fail_at: The step at which it raises.
    """

    def __init__(self, file: str, stop_after: int = 99, fail_at: int = 99) -> None:
        self.file = file
        self.stop_after = stop_after
        self.fail_at = fail_at
        self.steps = 0

    def write(self, *row: Any) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def bind(self, runtime: Any) -> None:
        self.write("bind", type(runtime.tokenizer).__name__)

    def on_run_start(self, event: Any) -> None:
        self.write("start", event.done, event.steps, event.recipe["model"]["path"], event.rank, event.world_size)

    def on_rollouts(self, event: Any) -> None:
        self.write("rollouts", event.step, len(event.trajectories))

    def on_batch(self, event: Any) -> None:
        self.write("batch", event.step, list(event.batch.advantages.shape) == list(event.batch.tokens.shape))

    def on_step_end(self, event: Any) -> None:
        self.steps += 1
        self.should_stop = event.step >= self.stop_after
        self.write("step", event.step, event.metrics["version"])
        event.metrics["recorder/steps"] = self.steps
        self.lr_factor = 0.5
        if event.step == self.fail_at:
            raise RuntimeError("enough")

    def on_validation(self, event: Any) -> None:
        self.write("validation", event.step, len(event.trajectories), "accuracy" in event.metrics)

    def on_checkpoint(self, event: Any) -> None:
        self.write("checkpoint", event.step, Path(event.place).is_dir())

    def on_run_end(self, event: Any) -> None:
        self.write("end", event.status, event.steps, event.error, self.steps)

    def state_dict(self) -> Any:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


@pytest.fixture
def with_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit import hookimpl

    plugin = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(Recorder)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("recorder", plugin)], entry_points=False))


BASE = (
    "fit", "--recipe=quickstart", "--train.steps=3", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation.limit=1", "--validation.samples=0", "--fabric.accelerator=cpu", "--train.schedule=Constant",
    "--save.every=1",
)  # fmt: skip


def recorder(file: Path, **options: int) -> str:
    return f"--callbacks=[{json.dumps({'class_path': 'Recorder', 'init_args': {'file': str(file), **options}})}]"


@pytest.mark.usefixtures("with_recorder")
def test_a_run_calls_its_callbacks_and_resumes_with_their_state(tmp_path: Path) -> None:
    file, out = tmp_path / "calls", f"--out={tmp_path / 'run'}"
    assert main([*BASE, out, recorder(file, stop_after=2)]) == 0
    rows = [row for row in read_jsonl(file) if row[0] != "checkpoint"]
    assert rows[1:] == [
        ["start", 0, 3, "tiny", 0, 1],
        ["validation", 0, 1, True],
        ["rollouts", 1, 4], ["batch", 1, True], ["step", 1, 1.0],
        ["rollouts", 2, 4], ["batch", 2, True], ["step", 2, 2.0],
        ["validation", 2, 1, True],
        ["end", "ok", 2, None, 2],
    ]  # fmt: skip
    assert ["checkpoint", 2, True] in read_jsonl(file)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["recorder/steps"] for line in lines] == [1.0, 2.0]
    assert lines[1]["lr"] == lines[0]["lr"]  # the warm-up doubles it, the callback halves it
    file.unlink()
    assert main([*BASE, out, recorder(file, fail_at=3), "--resume=auto"]) == 1
    rows = [row for row in read_jsonl(file) if row[0] in ("start", "step", "end")]
    assert rows[:2] == [["start", 2, 3, "tiny", 0, 1], ["step", 3, 3.0]]
    assert rows[2][:3] == ["end", "failed", 3]
    assert rows[2][3].startswith("Recorder of tests: `on_step_end` raised RuntimeError: enough")
    assert rows[2][4] == 3
    resumed = read_jsonl(tmp_path / "run" / "metrics.jsonl")[2]
    assert (resumed["step"], resumed["lr"]) == (3, pytest.approx(1.5 * lines[0]["lr"]))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["error"]["type"] == "CallbackError"
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
