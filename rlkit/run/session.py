"""A run in progress: its steps, validations and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlkit.base.garbage import lasting
from rlkit.interfaces.callback import CheckpointSaved, Json, LoggedRun, RunStart
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.placement import Pools
from rlkit.models.checkpoint_schema import RunState
from rlkit.models.checkpoints import CheckpointRef
from rlkit.models.store import Store, step_of
from rlkit.recipe import Profile, Recipe
from rlkit.records.folder import recipe_data
from rlkit.records.rewards import RewardHistory
from rlkit.records.verdict import Metrics
from rlkit.run.checkpoint.resume import lacks_optimizer, load, rollout_differences, validation_options, watched
from rlkit.run.checkpoint.state import numbers, tensors
from rlkit.run.checkpoint.write import Best, Saver, Writer
from rlkit.run.evaluate import Validator
from rlkit.run.method import Procedure, procedure_of
from rlkit.run.metrics_log import MetricsLog, open_loggers
from rlkit.run.outcome import Replay
from rlkit.run.preflight import memory
from rlkit.run.preflight.start import preflight
from rlkit.run.profile import NO_GPU, NsightCapture, profiled
from rlkit.run.progress import Progress
from rlkit.run.record import RunRecord
from rlkit.run.signals import Signals
from rlkit.train.ahead.stream import BesideStream, ColocatedStream, RolloutStream, TrainedGroups
from rlkit.train.metrics import phase_range
from rlkit.train.phases import StepResult
from rlkit.train.saved import kept_trajectories
from rlkit.train.setup import TrainContext
from rlkit.types import Trajectory


@dataclass
class Session:
    """A run in progress.

    Args:
        record: The outcome so far, and where it is shown and written.
        replay: The steps to make again, in a replay of another run.
    """

    record: RunRecord
    replay: Replay | None = None
    signals: Signals | None = None
    context: TrainContext | None = None
    """The context of the training, once it is prepared."""
    log: MetricsLog | None = None
    """The log of metrics; None except on rank 0."""
    stream: RolloutStream | None = None
    saver: Saver | None = None
    pools: Pools | None = None
    procedure: Procedure = field(init=False)
    progress: Progress = field(init=False)
    validator: Validator = field(init=False)
    stop_requested: bool = False
    """Whether a signal asked some rank to stop; all ranks agree on it after each step."""
    ended_early: bool = False
    """Whether a callback or `validation.patience` made the last step the last one; all ranks agree on it, too."""
    memory_warned: bool = False
    checkpoint_metrics: Metrics = field(default_factory=dict)
    """Metrics of the last step's checkpoint, for the next line of metrics."""

    def open_log(self, recipe: Recipe, last_step: int) -> None:
        """Open the loggers and `metrics.jsonl`; of an earlier start, lines and rollouts stay up to the last step.

        Raises:
            RecipeError: A logger's package is not installed.
        """
        if self.record.first:
            folder, reporter = self.record.folder, self.record.reporter
            run = LoggedRun(folder.path, folder.run_id() or "", recipe_data(folder.recipe_yaml), last_step)
            loggers = open_loggers(recipe.log.loggers, run, reporter.note)
            self.log = MetricsLog(folder.path / "metrics.jsonl", loggers, last_step)
            self.record.attempt("rollouts of later steps", lambda: folder.remove_rollouts_after(last_step))
            reporter.resumed(self.log.earlier)

    @lasting()
    def train(self, context: TrainContext, resumed: CheckpointRef | None) -> None:
        """Validate, run all steps, and validate again.

        Raises:
            TrainingError: Too many steps in a row had no learning signal.
        """
        train, validation = context.recipe.train, context.recipe.validation
        self.progress = Progress(context.recipe, RewardHistory() if self.log is None else self.log.rewards)
        self.procedure = procedure_of(context.recipe)
        self.validator = Validator(self.record, self.log, self.progress, self.procedure)
        saver = self._begin(context, resumed)
        outcome = self.record.outcome
        if context.recipe.rollout.max_staleness and self.replay is None:
            stream_type = BesideStream if Capability.BESIDE in context.service.engine.capabilities else ColocatedStream
            self.stream = stream_type(context.data, context.service, self._trained(context.recipe, resumed))
        replay = self.replay or Replay(train.total_steps)
        obtain = replay.obtain or self.stream or self.procedure.obtain

        def content(best: Best | None) -> tuple[dict[str, Tensor], RunState]:
            return tensors(context), self._state(context, best)

        capture = self._capture(context.recipe.profile)
        ending = self._agree_on_end(context)
        while not ending and outcome.steps < replay.last:
            number = outcome.steps + 1
            capture.start(number)
            with self._profiled(context.recipe.profile, number):
                result = self.procedure.step(context, number, obtain)
            memory_metrics = memory.metrics(context.device)
            # agreed: the names are the same on every rank
            metrics = result.metrics | {name: context.ranks.all_reduce_max(x) for name, x in memory_metrics.items()}
            outcome.steps = number
            self._write_rollouts(context, number, result.rollouts.all)
            metrics |= self._validate(context, number)
            try:
                metrics |= context.callbacks.end_step(number, metrics | self.checkpoint_metrics)
            finally:
                self._log(number, metrics | self.checkpoint_metrics)
                self.record.reporter.step(number, metrics)
            if context.recipe.method.samples:
                self.record.reporter.samples(self.record.outcome.steps, result.rollouts.all)
            self._check_step(context, result, metrics)
            ending = self._agree_on_end(context)
            with phase_range("save"):
                self.checkpoint_metrics = saver.after(number, metrics, content)
            capture.stop()
        if self.stream is not None:
            self.stream.close()
        outcome.diagnosis = self.progress.diagnosis(is_over=not self.stop_requested)
        saver.end(outcome.steps, content)
        if self.progress.stalled and self.progress.stalled == outcome.steps and not self.stop_requested:
            raise self.progress.failure(outcome.steps)
        if not self.stop_requested and validation is not None and validation.after:
            metrics_after = self.validator.metrics_by_step.get(outcome.steps)  # if the last step was validated
            # agreed: all ranks have validated after the same steps
            if metrics_after is None:
                metrics_after = self.validator.validate(context, "after")
            outcome.validation["after"] = metrics_after
        outcome.status = "interrupted" if self.stop_requested else "ok"

    def _validate(self, context: TrainContext, number: int) -> Metrics:
        """Validate if that is due after a step; return the metrics under their names in the log."""
        section = context.recipe.validation
        if section is None or not section.every or number % section.every:
            return {}
        is_last = section.after and number == context.recipe.train.total_steps
        validated = self.validator.validate(context, "after" if is_last else f"{number:05d}")
        return {f"validation/{name}": value for name, value in validated.items()}

    def _trained(self, recipe: Recipe, resumed: CheckpointRef | None) -> TrainedGroups:
        """Return the groups that the run was trained on; a synchronous run has trained on all up to its step."""
        if resumed is None:
            return TrainedGroups()
        trained = resumed.state.trained
        if not trained:
            return TrainedGroups(resumed.state.step * recipe.train.prompts_per_step)
        return TrainedGroups(trained[0], tuple(trained[1:]))

    def _profiled(self, section: Profile | None, number: int) -> AbstractContextManager[None]:
        if section is None or section.tool != "torch" or number not in section.steps:
            return nullcontext()
        folder = self.record.folder
        return profiled(folder.path / "profile", f"step-{number:05d}", folder.rank, self.record.attempt)

    def _capture(self, section: Profile | None) -> NsightCapture:
        if section is None or section.tool != "nsight":
            return NsightCapture(())
        if torch.cuda.is_available():
            return NsightCapture(section.steps)
        self.record.reporter.note(NO_GPU)
        return NsightCapture(())

    def _agree_on_end(self, context: TrainContext) -> bool:
        """Agree with all ranks on whether to stop, and return it; every rank must call this."""
        note, steps = self.record.reporter.note, self.record.outcome.steps
        own_signal = None if self.signals is None else self.signals.asked
        signals = context.ranks.gather_world(own_signal)
        received = [f"rank {rank}: {name}" for rank, name in enumerate(signals) if name]
        if received and not self.stop_requested and context.ranks.fabric.world_size > 1:
            note(f"the run ends after {steps} steps ({', '.join(received)})")
        self.stop_requested = bool(received)
        stopper = context.callbacks.stopper()
        if stopper is not None and not self.ended_early:
            self.ended_early = True
            note(f"callback {stopper} ended the training after step {steps}")
        reason = self.progress.exhausted()
        if reason is not None and not self.ended_early:
            self.ended_early = True
            note(f"the training ends after step {steps}: {reason}")
        return self.stop_requested or self.ended_early

    def _begin(self, context: TrainContext, resumed: CheckpointRef | None) -> Saver:
        """Load the checkpoint, prepare the engine and validate; return what saves checkpoints."""
        record = self.record
        section = context.recipe.save
        store = Store(section.folder or str(record.folder.path / "checkpoints"))
        best = None
        if resumed is not None:
            best = self._restore(context, resumed)
        steps = record.outcome.steps
        writer = Writer(store, section, context.ranks, steps, best)
        in_store = resumed is not None and resumed.store.root == store.root
        self.saver = Saver(writer, record.reporter.note, steps if in_store else 0)
        preflight(context, record.reporter.note, record.first)
        context.service.sync_weights()
        for check in self.procedure.checks:
            check(context.data, context.service)
        self._start_callbacks(context, self.saver, {} if resumed is None else resumed.state.callbacks)
        validation = context.recipe.validation
        if resumed is not None:
            record.reporter.note(f"resumed from {resumed.location}: step {steps} is done")
            if steps >= context.recipe.train.total_steps and not self.replay:
                epochs = context.recipe.train.data_epochs
                longer = f"train.steps above {steps}" if epochs is None else f"train.data_epochs above {epochs:g}"
                record.reporter.note(f"nothing is left to train: to go on, set {longer}")
            if lacks_optimizer(resumed):
                record.reporter.note(
                    "warning: the checkpoint has no optimizer state (save.optimizer: false), so moments start from "
                    "zero, and the next steps differ from those of an uninterrupted run"
                )
            reasons = [] if self.replay else rollout_differences(context.recipe.rollout)
            if reasons:
                record.reporter.note(f"the run will differ from an uninterrupted one: {'; '.join(reasons)}")
        elif validation is not None and validation.before:
            record.outcome.validation["before"] = self.validator.validate(context, "before")
        return self.saver

    def _restore(self, context: TrainContext, resumed: CheckpointRef) -> Best | None:
        """Load a checkpoint into the run; return its best step, if the recipe still selects it by the same metric."""
        load(context, resumed)
        state = resumed.state
        self.record.outcome.steps = state.step
        self.progress.stalled = state.stalled
        recipe = recipe_data(self.record.folder.recipe_yaml)
        if validation_options(state.recipe) == validation_options(recipe):
            self.record.outcome.validation["before"] = state.before
            self.validator.earlier = state.earlier
            if watched(state.recipe) == watched(recipe):
                self.progress.waited = state.waited
        return state.best if state.metric == context.recipe.save.keep_best else None

    def _start_callbacks(self, context: TrainContext, saver: Saver, states: Mapping[str, dict[str, Json]]) -> None:
        callbacks, ranks = context.callbacks, context.ranks.fabric
        callbacks.load(states)
        if callbacks.watching("on_checkpoint"):
            url = saver.writer.store.url
            saver.on_saved = lambda name: callbacks.emit(
                "on_checkpoint", CheckpointSaved(step_of(name), f"{url}/{name}")
            )
        folder, steps = self.record.folder, context.recipe.train.total_steps
        recipe = recipe_data(folder.recipe_yaml)
        steps_done = self.record.outcome.steps
        start = RunStart(folder.path, recipe, steps, steps_done, ranks.global_rank, ranks.world_size)
        callbacks.emit("on_run_start", start)

    def _state(self, context: TrainContext, best: Best | None) -> RunState:
        before, estimator = self.record.outcome.validation["before"], context.recipe.advantage
        estimates = None if estimator is None else estimator.state_dict()
        return RunState(
            step=self.record.outcome.steps,
            recipe=recipe_data(self.record.folder.recipe_yaml),
            numbers=numbers(context.service.version, context.transforms, estimates),
            before=None if before is None else {name: x for name, x in before.items() if isfinite(x)},
            earlier=self.validator.earlier,
            waited=self.progress.waited,
            best=best,
            metric=context.recipe.save.keep_best,
            stalled=self.progress.stalled,
            callbacks=context.callbacks.states(),
            trained=None if self.stream is None else [self.stream.trained.low, *self.stream.trained.beyond],
        )

    def _write_rollouts(self, context: TrainContext, number: int, trajectories: list[Trajectory]) -> None:
        """Write a step's trajectories, as far as the recipe asks for them."""
        kept = kept_trajectories(trajectories, number, context.recipe, context.ranks)
        if kept is not None:
            folder, name = self.record.folder, f"step-{number:05d}"
            self.record.attempt(f"rollouts/{name}", lambda: folder.dump(name, kept, len(kept) == len(trajectories)))

    def _log(self, number: int, metrics: Metrics) -> None:
        log = self.log
        if log is not None:
            self.record.attempt("a step's metrics", lambda: log.write(number, metrics))

    def _check_step(self, context: TrainContext, result: StepResult, metrics: Metrics) -> None:
        """Warn of full memory, of gradients that are not finite, of steps without a signal."""
        note = self.record.reporter.note
        number = self.record.outcome.steps
        memory_share = metrics["memory/share"]
        if memory_share > memory.CLOSE and not self.memory_warned:
            self.memory_warned = True
            note(
                f"warning: {memory_share:.0%} of the memory is in use; lower train.max_tokens_per_micro_batch, "
                "rollout.group_size or the engine's cache before it runs out"
            )
        if metrics.get("update/not_finite"):
            folder = self.record.folder
            name = f"not-finite-{number:05d}.rank{folder.rank}.safetensors"
            batch = {key: tensor.contiguous().clone() for key, tensor in result.batch.tensors().items()}
            self.record.attempt(name, lambda: save_file(batch, folder.path / name))
            note(f"warning: step {number} had a gradient that is not finite; its batch is kept: {name}")
        errors = result.rollouts.errors
        if self.progress.failed(metrics):  # agreed: by the metrics of all ranks
            errors = sum(context.ranks.gather_dp(errors), Counter())
        was_diagnosed = self.progress.diagnosed
        for warning in self.progress.see(number, metrics, errors):
            note(warning)
        self.record.outcome.training_reward = self.progress.rewards.change()
        self.record.outcome.diagnosis = self.progress.diagnosis()
        if self.progress.diagnosed and not was_diagnosed:
            self.record.reporter.samples(number, result.rollouts.all, 2)
