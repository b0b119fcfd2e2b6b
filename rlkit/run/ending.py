"""The end of a run: its policy is saved, its outcome is written, and what it opened is closed, whatever fails."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.base.errors import CallbackError, CheckpointError, TrainingError
from rlkit.base.text import redact
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.interfaces.callback import RunEnd
from rlkit.models.save import model_card, save_policy
from rlkit.models.source import merge_overrides, source_of
from rlkit.models.weights import full_state_dict
from rlkit.records.folder import AVERAGE, write_atomically
from rlkit.records.verdict import verdict_on
from rlkit.run.record import RunRecord
from rlkit.run.session import Session
from rlkit.train.setup import TrainContext


def end_session(session: Session, failure: Exception | None, at_once: bool = False) -> Exception | None:
    """Save the policy and write the outcome; return the first failure, of the run or of saving.

    Args:
        session: The session to end.
        failure: The error that ended the run, if any.
        at_once: Whether the run was interrupted in the middle of a step: the other ranks may be anywhere.
    """
    record = session.record
    if at_once:
        record.outcome.status = "interrupted"
    if failure is not None:
        record.add_failure(failure)
    try:
        _save_policies(session, failure, at_once)
    except Exception as error:  # must not hide an earlier failure
        failure = failure or error
        record.add_failure(failure)
    record.write_result()
    if session.signals is not None:
        session.signals.leaving = True  # from here on resources are freed whatever signal comes
    for name, close in _closers(session, failure, at_once):
        record.attempt(name, close)
    writer = None if session.saver is None else session.saver.writer
    record.reporter.finish(vars(record.outcome), record.advice(writer))
    return failure


def _closers(session: Session, failure: Exception | None, at_once: bool) -> list[tuple[str, Callable[[], None]]]:
    """Return the functions that close what the session opened, with names for messages."""
    outcome, context = session.record.outcome, session.context
    closers: list[tuple[str, Callable[[], None]]] = []
    if context is not None and not at_once:
        run_end = RunEnd(outcome.status, outcome.steps, None if failure is None else redact(str(failure)))
        callbacks = context.callbacks
        closers.append(("the callbacks", lambda: callbacks.end(run_end)))
    if session.saver is not None:
        closers.append(("the checkpoints' writer", session.saver.writer.close))
    log = session.log
    if log is not None:
        closers.append(("the loggers", lambda: log.close(outcome.status)))
    if context is not None:
        closers.append(("the rollouts", context.service.close))
    if session.pools is not None:
        closers.append(("the pools", session.pools.close))
    return closers


def _save_policies(session: Session, failure: Exception | None, at_once: bool) -> None:
    """Save the final policy; if sharded and ranks may be dead, rely on checkpoints."""
    record, context = session.record, session.context
    if context is None or not record.outcome.steps:  # agreed: all ranks count the same steps
        return
    # agreed: by `ends_alike`; a rank that waits here for one that has ended is ended by `Peers`
    if isinstance(context.ranks.fabric.strategy, FSDP2Strategy) and (at_once or not ends_alike(failure)):
        return
    save(record, context, "final")
    average = context.models.average
    if average is not None:
        with average.applied():
            save(record, context, AVERAGE)


def save(record: RunRecord, context: TrainContext, name: str) -> None:
    """Write the policy as a Hugging Face folder; all ranks take part."""
    policy = context.models.actor.policy
    weights = full_state_dict(policy, keep=record.first)
    if record.first:
        folder = record.folder.path / name
        model = context.recipe.model
        overrides = merge_overrides(source_of(model).overrides, model.config)
        dialogue = context.data.dialogue
        save_policy(policy, dialogue.tokenizer, folder, weights, overrides, ends=dialogue.template.ends)
        record.attempt("the model card", lambda: write_atomically(folder / "README.md", _card(record, context, name)))


def _card(record: RunRecord, context: TrainContext, name: str) -> bytes:
    outcome = record.outcome
    if name == AVERAGE:
        return model_card(
            context.recipe, outcome.steps, {}, "The weights are averages over steps (`train.ema`)."
        ).encode()
    verdict = verdict_on(outcome.validation["before"], outcome.validation["after"])
    sentence = "" if verdict is None else f"{verdict}.".capitalize()
    return model_card(context.recipe, outcome.steps, outcome.validation, sentence).encode()


def ends_alike(failure: Exception | None) -> bool:
    """Check whether all ranks have ended a run in the same way, so that they may still act together."""
    return failure is None or isinstance(failure, CallbackError | CheckpointError | TrainingError)
