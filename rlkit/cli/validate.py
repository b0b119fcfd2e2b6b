"""`rlkit validate`: answer a recipe's validation prompts, by one policy or several, and score the answers."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from rich.console import Console

from rlkit.cli.checkpoint import CHECKPOINT, each_checkpoint
from rlkit.cli.display import echo, figure_rows, show, side_by_side
from rlkit.cli.parsing.parser import Parsed, parse
from rlkit.distributed.offload import free_cached
from rlkit.errors import CheckpointError, RecipeError, RlkitError, explain
from rlkit.run.answers import write_answers
from rlkit.run.checkpoint.state import as_data
from rlkit.run.folder import environment, json_text, new_folder, of_rank, write_whole
from rlkit.train.data import Data, load_data
from rlkit.train.evaluate import Evaluation, evaluate, samplings
from rlkit.train.setup import fabric_for, prepare_rollouts

OWN: list[tuple[str, dict[str, Any]]] = [
    ("--json", {"action": "store_true", "help": "Print the figures as a JSON object; of several checkpoints by name."}),
    ("--out", {"type": str, "help": "A new folder for results.json and all answers, as JSON lines and parquet."}),
    (
        CHECKPOINT[0],
        {"type": str, "help": f"{CHECKPOINT[1]['help']} May be repeated: the others are compared with it."},
    ),
]


@dataclass
class Job:
    """What one policy answers; it holds the policy once it is loaded."""

    parsed: Parsed
    data: Data


@dataclass
class Validated:
    """What came of it: its entry in `results.json`, the figures and answers, and the ids of the prompts."""

    entry: dict[str, object]
    found: Evaluation
    prompts: list[str]


@dataclass
class Report:
    """What is shown and written of all policies, by the names of their checkpoints.

    `about` is what `results.json` has besides their entries.
    """

    checkpoints: list[str]
    json: bool
    out: Path | None
    about: dict[str, object]
    done: dict[str, Validated] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        """Whether there is more than one policy, so that they must be told apart."""
        return len(self.checkpoints) > 1

    def add(self, name: str, made: Validated, rank: int) -> None:
        """Compare a policy with the first one, write its answers, and free them."""
        first = self.done.get(self.checkpoints[0])
        self.done[name] = made
        if first is not None and first.prompts == made.prompts:
            made.found.compare("first", first.found.accuracies)
        elif first is not None:
            echo(f"note: {name} is not compared with {self.checkpoints[0]}, which had other prompts", error=True)
        if self.out is not None:
            answers = f"answers-{self.checkpoints.index(name) + 1}" if self.several else "answers"
            _attempt(self.out / of_rank(answers, rank), made.found)
            made.entry["answers"] = answers
        made.found.answers.clear()
        if self.out is not None and rank == 0:
            content = {"results": [made.entry for made in self.done.values()], **self.about}
            write_whole(self.out / "results.json", json_text(content))

    def show(self) -> None:
        """Print the figures."""
        figures = {name: made.found.figures for name, made in self.done.items()}
        name, first = next(iter(self.done.items()))
        if self.json:
            print(json.dumps(figures if self.several else figures[name]))
        elif self.several:
            Console().print(side_by_side(figures))
        else:
            show(("validation", f"{len(first.prompts)} prompts"), figure_rows(figures[name]))


def run(argv: Sequence[str]) -> int:
    """Validate and print the figures; return the exit status.

    Where one of several checkpoints fails, the others' figures are printed first.
    """
    jobs: dict[str, Job] = {}
    arguments = each_checkpoint(argv)
    for name, words in arguments.items():
        with _naming(name, len(arguments)):
            jobs[name] = _prepare(words)
    report, fabric = _open(list(jobs), next(iter(jobs.values())).parsed)
    failures: list[RlkitError] = []
    for name in arguments:  # agreed: all ranks have the same command line
        try:
            with _naming(name, len(arguments)):
                report.add(name, _validate(jobs.pop(name), name, fabric), fabric.global_rank)
        except RlkitError as error:
            failures.append(error)
            if fabric.world_size > 1:  # the other ranks may be anywhere
                break
        gc.collect()  # the engine and the policy refer to each other
        free_cached(fabric.device)
    if fabric.is_global_zero and report.done:
        report.show()
    if failures:
        raise type(failures[0])("\n".join(map(str, failures))) from failures[0]
    return 0


def _prepare(argv: Sequence[str]) -> Job:
    parsed = parse("validate", argv, OWN)
    if parsed.recipe.validation is None:
        raise RecipeError("validation is off, so there is nothing to validate: set the section validation")
    return Job(parsed, load_data(parsed.recipe))


def _open(checkpoints: list[str], parsed: Parsed) -> tuple[Report, Fabric]:
    """Return the report, whose folder is there, and the launched Fabric, by the first policy's recipe."""
    greedy, sampled = map(asdict, samplings(parsed.recipe))
    about: dict[str, object] = {
        "settings": {"greedy": greedy, "sampled": sampled, "seed": parsed.recipe.train.seed},
        "recipe": as_data(parsed.yaml),
        "environment": environment(parsed.registry),
    }
    out = None if parsed.options.out is None else new_folder(parsed.options.out)
    fabric = fabric_for(parsed.recipe)
    fabric.launch()
    return Report(checkpoints, parsed.options.json, out, about), fabric


def _validate(job: Job, name: str, fabric: Fabric) -> Validated:
    recipe, data = job.parsed.recipe, job.data
    rollouts = prepare_rollouts(recipe, data, fabric)
    try:
        rollouts.sync_weights()
        found = evaluate(rollouts, data.validation)
    finally:
        rollouts.close()
    prompts = [prompt.id for prompt in data.validation]
    entry: dict[str, object] = {
        "checkpoint": name or None,
        "model": {name: asdict(recipe.model)[name] for name in ("path", "lora")},
        "prompts": len(prompts),
        "figures": found.figures,
    }
    return Validated(entry, found, prompts)


def _attempt(stem: Path, found: Evaluation) -> None:
    """Write answers; a failure, such as a full disk, is a warning."""
    try:
        write_answers(stem, found)
    except Exception as error:
        echo(f"warning: {stem}: {explain(error)}", error=True)


@contextmanager
def _naming(checkpoint: str, count: int) -> Iterator[None]:
    """Name one of several checkpoints in errors, those of libraries included, which damaged files cause."""
    try:
        yield
    except Exception as error:
        if count < 2:
            raise
        kind, text = (type(error), error) if isinstance(error, RlkitError) else (CheckpointError, explain(error))
        raise kind(f"{CHECKPOINT[0]} {checkpoint}: {text}") from error
