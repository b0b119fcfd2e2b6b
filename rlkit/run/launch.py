"""The launch of a run from a checked recipe: folder, lock, checkpoint to resume from, processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric import Fabric

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.base.text import safe
from rlkit.data.data import Data, load_data
from rlkit.distributed.ranks import Ranks
from rlkit.models.checkpoints import CheckpointRef, newest_intact, open_checkpoint
from rlkit.models.store import Store
from rlkit.recipe import Recipe
from rlkit.records.folder import default_folder, home_of, output_path
from rlkit.registry import Registry
from rlkit.run.checkpoint.resume import compare
from rlkit.run.fit import fit
from rlkit.run.folder import RunFolder
from rlkit.run.lock import Lock
from rlkit.run.outcome import Outcome, Replay, Reporter
from rlkit.run.record import RunRecord
from rlkit.train.setup import fabric_for

LAUNCHER = "RLKIT_LAUNCHER_PID"
"""The environment variable that holds rank 0's process id for the ranks that it starts."""


@dataclass(frozen=True)
class Job:
    """A run to launch.

    Args:
        recipe: The recipe, checked by `rlkit.recipe.check`.
        yaml: Text of the recipe with every option filled in, for the run folder.
        registry: The parts that recipes can name.
        name: Prefix of the default run folder's name.
        out: The run folder; None for that of the resumed run, or a new one.
        resume: A checkpoint, a run folder, or `auto` for the newest checkpoint in `out`, if any; None for a new run.
        force: Whether to resume although the recipe has changed in a way that alters the training.
        replay: The steps of the resumed run to make again.
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
        """The run folder: `out`, that of the checkpoint, or a new one."""
        home = None if self.resume in (None, "auto") else home_of(str(self.resume))
        return output_path(self.out) if self.out is not None else home or default_folder(self.name)

    def store(self, folder: Path) -> Store:
        """Return the store of the run's checkpoints."""
        return Store(self.recipe.save.folder or str(folder / "checkpoints"))


def launch(job: Job, reporter: Callable[[bool], Reporter]) -> tuple[Outcome, Path]:
    """Load the data, start the processes, and train; return how the run ended, and its folder.

    Args:
        job: The run to launch.
        reporter: Creates the reporter; called with whether this process is rank 0.

    Raises:
        RecipeError: The data, the folder or the checkpoint does not fit the job.
        RlkitError: The run failed.
    """
    if job.resume == "auto" and job.out is None:
        raise RecipeError("--resume auto needs --out: the run folder with the checkpoint to resume from")
    if job.out is not None:
        output_path(job.out)
    if job.recipe.save.folder is not None:
        try:
            Store(job.recipe.save.folder)
        except CheckpointError as error:
            raise RecipeError(f"save.folder: {error}") from error
    data = load_data(job.recipe)
    fabric = fabric_for(job.recipe)
    try:
        _start_ranks(fabric)
        return _train(job, data, fabric, reporter(fabric.is_global_zero))
    except KeyboardInterrupt:
        for process in getattr(fabric.strategy.launcher, "procs", ()):  # ranks that wait for this process
            process.terminate()
        raise


def _start_ranks(fabric: Fabric) -> None:
    """Start the other ranks, or join them; a rank exits if its launcher dies before all have joined.

    Otherwise it would wait for its peers until `train.deadline`: rank 0 may be killed, or be interrupted before it has
    recorded which processes it started.
    """
    launcher = None if os.environ.get("LOCAL_RANK", "0") == "0" else os.environ.get(LAUNCHER)
    joined = threading.Event()
    if launcher is None:
        os.environ[LAUNCHER] = str(os.getpid())
    else:
        threading.Thread(
            target=_exit_without_launcher, args=(launcher, joined), daemon=True, name="rlkit-launcher"
        ).start()
    try:
        fabric.launch()
    finally:
        joined.set()
        os.environ.pop(LAUNCHER, None)


def _exit_without_launcher(launcher: str, joined: threading.Event) -> None:
    while str(os.getppid()) == launcher:
        if joined.wait(1.0):
            return
    try:
        print(f"error: process {safe(launcher)}, which started this rank, has ended", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _train(job: Job, data: Data, fabric: Fabric, reporter: Reporter) -> tuple[Outcome, Path]:
    """Lock the run folder for this process, and train."""
    ranks = Ranks(fabric)
    path = Path(ranks.same(str(job.folder)))
    lock = ranks.on_first(lambda: Lock(path) if os.path.isdir(path) else None)
    try:
        resumed = None if job.resume is None else _checkpoint(job, path, ranks, reporter)
        lock = ranks.on_first(lambda: lock or Lock(path))
        if lock is not None and lock.warning is not None:
            reporter.note(f"warning: {lock.warning}")
        folder = RunFolder(path, job.yaml, fabric.global_rank)
        ranks.on_first(lambda: _create(folder, job, resumed, device_names(fabric)))
        reporter.note(f"run folder: {folder.path}")
        record = RunRecord(folder, reporter, fabric.is_global_zero)
        return fit(job.recipe, data, fabric, record, resumed=resumed, replay=job.replay), path
    finally:
        if lock is not None:
            lock.release()


def _create(folder: RunFolder, job: Job, resumed: CheckpointRef | None, devices: str) -> None:
    """Create the run folder, unless checkpoints of another run would mix with this one's."""
    store = job.store(folder.path)
    auto = job.resume == "auto"
    if not auto and (resumed is None or resumed.store.root != store.root) and store.names():
        raise RecipeError(
            f"{store.url} holds another run; choose a new folder, or continue from its {store.names()[0]} with "
            "--resume auto"
        )
    folder.create(job.registry, resumed is not None or auto, devices)


def device_names(fabric: Fabric) -> str:
    """Return the devices of all ranks in words, as if each rank had one as rank 0's."""
    if fabric.device.type == "cuda":
        return f"{fabric.world_size} x {torch.cuda.get_device_name(fabric.device)}"
    processes = f"{fabric.world_size} processes on " if fabric.world_size > 1 else ""
    return f"{processes}{fabric.device.type.upper()}, {os.cpu_count()} cores"


def _checkpoint(job: Job, folder: Path, ranks: Ranks, reporter: Reporter) -> CheckpointRef | None:
    """Return the verified checkpoint to resume from, and show how the recipe differs from its own."""
    if job.resume is None or job.resume == "auto":
        checkpoint, damaged = newest_intact(job.store(folder), ranks)
        for problem in damaged:
            reporter.note(f"warning: {problem}; the run resumes from the one before")
    else:
        checkpoint = open_checkpoint(ranks.from_first(lambda: _location(job, folder)), ranks)
    if checkpoint is not None:
        for line in compare(checkpoint, job.yaml, job.force):
            reporter.note(f"changed: {line}")
    return checkpoint


def _location(job: Job, folder: Path) -> str:
    """Return the folder of the checkpoints: `save.folder` if the run in `folder` goes on and has none itself."""
    resume, save_folder = str(job.resume), job.recipe.save.folder
    if save_folder is None or Path(resume) != folder or Store(f"{resume}/checkpoints").names():
        return resume
    return save_folder
