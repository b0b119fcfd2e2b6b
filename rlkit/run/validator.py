"""Validation during a run: compared with earlier validations, shown, and written to the run folder."""

from __future__ import annotations

from rlkit.interfaces.callback import ValidationEnd
from rlkit.records.validation_metrics import Accuracies
from rlkit.records.verdict import Metrics
from rlkit.run.answers import write_answers
from rlkit.run.evaluate import evaluate
from rlkit.run.metrics_log import MetricsLog
from rlkit.run.progress import Progress
from rlkit.run.record import RunRecord
from rlkit.train.setup import TrainContext


class Validator:
    """Validates the policy on held-out prompts.

    Args:
        record: Shows the metrics; has the number of steps and the run folder.
        log: Passes completions to the loggers; None except on rank 0.
        progress: Counts validations without improvement.
    """

    def __init__(self, record: RunRecord, log: MetricsLog | None, progress: Progress) -> None:
        self.earlier: dict[str, dict[str, Accuracies]] = {}
        """Accuracies of the validations at the `start` and the `last` one, with which the next one is compared."""
        self._record = record
        self._log = log
        self._progress = progress
        self._metrics_by_step: dict[int, Metrics] = {}

    def validate(self, context: TrainContext, when: str) -> Metrics:
        """Validate, and return the metrics; the completions are written to the run folder."""
        record = self._record
        step = record.outcome.steps
        record.reporter.note(f"validating on {len(context.data.validation)} prompts")
        evaluation = evaluate(context.rollouts, context.data.validation)
        for name, accuracies in self.earlier.items():
            evaluation.compare(name, accuracies)
        self.earlier["last" if self.earlier else "start"] = evaluation.accuracies
        self._metrics_by_step = {step: evaluation.metrics}
        record.reporter.validated(step, evaluation.metrics)
        log = self._log
        if log is not None:
            record.attempt("completions for the loggers", lambda: log.answers(step, evaluation))
        self._progress.validated(evaluation.metrics)
        if context.recipe.log.rollouts.every:
            name = f"validation-{when}"
            record.attempt(f"rollouts/{name}", lambda: write_answers(record.folder.rollouts(name), evaluation))
        context.callbacks.emit("on_validation", ValidationEnd(step, evaluation.metrics, evaluation.trajectories))
        return evaluation.metrics

    def metrics_after(self, step: int) -> Metrics | None:
        """Return the metrics of the last validation if it took place after a step; None otherwise."""
        return self._metrics_by_step.get(step)
