"""Training from a recipe to a run folder, with an orderly end in every case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from lightning.fabric import Fabric

from rlkit.base.errors import INTERRUPTED, RlkitError
from rlkit.data.data import Data
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.placement import Pools
from rlkit.models.checkpoints import CheckpointRef
from rlkit.recipe import Recipe
from rlkit.registry.shelf import provider
from rlkit.run.ending import end_session, ends_alike
from rlkit.run.outcome import Outcome, Replay, part_warnings_as
from rlkit.run.peers import Peers
from rlkit.run.record import RunRecord
from rlkit.run.session import Session
from rlkit.run.signals import Signals
from rlkit.train.setup import prepare_training

POOL_PATIENCE = 5.0
"""Seconds in which a rank may end by itself after a process of a pool has died; meanwhile a reply may fail."""


def fit(
    recipe: Recipe,
    data: Data,
    fabric: Fabric,
    record: RunRecord,
    *,
    resumed: CheckpointRef | None = None,
    replay: Replay | None = None,
) -> Outcome:
    """Train to the recipe's last step.

    The first Ctrl-C, SIGTERM or SIGHUP ends the run after the step in progress. A second one ends it at once; then this
    function does not return if there are several ranks. The policy is saved, and the outcome is `interrupted`.

    Args:
        recipe: A checked recipe.
        data: The data, from `load_data`.
        fabric: A launched Fabric.
        record: The outcome, with the run folder, which exists.
        resumed: The checkpoint to continue from.
        replay: The steps to make again.

    Raises:
        RlkitError: The run failed; its outcome is written. RankError if another rank failed.
    """
    session = Session(record, replay)
    try:
        peers = Peers(fabric, record.folder.path, record.write_peer_failure)
    except RlkitError as error:
        end_session(session, error)  # nothing has started yet, but the outcome is written
        raise

    note = record.reporter.note

    def work() -> None:
        session.open_log(recipe, 0 if resumed is None else resumed.state.step)
        if recipe.placement is not None:
            session.pools = provider(Pools)(recipe, Ranks(fabric), record.folder.path)  # type: ignore[type-abstract]
            peers.watch(session.pools.failure, POOL_PATIENCE)
        session.context = prepare_training(recipe, data, fabric, note, session.pools)
        session.train(session.context, resumed)

    shown = part_warnings_as(note) if fabric.is_global_zero else nullcontext()  # other ranks show no notes
    with shown, Signals(note, partial(_exit_blocked, record, peers)) as signals:
        session.signals = signals
        try:
            run_error = _error_of(work)
            at_once = signals.at_once and run_error is not None
            failure = _end(session, signals, peers, run_error, at_once)
        except KeyboardInterrupt:  # a second signal while the run was ending by itself
            at_once = True
            failure = _end(session, signals, peers, None, at_once)
        signals.leaving = True  # the outcome is written: no signal changes it
        _leave(peers, failure, at_once)
    return record.outcome


def _end(
    session: Session, signals: Signals, peers: Peers, error: BaseException | None, at_once: bool
) -> Exception | None:
    """End the session, without waiting for other ranks that may have ended differently; return the failure."""
    failure = None if error is None or at_once else peers.explain(_as_exception(error))
    if at_once:
        signals.leaving = True
        peers.record_end(interrupted=signals.asked)
    if at_once or not ends_alike(failure):
        peers.release()
    return end_session(session, failure, at_once)


def _exit_blocked(record: RunRecord, peers: Peers, name: str) -> None:
    """End this process after a signal while the run is blocked."""
    record.write_interruption()
    peers.record_end(interrupted=name)
    peers.leave(INTERRUPTED)


def _leave(peers: Peers, failure: Exception | None, at_once: bool) -> None:
    """Record for the other ranks how this one ended; after an end at once, exit if there are other ranks."""
    if at_once and peers.fabric.world_size > 1:
        peers.leave(INTERRUPTED)
    if not at_once:
        peers.record_end(failure)
    if failure is not None:
        peers.end_children()
        raise failure


def _error_of(work: Callable[[], None]) -> BaseException | None:
    """Run a function; return the error that ended it, including a Ctrl-C during the handling of an error."""
    try:
        try:
            work()
        except BaseException as error:
            return error
    except KeyboardInterrupt as interrupt:
        return interrupt
    return None


def _as_exception(error: BaseException) -> Exception:
    """Return the error itself, or an error that explains an exit which would otherwise be silent."""
    if isinstance(error, Exception):
        return error
    failure = RlkitError(f"the run was ended by {type(error).__name__}({error}), which some part raised")
    failure.__cause__ = error
    return failure
