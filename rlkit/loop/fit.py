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


@dataclass
class Interrupt:
    """Whether somebody asked the run to end."""

    asked: bool = False


@dataclass
class Session:
    """A run in progress and those who follow it; `log` exists on rank 0 only."""

    folder: RunFolder
    reporter: Reporter
    log: MetricsLog | None
    outcome: Outcome = field(default_factory=Outcome)
    interrupt: Interrupt = field(default_factory=Interrupt)

    def train(self, run: Run) -> None:
        """Validate, make all steps, validate again."""
        train, every = run.recipe.train, run.recipe.validation.every
        run.publish()
        self.outcome.validation["before"] = self.validate(run, "before")
        for number in range(1, train.steps + 1):
            if run.largest(self.interrupt.asked):
                self.interrupt.asked = True
                return
            rollouts, figures = step(run, number)
            self.outcome.steps = number
            self.folder.dump(f"step-{number:05d}", rollouts.all)
            if every and number % every == 0 and number < train.steps:
                figures |= {f"validation/{name}": x for name, x in self.validate(run, f"{number:05d}").items()}
            if self.log is not None:
                self.log.write(number, figures)
            self.reporter.step(number, figures)
        self.outcome.validation["after"] = self.validate(run, "after")

    def validate(self, run: Run, when: str) -> Figures:
        """Give the figures on held-out prompts, and leave the answers in the run folder."""
        self.reporter.note(f"validating on {len(run.data.validation)} prompts")
        trajectories, figures = evaluate(run)
        self.folder.dump(f"validation-{when}", trajectories)
        return figures

    def end(self, run: Run | None) -> None:
        """Save what was learned and write how it ended."""
        if run is not None and self.log is not None and self.outcome.steps:
            save_policy(run.actor.policy, run.tokenizer, self.folder.path / "final")
            if run.average is not None:
                with run.average.applied():
                    save_policy(run.actor.policy, run.tokenizer, self.folder.path / "ema")
        if self.log is not None:
            self.folder.result(vars(self.outcome))
            self.log.close(self.outcome.status)
            self.reporter.finish(vars(self.outcome))


def fit(recipe: Recipe, data: Data, fabric: Fabric, folder: RunFolder, reporter: Reporter) -> Outcome:
    """Train to the recipe's last step.

    The first Ctrl-C ends the run after the step in progress, a second one at once; either way what was learned is
    saved and the outcome is `interrupted`. An error is re-raised after the outcome `failed` was written.
    """
    log = MetricsLog(folder.path / "metrics.jsonl", loggers(recipe.log, folder.path)) if fabric.is_global_zero else None
    session, start, run = Session(folder, reporter, log), time.time(), None
    outcome = session.outcome
    try:
        with _interruptible(session.interrupt, reporter):
            run = Run(recipe, data, fabric)
            session.train(run)
            outcome.status = "interrupted" if session.interrupt.asked else "ok"
    except KeyboardInterrupt:
        outcome.status = "interrupted"
    except Exception as error:
        outcome.error = {"type": type(error).__name__, "message": str(error)}
        raise
    finally:
        outcome.seconds = round(time.time() - start, 3)
        session.end(run)
        if run is not None:
            run.close()
    return outcome


@contextmanager
def _interruptible(interrupt: Interrupt, reporter: Reporter) -> Iterator[None]:
    def handle(*_: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        reporter.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
