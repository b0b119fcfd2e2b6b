"""Signals of a run: what the first, the second and the third one do, and what they no longer do at its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest

from rlkit.base.signals import raised
from rlkit.run.signals import INTERRUPT, PATIENCE, Signals
from tests.events import wait_until


def send(number: signal.Signals, until: Callable[[], object]) -> None:
    """Send this process a signal, and wait for what it does."""
    os.kill(os.getpid(), number)
    wait_until(until)


def interrupt(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(number, until=lambda: False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_for_the_end(number: signal.Signals) -> None:
    notes: list[str] = []
    with Signals(notes.append, notes.append) as signals:
        send(number, lambda: signals.asked)
        wait_until(lambda: notes)
        assert (signals.asked, signals.at_once) == (number.name, False)
    assert notes == [f"{number.name}: finishing this step, then saving; press Ctrl-C again to stop at once"]


def test_a_second_signal_interrupts_once_and_a_hangup_does_not() -> None:
    cut: list[str] = []
    with Signals(lambda _: None, cut.append) as signals:
        send(signal.SIGHUP, lambda: signals.asked)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.05)
        assert not signals.at_once
        interrupt(signal.SIGTERM)
        time.sleep(0.05)  # it is raised once
        assert cut == []
        send(signal.SIGINT, lambda: cut)
        assert (cut, signals.asked) == (["SIGINT"], "SIGHUP")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_run_that_hangs_after_the_second_signal_is_cut_short(leaves: bool) -> None:
    cut: list[str] = []
    with patch("threading.Timer") as timer, Signals(lambda _: None, cut.append) as signals:
        send(signal.SIGINT, lambda: signals.asked)
        interrupt(signal.SIGINT)
        wait_until(lambda: timer.return_value.start.called)
        seconds, overdue, name = timer.call_args.args
        assert (seconds, cut) == (PATIENCE, [])
        signals.leaving = leaves
        overdue(*name)
    assert cut == ([] if leaves else ["SIGINT"])


def test_an_interrupt_that_is_lost_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that comes right before a system call, which it does not end."""
    send_to_thread, sent = signal.pthread_kill, list[int]()

    def lose_two(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 2:
            send_to_thread(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_two)
    with Signals(lambda _: None, lambda _: None) as signals:
        send(signal.SIGINT, lambda: signals.asked)
        interrupt(signal.SIGINT)
        assert signals.at_once
    assert len(sent) >= 3
    assert {*sent} == {INTERRUPT}


def test_signals_change_nothing_once_the_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    interrupting: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), interrupting.append(thread)))
    with Signals(notes.append, notes.append) as signals:
        signals.leaving = True
        send(signal.SIGINT, lambda: signals.asked)
        send(signal.SIGINT, lambda: signals.at_once and interrupting[-1].name == "rlkit-interrupt")
        interrupting[-1].join(60)
        os.kill(os.getpid(), INTERRUPT)
    os.kill(os.getpid(), INTERRUPT)
    assert notes == []


def test_everything_is_as_before_afterwards() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, INTERRUPT)
    before = [*map(signal.getsignal, numbers), sys.unraisablehook]
    with Signals(lambda _: None, lambda _: None), raised():
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert [*map(signal.getsignal, numbers), sys.unraisablehook] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_interrupt_that_python_drops_comes_again() -> None:
    """One that is raised while an object is being deleted."""

    class Slow:
        def __del__(self) -> None:
            send(signal.SIGINT, until=lambda: False)

    def hang() -> None:
        Slow()
        wait_until(lambda: False)

    with Signals(lambda _: None, lambda _: None) as signals:
        send(signal.SIGINT, lambda: signals.asked)
        with pytest.raises(KeyboardInterrupt):
            hang()
