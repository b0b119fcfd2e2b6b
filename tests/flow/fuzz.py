"""Malformed recipes, overrides and data files by the thousand: each must be refused with a clear error, in time.

Every case starts from one legal recipe and spoils one thing. It is parsed, checked, and its data are loaded, all in
this process; nothing is trained. An outcome is

- clear: an `RlkitError` in rlkit's own words; `raw` if they are a library's, or a line is endless;
- accepted: allowed where `reason` knows why the case is legal, otherwise nonsense that was accepted;
- traceback: any other exception;
- hang: more than ten seconds.

    python tests/flow/fuzz.py --cases 1000 --seed 0
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that no folder has is not looked for elsewhere

from rlkit.cli.parsing.parser import parse
from rlkit.errors import RlkitError
from rlkit.train.data import load_data

sys.path.insert(0, str(Path(__file__).parents[2]))  # where it is run as a script
from tests.flow.fuzz_cases import Case, data_cases, file_cases, key_cases, leaf_cases, noise_cases

DEADLINE = 10


class Hang(BaseException):
    """The deadline of a case has passed; no `except Exception` on the way keeps it."""


def choose(count: int, seed: int) -> list[Case]:
    """Return so many cases: broken files and data first, then noise, then keys and leaves by the seed."""
    rng = random.Random(seed)
    fixed = [*file_cases(), *data_cases()]
    others = [*key_cases(), *leaf_cases()]
    rng.shuffle(fixed)
    rng.shuffle(others)
    fixed = fixed[: max(count // 3, count - len(others))]
    noise = list(noise_cases(count // 10, rng))
    return [*fixed, *noise, *others[: count - len(fixed) - len(noise)]]


def compute_logps(case: Case, folder: Path) -> tuple[str, str]:
    """Run a case; return its outcome and what was said."""

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(DEADLINE)
    faulthandler.dump_traceback_later(6 * DEADLINE, exit=True)  # where no signal is heard
    silent = io.StringIO()
    try:
        arguments = case.make(folder)
        with redirect_stdout(silent), redirect_stderr(silent):
            load_data(parse("fit", arguments).recipe)
    except RlkitError as error:
        text = str(error)
        raw = re.search("validation error|Traceback|<class|Parser key", text) or max(map(len, text.splitlines())) > 1000
        return ("raw" if raw or not text else "clear"), text
    except Hang:
        return "hang", f"more than {DEADLINE} s"
    except (Exception, SystemExit) as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    return ("accepted", case.legal) if case.legal else ("nonsense", "accepted")


def furnish(folder: Path) -> None:
    """Make what some paths name: a pipe, a link to itself, a link to nothing."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")


def run(count: int, seed: int, verbose: bool = False) -> tuple[Counter[str], list[str]]:
    """Judge so many cases in a folder of their own; return the count of each outcome, and what must not be."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        furnish(folder)
        os.chdir(folder)
        try:
            for case in choose(count, seed):
                started = time.perf_counter()
                outcome, said = compute_logps(case, folder)
                outcomes[outcome] += 1
                if outcome not in ("clear", "accepted"):
                    wrong.append(f"{outcome}: {case.name!a}: {said[:300]!a}")
                if verbose:
                    seconds = time.perf_counter() - started
                    print(f"{outcome:<9} {seconds:5.2f} s  {case.name[:70]!a}: {said[:160]!a}", flush=True)
        finally:
            os.chdir(before)
    return outcomes, wrong


def main() -> int:
    """Print the table; return 1 if something was not refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    outcomes, wrong = run(options.cases, options.seed, options.verbose)
    print("\n".join(wrong))
    print(f"{outcomes.total()} cases, seed {options.seed}")
    for outcome in ("clear", "accepted", "raw", "nonsense", "traceback", "hang"):
        print(f"  {outcome:<10} {outcomes[outcome]:5}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
