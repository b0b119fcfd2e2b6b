"""Training: validate, make steps, validate again; and end well however it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.fabric import Fabric

from rlkit.loop.data import Data
from rlkit.loop.evaluate import evaluate
from rlkit.loop.folder import RunFolder
from rlkit.loop.metrics import MetricsLog, loggers
from rlkit.loop.run import Run
from rlkit.loop.step import step
from rlkit.models.load import save_policy
from rlkit.recipe import Recipe

Figures = dict[str, float]


class Reporter(Protocol):
    """Shows a run to a person."""

    def note(self, text: str) -> None:
        """Say something."""

    def step(self, number: int, figures: Figures) -> None:
        """Show a step's figures."""

    def finish(self, result: dict[str, Any]) -> None:
        """Show how the run ended."""


@dataclass
class Outcome:
    """How a run ended: the content of `result.json`."""

    status: str = "failed"
    steps: int = 0
    validation: dict[str, Figures | None] = field(default_factory=lambda: {"before": None, "after": None})
    seconds: float = 0.0
    error: dict[str, str] | None = None


def fit(recipe: Recipe, data: Data, fabric: Fabric, folder: RunFolder, reporter: Reporter) -> Outcome:
    """Train to the recipe's last step.

    The first Ctrl-C ends the run after the step in progress, a second one at once; either way what was learned is
    saved and the outcome is `interrupted`. An error is re-raised after the outcome `failed` was written.
    """
    outcome, start, run = Outcome(), time.time(), None
    log = MetricsLog(folder.path / "metrics.jsonl", loggers(recipe.log, folder.path)) if fabric.is_global_zero else None
    try:
        with _interruptible(reporter) as interrupt:
            run = Run(recipe, data, fabric)
            _train(run, folder, log, reporter, outcome, interrupt)
            outcome.status = "interrupted" if interrupt.asked else "ok"
    except KeyboardInterrupt:
        outcome.status = "interrupted"
    except Exception as error:
        outcome.error = {"type": type(error).__name__, "message": str(error)}
        raise
    finally:
        outcome.seconds = round(time.time() - start, 3)
        if log is not None:
            if run is not None and outcome.steps:
                save_policy(run.actor.policy, run.tokenizer, folder.path / "final")
            folder.result(vars(outcome))
            log.close(outcome.status)
            reporter.finish(vars(outcome))
        if run is not None:
            run.close()
    return outcome


def _train(
    run: Run, folder: RunFolder, log: MetricsLog | None, reporter: Reporter, outcome: Outcome, interrupt: Interrupt
) -> None:
    train, every = run.recipe.train, run.recipe.validation.every
    run.publish()
    reporter.note(f"validating on {len(run.data.validation)} prompts")
    outcome.validation["before"] = _validate(run, folder, "validation-before")
    for number in range(1, train.steps + 1):
        if run.largest(interrupt.asked):
            interrupt.asked = True
            return
        trajectories, figures = step(run, number)
        outcome.steps = number
        folder.dump(f"step-{number:05d}", trajectories)
        if every and number % every == 0 and number < train.steps:
            validation = _validate(run, folder, f"validation-{number:05d}")
            figures |= {f"validation/{name}": value for name, value in validation.items()}
        if log is not None:
            log.write(number, figures)
        reporter.step(number, figures)
    reporter.note(f"validating on {len(run.data.validation)} prompts")
    outcome.validation["after"] = _validate(run, folder, "validation-after")


def _validate(run: Run, folder: RunFolder, name: str) -> Figures:
    trajectories, figures = evaluate(run)
    folder.dump(name, trajectories)
    return figures


@dataclass
class Interrupt:
    """Whether somebody asked the run to end."""

    asked: bool = False


@contextmanager
def _interruptible(reporter: Reporter) -> Iterator[Interrupt]:
    interrupt = Interrupt()

    def handle(signum: int, frame: Any) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        reporter.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
