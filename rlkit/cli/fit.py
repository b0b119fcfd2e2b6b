"""`rlkit fit`: train a policy from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.cli.display import Display
from rlkit.cli.parser import parse
from rlkit.loop.data import load_data
from rlkit.loop.fit import fit
from rlkit.loop.folder import RunFolder, default_folder

OUT = ("--out", {"type": str, "help": "The run folder; default: runs/<recipe>-<time>."})


def run(argv: Sequence[str]) -> int:
    """Train; give the exit status."""
    parsed = parse("fit", argv, [OUT])
    data = load_data(parsed.recipe)
    fabric = Fabric(**parsed.recipe.fabric)
    fabric.launch()
    out = parsed.options.out or str(default_folder(parsed.name))
    folder = RunFolder(Path(fabric.broadcast(out)), fabric.global_rank)
    if fabric.is_global_zero:
        folder.create(parsed.yaml, parsed.registry)
    fabric.barrier()
    display = Display(parsed.recipe.train.steps, quiet=not fabric.is_global_zero)
    display.note(f"run folder: {folder.path}")
    outcome = fit(parsed.recipe, data, fabric, folder, display)
    return 130 if outcome.status == "interrupted" else 0
