"""Code that blocks the event loop of all rollouts is named once, by function, file and line."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator

import pytest

from rlkit.interfaces.runtime import RunPart
from rlkit.rollout import loop as loop_module
from rlkit.rollout.loop import EventLoop, close_on_loop

LONGEST = 60.0


class Warnings:
    """Takes warnings, and lets code wait until there is one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.taken = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.taken.set()


@pytest.fixture
def warnings() -> Warnings:
    return Warnings()


@pytest.fixture
def loop(warnings: Warnings, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.01)
    made = EventLoop(lambda: None, warnings)
    yield made
    made.close()


def test_a_function_that_blocks_is_named_once(loop: EventLoop, warnings: Warnings) -> None:
    async def block() -> bool:
        return warnings.taken.wait(LONGEST)

    assert loop.run(block())
    assert loop.run(block())
    [text] = warnings.texts
    line = inspect.getsourcelines(block)[1] + 1
    assert text.startswith("warning: test_a_function_that_blocks_is_named_once.<locals>.block of tests has blocked all")
    assert f"({__file__}, line {line}: return warnings.taken.wait(LONGEST))" in text
    assert text.endswith("await what takes time, such as asyncio.sleep, or call it by `await asyncio.to_thread(...)`")


def test_waiting_is_no_blocking(loop: EventLoop, warnings: Warnings) -> None:
    async def wait() -> None:
        await asyncio.to_thread(warnings.taken.wait, 0.3)

    loop.run(wait())
    assert warnings.texts == []


def test_a_part_that_closes_blocks_no_rollout(loop: EventLoop, warnings: Warnings) -> None:
    class Server(RunPart):
        def close(self) -> None:
            warnings.taken.wait(0.3)

    loop.run(close_on_loop([Server()]))
    assert warnings.texts == []
