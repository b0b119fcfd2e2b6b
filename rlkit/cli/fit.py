"""`rlkit fit`: train a policy from a recipe."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import INTERRUPTED, RecipeError
from rlkit.base.garbage import permanent
from rlkit.base.signals import raised
from rlkit.commands import ALLOW_CODE, Parsed, parse
from rlkit.interfaces.launcher import LaunchedRun, is_launched
from rlkit.recipe.credentials import withhold
from rlkit.recipe.parsing.reader import structured
from rlkit.registry import calling, require

OPTIONS = (
    ("--out", {"type": str, "help": "The run folder; default: runs/<recipe>-<time>, or the resumed run's."}),
    ("--resume", {"type": str, "help": "Go on from a checkpoint, a run folder, or `auto`: the newest in --out."}),
    ("--force", {"action": "store_true", "help": "Resume although the recipe has changed what is learned."}),
    ALLOW_CODE,
)


def run(argv: Sequence[str]) -> int:
    """Train; return the exit status."""
    with raised():
        parsed = parse("fit", argv, OPTIONS, trains=True, needs_files=True, run_of=_resumed)
        options, train = parsed.options, parsed.recipe.train
        with permanent():
            from rlkit.cli.display import Display
            from rlkit.run.launch import Job, launch
        job = Job(parsed.recipe, parsed.yaml, parsed.registry, parsed.name, options.out, options.resume, options.force)
        launcher = parsed.recipe.launcher
        if launcher is not None and not is_launched():
            from rlkit.interfaces import outputs

            launched_run = _launch_of(parsed, job.folder)
            with calling(launcher, "launch"):
                status = launcher.launch(launched_run)
            require(launcher, "launch", outputs.of_launcher(status))
            return status
        outcome, _ = launch(job, lambda first: Display(train.total_steps, parsed.recipe.log.samples, quiet=not first))
    return INTERRUPTED if outcome.status == "interrupted" else 0


def _launch_of(parsed: Parsed, folder: Path) -> LaunchedRun:
    """Return the command for a launcher: this one, with its recipes by absolute path, and without credentials.

    Scripts of jobs are kept, and others see command lines; the credentials are in the environment instead.

    Raises:
        RecipeError: The number of devices is not said, or they are indices.
    """
    line, fabric = parsed.line, parsed.recipe.fabric
    if not isinstance(fabric.devices, int):
        problem = f"fabric.devices is {fabric.devices!r} with a launcher, expected the number on each node"
        raise RecipeError(f"{problem}; set --fabric.devices and --fabric.num_nodes")
    words = [f"--recipe={os.path.abspath(name) if os.path.isfile(name) else name}" for name in line.recipes]
    values = dict(os.environ)
    for key, text in line.overrides:
        value = structured(text)
        withheld = withhold(value, values, key)  # with references for credentials, whose values are added to `values`
        plain_text = withheld if isinstance(withheld, str) else json.dumps(withheld, default=str)
        words.append(f"--{key}={text if withheld == value else plain_text}")
    os.environ.update(values)  # of the launcher, whose ranks inherit them
    resume = line.options.resume
    on_gpus = fabric.accelerator != "cpu"
    servers = parsed.recipe.engine.server_gpus
    return LaunchedRun(
        tuple(words),
        folder.resolve(),
        None if resume in (None, "auto") else resume,
        bool(line.options.force),
        fabric.num_nodes,
        fabric.devices,
        on_gpus,
        servers if on_gpus else (0,) * len(servers),
        () if parsed.recipe.placement is None else parsed.recipe.placement.gpus(),
    )


def _resumed(options: Namespace) -> Path | None:
    """Return the folder of the run that is resumed; None for a new run.

    Raises:
        RecipeError: There is none.
    """
    resume = options.resume
    if resume is None:
        return None
    from rlkit.base.files import nearby
    from rlkit.records.folder import home_of

    home = home_of(resume)
    if home is None and resume != "auto" and "://" not in resume:
        hint = "" if os.path.exists(resume) else f"; {nearby(Path(resume))}"
        raise RecipeError(f"--resume is {resume!r}, expected a run folder or one of its checkpoints{hint}")
    return home
