"""`rlkit reward try`: score saved rollouts with another reward, and compare."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rlkit.base.errors import RecipeError
from rlkit.base.files import nearby, unwritable
from rlkit.base.terminal import echo
from rlkit.commands import ALLOW_CODE, parse
from rlkit.records.folder import home_of
from rlkit.types import JsonObject
from rlkit_report.agreement import Agreement
from rlkit_report.rescore import rescoring
from rlkit_report.reward_comparison import RescoredGroup, RewardComparison, report

USAGE = """usage: rlkit reward try --rollouts PATH [--recipe NAME] [--reward X] [overrides]
    scores saved rollouts again, with the reward of the recipe and its overrides, and shows what changes
    PATH is a run folder, of which the rollouts of its steps are scored, or one file: of a run's rollouts/, or any
    JSON lines with messages (of the prompt), text and answer; a run's own recipe is taken if none is given, and its
    code runs with --allow-code alone
    --label COLUMN also shows how far the reward agrees with labels of the rows: numbers or booleans
"""
OWN: list[tuple[str, dict[str, object]]] = [
    ("--rollouts", {"type": str, "help": "A run folder, or a .jsonl or .jsonl.gz with rollouts."}),
    ("--out", {"type": str, "help": "A file to write: every row with both rewards, as JSON lines."}),
    ("--label", {"type": str, "help": "A column of the rows, or of their meta, with which the reward should agree."}),
    ("--json", {"action": "store_true", "help": "Print the comparison as a JSON object."}),
    ALLOW_CODE,
]


def run(argv: Sequence[str]) -> int:
    """Compare; return the exit status: 1 if the reward failed on everything."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] != "try":
        raise RecipeError(f"rlkit reward has no verb {argv[0]!r}, expected try")
    parsed = parse("reward try", argv[1:], OWN, run_of=_scored_run)
    if parsed.options.rollouts is None:
        raise RecipeError("rlkit reward try needs --rollouts PATH: a run folder, or a file of rollouts")
    files, comparison = rollout_files(parsed.options.rollouts), RewardComparison()
    agreement = None if parsed.options.label is None else Agreement(parsed.options.label)
    with ExitStack() as stack:
        out = _open(stack, parsed.options.out, files)
        scorer = stack.enter_context(rescoring(parsed.recipe))
        console = Console(stderr=True, quiet=len(files) < 2 or not Console(stderr=True).is_terminal)
        for path in track(files, "scoring", console=console, transient=True):
            for group in map(RescoredGroup, scorer.score(path)):
                comparison.add(group)
                if agreement is not None:
                    agreement.add(group.rows)
                if out is not None:
                    _write(out, group.lines())
    counts = dict(parsed.recipe.scorer.counts())
    if parsed.options.json:
        agreed = {} if agreement is None else {"agreement_with_labels": agreement.metrics()}
        print(json.dumps({**comparison.metrics(), **agreed, "counts": counts}))
    else:
        report(comparison, len(files))
        for line in () if agreement is None else agreement.lines():
            echo(line)
        for name, total in counts.items():
            echo(f"{name} {total:,}")
    return 0 if comparison.scored else 1


def _scored_run(options: Namespace) -> Path | None:
    """Return the folder of the run that the rollouts are of."""
    if options.rollouts is None:
        return None
    rollout_files(options.rollouts)  # a misspelt path, before the recipe that it should bring
    return home_of(options.rollouts)


def rollout_files(location: str) -> list[Path]:
    """Return the files of rollouts: those of a run's steps, or of its validations if there are no others.

    Raises:
        RecipeError: There are none.
    """
    path = Path(location)
    if os.path.isfile(path):
        return [path.resolve() if os.path.islink(path) else path]
    folder = path / "rollouts" if os.path.isdir(path / "rollouts") else path
    for pattern in ("step-*.jsonl.gz", "*.jsonl.gz", "*.jsonl"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    if not os.path.isdir(path):
        raise RecipeError(f"--rollouts is {location!r}, neither a file nor a folder; {nearby(path)}")
    raise RecipeError(
        f"--rollouts is {location!r}, a folder without rollouts; expected a run folder, or a .jsonl or .jsonl.gz of "
        "rollouts"
    )


def _open(stack: ExitStack, out: str | None, inputs: Sequence[Path]) -> FileIO | None:
    """Open the file to write, without a buffer that could fail once it is closed.

    Raises:
        RecipeError: It is one of those that are read, or cannot be written.
    """
    if out is None:
        return None
    if any(Path(out).resolve() == path.resolve() for path in inputs):
        raise RecipeError(f"--out is {out!r}, which is a file to read; name another one")
    try:
        return stack.enter_context(FileIO(out, "w"))
    except OSError as error:
        raise RecipeError(f"--out is {out!r}, which cannot be written: {unwritable(error)}") from error


def _write(out: FileIO, lines: Iterable[JsonObject]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    unwritten = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while unwritten:
            unwritten = unwritten[out.write(unwritten) :]
    except OSError as error:
        raise RecipeError(f"--out is {out.name!r}, which cannot be written: {unwritable(error)}") from error
