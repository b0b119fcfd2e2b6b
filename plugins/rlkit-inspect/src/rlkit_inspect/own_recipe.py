"""A recipe for a file of rows, written from the file's columns: with a reward, or for the completions in them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit.base.errors import RecipeError, show
from rlkit.base.files import nearby
from rlkit.base.functions import missing_function
from rlkit.base.text import counted
from rlkit.commands import parse_part
from rlkit.interfaces.rows import label_of
from rlkit.interfaces.task import RowReader
from rlkit.registry.shelf import provider

PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query", "text")
"""Names of columns with prompts, the likeliest first."""
ANSWERS = (
    "answer", "solution", "gold", "gold_answer", "final_answer", "correct_answer", "reference_answer", "expected",
    "expected_answer", "reference", "label", "target", "total", "output", "response", "ground_truth", "category",
)  # fmt: skip
"""Names of columns with reference answers, the likeliest first."""
RECORDED_PROMPTS = tuple(name for name in PROMPTS if name != "text")
"""Names of columns with the prompts of recorded completions: `text` is a complete text, which has none."""

HELD_OUT = 150
"""Rows to validate on, enough to see an improvement by a tenth; at most half of all."""
HEADER_ROWS = 1000
"""Rows that are compared with the columns' names."""
STEPS = 40
GROUP_SIZE = 8
PROMPTS_PER_STEP = 16
RECORDED_PER_STEP = 32
LEARNING_RATES = {
    "CrossEntropy": ("1.0e-3", "2.0e-4", "2.0e-5"),
    "DPO": ("2.0e-4", "1.0e-5", "1.0e-6"),
    "KTO": ("2.0e-4", "1.0e-5", "1.0e-6"),
}
"""Of losses of recorded completions: for the tiny model, with LoRA, and for all weights, as in TRL's guides."""


@dataclass(frozen=True)
class Saving:
    """Options that save memory.

    Args:
        name: What the user reads about them.
        model: Of the section `model:`, besides its path.
        train: Of the section `train:`.
    """

    name: str = ""
    model: str = ""
    train: str = ""


LORA = "lora: {rank: 16}, dtype: bfloat16"
CHECKPOINT = "checkpoint_activations: true"
SMALL = f"{CHECKPOINT}, max_tokens_per_micro_batch: 4096"
SAVINGS = (
    Saving(),
    Saving("activations are computed again", train=CHECKPOINT),
    Saving("LoRA", LORA),
    Saving("LoRA, and activations are computed again", LORA, CHECKPOINT),
    Saving("LoRA, with small micro-batches", LORA, SMALL),
    Saving("LoRA on a base in 4 bits", f"{LORA}, quantization: nf4", SMALL),
)
"""What is tried in turn until a run fits a GPU: nothing first, and what changes learning last."""


def own_recipe(
    data: str, reward: str, model: str, reward_options: Sequence[tuple[str, str]] = (), saving: Saving = SAVINGS[0]
) -> str:
    """Return the YAML of a recipe that trains on the rows of a file.

    Args:
        data: The file, of any format that `HFDataset` reads.
        reward: `file.py:name` of a function, or the name of a reward.
        model: A model's folder or name.
        reward_options: Options of a reward with a name, such as (`reward.weight`, `0.5`).
        saving: What saves memory.

    Raises:
        RecipeError: The file cannot be read, has no rows or no text to prompt with, or there is no such reward.
    """
    part = _function(reward) if ":" in reward or reward.endswith(".py") else _named(reward, reward_options)
    rows = _rows(data)
    columns = list(rows[0])
    prompt = _column(columns, PROMPTS, columns[0])
    further_columns = [column for column in columns if column != prompt]
    varying = [column for column in further_columns if _varies(rows, column)] or further_columns
    answer = _column(further_columns, ANSWERS, varying[-1]) if further_columns else None
    is_guess = len(further_columns) > 1 and answer is not None and answer.lower() not in ANSWERS
    note = "  # a guess: no column has a usual name for answers" if is_guess else ""
    share = _held_out_share(rows)
    prompts_per_step = min(PROMPTS_PER_STEP, len(rows) - round(len(rows) * share))
    is_tiny = model == "tiny"
    rate = "5.0e-4" if is_tiny else "1.0e-5" if saving.model else "1.0e-6"
    savings = f", {saving.train}" if saving.train else ""
    return f"""\
{_head(data, rows, model, saving)}
    prompt_field: {_quoted(prompt)}
    answer_field: {_quoted(answer)}{note}
    validation_split: {share}  # the share of rows to validate on
reward: {part}
advantage: GRPO
loss: ClipLoss
rollout: {{group_size: {GROUP_SIZE}, sampling: {{max_tokens: {16 if is_tiny else 512}}}}}
train: {{steps: {STEPS}, prompts_per_step: {prompts_per_step}, lr: {rate}{savings}}}
{_precision(model)}"""


def recorded_recipe(data: str, model: str, saving: Saving = SAVINGS[0]) -> str:
    """Return the YAML of a recipe that trains on the completions in the rows of a file.

    The loss follows from the columns: `DPO` for `chosen` and `rejected`, `KTO` for a `completion` with a `label`,
    otherwise `CrossEntropy`.

    Args:
        data, model, saving: As of `own_recipe`.

    Raises:
        RecipeError: The file cannot be read, has no rows, or no columns with completions.
    """
    rows = _rows(data)
    loss = _recorded_loss(_first_values(rows))
    if loss is None:
        raise RecipeError(
            f"rlkit recipe new with --task {show(data)} needs --reward FILE.py:FUNCTION, or --reward NAME: its columns "
            f"are {show(list(rows[0]))}, and record no completions, as these do, in lower case: prompt and completion; "
            "prompt, chosen and rejected; messages; text"
        )
    share = _held_out_share(rows)
    prompt = _column([*rows[0]], RECORDED_PROMPTS, "prompt")
    prompts_per_step = min(RECORDED_PER_STEP, len(rows) - round(len(rows) * share))
    tiny_rate, lora_rate, full_rate = LEARNING_RATES[loss]
    rate = tiny_rate if model == "tiny" else lora_rate if saving.model else full_rate
    schedule = "schedule: Linear, warmup_ratio: 0.03"
    savings = f", {saving.train}" if saving.train else ""
    return f"""\
{_head(data, rows, model, saving)}
    prompt_field: {_quoted(prompt)}
    answer_field: null
    validation_split: {share}  # the share of rows to validate on
rollout: {{engine: Recorded}}
loss: {loss}
train: {{data_epochs: 1, prompts_per_step: {prompts_per_step}, lr: {rate}, {schedule}{savings}}}
{_precision(model)}"""


def misread_header(data: str) -> str | None:
    """Return the problem of a CSV file whose first row was taken for the columns' names; None if they look like names.

    Args:
        data: A file whose rows `own_recipe` has read.
    """
    if not {".csv", ".tsv"} & {suffix.lower() for suffix in Path(data).suffixes}:
        return None
    rows = provider(RowReader)().rows_of(data, "--task")  # type: ignore[type-abstract]
    columns = list(rows[0])
    for row in itertools.islice(rows, HEADER_ROWS):
        for column in columns:
            if column == row[column] or column.strip().replace(".", "", 1).isdigit():
                return (
                    f"the first line of {show(data)} is read as the columns' names, but {show(column, 60)} looks like "
                    "a value: if it is one, write a line of names above it, such as prompt,answer"
                )
    return None


def _rows(data: str) -> Sequence[Mapping[str, object]]:
    """Return the rows of a file, of which there are at least two, with columns."""
    rows = provider(RowReader)().rows_of(data, "--task")  # type: ignore[type-abstract]
    if len(rows) < 2:
        raise RecipeError(f"--task {show(data)} has {counted(len(rows), 'row')}, expected at least 2, to hold one out")
    if not rows[0]:
        raise RecipeError(f"--task is {show(data)}, whose first row has no columns, expected one with the prompt")
    return rows


def _varies(rows: Sequence[Mapping[str, object]], column: str) -> bool:
    """Whether a column has different values in the first rows."""
    values = (row.get(column) for row in itertools.islice(rows, HEADER_ROWS))
    return len({repr(value) for value in values}) > 1


def _held_out_share(rows: Sequence[object]) -> float:
    return min(0.5, max(0.05, round(HELD_OUT / len(rows), 2)))


def _head(data: str, rows: Sequence[Mapping[str, object]], model: str, saving: Saving) -> str:
    """Return the first lines of a recipe: a comment, the model, and the file of its task."""
    return f"""\
# {show(Path(data).name)}: {len(rows)} rows with the columns {show([*rows[0]])}. Every option: rlkit recipe show FILE
model: {{{", ".join(filter(None, (f"path: {_quoted(model)}", saving.model)))}}}
task:
  class_path: HFDataset
  init_args:
    path: {_quoted(data)}"""


def _precision(model: str) -> str:
    return "" if model == "tiny" else "fabric: {precision: bf16-mixed}\n"


def _first_values(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the first value of each column that is not null, in the first rows."""
    values: dict[str, object] = {}
    for row in itertools.islice(rows, HEADER_ROWS):
        for column, value in row.items():
            if value is not None:
                values.setdefault(column, value)
    return values


def _recorded_loss(row: Mapping[str, object]) -> str | None:
    """Return the loss for the completions that a row without nulls records in its columns; None if it records none."""
    columns = {*row}
    if {"chosen", "rejected"} <= columns:
        return "DPO"
    names = {column.lower() for column in columns}
    if "completion" in columns and names & {*RECORDED_PROMPTS}:
        return "CrossEntropy" if label_of(row.get("label")) is None else "KTO"
    is_plain_text = "text" in columns and not names & {*RECORDED_PROMPTS, *ANSWERS}
    return "CrossEntropy" if is_plain_text or columns & {"messages", "conversations"} else None


def _function(function: str) -> str:
    """Return a Python reward in YAML."""
    module, _, name = function.rpartition(":")
    if not module.endswith(".py") or not name.isidentifier():
        raise RecipeError(
            f"--reward is {show(function)}, expected FILE.py:FUNCTION, such as reward.py:score, or the name of a reward"
            ", such as MathReward"
        )
    if not os.path.isfile(module):
        raise RecipeError(f"--reward is {show(function)}, but there is no such file; {nearby(Path(module))}")
    problem = missing_function(function)
    if problem is not None:
        raise RecipeError(f"--reward is {show(function)}, but {problem}")
    return f"{{class_path: PythonReward, init_args: {{function: {_quoted(function)}, allow_code: true}}}}"


def _named(reward: str, reward_options: Sequence[tuple[str, str]]) -> str:
    """Return a reward with a name and its options in YAML, checked as a recipe's are."""
    data = parse_part("reward", [("reward", reward), *reward_options])
    names = {key.split(".")[1] for key, _ in reward_options}
    arguments = data.get("init_args", {}) if isinstance(data, dict) else {}
    chosen = {name: value for name, value in arguments.items() if name in names}
    return f"{{class_path: {reward}, init_args: {json.dumps(chosen, ensure_ascii=False)}}}" if chosen else reward


def _quoted(text: str | None) -> str:
    """Return a text as a quoted scalar, which YAML shares with JSON; `null` for None."""
    return json.dumps(text, ensure_ascii=False)  # YAML does not join the pairs by which JSON escapes emoji


def _column(columns: Sequence[str], names: Sequence[str], default: str) -> str:
    """Return the first of the likely names that is a column, in any case; otherwise the default."""
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), default)
