"""Training from a recipe to a run folder, ended well however it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric import Fabric

from rlkit.loop.data import Data
from rlkit.loop.folder import RunFolder
from rlkit.loop.metrics import MetricsLog, loggers
from rlkit.loop.peers import Peers
from rlkit.loop.resume import Found
from rlkit.loop.run import Run
from rlkit.loop.session import Interrupt, Outcome, Reporter, Session
from rlkit.recipe import Recipe


def fit(
    recipe: Recipe,
    data: Data,
    fabric: Fabric,
    folder: RunFolder,
    reporter: Reporter,
    *,
    resumed: Found | None = None,
) -> Outcome:
    """Train to the recipe's last step.

    The first Ctrl-C ends the run after the step in progress, a second one at once; either way what was learned is
    saved and the outcome is `interrupted`. An error is re-raised after the outcome `failed` was written.

    Args:
        recipe: Checked.
        data: From `load_data`.
        fabric: Launched.
        folder: The run folder, created.
        reporter: Shows the run.
        resumed: The checkpoint to go on from.

    Raises:
        RlkitError: The run failed; RankError where another rank did.
    """
    log = None
    if fabric.is_global_zero:
        done = 0 if resumed is None else int(resumed.state["step"])
        log = MetricsLog(folder.path / "metrics.jsonl", loggers(recipe.log, folder), done)
    session, run = Session(folder, reporter, log), None
    peers = Peers(fabric, folder.path, session.lost)
    failure: Exception | None = None
    try:
        with _interruptible(session.interrupt, reporter):
            run = Run(recipe, data, fabric)
            session.train(run, resumed)
            session.outcome.status = "interrupted" if session.interrupt.asked else "ok"
    except KeyboardInterrupt:
        session.outcome.status = "interrupted"
    except Exception as error:
        failure = peers.explain(error)
    failure = session.end(run, failure)
    if run is not None:
        run.close()
    peers.done(failure)
    if failure is not None:
        peers.end_children()
        raise failure
    return session.outcome


@contextmanager
def _interruptible(interrupt: Interrupt, reporter: Reporter) -> Iterator[None]:
    def handle(*_: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        reporter.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    def swallowed(unraisable: Any) -> None:
        """Say it again: Python drops a Ctrl-C that comes while an object is being deleted."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            hook(unraisable)

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for signum, handler in previous.items():
            signal.signal(signum, handler)
