"""A run in progress: its steps, its checkpoints, and how it ends."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from rlkit.errors import CheckpointError, RankError, RlkitError
from rlkit.loop import memory
from rlkit.loop.checkpoint import Store, Writer
from rlkit.loop.evaluate import evaluate
from rlkit.loop.folder import RunFolder
from rlkit.loop.metrics import MetricsLog
from rlkit.loop.plan import lines, try_reward
from rlkit.loop.proof import prove
from rlkit.loop.resume import Found, load
from rlkit.loop.run import Run
from rlkit.loop.state import numbers, tensors
from rlkit.loop.step import Made, step
from rlkit.models.load import save_policy
from rlkit.models.parallel import FSDP2
from rlkit.models.weights import whole

Figures = dict[str, float]

IN_A_ROW = 3
"""So many steps without a finite gradient, or checkpoints that cannot be written, one after another, end the run."""


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
    writer: Writer | None = None
    not_finite: int = 0
    unsaved: int = 0
    warned: bool = False
    start: float = field(default_factory=time.time)
    troubles: Figures = field(default_factory=dict)
    """What became of the last step's checkpoint, for the next line of metrics."""

    def train(self, run: Run, resumed: Found | None) -> None:
        """Validate, make all steps, validate again."""
        train, validation = run.recipe.train, run.recipe.validation
        every = validation.every if validation is not None and run.recipe.validates else 0
        self._begin(run, resumed)
        for number in range(self.outcome.steps + 1, train.steps + 1):
            if run.ranks.largest(self.interrupt.asked):
                self.interrupt.asked = True
                break
            made = step(run, number)
            figures = made.figures | {k: run.ranks.largest(v) for k, v in memory.figures(run.device).items()}
            self.outcome.steps = number
            self.folder.dump(f"step-{number:05d}", made.rollouts.all)
            self._watch(made, number, figures["memory/share"])
            if every and number % every == 0 and number < train.steps:
                figures |= {f"validation/{name}": x for name, x in self.validate(run, f"{number:05d}").items()}
            if self.log is not None:
                self.log.write(number, figures | self.troubles)
            self.reporter.step(number, figures)
            self.troubles = self._checkpoint(run, number, figures)
        if self.writer is not None:
            self.writer.finish()
        if not self.interrupt.asked and run.recipe.validates:
            self.outcome.validation["after"] = self.validate(run, "after")

    def validate(self, run: Run, when: str) -> Figures:
        """Give the figures on held-out prompts, and leave the answers in the run folder."""
        self.reporter.note(f"validating on {len(run.data.validation)} prompts")
        trajectories, figures = evaluate(run)
        self.folder.dump(f"validation-{when}", trajectories)
        return figures

    def save(self, run: Run, name: str) -> None:
        """Write the policy as a Hugging Face folder; all ranks take part."""
        first = self.log is not None
        weights = whole(run.actor.policy, keep=first)
        if first:
            save_policy(run.actor.policy, run.tokenizer, self.folder.path / name, weights)

    def _begin(self, run: Run, resumed: Found | None) -> None:
        save = run.recipe.save
        if resumed is not None:
            load(run, resumed)
            self.outcome = Outcome(**resumed.state["outcome"])
            self.not_finite = resumed.state["not_finite"]
        if save.every or save.keep_best:
            store = Store(save.folder or str(self.folder.path / "checkpoints"))
            self.writer = Writer(store, save, run.ranks)
            self.writer.best = None if resumed is None else resumed.state["best"]
        run.publish()
        prove(run)
        self._preflight(run)
        if resumed is not None:
            self.reporter.note(f"resumed from {resumed.place}: step {self.outcome.steps} is done")
        elif run.recipe.validates:
            self.outcome.validation["before"] = self.validate(run, "before")

    def _preflight(self, run: Run) -> None:
        """Show how the numbers work out, and what looks wrong before anything is spent."""
        for line in lines(run.data, run.ranks.count):
            self.reporter.note(line)
        for warning in run.template.prove().warnings:
            self.reporter.note(f"warning: {warning}")
        if self.log is not None:
            reward = run.recipe.reward
            self.reporter.note(run.wait(try_reward(lambda t: run.score(reward, t), *run.data.examples(1))))

    def _watch(self, made: Made, number: int, share: float) -> None:
        """Keep the batch of a step whose gradient was not finite; warn of memory."""
        if share > memory.CLOSE and not self.warned:
            self.warned = True
            self.reporter.note(
                f"warning: {share:.0%} of the memory is in use; lower train.micro_tokens, rollout.group or "
                "the engine's cache before it runs out"
            )
        if not made.figures.get("update/not_finite"):
            self.not_finite = 0
            return
        self.not_finite += 1
        torch.save(made.batch.tensors(), self.folder.path / f"not-finite-{number:05d}.rank{self.folder.rank}.pt")
        self.reporter.note(f"warning: step {number} gave no finite gradient and was skipped; its batch is kept")
        if self.not_finite >= IN_A_ROW:
            raise RlkitError(
                f"{IN_A_ROW} steps in a row gave no finite gradient, up to step {number}; their batches are in "
                f"{self.folder.path}/not-finite-*.pt. Lower train.lr or train.max_norm and resume from {self._last()}"
            )

    def _checkpoint(self, run: Run, number: int, figures: Figures) -> Figures:
        """Start a checkpoint where one is due, unless the one before is still being written; count what goes wrong."""
        if self.writer is None:
            return {}
        save, better = run.recipe.save, False
        last = bool(run.ranks.largest(self.interrupt.asked or number == run.recipe.train.steps))
        if save.keep_best is not None and save.keep_best in figures:
            value = figures[save.keep_best]
            better = self.writer.best is None or value > self.writer.best[0]
            if better:
                self.writer.best = (value, f"step-{number:06d}")
        due = bool(save.every) and (number % save.every == 0 or (last and number < run.recipe.train.steps))
        if not run.ranks.largest(due or better):
            return {}
        if self.writer.busy and not last:
            return {"checkpoint/skipped": 1.0}
        state = {
            "step": number,
            "recipe": self.folder.recipe_yaml,
            "numbers": numbers(run),
            "outcome": asdict(self.outcome),
            "best": self.writer.best,
            "not_finite": self.not_finite,
        }
        try:
            self.writer.save(number, tensors(run), state)
            self.unsaved = 0
        except CheckpointError as error:
            self.unsaved += 1
            self.reporter.note(f"warning: {error}")
            if self.unsaved >= IN_A_ROW:
                raise
            return {"checkpoint/failed": 1.0}
        return {}

    def _last(self) -> str:
        names = [] if self.writer is None else self.writer.store.names()
        return f"{self.writer.store.url}/{names[0]}" if self.writer is not None and names else "the start"

    def lost(self, rank: str) -> None:
        """Write that another rank is gone, while this one hangs."""
        self._note_failure(RankError(rank))
        if self.log is not None:
            self.folder.result(vars(self.outcome))

    def end(self, run: Run | None, failure: Exception | None) -> Exception | None:
        """Save what was learned and write how it ended; give the first failure, be it of the run or of saving."""
        if failure is not None:
            self._note_failure(failure)
        try:
            self._keep(run, failure)
        except Exception as error:  # it must not hide what came before
            failure = failure or error
            self._note_failure(failure)
        self.outcome.seconds = round(time.time() - self.start, 3)
        if self.writer is not None:
            self.writer.close()
        if self.log is not None:
            self.folder.result(vars(self.outcome))
            self.log.close(self.outcome.status)
            self.reporter.finish(vars(self.outcome))
        return failure

    def _keep(self, run: Run | None, failure: Exception | None) -> None:
        """Save the policy; of one whose shards other ranks hold, who may be gone, the checkpoints must do."""
        if run is None or not self.outcome.steps:
            return
        sharded = isinstance(run.fabric.strategy, FSDP2)
        if not sharded or failure is None or isinstance(failure, CheckpointError):  # which all ranks raise alike
            self.save(run, "final")
            if run.average is not None:
                with run.average.applied():
                    self.save(run, "ema")

    def _note_failure(self, failure: Exception) -> None:
        self.outcome.status = "failed"
        self.outcome.error = {"type": type(failure).__name__, "message": str(failure)}
