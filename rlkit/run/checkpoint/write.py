"""Checkpoints: written beside the run by a thread, whole or not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isfinite

from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.distributed.tensor_store import save_tensors
from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.checkpoint_schema import FORMAT, MANIFEST, STATE, Manifest, RunState
from rlkit.models.store import Store, name_of, step_of
from rlkit.models.tensor_files import TensorWriter, file_of
from rlkit.sections import Save

Best = tuple[float, int]
"""A value of `save.keep_best` and the step whose checkpoint has it."""

IN_A_ROW = 3
"""So many checkpoints that cannot be written, one after another, end the run."""


class Writer:
    """Writes checkpoints into a store while the run goes on; a step waits for no more than a copy to host memory.

    Checkpoints of later steps than `step` belong to a run that is not gone on with. They stay until the first one of
    this run is written, and are withdrawn right before it gets its name, so that the newest is always this run's own.

    Args:
        store: Where to.
        section: The recipe's.
        ranks: All take part.
        step: Where the run starts.
        best: Of the checkpoints that are there.
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

    @property
    def busy(self) -> bool:
        """Whether some rank is still writing; all ranks must ask."""
        return self.ranks.any(self._writing is not None and not self._writing.done())

    def save(self, tensors: dict[str, Tensor], state: RunState) -> None:
        """Copy the tensors and start writing; `finish` must have been called since the last time.

        Raises:
            CheckpointError: Some rank could not start.
        """
        name, copied, problem = name_of(state.step), {}, None
        try:
            if self.ranks.fabric.is_global_zero:
                self.store.remove(f"{name}.partial")
                self.store.fs.makedirs(self.store.path(f"{name}.partial"), exist_ok=True)
            copied = BlockingAsyncStager().stage(tensors)
        except (OSError, MemoryError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._agree(name, self.ranks.gather_world(problem))
        self._writing, self.writing = self._thread.submit(self._write, copied, state), name

    def finish(self) -> bool:
        """Wait until all is written; return whether there was anything.

        Raises:
            CheckpointError: It could not be; the message names the newest whole checkpoint.
        """
        if self._writing is None:
            return False
        writing, self._writing, self.writing = self._writing, None, None
        self.best = writing.result()
        return True

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, tensors: dict[str, Tensor], state: RunState) -> Best | None:
        """Write the tensors and the checksums, and rename the checkpoint; return the best one afterwards."""
        name, rank = name_of(state.step), self.ranks.fabric.global_rank
        partial = f"{name}.partial"
        digests: dict[str, str] = {}
        problem: str | None = None
        try:
            writer = TensorWriter(self.store.fs, self.store.path(partial))
            save_tensors(tensors, writer, self._group.group)
            own = [file_of(rank)] if self.store.fs.exists(self.store.path(partial, file_of(rank))) else []
            if rank == 0:
                self.store.write(partial, STATE, state)
                own.append(STATE)
            digests = {file: self.store.digest(partial, file) for file in own}
        except Exception as error:  # the other ranks must learn of whatever it was
            problem = str(error)
        everyone = self._group.gather_world((problem, digests))
        self._agree(name, [found for found, _ in everyone])
        if rank == 0:
            try:
                files = {file: digest for _, part in everyone for file, digest in part.items()}
                self.store.write(partial, MANIFEST, Manifest(format=FORMAT, files=files))
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
        """Remove what need not stay, and what processes that were killed have left behind."""
        keep = set(self.store.names()[: self.section.keep_last])
        if best is not None:
            keep.add(name_of(best[1]))
        for name in (*self.store.entries(), *self.store.entries(".partial")):
            if name not in keep:
                self.store.remove(name)

    def _agree(self, name: str, problems: list[str | None]) -> None:
        """Raise on every rank where one has a problem; what was written is removed, since the disk may be full."""
        found = [problem for problem in problems if problem is not None]
        if found:
            if self.ranks.fabric.is_global_zero:
                with suppress(Exception):  # whatever a file system's client raises: the first problem is what counts
                    self.store.remove(f"{name}.partial")
            names = self.store.names()
            last = f"the last whole one is {self.store.url}/{names[0]}" if names else "there is none before it"
            raise CheckpointError(f"checkpoint {self.store.url}/{name} cannot be written: {found[0]}; {last}")


class Saver:
    """Decides after each step whether a checkpoint is due, and what becomes of one that cannot be written.

    Args:
        writer: Writes them.
        note: Shows a warning.
        step: The last step that has a checkpoint.
    """

    def __init__(self, writer: Writer, note: Callable[[str], None], step: int = 0) -> None:
        self.writer = writer
        self.note = note
        self.saved = step
        self.failed = 0
        """Checkpoints that could not be written since the last one that could."""
        self.on_saved: Callable[[str], None] | None = None
        """Called on all ranks with the name of a checkpoint that is whole."""
        self.found = False
        """Whether some step had the metric that `save.keep_best` names."""

    def after(
        self, step: int, metrics: dict[str, float], content: Callable[[Best | None], tuple[dict[str, Tensor], RunState]]
    ) -> dict[str, float]:
        """Start a checkpoint where one is due or the step is the best so far; all ranks must call this.

        One that is due is skipped while the one before is still being written; the best is waited for.

        Args:
            step: The step that is done.
            metrics: The step's, the same on every rank.
            content: Returns what to save; it gets which checkpoint will be the best.

        Returns:
            What became of it, as metrics.

        Raises:
            CheckpointError: It is one failure too many.
            RecipeError: No metric has the name of `save.keep_best`.
        """
        every, key = self.writer.section.every, self.writer.section.keep_best
        self._require(key, metrics)
        failed = False
        # agreed: all ranks have the recipe's callbacks, and begin and end to write together
        if self.on_saved is not None and self.writer.writing is not None and not self.writer.busy:
            failed = not self._attempt(self._finish)
        value = metrics.get(key) if key is not None else None
        due = every > 0 and step % every == 0
        better = self._better(value)
        if not due and not better:  # agreed: all ranks count the same steps
            return {"checkpoint/failed": 1.0} if failed else {}
        # agreed: `better` is
        if not better and self.writer.busy:
            return {"checkpoint/skipped": 1.0}
        failed = not self._attempt(self._finish) or failed
        better = self._better(value)  # what was being written may be better still
        if due or better:
            best = (value, step) if value is not None and better else self.writer.best
            if self._attempt(lambda: self.writer.save(*content(best))):
                self.saved = step
            else:
                failed = True
        return {"checkpoint/failed": 1.0} if failed else {}

    def end(self, step: int, content: Callable[[Best | None], tuple[dict[str, Tensor], RunState]]) -> None:
        """Wait until all is written, the run's last step included; all ranks must call this.

        Raises:
            CheckpointError: The last step has no checkpoint.
        """
        written = self._attempt(self._finish)
        # agreed: all ranks count the same steps, and a checkpoint is whole for all of them or for none
        if step > 0 and (not written or step != self.saved):
            self.writer.save(*content(self.writer.best))
            self._finish()
            self.saved = step

    def _require(self, key: str | None, metrics: Mapping[str, float]) -> None:
        """Refuse a name that the first step with scores, or the first validation, does not have among its metrics."""
        self.found = self.found or key is None or key in metrics
        scored = "validation/reward" if str(key).startswith("validation/") else "reward/mean"
        if not self.found and scored in metrics:
            raise RecipeError(f"save.keep_best is {key!r}, expected a metric of a step: {', '.join(sorted(metrics))}")

    def _better(self, value: float | None) -> bool:
        best = self.writer.best
        mine = value is not None and isfinite(value) and (best is None or value > best[0])
        return self.writer.ranks.any(mine)

    def _finish(self) -> bool:
        """Wait until a checkpoint that is being written is whole; return whether there was one."""
        name = self.writer.writing
        written = self.writer.finish()
        # agreed: a checkpoint is whole for all ranks or for none
        if written and name is not None and self.on_saved is not None:
            self.on_saved(name)
        return written

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Do something that may fail; return whether it did not."""
        try:
            if work():
                self.failed = 0
        except CheckpointError as error:
            self.failed += 1
            self.note(f"warning: {error}")
            if self.failed >= IN_A_ROW:
                raise
            return False
        return True
