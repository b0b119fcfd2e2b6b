"""`rlkit report RUN...`: one HTML file with the curves, the timeline, the rollouts and the recipe of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import inf
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import unwritable
from rlkit.base.terminal import echo
from rlkit.base.text import similar
from rlkit.records.folder import folder_of
from rlkit_report.files import MOST_STEPS, RunFiles
from rlkit_report.page import MARK, write_page
from rlkit_report.server import serve

USAGE = """usage: rlkit report RUN... [--out FILE] [--max-mb N]
       rlkit report RUN... --serve [--port N] [--max-mb N]
    writes one HTML file, which opens without a network: what has changed, curves of all metrics, time by phase, memory,
    the rollouts token by token, recipes and environments; several runs are overlaid, a run in progress is shown so far
    --out FILE     by default report.html in the first run's folder
    --max-mb N     keep the rollouts of every second step, every third and so on, so that they take at most N megabytes;
                   by default 100, and of at most 500 steps, of which a browser opens the file within seconds
    --serve        writes no file: serves the page to browsers on this machine, and renews it while the runs go on
    --port N       of 127.0.0.1, by default 8642; 0 for any that is free
"""


MAX_MB = 100.0
"""Megabytes of rollouts by default."""
FLAGS = ("--out", "--max-mb", "--serve", "--port")
PORT = 8642
"""Where the page is served by default."""


def run(argv: Sequence[str]) -> int:
    """Write the report; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    parser = argparse.ArgumentParser(prog="rlkit report", allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out")
    parser.add_argument("--max-mb", type=float)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int)
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise RecipeError(f"rlkit report: {error}") from error
    if unknown:
        name = unknown[0].partition("=")[0]
        raise RecipeError(f"unknown option {name!r}; {similar(name, FLAGS, 'expected')}")
    _check(options)
    folders = [folder_of(name) for name in dict.fromkeys(options.runs)]
    max_bytes = (MAX_MB if options.max_mb is None else options.max_mb) * 1e6 / len(folders)
    max_steps = MOST_STEPS if options.max_mb is None else inf

    def open_runs() -> list[RunFiles]:
        return [RunFiles(folder, max_bytes, max_steps) for folder in folders]

    if options.serve:
        return serve(open_runs, PORT if options.port is None else options.port)
    return _write(Path(options.out or folders[0] / "report.html"), open_runs())


def _check(options: argparse.Namespace) -> None:
    if options.max_mb is not None and not options.max_mb > 0:
        raise RecipeError(f"--max-mb is {options.max_mb:g}, expected a number above 0")
    if options.port is not None and not 0 <= options.port <= 65535:
        raise RecipeError(f"--port is {options.port}, expected a whole number from 0 to 65535")
    if options.serve and options.out is not None:
        raise RecipeError("--serve writes no file, expected no --out with it")
    if options.port is not None and not options.serve:
        raise RecipeError("--port is of the page that --serve serves; add --serve")


def _write(path: Path, runs: Sequence[RunFiles]) -> int:
    _writable(path)
    try:
        rows = write_page(path, runs)
    except OSError as error:
        raise RecipeError(f"--out is {str(path)!r}, which cannot be written: {unwritable(error)}") from error
    for note in (note for run in runs for note in run.notes):
        echo(f"warning: {note}")
    echo(f"{path}: {rows:,} rollouts, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _writable(path: Path) -> None:
    """Check that nothing is lost at a path: only an earlier report is replaced."""
    try:
        with path.open("rb") as file:
            is_report = file.read(len(MARK)) == MARK
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecipeError(f"--out is {str(path)!r}, which cannot be written: {unwritable(error)}") from error
    if not is_report:
        raise RecipeError(f"--out is {str(path)!r}, which is no report of rlkit; choose another name")
