"""Training from a recipe to a run folder, with an orderly end in every case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning.fabric import Fabric

from rlkit.data.data import Data
from rlkit.errors import RlkitError
from rlkit.models.checkpoints import CheckpointRef
from rlkit.recipe import Recipe
from rlkit.run.folder import RunFolder
from rlkit.run.outcome import Outcome, Replay, Reporter
from rlkit.run.peers import Peers
from rlkit.run.session import Session, agreed
from rlkit.run.signals import Signals
from rlkit.train.setup import TrainContext, prepare_training

INTERRUPTED = 130
"""The exit status of a run that a signal ended, whichever it was."""


def fit(
    recipe: Recipe,
    data: Data,
    fabric: Fabric,
    folder: RunFolder,
    reporter: Reporter,
    *,
    resumed: CheckpointRef | None = None,
    replay: Replay | None = None,
) -> Outcome:
    """Train to the recipe's last step.

    The first Ctrl-C, SIGTERM or SIGHUP ends the run after the step in progress, a second one at once, when one of
    several ranks does not return from here; what was learned is saved and the outcome is `interrupted`.

    Args:
        recipe: Checked.
        data: From `load_data`.
        fabric: Launched.
        folder: The run folder, created.
        reporter: Shows the run.
        resumed: The checkpoint to go on from.
        replay: Which steps to make again.

    Raises:
        RlkitError: The run failed, which is written as its outcome; RankError where another rank did.
    """
    session = Session(folder, reporter, fabric.is_global_zero, replay=replay)
    try:
        peers = Peers(fabric, folder.path, session.lost)
    except RlkitError as refused:
        session.end(None, refused)  # no part of the run exists yet, but how it ended is written
        raise
    contexts: list[TrainContext] = []

    def work() -> None:
        session.open_log(recipe, 0 if resumed is None else resumed.state.step)
        contexts.append(prepare_training(recipe, data, fabric, reporter.note))
        session.train(contexts[0], resumed)

    def end(error: BaseException | None, at_once: bool) -> Exception | None:
        failure = None if error is None or at_once else peers.explain(_as_exception(error))
        if at_once:
            signals.leaving = True
            peers.done(interrupted=signals.asked)
        if at_once or not agreed(failure):
            peers.release()
        return session.end(contexts[0] if contexts else None, failure, at_once)

    with Signals(reporter.note, partial(_cut_short, session, peers)) as signals:
        session.signals = signals
        try:
            error = _outcome_of(work)
            at_once = signals.at_once and error is not None
            failure = end(error, at_once)
        except KeyboardInterrupt:  # a second signal while the run was ending by itself
            at_once, failure = True, end(None, at_once=True)
        signals.leaving = True  # how the run ended is written: a signal changes nothing any more
        _leave(peers, failure, at_once)
    return session.outcome


def _cut_short(session: Session, peers: Peers, name: str) -> None:
    """End this process after a signal, while the run hangs."""
    session.cut_short()
    peers.done(interrupted=name)
    peers.leave(INTERRUPTED)


def _leave(peers: Peers, failure: Exception | None, at_once: bool) -> None:
    """Record for the other ranks how this one ended; if there are any, a process ended at once does not return."""
    if at_once and peers.fabric.world_size > 1:
        peers.leave(INTERRUPTED)
    if not at_once:
        peers.done(failure)
    if failure is not None:
        peers.end_children()
        raise failure


def _outcome_of(work: Callable[[], None]) -> BaseException | None:
    """Run the session; return what ended it early, including a Ctrl-C during the handling of an error."""
    try:
        try:
            work()
        except BaseException as error:
            return error
    except KeyboardInterrupt as interrupt:
        return interrupt
    return None


def _as_exception(error: BaseException) -> Exception:
    """Return the error itself, or an explained one for an exit that would otherwise be silent."""
    if isinstance(error, Exception):
        return error
    failure = RlkitError(f"the run was ended by {type(error).__name__}({error}), which some part raised")
    failure.__cause__ = error
    return failure
