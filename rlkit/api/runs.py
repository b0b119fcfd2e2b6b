"""Runs that a verb makes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlkit.cli.display import Display
from rlkit.commands import Parsed
from rlkit.run.kept import KeptRollouts
from rlkit.run.launch import Job, launch
from rlkit.run.outcome import Replay

__all__ = ["Repeated", "repeat_steps"]


class Repeated(NamedTuple):
    """The outcome of steps that were made again: the status, the run folder, and whether this is rank 0."""

    status: str
    folder: Path
    is_first: bool


def repeat_steps(parsed: Parsed, last: int, out: Path, resume: str | None, kept: Path | None = None) -> Repeated:
    """Make steps of a run again, from a checkpoint or the start, and show them.

    Args:
        parsed: The run's recipe.
        last: The last step to make.
        out: The run folder to write.
        resume: The checkpoint before the steps; None to begin with step 1.
        kept: The run folder whose kept rollouts are learned from; None to sample.

    Raises:
        RecipeError: The data, the checkpoint or the kept rollouts do not fit the recipe.
        RlkitError: The run failed.
    """
    replay = Replay(last, None if kept is None else KeptRollouts(kept))
    job = Job(parsed.recipe, parsed.yaml, parsed.registry, parsed.name, str(out), resume, True, replay)
    firsts = []

    def display(first: bool) -> Display:
        firsts.append(first)
        return Display(parsed.recipe.train.total_steps, samples=0, quiet=not first)

    outcome, folder = launch(job, display)
    return Repeated(outcome.status, folder, all(firsts))
