"""A run in progress: its steps, its checkpoints, and how it ends."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite

from safetensors.torch import save_file
from torch import Tensor

from rlkit.concurrency.garbage import lasting
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.errors import CallbackError, CheckpointError, RankError, TrainingError, explain, shorten
from rlkit.interfaces.callback import CheckpointSaved, Json, LoggedRun, RunEnd, RunStart, ValidationEnd
from rlkit.models.checkpoint_schema import RunState
from rlkit.models.checkpoints import CheckpointRef
from rlkit.models.save import save_policy
from rlkit.models.store import Store, step_of
from rlkit.models.weights import full_state_dict
from rlkit.recipe import Recipe
from rlkit.run.answers import write_answers
from rlkit.run.checkpoint.resume import held_out, load, not_repeated
from rlkit.run.checkpoint.state import as_data, numbers, tensors
from rlkit.run.checkpoint.write import Best, Saver, Writer
from rlkit.run.folder import RunFolder, first_groups
from rlkit.run.loggers import open_loggers
from rlkit.run.measure import memory
from rlkit.run.measure.profile import profiled
from rlkit.run.metrics_log import MetricsLog
from rlkit.run.outcome import Metrics, Outcome, Replay, Reporter
from rlkit.run.preflight.start import preflight
from rlkit.run.preflight.weight_check import check_weights
from rlkit.run.progress import Progress
from rlkit.run.signals import Signals
from rlkit.sections import Profile
from rlkit.text import redact
from rlkit.train.ahead.beside import BesideStream
from rlkit.train.ahead.colocated import ColocatedStream
from rlkit.train.ahead.stream import RolloutStream, TrainedGroups
from rlkit.train.method import method_of
from rlkit.train.phases import StepResult
from rlkit.train.setup import TrainContext
from rlkit.train.validation.evaluate import evaluate
from rlkit.train.validation.metrics import Accuracies
from rlkit.types import Trajectory


@dataclass
class Session:
    """A run in progress and those who follow it; `log` exists on rank 0 only."""

    folder: RunFolder
    reporter: Reporter
    first: bool
    """Whether this is rank 0, which writes what all ranks have in common."""
    signals: Signals | None = None
    log: MetricsLog | None = None
    replay: Replay | None = None
    stream: RolloutStream | None = None
    outcome: Outcome = field(default_factory=Outcome)
    saver: Saver | None = None
    progress: Progress | None = None
    stopping: bool = False
    """Whether some rank was asked to end; all ranks agree on it after each step."""
    enough: bool = False
    """Whether a callback or `validation.patience` made the last step the last one; all ranks agree on it, too."""
    warned: bool = False
    start: float = field(default_factory=time.time)
    checkpoint_metrics: Metrics = field(default_factory=dict)
    """What became of the last step's checkpoint, for the next line of metrics."""
    earlier: dict[str, dict[str, Accuracies]] = field(default_factory=dict)
    """Accuracies of the validations at the `start` and the `last` one, which the next one is compared with."""
    validated: dict[int, Metrics] = field(default_factory=dict)
    """The last validation's metrics, by the number of steps before it."""

    def open_log(self, recipe: Recipe, done: int) -> None:
        """Open `metrics.jsonl`, of which so many steps stay, and the loggers.

        Raises:
            RecipeError: A logger's package is not installed.
        """
        if self.first:
            run = LoggedRun(self.folder.path, self.folder.run_id() or "", as_data(self.folder.recipe_yaml), done)
            loggers = open_loggers(recipe.log.loggers, run, self.reporter.note)
            self.log = MetricsLog(self.folder.path / "metrics.jsonl", loggers, done)
            self.reporter.resumed(self.log.earlier)

    @lasting()
    def train(self, context: TrainContext, resumed: CheckpointRef | None) -> None:
        """Validate, make all steps, validate again.

        Raises:
            TrainingError: The steps taught the policy nothing.
        """
        train, validation = context.recipe.train, context.recipe.validation
        every, after = (0, False) if validation is None else (validation.every, validation.after)
        self.progress = Progress(context.recipe)
        saver = self._begin(context, resumed)
        if context.recipe.rollout.max_staleness and self.replay is None:
            kind = BesideStream if context.rollouts.engine.beside else ColocatedStream
            self.stream = kind(context.data, context.rollouts, self._trained(context.recipe, resumed))
        replay = self.replay or Replay(train.steps)
        method = method_of(context.recipe)
        obtain = replay.obtain or self.stream or method.obtain

        def content(best: Best | None) -> tuple[dict[str, Tensor], RunState]:
            return tensors(context), self._state(context, best)

        self._agree(context)
        # agreed: `stopping` and `enough` are, and all ranks count the same steps
        while not (self.stopping or self.enough) and self.outcome.steps < replay.last:
            number = self.outcome.steps + 1
            with self._profiled(context.recipe.profile, number):
                made = method.step(context, number, obtain)
            used = memory.metrics(context.device)
            # agreed: the names are the same on every rank
            metrics = made.metrics | {name: context.ranks.all_reduce_max(x) for name, x in used.items()}
            self.outcome.steps = number
            self._dump(context, number, made.rollouts.all)
            if every and number % every == 0 and (number < train.steps or not after):
                metrics |= {f"validation/{name}": x for name, x in self.validate(context, f"{number:05d}").items()}
            try:
                metrics |= context.callbacks.end_step(number, metrics | self.checkpoint_metrics)
            finally:
                self._log(number, metrics | self.checkpoint_metrics)
                self.reporter.step(number, metrics)
            self._watch(context, made, metrics)
            self._agree(context)
            self.checkpoint_metrics = saver.after(number, metrics, content)
        if self.stream is not None:  # agreed: an option of the recipe
            self.stream.close()
        saver.end(self.outcome.steps, content)
        if self.progress.stalled and self.progress.stalled == self.outcome.steps and not self.stopping:
            raise self.progress.failure(self.outcome.steps)
        if not self.stopping and after:
            known = self.validated.get(self.outcome.steps)  # where training ended early, right after a validation
            # agreed: all ranks have validated after the same steps
            self.outcome.validation["after"] = self.validate(context, "after") if known is None else known
        self.outcome.status = "interrupted" if self.stopping else "ok"

    def _trained(self, recipe: Recipe, resumed: CheckpointRef | None) -> TrainedGroups:
        """Return the groups that the run was trained on; a synchronous run has trained on all up to its step."""
        if resumed is None:
            return TrainedGroups()
        known = resumed.state.trained
        return (
            TrainedGroups(resumed.state.step * recipe.train.prompts_per_step)
            if not known
            else TrainedGroups(known[0], tuple(known[1:]))
        )

    def _profiled(self, section: Profile | None, number: int) -> AbstractContextManager[None]:
        if section is None or number not in section.steps:
            return nullcontext()
        return profiled(self.folder.path / "profile", f"step-{number:05d}", self.folder.rank, self._attempt)

    def _agree(self, context: TrainContext) -> None:
        """Agree on whether any rank was asked to stop; every rank must call this."""
        asked = None if self.signals is None else self.signals.asked
        named = [f"rank {i}: {name}" for i, name in enumerate(context.ranks.gather_world(asked)) if name]
        if named and not self.stopping and context.ranks.fabric.world_size > 1:
            self.reporter.note(f"the run ends after {self.outcome.steps} steps ({', '.join(named)})")
        self.stopping = bool(named)
        stopper = context.callbacks.stopper()
        if stopper is not None and not self.enough:
            self.enough = True
            self.reporter.note(f"callback {stopper} ended the training after step {self.outcome.steps}")
        why = None if self.progress is None else self.progress.exhausted()
        if why is not None and not self.enough:
            self.enough = True
            self.reporter.note(f"the training ends after step {self.outcome.steps}: {why}")

    def validate(self, context: TrainContext, when: str) -> Metrics:
        """Return the metrics on held-out prompts, and leave the answers in the run folder."""
        self.reporter.note(f"validating on {len(context.data.validation)} prompts")
        found = evaluate(context.rollouts, context.data.validation)
        for name, accuracies in self.earlier.items():
            found.compare(name, accuracies)
        self.earlier["last" if self.earlier else "start"] = found.accuracies
        self.validated = {self.outcome.steps: found.metrics}
        self.reporter.validated(self.outcome.steps, found.metrics)
        if (log := self.log) is not None:
            self._attempt("answers for the loggers", lambda: log.answers(self.outcome.steps, found))
        if self.progress is not None:  # agreed: there is one while steps are made
            self.progress.validated(found.metrics)
        if context.recipe.log.rollouts.every:
            name = f"validation-{when}"
            self._attempt(f"rollouts/{name}", lambda: write_answers(self.folder.rollouts(name), found))
        context.callbacks.emit("on_validation", ValidationEnd(self.outcome.steps, found.metrics, found.trajectories))
        return found.metrics

    def save(self, context: TrainContext, name: str) -> None:
        """Write the policy as a Hugging Face folder; all ranks take part."""
        policy = context.models.actor.policy
        weights = full_state_dict(policy, keep=self.first)
        if self.first:
            save_policy(policy, context.data.dialogue.tokenizer, self.folder.path / name, weights)

    def _begin(self, context: TrainContext, resumed: CheckpointRef | None) -> Saver:
        save, best, here = context.recipe.save, None, False
        store = Store(save.folder or str(self.folder.path / "checkpoints"))
        if resumed is not None:
            load(context, resumed)
            state, here = resumed.state, resumed.store.root == store.root
            self.outcome = Outcome(steps=state.step, validation={"before": state.before, "after": None})
            if self.progress is not None:
                self.progress.stalled, self.progress.waited = state.stalled, state.waited
            if held_out(state.recipe) == held_out(as_data(self.folder.recipe_yaml)):
                self.earlier = state.earlier
            best = state.best if state.metric == save.keep_best else None
        writer = Writer(store, save, context.ranks, self.outcome.steps, best)
        self.saver = Saver(writer, self.reporter.note, self.outcome.steps if here else 0)
        preflight(context, self.reporter.note, self.first)
        context.rollouts.sync_weights()
        if context.recipe.generates:  # agreed: an option of the recipe
            check_weights(context.data, context.rollouts)
        self._start_callbacks(context, self.saver, {} if resumed is None else resumed.state.callbacks)
        if resumed is not None:
            self.reporter.note(f"resumed from {resumed.location}: step {self.outcome.steps} is done")
            reasons = [] if self.replay else not_repeated(context.recipe.rollout)
            if reasons:
                self.reporter.note(f"the run will differ from an uninterrupted one: {'; '.join(reasons)}")
        elif (validation := context.recipe.validation) is not None and validation.before:
            self.outcome.validation["before"] = self.validate(context, "before")
        return self.saver

    def _start_callbacks(self, context: TrainContext, saver: Saver, states: Mapping[str, dict[str, Json]]) -> None:
        callbacks, ranks = context.callbacks, context.ranks.fabric
        callbacks.load(states)
        if callbacks.watching("on_checkpoint"):
            url = saver.writer.store.url
            saver.on_saved = lambda name: callbacks.emit(
                "on_checkpoint", CheckpointSaved(step_of(name), f"{url}/{name}")
            )
        recipe, steps = as_data(self.folder.recipe_yaml), context.recipe.train.steps
        start = RunStart(self.folder.path, recipe, steps, self.outcome.steps, ranks.global_rank, ranks.world_size)
        callbacks.emit("on_run_start", start)

    def _state(self, context: TrainContext, best: Best | None) -> RunState:
        before = self.outcome.validation["before"]
        return RunState(
            step=self.outcome.steps,
            recipe=as_data(self.folder.recipe_yaml),
            numbers=numbers(context.rollouts.version, context.transforms),
            before=None if before is None else {name: x for name, x in before.items() if isfinite(x)},
            earlier=self.earlier,
            waited=None if self.progress is None else self.progress.waited,
            best=best,
            metric=context.recipe.save.keep_best,
            stalled=0 if self.progress is None else self.progress.stalled,
            callbacks=context.callbacks.states(),
            trained=None if self.stream is None else [self.stream.trained.low, *self.stream.trained.beyond],
        )

    def _dump(self, context: TrainContext, number: int, trajectories: list[Trajectory]) -> None:
        """Keep what the recipe wants of the trajectories of a step."""
        log, name = context.recipe.log.rollouts, f"step-{number:05d}"
        if log.every and number % log.every == 0:
            share = None if log.limit is None else max(1, log.limit // context.ranks.count)
            self._attempt(f"rollouts/{name}", lambda: self.folder.dump(name, first_groups(trajectories, share)))

    def _log(self, number: int, metrics: Metrics) -> None:
        if (log := self.log) is not None:
            self._attempt("a step's metrics", lambda: log.write(number, metrics))

    def _watch(self, context: TrainContext, made: StepResult, metrics: Metrics) -> None:
        """Keep the batch of a step whose gradient was not finite; warn of memory, and of steps that teach nothing."""
        number, share = self.outcome.steps, metrics["memory/share"]
        if share > memory.CLOSE and not self.warned:
            self.warned = True
            self.reporter.note(
                f"warning: {share:.0%} of the memory is in use; lower train.max_tokens_per_micro_batch, "
                "rollout.group_size or the engine's cache before it runs out"
            )
        if metrics.get("update/not_finite"):
            name = f"not-finite-{number:05d}.rank{self.folder.rank}.safetensors"
            batch = {key: tensor.contiguous().clone() for key, tensor in made.batch.tensors().items()}
            self._attempt(name, lambda: save_file(batch, self.folder.path / name))
            self.reporter.note(f"warning: step {number} had a gradient that is not finite; its batch is kept: {name}")
        if self.progress is None:  # agreed: there is one while steps are made
            return
        errors = made.rollouts.errors
        if self.progress.failed(metrics):  # agreed: by the metrics of all ranks
            errors = sum(context.ranks.gather_dp(errors), Counter())
        for warning in self.progress.see(number, metrics, errors):
            self.reporter.note(warning)

    def lost(self, rank: str) -> None:
        """Write that another rank is gone, while this one hangs."""
        self._note_failure(RankError(rank))
        self._write_result()

    def cut_short(self) -> None:
        """Write that the run was interrupted, while it hangs."""
        self.outcome.status = "interrupted"
        self._write_result()

    def end(self, context: TrainContext | None, failure: Exception | None, at_once: bool = False) -> Exception | None:
        """Save what was learned and write how it ended; return the first failure, be it of the run or of saving.

        Args:
            context: None if it was not built.
            failure: What ended it.
            at_once: It was interrupted in the middle of something: the other ranks may be anywhere.
        """
        if at_once:
            self.outcome.status = "interrupted"
        if failure is not None:
            self._note_failure(failure)
        try:
            self._keep(context, failure, at_once)
        except Exception as error:  # it must not hide what came before
            failure = failure or error
            self._note_failure(failure)
        self._write_result()
        if self.signals is not None:
            self.signals.leaving = True  # what the run holds is freed whatever comes
        closing: list[tuple[str, Callable[[], None]]] = []
        if context is not None and not at_once:
            ended = RunEnd(self.outcome.status, self.outcome.steps, None if failure is None else redact(str(failure)))
            closing.append(("the callbacks", lambda: context.callbacks.end(ended)))
        if self.saver is not None:
            closing.append(("the checkpoints' writer", self.saver.writer.close))
        if (log := self.log) is not None:
            closing.append(("the loggers", lambda: log.close(self.outcome.status)))
        if context is not None:
            closing.append(("the rollouts", context.rollouts.close))
        for what, close in closing:
            self._attempt(what, close)
        self.reporter.finish(vars(self.outcome), self._advice())
        return failure

    def _keep(self, context: TrainContext | None, failure: Exception | None, at_once: bool) -> None:
        """Save the policy; of one whose shards other ranks hold, who may be gone, the checkpoints must do."""
        if context is None or not self.outcome.steps:  # agreed: all ranks count the same steps
            return
        # agreed: by `agreed`; a rank that waits here for one that has ended is ended by `Peers`
        if isinstance(context.ranks.fabric.strategy, FSDP2Strategy) and (at_once or not agreed(failure)):
            return
        self.save(context, "final")
        if (average := context.models.average) is not None:
            with average.applied():
                self.save(context, "ema")

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        """Run an optional action, such as writing rollouts: a failure, such as a full disk, is a warning."""
        try:
            work()
        except Exception as error:
            self.reporter.note(f"warning: {what}: {explain(error)}")

    def _write_result(self) -> None:
        self.outcome.seconds = round(time.time() - self.start, 3)
        if self.first:
            self._attempt("result.json", lambda: self.folder.result(vars(self.outcome)))

    def _note_failure(self, failure: Exception) -> None:
        self.outcome.status = "failed"
        self.outcome.error = {"type": type(failure).__name__, "message": redact(shorten(str(failure)))}

    def _advice(self) -> str:
        """Return the run's folder and the command that continues from it."""
        path = shlex.quote(str(self.folder.path))
        try:
            saved = self.saver is not None and bool(self.saver.writer.store.names())
        except Exception:  # a store far away that cannot be reached
            saved = False
        if not saved or self.saver is None:
            return f"the run is in {path}"
        if self.outcome.status == "ok":
            look = f"to look at it: rlkit report {path}"
            return f"the run is in {path}; {look}; to use the model: rlkit export --checkpoint {path} --out MODEL"
        folder = self.saver.writer.section.folder
        if folder is None:
            return f"the run is in {path}; to go on: rlkit fit --resume {path}"
        elsewhere = f"--out {path} --resume auto --save.folder {shlex.quote(folder)}"
        return f"the run is in {path}; to go on: rlkit fit --recipe {path}/recipe.yaml {elsewhere}"


def agreed(failure: Exception | None) -> bool:
    """Whether all ranks have ended a run alike, so that they may still do something together."""
    return failure is None or isinstance(failure, CallbackError | CheckpointError | TrainingError)
