"""From a checked recipe to a finished run: its folder, its lock, the checkpoint that it goes on from, its processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.data.data import Data, load_data
from rlkit.distributed.ranks import Ranks
from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.checkpoint_schema import MANIFEST
from rlkit.models.checkpoints import CheckpointRef, newest_intact, open_checkpoint
from rlkit.models.store import Store
from rlkit.recipe import Recipe
from rlkit.registry import Registry
from rlkit.run.checkpoint.resume import compare
from rlkit.run.fit import fit
from rlkit.run.folder import RunFolder, default_folder, output_path
from rlkit.run.lock import Lock
from rlkit.run.outcome import Outcome, Replay, Reporter
from rlkit.text import safe
from rlkit.train.setup import fabric_for

LAUNCHER = "RLKIT_LAUNCHER_PID"
"""The environment variable by which the ranks that rank 0 starts know its process id."""


@dataclass(frozen=True)
class Job:
    """A run that is asked for.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        yaml: The same, every option filled in: what the run folder keeps.
        registry: The parts that can be named.
        name: Begins the name of the default run folder.
        out: The run folder; None for the resumed run's, or a new one.
        resume: A checkpoint, a run folder, or `auto` for the newest checkpoint in `out`, if any; None for a new run.
        force: Resume although the recipe has changed what is learned.
        replay: Which steps of the resumed run to make again.
    """

    recipe: Recipe
    yaml: str
    registry: Registry
    name: str
    out: str | None = None
    resume: str | None = None
    force: bool = False
    replay: Replay | None = None

    @property
    def folder(self) -> Path:
        """The run folder: as asked for, that of the checkpoint, or a new one."""
        home = None if self.resume in (None, "auto") else home_of(str(self.resume))
        return output_path(self.out) if self.out is not None else home or default_folder(self.name)

    def store(self, folder: Path) -> Store:
        """Return where the run's checkpoints are."""
        return Store(self.recipe.save.folder or str(folder / "checkpoints"))


def launch(job: Job, reporter: Callable[[bool], Reporter]) -> tuple[Outcome, Path]:
    """Load the data, start the processes, and train; return how the run ended, and its folder.

    Args:
        job: What to run.
        reporter: Makes what shows the run; called with whether this process is rank 0.

    Raises:
        RecipeError: The data, the folder or the checkpoint is not what the job needs.
        RlkitError: The run failed.
    """
    if job.resume == "auto" and job.out is None:
        raise RecipeError("--resume auto needs --out: the run folder whose newest checkpoint it takes")
    if job.out is not None:
        output_path(job.out)
    _check_store(job.recipe)
    data = load_data(job.recipe)
    fabric = fabric_for(job.recipe)
    try:
        _start_ranks(fabric)
        return _train(job, data, fabric, reporter(fabric.is_global_zero))
    except KeyboardInterrupt:
        for process in getattr(fabric.strategy.launcher, "procs", ()):  # ranks that wait for this one
            process.terminate()
        raise


def _start_ranks(fabric: Fabric) -> None:
    """Start the other ranks, or join them; a rank exits if the process that started it is gone before all have joined.

    Without this, it would wait for the others until `train.deadline`: rank 0 may be killed, or interrupted before it
    has noted whom it started.
    """
    launcher = None if os.environ.get("LOCAL_RANK", "0") == "0" else os.environ.get(LAUNCHER)
    joined = threading.Event()
    if launcher is None:
        os.environ[LAUNCHER] = str(os.getpid())
    else:
        threading.Thread(target=_exit_without, args=(launcher, joined), daemon=True, name="rlkit-launcher").start()
    try:
        fabric.launch()
    finally:
        joined.set()
        os.environ.pop(LAUNCHER, None)


def _exit_without(launcher: str, joined: threading.Event) -> None:
    while str(os.getppid()) == launcher:
        if joined.wait(1.0):
            return
    try:
        print(f"error: process {safe(launcher)}, which started this rank, is gone", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def home_of(place: str) -> Path | None:
    """Return the run folder that a place to resume from is, or lies in; what a checkpoint itself holds is no recipe."""
    folders = (Path(place), *Path(place).parents[:2])
    return next((f for f in folders if os.path.isfile(f / "recipe.yaml") and not os.path.exists(f / MANIFEST)), None)


def _check_store(recipe: Recipe) -> None:
    if recipe.save.folder is not None:
        try:
            Store(recipe.save.folder)
        except CheckpointError as error:
            raise RecipeError(f"save.folder: {error}") from error


def _train(job: Job, data: Data, fabric: Fabric, reporter: Reporter) -> tuple[Outcome, Path]:
    """Open the run folder, which no other process may use meanwhile, and train."""
    ranks = Ranks(fabric)
    path = Path(ranks.same(str(job.folder)))
    lock = ranks.on_first(lambda: Lock(path) if os.path.isdir(path) else None)
    try:
        resumed = None if job.resume is None else _find(job, path, ranks, reporter)
        lock = ranks.on_first(lambda: lock or Lock(path))
        if lock is not None and lock.warning is not None:
            reporter.note(f"warning: {lock.warning}")
        folder = RunFolder(path, job.yaml, fabric.global_rank)
        ranks.on_first(lambda: _create(folder, job, resumed))
        reporter.note(f"run folder: {folder.path}")
        return fit(job.recipe, data, fabric, folder, reporter, resumed=resumed, replay=job.replay), path
    finally:
        if lock is not None:
            lock.release()


def _create(folder: RunFolder, job: Job, resumed: CheckpointRef | None) -> None:
    """Create the run folder, unless checkpoints of another run would mix with this one's."""
    auto, store = job.resume == "auto", job.store(folder.path)
    if not auto and (resumed is None or resumed.store.root != store.root) and store.names():
        raise RecipeError(
            f"{store.url} holds another run; choose a new folder, or go on from its {store.names()[0]} with "
            "--resume auto"
        )
    folder.create(job.registry, resumed is not None or auto)


def _find(job: Job, folder: Path, ranks: Ranks, reporter: Reporter) -> CheckpointRef | None:
    """Return the checkpoint to go on from, its files verified; show in what the recipe differs."""
    if job.resume is None or job.resume == "auto":
        found, damaged = newest_intact(job.store(folder), ranks)
        for problem in damaged:
            reporter.note(f"warning: {problem}; the one before is taken")
    else:
        found = open_checkpoint(job.resume, ranks)
    if found is not None:
        for line in compare(found, job.yaml, job.force):
            reporter.note(f"changed: {line}")
    return found
