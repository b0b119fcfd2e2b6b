"""Checkpoints: written atomically, by a thread beside the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isfinite

from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.base.files import MANIFEST
from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.distributed.tensor_store import save_tensors
from rlkit.models.checkpoint_schema import FORMAT, STATE, Manifest, RunState
from rlkit.models.store import Store, name_of, step_of
from rlkit.models.tensor_files import TensorWriter, file_of
from rlkit.recipe import Save
from rlkit.records.verdict import merit

Best = tuple[float, int]
"""The best value of the metric `save.keep_best`, and the step of its checkpoint."""

MAX_FAILURES = 3
"""Consecutive checkpoints that cannot be written before the run ends."""


class Writer:
    """Writes checkpoints while the run continues; a step waits only for a copy to host memory.

    Checkpoints of later steps than `step` belong to an abandoned run. They stay until this run's first checkpoint is
    written, and are withdrawn right before it gets its name, so that the newest checkpoint is always this run's own.

    Args:
        store: Store of the checkpoints.
        section: The recipe's section `save`.
        ranks: All ranks of the run.
        step: The step from which the run starts.
        best: The best checkpoint so far; ignored if the store no longer has it.
    """

    def __init__(self, store: Store, section: Save, ranks: Ranks, step: int = 0, best: Best | None = None) -> None:
        self.store = store
        self.section = section
        self.ranks = ranks
        names = ranks.from_first(store.names)
        self.best = best if best is not None and name_of(best[1]) in names else None
        self._abandoned = [name for name in names if step_of(name) > step]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlkit-checkpoint")
        self._writing: Future[Best | None] | None = None
        self._group = SideGroup(ranks.fabric)
        self.writing: str | None = None
        """The name of the checkpoint that is being written."""

    def busy(self) -> bool:
        """Whether some rank is still writing; all ranks must call this."""
        return self.ranks.any(self._writing is not None and not self._writing.done())

    def save(self, tensors: dict[str, Tensor], state: RunState) -> None:
        """Copy the tensors and start writing; the last checkpoint must be finished.

        Raises:
            CheckpointError: Some rank could not start.
        """
        name = name_of(state.step)
        copied: dict[str, Tensor] = {}
        problem = None
        try:
            if self.ranks.fabric.is_global_zero:
                self.store.remove(f"{name}.partial")
                self.store.fs.makedirs(self.store.path(f"{name}.partial"), exist_ok=True)
            copied = BlockingAsyncStager().stage(tensors)
        except (OSError, MemoryError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._agree(name, self.ranks.gather_world(problem))
        self._writing = self._thread.submit(self._write, copied, state)
        self.writing = name

    def finish(self) -> bool:
        """Wait until the current checkpoint is written; return whether there was one.

        Raises:
            CheckpointError: It cannot be written; the message names the newest complete checkpoint.
        """
        if self._writing is None:
            return False
        future = self._writing
        self._writing = self.writing = None
        self.best = future.result()
        return True

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, tensors: dict[str, Tensor], state: RunState) -> Best | None:
        """Write tensors and checksums, and rename the checkpoint; return the best checkpoint afterwards."""
        name = name_of(state.step)
        partial = f"{name}.partial"
        rank = self.ranks.fabric.global_rank
        digests: dict[str, str] = {}
        problem: str | None = None
        try:
            writer = TensorWriter(self.store.fs, self.store.path(partial))
            save_tensors(tensors, writer, self._group.group)
            files = [file_of(rank)] if self.store.fs.exists(self.store.path(partial, file_of(rank))) else []
            if rank == 0:
                self.store.write(partial, STATE, state)
                files.append(STATE)
            digests = {file: self.store.digest(partial, file) for file in files}
        except Exception as error:  # the other ranks must learn of whatever it was
            problem = str(error)
        reports = self._group.gather_world((problem, digests))
        self._agree(name, [rank_problem for rank_problem, _ in reports])
        if rank == 0:
            try:
                all_digests = {file: digest for _, rank_digests in reports for file, digest in rank_digests.items()}
                self.store.write(partial, MANIFEST, Manifest(format=FORMAT, files=all_digests))
                for abandoned in self._abandoned:
                    self.store.withdraw(abandoned)
                self.store.finalize(partial, name)
                self._abandoned = []
                self._prune(state.best)
            except Exception as error:  # the other ranks wait to learn of it
                problem = str(error)
        self._agree(name, self._group.gather_world(problem))
        return state.best

    def _prune(self, best: Best | None) -> None:
        """Remove checkpoints that are not to be kept, and partial ones of killed processes."""
        keep = set(self.store.names()[: self.section.keep_last])
        if best is not None:
            keep.add(name_of(best[1]))
        for name in (*self.store.entries(), *self.store.entries(".partial")):
            if name not in keep:
                self.store.remove(name)

    def _agree(self, name: str, problems: list[str | None]) -> None:
        """Raise on every rank if one has a problem, after removing the partial files, since the disk may be full."""
        first_problem = next((problem for problem in problems if problem is not None), None)
        if first_problem is None:
            return
        if self.ranks.fabric.is_global_zero:
            with suppress(Exception):  # whatever a file system's client raises: the first problem counts
                self.store.remove(f"{name}.partial")
        names = self.store.names()
        newest = (
            f"the newest complete checkpoint is {self.store.url}/{names[0]}" if names else "there is none before it"
        )
        raise CheckpointError(f"checkpoint {self.store.url}/{name} cannot be written: {first_problem}; {newest}")


class Saver:
    """Decides after each step whether a checkpoint is due, and handles those that cannot be written.

    Args:
        writer: Writer of the checkpoints.
        note: Function that shows a warning.
        step: The last step that has a checkpoint.
    """

    def __init__(self, writer: Writer, note: Callable[[str], None], step: int = 0) -> None:
        self.writer = writer
        self.note = note
        self.saved = step
        self.failures = 0
        """Consecutive checkpoints that could not be written."""
        self.on_saved: Callable[[str], None] | None = None
        """Called on all ranks with the name of a checkpoint that is complete."""
        self._metric_exists = False
        """Whether some step had the metric that `save.keep_best` names."""

    def after(
        self, step: int, metrics: dict[str, float], content: Callable[[Best | None], tuple[dict[str, Tensor], RunState]]
    ) -> dict[str, float]:
        """Start a checkpoint if one is due or the step is the best so far; all ranks must call this.

        A checkpoint that is due is skipped while the last one is still being written; the best waits for it.

        Args:
            step: The step that is done.
            metrics: The step's metrics, the same on every rank.
            content: Function that returns the tensors and state to save, given the best checkpoint.

        Returns:
            Metrics of the checkpoint: whether it was skipped or failed.

        Raises:
            CheckpointError: Too many checkpoints in a row cannot be written.
            RecipeError: No metric has the name of `save.keep_best`.
        """
        section = self.writer.section
        key = section.keep_best
        self._require(key, metrics)
        failed = False
        # agreed: all ranks have the recipe's callbacks, and begin and end to write together
        if self.on_saved is not None and self.writer.writing is not None and not self.writer.busy():
            failed = not self._attempt(self._finish)
        value = metrics.get(key) if key is not None else None
        due = section.every > 0 and step % section.every == 0
        better = self._better(value)
        if not due and not better:
            return {"checkpoint/failed": 1.0} if failed else {}
        if not better and self.writer.busy():
            return {"checkpoint/skipped": 1.0}
        failed = not self._attempt(self._finish) or failed
        better = self._better(value)  # the checkpoint that was being written may be better still
        if due or better:
            best = (value, step) if value is not None and better else self.writer.best
            if self._attempt(lambda: self.writer.save(*content(best))):
                self.saved = step
            else:
                failed = True
        return {"checkpoint/failed": 1.0} if failed else {}

    def end(self, step: int, content: Callable[[Best | None], tuple[dict[str, Tensor], RunState]]) -> None:
        """Save the run's last step, and wait until all is written; all ranks must call this.

        Raises:
            CheckpointError: The last step has no checkpoint.
        """
        finished = self._attempt(self._finish)
        # agreed: all ranks count the same steps, and a checkpoint is complete for all of them or for none
        if step > 0 and (not finished or step != self.saved):
            self.writer.save(*content(self.writer.best))
            self._finish()
            self.saved = step

    def _require(self, key: str | None, metrics: Mapping[str, float]) -> None:
        """Refuse a metric that the first step with scores, or the first validation, does not have."""
        self._metric_exists = self._metric_exists or key is None or key in metrics
        scored = "reward/mean"
        if str(key).startswith("validation/"):  # of completions, some of which may fail, or of held-out losses alone
            scored = "validation/reward" if "validation/failed" in metrics else "validation/loss"
        if not self._metric_exists and scored in metrics:
            raise RecipeError(f"save.keep_best is {key!r}, expected a metric of a step: {', '.join(sorted(metrics))}")

    def _better(self, value: float | None) -> bool:
        best, metric = self.writer.best, self.writer.section.keep_best or ""
        if value is None or not isfinite(value):
            better = False
        else:
            better = best is None or merit(metric, value) > merit(metric, best[0])
        return self.writer.ranks.any(better)

    def _finish(self) -> bool:
        """Wait until the checkpoint that is being written is complete; return whether there was one."""
        name = self.writer.writing
        finished = self.writer.finish()
        # agreed: a checkpoint is complete for all ranks or for none
        if finished and name is not None and self.on_saved is not None:
            self.on_saved(name)
        return finished

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Run a function that may fail; return whether it succeeded."""
        try:
            if work():
                self.failures = 0
        except CheckpointError as error:
            self.failures += 1
            self.note(f"warning: {error}")
            if self.failures >= MAX_FAILURES:
                raise
            return False
        return True
