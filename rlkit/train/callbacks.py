"""Calls a run's callbacks: within their budgets, under their names, and with one outcome on all ranks."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from statistics import fmean
from typing import Any, TypeVar

from rlkit.base.errors import CallbackError, PartError, explain_foreign, show
from rlkit.base.text import part_name
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces import outputs
from rlkit.interfaces.callback import Callback, Json, RunEnd, StepEnd
from rlkit.interfaces.reward import as_number
from rlkit.registry import calling, require

T = TypeVar("T")

LR_FACTOR = "rlkit.lr_factor"
"""The name of a callback's `lr_factor` beside its own state."""

LONGEST_STATE = 1 << 20
"""Characters of a callback's state in a checkpoint at most."""


class Callbacks:
    """The callbacks of a run on this rank; all ranks must call the methods together, but for `end`.

    Args:
        callbacks: The recipe's.
        ranks: This rank among the others.
        note: Shows a warning.
    """

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks, note: Callable[[str], None]) -> None:
        self.callbacks = callbacks
        self.ranks = ranks
        self.note = note
        self._started = False
        self._slow: set[tuple[Callback, str]] = set()

    def emit(self, method: str, event: object) -> None:
        """Call a method of all callbacks that have it.

        Raises:
            CallbackError: One raised, on some rank.
        """
        self._started = self._started or method == "on_run_start"
        watching = self.watching(method)
        if watching:
            self._together(lambda: self._call_all(watching, method, event))

    def end_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call `on_step_end` of all callbacks; return the metrics that they add, as means over the ranks that do.

        Raises:
            CallbackError: One raised, changed a metric, or added one that is no finite number or has a name in use.
        """
        watching = self.watching("on_step_end")
        if not watching:
            return {}
        added = self._together(lambda: self._added(watching, step, metrics))
        values: dict[str, list[float]] = {}
        for of_rank in self.ranks.gather_world(added):
            for name, value in of_rank.items():
                values.setdefault(name, []).append(value)
        return {name: fmean(values[name]) for name in sorted(values)}

    def _added(self, callbacks: Sequence[Callback], step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that this rank's callbacks add."""
        added: dict[str, float] = {}
        for part in callbacks:
            event = StepEnd(step, {**metrics, **added})
            before = dict(event.metrics)
            self._call_all([part], "on_step_end", event)
            changed = [name for name, value in before.items() if event.metrics.get(name) is not value]
            problem = f"changed the metric {changed[0]!r}; add one under another name" if changed else None
            require(part, "on_step_end", problem)
            new = {name: value for name, value in event.metrics.items() if name not in before}
            require(part, "on_step_end", outputs.of_metrics(new, ("step",)))
            added |= {name: as_number(value) for name, value in new.items()}
        return added

    def lr_factor(self) -> float:
        """Return the callbacks' factor of the learning rates, on rank 0.

        Raises:
            CallbackError: A factor is not a finite number of 0 or more.
        """
        if not self.callbacks:
            return 1.0
        return self.ranks.gather_world(self._together(lambda: prod(map(_lr_factor, self.callbacks))))[0]

    def watching(self, method: str) -> list[Callback]:
        """Return the callbacks that override a method."""
        return [part for part in self.callbacks if getattr(type(part), method) is not getattr(Callback, method)]

    def stopper(self) -> str | None:
        """Return the callback that wants the run to end, on any rank."""
        if not self.callbacks:
            return None
        wanting = next((part_name(part) for part in self.callbacks if part.should_stop), None)
        return next((name for name in self.ranks.gather_world(wanting) if name is not None), None)

    def states(self) -> dict[str, dict[str, Json]]:
        """Return the state of each callback for a checkpoint.

        Raises:
            CallbackError: It is not what JSON holds, or too long.
        """
        if not self.callbacks:
            return {}
        states = self._together(lambda: {name: _state(part) for name, part in self._named()})
        return {name: state for name, state in states.items() if state}

    def load(self, states: Mapping[str, dict[str, Json]]) -> None:
        """Restore the callbacks from what a checkpoint holds of them.

        Raises:
            CallbackError: One raised.
        """
        restored = [(part, dict(states[name])) for name, part in self._named() if name in states]

        def load_all() -> None:
            for part, state in restored:
                part.lr_factor = float(state.pop(LR_FACTOR, 1.0))  # type: ignore[arg-type]
                if state:
                    _call(part, "load_state_dict", state)

        if restored:  # agreed: all ranks have the recipe's callbacks, and read the same checkpoint
            self._together(load_all)

    def end(self, event: RunEnd) -> None:
        """Call `on_run_end`, for no longer than its budget, if there was an `on_run_start`.

        The ranks may have ended apart, and no signal ends the process any more: what a callback raises is a warning.
        """
        for part in self.watching("on_run_end") if self._started else ():
            problems: list[str] = []
            thread = threading.Thread(target=_end, args=(part, event, problems), daemon=True)
            thread.start()
            budget = _budget(part, "on_run_end")
            thread.join(budget)
            if thread.is_alive():
                problems.append(f"{part_name(part)}: `on_run_end` has not ended after {budget:g} s, its budget")
            for problem in problems:
                self.note(f"warning: {problem}")

    def _named(self) -> list[tuple[str, Callback]]:
        """Return the callbacks by the names of their classes; the second of a class is `Name.2`."""
        counts: Counter[str] = Counter()
        named = []
        for part in self.callbacks:
            name = type(part).__name__
            counts[name] += 1
            named.append((name if counts[name] == 1 else f"{name}.{counts[name]}", part))
        return named

    def _call_all(self, callbacks: Sequence[Callback], method: str, event: object) -> None:
        for part in callbacks:
            start = time.monotonic()
            _call(part, method, event)
            seconds, budget = time.monotonic() - start, _budget(part, method)
            if seconds > budget and (part, method) not in self._slow:
                self._slow.add((part, method))
                self.note(
                    f"warning: {part_name(part)}: `{method}` took {seconds:.1f} s, its budget is {budget:g} s; the run "
                    "waits for it: do the work in a thread, or raise its class's budgets"
                )

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's part of something; what one rank raises, all raise."""
        result, failure = None, None
        try:
            result = work()
        except PartError as error:
            failure = error
        problems = self.ranks.gather_world(None if failure is None else str(failure))
        failures = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
        if failures:
            raise CallbackError(
                failures[0].removeprefix("rank 0: ") if len(problems) == 1 else failures[0]
            ) from failure
        return result  # type: ignore[return-value]


def _call(part: Callback, method: str, *arguments: object) -> Any:
    """Call a method; whatever it raises becomes an error that names the callback.

    Raises:
        PartError: It raised.
    """
    try:
        with calling(part, method):
            return getattr(part, method)(*arguments)
    except PartError:
        raise
    except (Exception, SystemExit) as error:  # rlkit's own errors and memory errors too: the ranks must agree
        raise PartError(f"{part_name(part)}: `{method}` raised {explain_foreign(error)}") from error


def _end(part: Callback, event: RunEnd, problems: list[str]) -> None:
    try:
        _call(part, "on_run_end", event)
    except PartError as error:
        problems.append(str(error))


def _lr_factor(part: Callback) -> float:
    require(part, "lr_factor", outputs.of_lr_factor(part.lr_factor))
    return part.lr_factor


def _budget(part: Callback, method: str) -> float:
    return part.budgets.get(method, Callback.budgets[method])


def _state(part: Callback) -> dict[str, Json]:
    state = _call(part, "state_dict")
    copied: dict[str, Json] = {}  # the callback goes on while the state is written
    try:
        text = json.dumps(state, allow_nan=False)
        copied = json.loads(text)
        fine = isinstance(state, dict) and copied == state
    except (TypeError, ValueError, RecursionError):
        fine, text = False, ""
    require(part, "state_dict", None if fine else f"returned {show(state)}, expected what JSON holds, by name")
    long = len(text) > LONGEST_STATE
    require(part, "state_dict", f"returned {len(text)} characters, at most {LONGEST_STATE} are kept" if long else None)
    if part.lr_factor != 1:
        copied[LR_FACTOR] = _lr_factor(part)
    return copied
