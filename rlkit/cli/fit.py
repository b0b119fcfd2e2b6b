"""`rlkit fit`: train a policy from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.cli.display import Display
from rlkit.cli.parsing.parser import Parsed, parse, split
from rlkit.distributed.ranks import Ranks
from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.store import MANIFEST, CheckpointRef, Store, newest_whole, open_checkpoint
from rlkit.run.checkpoint.resume import compare
from rlkit.run.fit import INTERRUPTED, fit
from rlkit.run.folder import RunFolder, default_folder
from rlkit.run.lock import Lock
from rlkit.run.session import Outcome
from rlkit.run.signals import raised
from rlkit.train.data import Data, load_data
from rlkit.train.run import fabric_for

OPTIONS = (
    ("--out", {"type": str, "help": "The run folder; default: runs/<recipe>-<time>, or the resumed run's."}),
    (
        "--resume",
        {
            "type": str,
            "help": "Go on from a checkpoint: its path, a run folder, or `auto` for the newest in --out, if any.",
        },
    ),
    ("--force", {"action": "store_true", "help": "Resume although the recipe has changed what is learned."}),
)


def run(argv: Sequence[str]) -> int:
    """Train; give the exit status."""
    with raised():
        parsed = parse("fit", _with_recipe(argv), OPTIONS)
        if parsed.options.resume == "auto" and parsed.options.out is None:
            raise RecipeError("--resume auto needs --out: the run folder whose newest checkpoint it takes")
        _check_store(parsed)
        data = load_data(parsed.recipe)
        fabric = fabric_for(parsed.recipe)
        try:
            fabric.launch()
            outcome = _train(parsed, data, fabric)
        except KeyboardInterrupt:
            for process in getattr(fabric.strategy.launcher, "procs", ()):  # ranks that wait for this one
                process.terminate()
            raise
    return INTERRUPTED if outcome.status == "interrupted" else 0


def _train(parsed: Parsed, data: Data, fabric: Fabric) -> Outcome:
    """Open the run folder, which no other process may use meanwhile, and train."""
    ranks, display = Ranks(fabric), Display(parsed.recipe.train.steps, quiet=not fabric.is_global_zero)
    path = Path(fabric.broadcast(_out(parsed)))
    lock = ranks.on_first(lambda: Lock(path) if path.is_dir() else None)
    try:
        resumed = None if parsed.options.resume is None else _find(parsed, path, ranks, display)
        lock = ranks.on_first(lambda: lock or Lock(path))
        if lock is not None and lock.warning is not None:
            display.note(f"warning: {lock.warning}")
        folder = RunFolder(path, parsed.yaml, fabric.global_rank)
        ranks.on_first(lambda: _create(folder, parsed, resumed))
        display.note(f"run folder: {folder.path}")
        return fit(parsed.recipe, data, fabric, folder, display, resumed=resumed)
    finally:
        if lock is not None:
            lock.release()


def _with_recipe(argv: Sequence[str]) -> list[str]:
    """Where a run folder is resumed without a recipe, take its own."""
    given = split(argv, OPTIONS)
    if given.options.resume is None or given.recipes:
        return list(argv)
    home = home_of(given.options.resume)
    return list(argv) if home is None else ["--recipe", str(home / "recipe.yaml"), *argv]


def home_of(place: str) -> Path | None:
    """Return the run folder that a place to resume from is, or lies in; what a checkpoint itself holds is no recipe."""
    folders = (Path(place), *Path(place).parents[:2])
    return next((f for f in folders if (f / "recipe.yaml").is_file() and not (f / MANIFEST).exists()), None)


def _check_store(parsed: Parsed) -> None:
    if parsed.recipe.save.folder is not None:
        try:
            Store(parsed.recipe.save.folder)
        except CheckpointError as error:
            raise RecipeError(f"save.folder: {error}") from error


def _store(parsed: Parsed, folder: Path) -> Store:
    return Store(parsed.recipe.save.folder or str(folder / "checkpoints"))


def _create(folder: RunFolder, parsed: Parsed, resumed: CheckpointRef | None) -> None:
    """Create the run folder, unless checkpoints of another run would mix with this one's."""
    auto, store = parsed.options.resume == "auto", _store(parsed, folder.path)
    if not auto and (resumed is None or resumed.store.root != store.root) and store.names():
        raise RecipeError(
            f"{store.url} holds another run; choose a new folder, or go on from its {store.names()[0]} with "
            "--resume auto"
        )
    folder.create(parsed.registry, resumed is not None or auto)


def _find(parsed: Parsed, folder: Path, ranks: Ranks, display: Display) -> CheckpointRef | None:
    """Return the checkpoint to go on from, its files proved; say in what the recipe differs."""
    options = parsed.options
    if options.resume == "auto":
        found, damaged = newest_whole(_store(parsed, folder), ranks)
        for problem in damaged:
            display.note(f"warning: {problem}; the one before is taken")
    else:
        found = open_checkpoint(options.resume, ranks)
    if found is not None:
        for line in compare(found, parsed.yaml, options.force):
            display.note(f"changed: {line}")
    return found


def _out(parsed: Parsed) -> str:
    """Return the run folder: as said, that of the checkpoint, or a new one."""
    resume = parsed.options.resume
    home = None if resume in (None, "auto") else home_of(resume)
    return str(parsed.options.out or home or default_folder(parsed.name))
