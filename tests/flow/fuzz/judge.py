"""Runs cases in this process, up to the data: nothing is trained.

An outcome is

- clear: an `RlkitError` in rlkit's own words; `raw` if they are a library's, or a line is endless;
- accepted: allowed where the case says why it is legal, otherwise `nonsense`;
- traceback: any other exception;
- hang: more than ten seconds of computing, or a minute of anything.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from rlkit.base import text
from rlkit.base.errors import LONGEST, RlkitError
from rlkit.commands import parse
from rlkit.data.data import load_data
from tests.flow.fuzz.cases import Case

COMPUTING, DEADLINE = 10, 60
"""Seconds of this process's computing, and of the clock: other work of the machine counts in the second alone."""
OUTCOMES = ("clear", "accepted", "raw", "nonsense", "traceback", "hang")
FOREIGN = re.compile("validation error|Traceback|<class|Parser key|Namespace\\(|object at 0x")
"""Words of libraries, which no message of rlkit has."""


class Hang(BaseException):
    """The deadline of a case has passed; no `except Exception` on the way keeps it."""


def run_case(case: Case, folder: Path) -> tuple[str, str]:
    """Run a case; return its outcome and what was said."""

    def stop(*_: object) -> None:
        raise Hang

    for heard in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(heard, stop)
    signal.setitimer(signal.ITIMER_PROF, COMPUTING)
    signal.alarm(DEADLINE)
    faulthandler.dump_traceback_later(2 * DEADLINE, exit=True)  # where no signal is heard
    silent = io.StringIO()
    try:
        with redirect_stdout(silent), redirect_stderr(silent):
            load_data(parse("fit", case.make(folder)).recipe)
    except RlkitError as error:
        text = str(error)
        raw = not text or FOREIGN.search(text) or max(map(len, text.splitlines())) > LONGEST
        return ("raw" if raw else "clear"), text
    except Hang:
        return "hang", f"more than {COMPUTING} s of computing, or {DEADLINE} s"
    except (Exception, SystemExit) as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    return ("accepted", case.legal) if case.legal else ("nonsense", "accepted")


def run_cases(cases: Iterable[Case], verbose: bool = False) -> tuple[Counter[str], list[str]]:
    """Run cases in a folder of their own; return the count of each outcome, and what must not be."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with workplace() as folder:
        for case in cases:
            started = time.perf_counter()
            outcome, said = run_case(case, folder)
            outcomes[outcome] += 1
            if outcome not in ("clear", "accepted"):
                wrong.append(f"{outcome}: {str(case)!a}: {said[:300]!a}")
            if verbose:
                seconds = time.perf_counter() - started
                print(f"{outcome:<9} {seconds:5.2f} s  {str(case)[:100]!a}: {said[:200]!a}", flush=True)
    return outcomes, wrong


@contextmanager
def workplace() -> Iterator[Path]:
    """Make an empty folder the current one, with what some paths name, and install the plugin `parts`."""
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")
        (folder / "dangling").symlink_to("nowhere")
        site = folder / "site"
        info = site / "fuzz_parts-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fuzz-parts\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[rlkit]\nfuzz-parts = tests.flow.fuzz.parts\n")
        sys.path.insert(0, str(site))
        try:
            yield folder
        finally:
            sys.path.remove(str(site))
            text._source_of_package.cache_clear()  # in it `tests` is the plugin
