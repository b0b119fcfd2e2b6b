"""A recipe for a file of rows and a reward function, written from the file's columns."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError, show
from rlkit.base.functions import missing_function
from rlkit.tasks import sources

PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query", "text")
"""Names of columns with prompts, the likeliest first."""
ANSWERS = ("answer", "solution", "label", "target", "total", "output", "response", "ground_truth", "category")
"""Names of columns with reference answers, the likeliest first."""

HELD_OUT = 150
"""Rows to validate on, enough to see an improvement by a tenth; at most half of all."""
STEPS = 40
GROUP_SIZE = 8
PROMPTS_PER_STEP = 16


def own_recipe(data: str, function: str, model: str) -> str:
    """Return the YAML of a recipe that trains on the rows of a file with a Python reward.

    Args:
        data: The file, of any format that `HFDataset` reads.
        function: `file.py:name` of the reward.
        model: A model's folder or name.

    Raises:
        RecipeError: The file cannot be read, has no rows or no text to prompt with, or the function is in none.
    """
    module, _, name = function.rpartition(":")
    if not module.endswith(".py") or not name.isidentifier():
        raise RecipeError(f"--reward is {show(function)}, expected FILE.py:FUNCTION, such as reward.py:score")
    if not os.path.isfile(module):
        raise RecipeError(f"--reward is {show(function)}, but there is no file {show(module)}")
    problem = missing_function(function)
    if problem is not None:
        raise RecipeError(f"--reward is {show(function)}, but {problem}")
    rows = sources.files(sources.expand(data, "--task"), "--task")
    if len(rows) < 2:
        raise RecipeError(f"--task is {show(data)}, which has {len(rows)} rows, expected at least 2, to hold one out")
    columns = list(rows[0])
    if not columns:
        raise RecipeError(f"--task is {show(data)}, whose first row has no columns, expected one with the prompt")
    prompt = _column(columns, PROMPTS, columns[0])
    further_columns = [column for column in columns if column != prompt]
    answer = _column(further_columns, ANSWERS, further_columns[-1]) if further_columns else None
    share = min(0.5, max(0.05, round(HELD_OUT / len(rows), 2)))
    prompts_per_step = min(PROMPTS_PER_STEP, len(rows) - round(len(rows) * share))
    is_tiny = model == "tiny"
    precision = "" if is_tiny else "fabric: {precision: bf16-mixed}\n"
    return f"""\
# {show(Path(data).name)}: {len(rows)} rows with the columns {show(columns)}. Every option: rlkit recipe show FILE
model: {{path: {_quoted(model)}}}
task:
  class_path: HFDataset
  init_args:
    path: {_quoted(data)}
    prompt_field: {_quoted(prompt)}
    answer_field: {_quoted(answer)}
    validation_split: {share}  # the share of rows to validate on
reward: {{class_path: PythonReward, init_args: {{function: {_quoted(function)}, allow_code: true}}}}
advantage: GRPO
loss: ClipLoss
rollout: {{group_size: {GROUP_SIZE}, sampling: {{max_tokens: {16 if is_tiny else 512}}}}}
train: {{steps: {STEPS}, prompts_per_step: {prompts_per_step}, lr: {"5.0e-4" if is_tiny else "1.0e-6"}}}
{precision}"""


def _quoted(text: str | None) -> str:
    """Return a text as a quoted scalar, which YAML shares with JSON; `null` for None."""
    return json.dumps(text, ensure_ascii=False)  # YAML does not join the pairs by which JSON escapes emoji


def _column(columns: Sequence[str], names: Sequence[str], default: str) -> str:
    """Return the first of the likely names that is a column, in any case; otherwise the default."""
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), default)
