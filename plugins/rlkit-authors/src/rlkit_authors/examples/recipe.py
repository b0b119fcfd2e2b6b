"""Recipes that are found by name: `rlkit fit --recipe twelves`, from the file `twelves.yaml` in the folder.

    [project.entry-points.rlkit]
    twelves = "rlkit_twelves"

The folder belongs into the wheel, so it is inside of the package. `rlkit recipe list` prints each recipe's first line.
"""

from __future__ import annotations

from pathlib import Path

from rlkit.hooks import hookimpl


@hookimpl
def rlkit_recipes() -> Path:
    """Return the folder of the recipes."""
    return Path(__file__).parent / "recipes"
