"""Signals that end a run: the first after the step in progress, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rlkit.base.signals import is_handled

PATIENCE = 15.0
"""Seconds that a run has to end at once; then a run that is blocked, for example in a collective, is ended."""
INTERRUPT = signal.SIGURG
"""What makes the main thread handle a signal; nobody else sends it, and where it is not handled nothing happens."""
REPEAT_SECONDS = 0.05
"""Before each of these; a deletion that has dropped one is over then."""


class Signals:
    """Handles Ctrl-C, SIGTERM and SIGHUP during a run.

    The first signal only sets `asked`, on which the ranks agree after each step. A second Ctrl-C or SIGTERM sets
    `at_once` and raises KeyboardInterrupt in the main thread; if that does not end the run within `PATIENCE` seconds,
    and at a third signal, `cut_short` is called and must not return. A SIGHUP never counts as a second signal, since a
    terminal that closes may send several; an ignored SIGHUP (nohup) stays ignored.

    A separate thread reads which signals arrived: Python's handlers wait while the main thread is in a collective. In a
    run outside the main thread, signals are not handled here.

    Args:
        note: Function that shows a line to the user.
        cut_short: Function that writes the outcome and exits the process; called with the signal's name.
    """

    def __init__(self, note: Callable[[str], None], cut_short: Callable[[str], None]) -> None:
        self.asked: str | None = None
        self.at_once = False
        self.leaving = False
        """Whether the main thread has left the training and no longer waits for other ranks."""
        self._note = note
        self._cut_short = cut_short
        self._raised = False
        self._numbers = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_handled(s)]
        self._main_thread = threading.current_thread() is threading.main_thread()  # no other thread can handle signals

    def __enter__(self) -> Signals:
        if not self._main_thread:
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._main = threading.get_ident()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="rlkit-signals")
        self._listener.start()
        self._handlers = {number: signal.signal(number, self._handle) for number in (*self._numbers, INTERRUPT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leaving = True
        if not self._main_thread:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup)
        sys.unraisablehook = self._hook
        os.write(self._write, b"\0")
        self._listener.join()
        os.close(self._read)
        os.close(self._write)

    def _handle(self, *_: object) -> None:
        if self.at_once and not (self.leaving or self._raised):
            self._raised = True
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while (number := os.read(self._read, 1)[0]) != 0:
            if number in self._numbers:
                self._receive(signal.Signals(number).name)

    def _receive(self, name: str) -> None:
        if self.asked is None:
            self.asked = name
            if self.leaving:
                return
            text = f"{name}: finishing this step, then saving; press Ctrl-C again to stop at once"
            # in a thread, since a blocked terminal must not delay the next signal
            threading.Thread(target=self._note, args=(text,), daemon=True).start()
        elif name == "SIGHUP":
            return
        elif not self.at_once:
            self.at_once = True
            overdue = threading.Timer(PATIENCE, self._overdue, (name,))
            overdue.daemon = True
            overdue.start()
            self._start_interrupting()
        else:
            self._cut_short(name)

    def _overdue(self, name: str) -> None:
        if not self.leaving:
            self._cut_short(name)

    def _start_interrupting(self) -> None:
        threading.Thread(target=self._interrupt_main, daemon=True, name="rlkit-interrupt").start()

    def _interrupt_main(self) -> None:
        """Make the main thread run `_handle`, even if it waits in a system call.

        A signal that comes right before the call does not end it, so it is sent until it is handled.
        """
        while not (self._raised or self.leaving):
            time.sleep(REPEAT_SECONDS)
            signal.pthread_kill(self._main, INTERRUPT)

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise a KeyboardInterrupt again that Python dropped because an object was being deleted."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._raised = False
            self._start_interrupting()
        else:
            self._hook(unraisable)
