"""`rlkit replay RUN --step N`: make a step of a run again, and compare it with what it was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlkit_engine_torch import TorchEngine
from rlkit_report.comparison import compare, lines, recipe_of

from rlkit.api.runs import Repeated, repeat_steps
from rlkit.base.errors import INTERRUPTED, RecipeError
from rlkit.base.signals import raised
from rlkit.base.terminal import echo
from rlkit.commands import ALLOW_CODE, Parsed, parse, with_recipe_of
from rlkit.engines import Recorded
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.runtime import Runtime
from rlkit.models.config import load_config
from rlkit.models.store import Store, name_of, step_of
from rlkit.models.vision import reads_pictures
from rlkit.records.folder import default_folder, folder_of, output_path
from rlkit.records.lines import step_metrics

USAGE = """usage: rlkit replay RUN --step N [--phase learn] [--out FOLDER] [--allow-code] [--SECTION.OPTION=VALUE ...]
    makes a step of a run again, from the checkpoint before it and with all steps between, and compares metrics,
    answers and tensors with the run's: with TorchEngine on a CPU they are the same bit for bit
    --phase learn   learn from the rollouts that the run has kept, instead of sampling: for engines that sample
                    otherwise each time, and to try another loss or learning rate on the same answers
    --out FOLDER    where the result is kept, as a run folder with a checkpoint; default: runs/<run>-step-<N>-<time>
    --allow-code    run the code and use the addresses that the run's recipe names, if you trust the folder
    --SECTION.OPTION=VALUE  changes the recipe: what would the step have been?
    exit status: 0 if all is the same, 1 if something differs
"""

OPTIONS: tuple[tuple[str, dict[str, object]], ...] = (
    ("--step", {"type": str, "help": "The step, from 1."}),
    ("--phase", {"type": str, "help": "`learn`: from the rollouts that the run has kept."}),
    ("--out", {"type": str, "help": "Where the result is kept; default: runs/<run>-step-<N>-<time>."}),
    ALLOW_CODE,
)

STEP_ALONE = (
    "--validation=null", "--callbacks=[]", "--log.loggers=[]", "--save.keep_best=null",
    "--save.folder=null",
)  # fmt: skip
"""What a step that is made again does without."""

OTHERWISE = ("validation/", "imbalance/", "filter/", "replay/", "staleness/")
"""Metrics that validations add, and those of sampling, for learning alone."""


REPLAYED = "router/differs"
"""The metric of runs that replay the experts of their engine."""


class KeptEngine(TorchEngine):
    """Stands for the engine that sampled the kept rollouts, whose fields it declares; only checks sample from it.

    Args:
        engine: That of the recipe.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self.fills, self.reserved = engine.fills, engine.reserved

    def bind(self, runtime: Runtime) -> None:
        routers, self.routers = self.routers, None  # no request asks for experts
        super().bind(runtime)
        self.routers = routers


def run(argv: Sequence[str]) -> int:
    """Make a step of a run again; return the exit status: 1 if it differs."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    with raised():
        if argv[0].startswith("-"):
            raise RecipeError(f"the first argument is {argv[0]!r}, expected a run folder: rlkit replay RUN --step N")
        home = folder_of(argv[0])
        parsed = parse("replay", [*with_recipe_of(home, argv[1:]), *STEP_ALONE], OPTIONS, trains=True)
        repeated = _repeat(home, parsed)
        if repeated.status == "interrupted":
            return INTERRUPTED
        if not repeated.is_first:
            return 0
        comparison = compare(home, repeated.folder, OTHERWISE)
        for line in lines(comparison):
            echo(line)
    return 1 if comparison.step or comparison.answer or comparison.tensor else 0


def _repeat(home: Path, parsed: Parsed) -> Repeated:
    """Make the step again from the newest checkpoint before it.

    Raises:
        RecipeError: The run has no such step, or nothing from which it can be reached.
    """
    if parsed.options.phase not in (None, "learn"):
        raise RecipeError(f"--phase is {parsed.options.phase!r}, expected learn, or none for the whole step")
    number, learn = _number(parsed.options.step), parsed.options.phase == "learn"
    if learn and reads_pictures(load_config(parsed.recipe.model)):
        raise RecipeError(
            "--phase learn reads the texts of rollouts alone, and model.path reads pictures; leave out --phase, and "
            "the step is sampled again"
        )
    if parsed.recipe.rollout.max_staleness and not learn:
        raise RecipeError(
            "the run has sampled ahead of its steps (rollout.max_staleness), so that one alone cannot be sampled "
            "again; add --phase learn"
        )
    steps = [line["step"] for line in step_metrics(home)]
    if number not in steps:
        expected = f"one from {steps[0]} to {steps[-1]}" if steps else "a run with steps"
        raise RecipeError(f"--step is {parsed.options.step or 'missing'}, expected {expected}, as {home} has them")
    store = Store(str(recipe_of(home).get("save.folder", home / "checkpoints")))
    start = max((step for step in map(step_of, store.names()) if step < number), default=0)
    if not start and steps[0] > 1:
        raise RecipeError(f"{home} begins with step {steps[0]} and has no checkpoint before step {number}")
    if learn and parsed.recipe.train.router_replay == "auto":  # which the kept rollouts have decided
        parsed.recipe.train.router_replay = any(REPLAYED in line for line in step_metrics(home))
    if learn and not isinstance(parsed.recipe.rollout.engine, TorchEngine | Recorded):
        parsed.recipe.rollout.engine = KeptEngine(parsed.recipe.rollout.engine)
    resume = f"{store.url}/{name_of(start)}" if start else None
    out_option = parsed.options.out
    out = default_folder(f"{home.resolve().name}-step-{number:05d}") if out_option is None else output_path(out_option)
    if os.path.isdir(out) and any(out.iterdir()):
        raise RecipeError(f"--out is {str(out)!r}, which holds something; choose a new folder")
    return repeat_steps(parsed, number, out, resume, kept=home if learn else None)


def _number(text: str | None) -> int:
    """Return the step that was given; 0, which is none, for what is no whole number."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 9 else 0
