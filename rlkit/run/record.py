"""The outcome of a run in progress: shown by the reporter, written to `result.json`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from rlkit.base.errors import RankError, explain, shorten
from rlkit.base.text import redact
from rlkit.records.folder import recipe_data
from rlkit.records.verdict import next_command
from rlkit.run.checkpoint.write import Writer
from rlkit.run.folder import RunFolder
from rlkit.run.outcome import Outcome, Reporter, WarningKeeper


@dataclass
class RunRecord:
    """The outcome of a run so far, with the folder and the reporter that receive it.

    Args:
        folder: The run folder.
        reporter: Displays the run.
        first: Whether this is rank 0, which writes the files that all ranks have in common.
    """

    folder: RunFolder
    reporter: Reporter
    first: bool
    outcome: Outcome = field(default_factory=Outcome)
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.reporter = cast(Reporter, WarningKeeper(self.reporter, self.outcome))

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Run an optional action such as writing rollouts; a failure such as a full disk is a warning."""
        try:
            work()
        except Exception as error:
            self.reporter.note(f"warning: {what}: {explain(error)}")

    def add_failure(self, failure: Exception) -> None:
        """Set the outcome to a failure."""
        self.outcome.status = "failed"
        self.outcome.error = {"type": type(failure).__name__, "message": redact(shorten(str(failure)))}

    def write_result(self) -> None:
        """Write `result.json`, on rank 0."""
        self.outcome.seconds = round(time.monotonic() - self.start, 3)
        self.outcome.set_verdict()
        if self.first:
            self.attempt("result.json", lambda: self.folder.result(vars(self.outcome)))

    def write_peer_failure(self, problem: str) -> None:
        """Record a peer failure while this rank is blocked."""
        self.add_failure(RankError(problem))
        self.write_result()

    def write_interruption(self) -> None:
        """Record an interruption while this rank is blocked."""
        self.outcome.status = "interrupted"
        self.write_result()

    def advice(self, writer: Writer | None) -> str:
        """Return the run's folder, and the command that continues from it or uses its model, a line each.

        Args:
            writer: The writer of the run's checkpoints; None if the run ended before there was one.
        """
        path = shlex.quote(str(self.folder.path))
        try:
            has_checkpoint = writer is not None and bool(writer.store.names())
        except Exception:  # a remote store that cannot be reached
            has_checkpoint = False
        if writer is None or not has_checkpoint:
            return f"the run is in {path}"
        recipe = recipe_data(self.folder.recipe_yaml)
        command = next_command(self.folder.path, self.outcome.status == "ok", writer.section.folder, recipe)
        if self.outcome.status == "ok":
            use = f"to use the model: {command}"
            if self.outcome.diagnosis is not None:
                use = "what may be wrong: rlkit docs why-it-does-not-learn"
            return f"the run is in {path}\nto look at it: rlkit report {path}\n{use}"
        return f"the run is in {path}\nto continue: {command}"
