"""`rlkit validate`: validate one policy or several as a run does: answers are scored, and recorded ones have a loss."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning.fabric import Fabric
from rich.console import Console
from rich.table import Table

from rlkit.api.policy import Evaluation, fabric_for, samplings, validate_policy
from rlkit.api.prompts import Data, load_data
from rlkit.base.errors import CheckpointError, RecipeError, RlkitError, explain
from rlkit.base.terminal import echo, make_table, show
from rlkit.commands import ALLOW_CODE, Parsed, parse
from rlkit.distributed.offload import free_cached
from rlkit.recipe import Model, Recipe
from rlkit.records.environment import environment
from rlkit.records.folder import json_text, of_rank, recipe_data, write_atomically
from rlkit.records.validation_metrics import metric_rows
from rlkit.records.verdict import p_text
from rlkit_policy.checkpoint import CHECKPOINT, each_checkpoint, new_folder, without_checkpoint
from rlkit_policy.harness import Harness

OWN: list[tuple[str, dict[str, object]]] = [
    ("--json", {"action": "store_true", "help": "Print the metrics as a JSON object; of several checkpoints by name."}),
    ("--out", {"type": str, "help": "A new folder for results.json and all answers, as JSON lines and parquet."}),
    ("--harness", {"type": str, "action": "append", "help": "A task of lm-evaluation-harness to run instead."}),
    ("--harness-path", {"type": str, "help": "A folder of tasks, instead of the harness's own: it can run code."}),
    (
        CHECKPOINT[0],
        {"type": str, "help": f"{CHECKPOINT[1]['help']} May be repeated: the others are compared with it."},
    ),
    ALLOW_CODE,
]


@dataclass
class ValidationJob:
    """What one policy answers: prompts, or a harness's tasks; it holds the policy once it is loaded.

    `initial` is the policy with which the run began, if the loss compares with that.
    """

    parsed: Parsed
    work: Data | Harness
    initial: Model | None = None


@dataclass
class Validated:
    """What came of it: its entry in `results.json`, metrics, the ids of the prompts, and what writes the answers.

    `write` is None where a loss alone is measured.
    """

    entry: dict[str, object]
    evaluation: Evaluation
    prompts: list[str]
    write: Callable[[Path], None] | None


@dataclass
class Report:
    """What is shown and written of all policies, by the names of their checkpoints.

    `about` is what `results.json` has besides their entries; `failures` are those of policies and of that file.
    """

    checkpoints: list[str]
    json: bool
    out: Path | None
    about: dict[str, object]
    done: dict[str, Validated] = field(default_factory=dict)
    failures: list[RlkitError] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether there is more than one policy, so that they must be told apart."""
        return len(self.checkpoints) > 1

    def add(self, name: str, validated: Validated, rank: int) -> None:
        """Compare a policy with the first one, write its answers, and free them."""
        first = self.done.get(self.checkpoints[0])
        self.done[name] = validated
        if first is not None and first.prompts == validated.prompts:
            validated.evaluation.compare("first", first.evaluation.accuracies)
        elif first is not None and rank == 0:
            echo(f"note: {name} is not compared with {self.checkpoints[0]}, which had other prompts", error=True)
        if self.out is not None and validated.write is not None:
            answers = f"answers-{self.checkpoints.index(name) + 1}" if self.several else "answers"
            _attempt(self.out / of_rank(answers, rank), validated.write)
            validated.entry["answers"] = answers
        validated.evaluation.answers.clear()
        if self.out is not None and rank == 0:
            content = {"results": [validated.entry for validated in self.done.values()], **self.about}
            try:
                write_atomically(self.out / "results.json", json_text(content))
            except OSError as error:
                self.failures.append(CheckpointError(f"{self.out / 'results.json'} cannot be written: {error}"))

    def show(self) -> None:
        """Print the metrics."""
        metrics = {name: validated.evaluation.metrics for name, validated in self.done.items()}
        name, first = next(iter(self.done.items()))
        if self.json:
            print(json.dumps(metrics if self.several else metrics[name]))
        elif self.several:
            Console().print(by_checkpoint(metrics))
        else:
            header = f"{len(first.prompts)} prompts" if first.prompts else "lm-evaluation-harness"
            show(("validation", header), metric_rows(metrics[name]))


def by_checkpoint(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of several checkpoints' validation metrics, with p-values of comparisons with the first."""
    texts = {checkpoint: dict(metric_rows(own)) for checkpoint, own in metrics.items()}
    rows = []
    for name in dict.fromkeys(name for own in texts.values() for name in own):
        if name.endswith(("failed", "unscored")) and not any(own.get(name) for own in metrics.values()):
            continue
        for number, (checkpoint, own) in enumerate(metrics.items()):
            p_value = own.get(f"{name}_p_first")
            shown_p = "" if p_value is None else p_text(p_value)
            rows.append(("" if number else name, checkpoint, texts[checkpoint].get(name, "-"), shown_p))
    return make_table(("validation", "checkpoint", "", "p-value"), rows)


def run(argv: Sequence[str]) -> int:
    """Validate and print the metrics; return the exit status.

    Where one of several checkpoints fails, or no file can be written, the metrics that there are are printed first.
    """
    jobs: dict[str, ValidationJob] = {}
    arguments = each_checkpoint(argv)
    for name, words in arguments.items():
        with _naming(name, len(arguments)):
            jobs[name] = _prepare(words, argv)
    report, fabric = _open(list(jobs), next(iter(jobs.values())).parsed)
    for name in arguments:
        try:
            with _naming(name, len(arguments)):
                report.add(name, _run(jobs.pop(name), name, fabric), fabric.global_rank)
        except RlkitError as error:
            report.failures.append(error)
            if fabric.world_size > 1:  # the other ranks may be anywhere
                break
            _clear_frames(error)
        gc.collect()  # the engine and the policy refer to each other
        free_cached(fabric.device)
    if fabric.is_global_zero and report.done:
        report.show()
    if report.failures:
        raise type(report.failures[0])("\n".join(dict.fromkeys(map(str, report.failures)))) from report.failures[0]
    return 0


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of a failure hold, such as the policy."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _prepare(words: Sequence[str], argv: Sequence[str]) -> ValidationJob:
    """Return the job of a policy, from the words that name it and from all that were given."""
    parsed = parse("validate", words, OWN)
    if parsed.options.harness:
        return ValidationJob(parsed, _harness(parsed))
    if parsed.options.harness_path:
        raise RecipeError(
            "--harness-path is where tasks of --harness are looked for, but there is no --harness; add it"
        )
    if parsed.recipe.validation is None:
        raise RecipeError("validation is off, so there is nothing to validate: set the section validation")
    return ValidationJob(parsed, load_data(parsed.recipe), _initial(parsed.recipe, argv))


def _initial(recipe: Recipe, argv: Sequence[str]) -> Model | None:
    """Return the policy with which the run began, if the loss of recorded completions is measured against it."""
    teacher = recipe.teacher
    if recipe.method.samples or not (recipe.needs_reference or (teacher is not None and teacher.path is None)):
        return None
    return parse("validate", without_checkpoint(argv), OWN).recipe.model


def _harness(parsed: Parsed) -> Harness:
    limit = None if parsed.recipe.validation is None else parsed.recipe.validation.limit
    harness = Harness(parsed.options.harness, parsed.options.harness_path, limit)
    harness.check()
    return harness


def _open(checkpoints: list[str], parsed: Parsed) -> tuple[Report, Fabric]:
    """Return the report, whose folder is there, and the launched Fabric, by the first policy's recipe."""
    about: dict[str, object] = {"recipe": recipe_data(parsed.yaml), "environment": environment(parsed.registry)}
    if not parsed.options.harness:
        greedy, sampled = map(asdict, samplings(parsed.recipe))
        about["settings"] = {"greedy": greedy, "sampled": sampled, "seed": parsed.recipe.train.seed}
    out = None if parsed.options.out is None else new_folder(parsed.options.out)
    fabric = fabric_for(parsed.recipe)
    if parsed.options.harness and fabric.world_size > 1:
        raise RecipeError(f"--harness runs in one process, not in {fabric.world_size}; add --fabric.devices=1")
    fabric.launch()
    return Report(checkpoints, parsed.options.json, out, about), fabric


def _run(job: ValidationJob, name: str, fabric: Fabric) -> Validated:
    """Run a validation job and return its result."""
    model, work = job.parsed.recipe.model, job.work
    entry: dict[str, object] = {
        "checkpoint": name or None,
        "model": {name: asdict(model)[name] for name in ("path", "lora")},
    }
    if isinstance(work, Harness):
        half = fabric.device.type == "cuda" and job.parsed.recipe.fabric.precision.startswith("bf16")
        result = work.run(model, fabric.device, "bfloat16" if half else "float32")
        entry |= {"metrics": result.metrics, "harness": result.details}
        return Validated(entry, Evaluation(metrics=result.metrics), [], result.write)
    is_trained = job.initial is not None and job.initial.path != model.path
    if is_trained and job.parsed.recipe.reference is not None and fabric.is_global_zero:
        echo("note: losses compare with the policy at the start, which `reference:` has updated since", error=True)
    evaluation = validate_policy(job.parsed.recipe, work, fabric, job.initial)
    prompts = [prompt.id for prompt in work.validation]
    entry |= {"prompts": len(prompts), "metrics": evaluation.metrics}
    return Validated(entry, evaluation, prompts, evaluation.write if evaluation.answers else None)


def _attempt(stem: Path, write: Callable[[Path], None]) -> None:
    """Write answers; a failure, such as a full disk, is a warning."""
    try:
        write(stem)
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
