"""The commands of training clients: those of a client run in order, passes of several clients together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlkit.base.errors import explain
from rlkit_tinker.training import PassRequest, Trainer

T = TypeVar("T")
U = TypeVar("U")


class APIFuture(Generic[T]):
    """The result of a command, which runs when a result is asked for, after the commands before it.

    Args:
        run: Runs commands until this future is done.
    """

    def __init__(self, run: Callable[[APIFuture[T]], None]) -> None:
        self._run = run
        self._results: list[T] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the command has run."""
        return bool(self._results) or self._error is not None

    def result(self) -> T:
        """Return the result.

        Raises:
            RequestFailedError: The command was refused.
        """
        if not self.done:
            self._run(self)
        if self._error is not None:
            raise self._error
        return self._results[0]

    def then(self, convert: Callable[[T], U]) -> APIFuture[U]:
        """Return the future of a function of the result."""

        def run(future: APIFuture[U]) -> None:
            _resolve(future, lambda: convert(self.result()))

        return APIFuture(run)

    def set_result(self, result: T) -> None:
        """Resolve the future."""
        self._results = [result]

    def set_exception(self, error: BaseException) -> None:
        """Resolve the future with an error."""
        self._error = error


@dataclass(eq=False)
class ClientCommand:
    """A command: a pass, or any other work.

    Args:
        future: Its result.
        work: The pass, or a function.
    """

    future: APIFuture[object]
    work: PassRequest | Callable[[], object]


@dataclass(eq=False)
class CommandLog:
    """The commands of one client, in order."""

    waiting: deque[ClientCommand] = field(default_factory=deque)


class Scheduler:
    """Runs commands in the order of their arrival; the next passes of all clients run together.

    Args:
        trainer: Runs passes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._order: deque[tuple[CommandLog, ClientCommand]] = deque()

    def submit(self, log: CommandLog, work: PassRequest | Callable[[], T]) -> APIFuture[T]:
        """Add a command to those of a client; return its result to come."""
        future: APIFuture[T] = APIFuture(self._run_until)
        command = ClientCommand(future, work)
        log.waiting.append(command)
        self._order.append((log, command))
        return future

    def _run_until(self, future: APIFuture[T]) -> None:
        while not future.done:
            log, command = self._order.popleft()
            if command.future.done:  # with passes of other clients
                continue
            if isinstance(command.work, PassRequest):
                self._run_passes(self._joining(log, command.work))
            else:
                log.waiting.popleft()
                _resolve(command.future, command.work)

    def _joining(self, log: CommandLog, first: PassRequest) -> list[ClientCommand]:
        """Remove and return the next command of a client and those of other clients that may run with it."""
        joining = []
        for candidate in dict.fromkeys((log, *(later for later, _ in self._order))):
            work = candidate.waiting[0].work if candidate.waiting else None
            if isinstance(work, PassRequest) and work.backward == first.backward:
                joining.append(candidate.waiting.popleft())
        return joining

    def _run_passes(self, commands: Sequence[ClientCommand]) -> None:
        """Run passes together; if that fails, each alone, so that a client fails by its own fault only."""
        requests = [command.work for command in commands if isinstance(command.work, PassRequest)]
        try:
            outputs = self._trainer.run(requests)
        except Exception as error:
            if len(commands) > 1:
                for command in commands:
                    self._run_passes([command])
            else:
                self._fail(commands, error)
            return
        except BaseException as error:
            self._fail(commands, error)
            raise
        for command, output in zip(commands, outputs, strict=True):
            command.future.set_result(output)

    def _fail(self, commands: Sequence[ClientCommand], error: BaseException) -> None:
        for command in commands:
            if isinstance(command.work, PassRequest) and command.work.backward:
                command.work.adapter.failure = f"a forward_backward before it failed: {explain(error)}"
            command.future.set_exception(error)


def _resolve(future: APIFuture[T], work: Callable[[], T]) -> None:
    """Run a function, and resolve a future with its result or its error."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
