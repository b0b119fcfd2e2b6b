"""`rlkit data sample|prepare|show|stats`: write an example or a task's prompts; show prompts; count them."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from rlkit.api.policy import fabric_for, sample, sampling_service
from rlkit.api.prompts import load_data, make_prompt, unchecked_data
from rlkit.base.errors import RecipeError
from rlkit.base.files import unwritable
from rlkit.base.terminal import echo
from rlkit.commands import parse
from rlkit.interfaces.content import json_messages
from rlkit.interfaces.task import Split, Task
from rlkit.models.config import load_config
from rlkit.models.vision import reads_pictures
from rlkit.recipe import Recipe
from rlkit.records.folder import output_path
from rlkit.registry import calling, load_plugins
from rlkit.types import JsonObject, Prompt
from rlkit_inspect.data_report import show, stats
from rlkit_inspect.new_file import new_file

USAGE = """usage: rlkit data sample FILE.csv                    300 sums, in the columns question and total, to try
       rlkit data show --recipe NAME [overrides]     three training prompts as the policy reads them
       rlkit data stats --recipe NAME [overrides]    lengths in tokens, sources, duplicates, overlap of the splits
       rlkit data prepare --recipe NAME --out DIR [--samples N] [overrides]
    prepare writes DIR/train.jsonl and DIR/validation.jsonl, which the task Jsonl reads:
    rlkit fit --recipe NAME --task Jsonl --task.path DIR/train.jsonl --task.validation_path DIR/validation.jsonl
"""
SAMPLES: tuple[str, dict[str, object]] = (
    "--samples",
    {
        "type": str,
        "help": "Sample each training prompt so often with the recipe's policy, and write the rewards as the column "
        "reference_rewards, which the advantage OptimalAdvantage reads.",
    },
)
OUT: tuple[str, dict[str, object]] = ("--out", {"type": str, "help": "The folder to write to."})
SAMPLE_ROWS = 300
"""Rows of the example: half of them train the shipped model in seconds, and half show what it has learned."""

JSON: tuple[str, dict[str, object]] = ("--json", {"action": "store_true", "help": "Print JSON instead of text."})


def run(argv: Sequence[str]) -> int:
    """Prepare, show or count; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):  # agreed: from the command line
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "sample":  # agreed: from the command line
        return _sample(argv[1:])
    if argv[0] not in ("prepare", "show", "stats"):
        raise RecipeError(f"rlkit data has no verb {argv[0]!r}, expected sample, prepare, show or stats")
    parsed = parse(f"data {argv[0]}", argv[1:], [OUT, SAMPLES] if argv[0] == "prepare" else [JSON])
    if argv[0] == "prepare":  # agreed: from the command line
        if parsed.options.out is None:
            raise RecipeError("rlkit data prepare needs --out DIR, the folder to write to")
        files, samples = new_files(parsed.recipe, output_path(parsed.options.out)), parsed.options.samples
        if samples is None:
            prepare(parsed.recipe, files)
        elif samples.isascii() and samples.isdecimal() and int(samples[:9]):
            fabric = fabric_for(parsed.recipe)
            fabric.launch()
            rewards = sample_rewards(parsed.recipe, int(samples[:9]), fabric)
            if fabric.is_global_zero:
                prepare(parsed.recipe, files, rewards)
        else:
            raise RecipeError(f"--samples is {samples!r}, expected a number from 1 (usual: 8)")
        return 0
    with unchecked_data(parsed.recipe) as data:
        (show if argv[0] == "show" else stats)(data, parsed.options.json)
    return 0


def _sample(argv: Sequence[str]) -> int:
    """Write sums to a CSV file that does not exist yet; return the exit status."""
    if len(argv) != 1 or argv[0].startswith("-") or not argv[0].endswith(".csv"):
        raise RecipeError("rlkit data sample needs one file to write, such as sums.csv")
    rows = load_plugins().parts["tasks"]["Arithmetic"].cls(validation_size=SAMPLE_ROWS).rows("validation")
    with new_file(argv[0]) as file:
        table = csv.writer(file)
        table.writerow(("question", "total"))
        table.writerows((row["question"], row["answer"]) for row in rows)
    echo(f"{argv[0]}: {len(rows)} rows with the columns question and total")
    return 0


def sample_rewards(recipe: Recipe, samples: int, fabric: Fabric) -> dict[int, list[float]]:
    """Return the rewards of samples of each training prompt, by row; all ranks must call this.

    Failed rollouts and rewards are left out, and so are prompts without any other.

    Raises:
        RecipeError: The recipe has no reward, or no sample has one.
    """
    recipe.scorer  # noqa: B018 (raises without one)
    data = load_data(recipe)
    console, chunk = Console(stderr=True), recipe.train.prompts_per_step
    rows, rewards = data.order.rows, defaultdict[int, list[float]](list)
    with sampling_service(recipe, data, fabric) as service:
        with service.engine_on_device(), Progress(console=console, transient=True, disable=not data.show) as bar:
            for start in bar.track(range(0, len(rows), chunk), description="sampling"):
                prompts = [(row, data.prompt(row)) for row in rows[start : start + chunk]]
                for trajectory in sample(service, service.shard_for_rank(prompts), samples, scored=True):
                    if trajectory.error is None and trajectory.reward is not None:
                        rewards[trajectory.group].append(trajectory.reward)
        by_rank = service.ranks.gather_dp(dict(rewards))
    gathered = {row: values for of_rank in by_rank for row, values in of_rank.items()}
    if not gathered:
        raise RecipeError("no sample of a training prompt has a reward; rlkit validate shows the errors")
    return gathered


def new_files(recipe: Recipe, out: Path) -> dict[Split, Path]:
    """Return the file of each split that `prepare` writes.

    Raises:
        RecipeError: One of them exists: it may be what the task reads.
    """
    splits: list[Split] = ["train", "validation"] if recipe.validation is not None else ["train"]
    files = {split: out / f"{split}.jsonl" for split in splits}
    for path in files.values():
        if os.path.lexists(path):
            raise RecipeError(f"--out is {str(out)!r}, where {path.name} exists already; choose a new folder")
    return files


def prepare(recipe: Recipe, files: Mapping[Split, Path], rewards: Mapping[int, list[float]] | None = None) -> None:
    """Write a file of prompts for each split, each only once it is complete.

    Args:
        recipe: Checked.
        files: From `new_files`.
        rewards: Of samples of the training prompts, by row; only these rows are written, with a column of them.

    Raises:
        RecipeError: The folder cannot be written, or a row cannot become a prompt.
    """
    for split, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            pictures, of_split = reads_pictures(load_config(recipe.model)), rewards if split == "train" else None
            sources = recipe.model.vision.sources
            count = write(recipe.task, split, path, pictures=pictures, sources=sources, rewards=of_split)
        except OSError as error:
            raise RecipeError(f"--out is {str(path.parent)!r}, which cannot be written: {unwritable(error)}") from error
        echo(f"{path}: {count:,} prompts")


def write(
    task: Task,
    split: Split,
    path: Path,
    *,
    pictures: bool = False,
    sources: Sequence[str] = (),
    rewards: Mapping[int, list[float]] | None = None,
) -> int:
    """Write a split as the task `Jsonl` reads it, with progress on a terminal; return the number of prompts."""
    with calling(task, "rows"):
        rows = task.rows(split)
    indices = range(len(rows)) if rewards is None else sorted(rewards)
    beside, console = path.with_suffix(".partial"), Console(stderr=True)
    try:
        with (
            beside.open("w", encoding="utf-8") as lines,
            Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        ):
            for index in bar.track(indices, description=f"writing {split}"):
                row = as_row(make_prompt(task, rows, index, pictures=pictures, sources=sources))
                if rewards is not None:
                    row["reference_rewards"] = rewards[index]
                lines.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(indices)


def as_row(prompt: Prompt) -> JsonObject:
    """Return a prompt as a row from which `Jsonl` makes the same one."""
    row = {**prompt.meta, "id": prompt.id, "prompt": json_messages(prompt.messages), "answer": prompt.answer}
    tools, arguments = prompt.tools, prompt.meta.get("tools")
    if tools is not None:
        names = [tool for tool in tools if isinstance(tool, str)]
        named = isinstance(arguments, Mapping) and len(names) == len(tools)
        row["tools"] = {name: dict(arguments or {}).get(name, {}) for name in names} if named else tools
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: object) -> object:
    """Return a value without NaN and infinities, which JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
