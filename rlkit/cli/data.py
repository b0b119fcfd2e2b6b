"""`rlkit data prepare`: write a task's prompts to files, so that runs need no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlkit.cli.display import echo
from rlkit.cli.parsing.parser import parse
from rlkit.errors import RecipeError
from rlkit.interfaces.task import Split, Task
from rlkit.registry import calling
from rlkit.train.data import make_prompt

USAGE = """usage: rlkit data prepare --recipe NAME --out DIR [overrides]
    writes DIR/train.jsonl and DIR/validation.jsonl, which the task Jsonl reads:
    rlkit fit --recipe NAME --task Jsonl --task.path DIR/train.jsonl --task.validation_path DIR/validation.jsonl
"""
OUT = ("--out", {"type": str, "help": "The folder to write to."})


def run(argv: Sequence[str]) -> int:
    """Prepare; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] != "prepare":
        raise RecipeError(f"rlkit data has no verb {argv[0]!r}, expected prepare")
    parsed = parse("data prepare", argv[1:], [OUT])
    if parsed.options.out is None:
        raise RecipeError("rlkit data prepare needs --out DIR, the folder to write to")
    out = Path(parsed.options.out)
    out.mkdir(parents=True, exist_ok=True)
    splits: list[Split] = ["train", "validation"] if parsed.recipe.validation is not None else ["train"]
    for split in splits:
        count = write(parsed.recipe.task, split, out / f"{split}.jsonl")
        echo(f"{out / f'{split}.jsonl'}: {count} prompts")
    return 0


def write(task: Task, split: Split, path: Path) -> int:
    """Write a split as the task `Jsonl` reads it; return the number of prompts."""
    with calling(task, "rows"):
        rows = task.rows(split)
    with path.open("w", encoding="utf-8") as lines:
        for index in range(len(rows)):
            prompt = make_prompt(task, rows, index)
            row = {**prompt.meta, "id": prompt.id, "prompt": prompt.messages, "answer": prompt.answer}
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return len(rows)
