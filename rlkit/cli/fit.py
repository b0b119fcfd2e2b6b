"""`rlkit fit`: train a policy from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.cli.display import Display
from rlkit.cli.parser import Parsed, parse
from rlkit.errors import CheckpointError, RecipeError
from rlkit.loop.checkpoint import Store
from rlkit.loop.data import load_data
from rlkit.loop.fit import INTERRUPTED, fit
from rlkit.loop.folder import RunFolder, default_folder
from rlkit.loop.resume import Found, compare, newest_whole, open_checkpoint
from rlkit.models.parallel import make_fabric
from rlkit.models.ranks import Ranks

OPTIONS = (
    ("--out", {"type": str, "help": "The run folder; default: runs/<recipe>-<time>, or the resumed run's."}),
    (
        "--resume",
        {
            "type": str,
            "help": "Go on from a checkpoint: its path, a run folder, or `auto` for the newest in --out, if any.",
        },
    ),
    ("--force", {"action": "store_true", "help": "Resume although the recipe has changed what is learnt."}),
)


def run(argv: Sequence[str]) -> int:
    """Train; give the exit status."""
    parsed = parse("fit", _with_recipe(argv), OPTIONS)
    options = parsed.options
    if options.resume == "auto" and options.out is None:
        raise RecipeError("--resume auto needs --out: the run folder whose newest checkpoint it takes")
    data = load_data(parsed.recipe)
    fabric = make_fabric(parsed.recipe.fabric, parsed.recipe.train.deadline)
    fabric.launch()
    display = Display(parsed.recipe.train.steps, quiet=not fabric.is_global_zero)
    resumed = None if options.resume is None else _find(parsed, fabric, display)
    folder = RunFolder(Path(fabric.broadcast(_out(parsed, resumed))), parsed.yaml, fabric.global_rank)
    if fabric.is_global_zero:
        folder.create(parsed.registry, resumed is not None or options.resume == "auto")
    fabric.barrier()
    display.note(f"run folder: {folder.path}")
    outcome = fit(parsed.recipe, data, fabric, folder, display, resumed=resumed)
    return INTERRUPTED if outcome.status == "interrupted" else 0


def _with_recipe(argv: Sequence[str]) -> list[str]:
    """Where a run folder is resumed without a recipe, take its own."""
    places = [b for a, b in pairwise(argv) if a == "--resume"]
    places += [a.partition("=")[2] for a in argv if a.startswith("--resume=")]
    if not places or any(a.partition("=")[0] == "--recipe" for a in argv):
        return list(argv)
    for folder in (Path(places[0]), *Path(places[0]).parents[:2]):
        if (folder / "recipe.yaml").is_file():
            return ["--recipe", str(folder / "recipe.yaml"), *argv]
    return list(argv)


def _find(parsed: Parsed, fabric: Fabric, display: Display) -> Found | None:
    """Give the checkpoint to go on from, its files proved; say in what the recipe differs."""
    ranks, options = Ranks(fabric), parsed.options
    if options.resume == "auto":
        store = Store(parsed.recipe.save.folder or f"{options.out}/checkpoints")
        found, damaged = newest_whole(store, ranks)
        for problem in damaged:
            display.note(f"warning: {problem}; the one before is taken")
    else:
        found = open_checkpoint(options.resume)
        try:
            found.store.verify(found.name, ranks)
        except CheckpointError as error:
            other, _ = newest_whole(found.store, ranks)
            raise CheckpointError(f"{error}; {other.place if other else 'none'} is whole") from error
    if found is not None:
        for line in compare(found, parsed.yaml, options.force):
            display.note(f"changed: {line}")
    return found


def _out(parsed: Parsed, resumed: Found | None) -> str:
    """Give the run folder: as said, that of the checkpoint, or a new one."""
    if parsed.options.out is not None:
        return str(parsed.options.out)
    if resumed is not None:
        home = Path(resumed.store.root).parent
        if (home / "recipe.yaml").is_file():
            return str(home)
    return str(default_folder(parsed.name))
