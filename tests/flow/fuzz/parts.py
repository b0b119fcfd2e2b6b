"""Parts of a plugin, whose options are spoiled as those of rlkit are."""

from __future__ import annotations

from rlkit.base.ranges import PositiveInt, Share
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.tool import State, Tool
from rlkit.types import JsonObject, Prompt


class Watcher(Callback):
    """Watches nothing.

    Args:
        label: A text.
        every: A count.
        bound: A fraction.
    """

    def __init__(self, label: str, every: PositiveInt = 1, bound: Share = 0.5) -> None:
        self.label = label
        self.every = every
        self.bound = bound


class Countdown(Environment):
    """Counts down.

    Args:
        start: Where it begins.
        hint: The first observation.
    """

    def __init__(self, start: PositiveInt, hint: str = "") -> None:
        self.start = start
        self.hint = hint

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return self.hint

    async def step(self, action: str, state: State) -> Observation:
        return Observation("", done=True)


class Echo(Tool):
    """Repeats its argument.

    Args:
        prefix: What it begins with.
    """

    name = "echo"
    description = "Repeats a text."
    parameters: JsonObject = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    async def call(self, arguments: JsonObject, state: State, **kwargs: object) -> str:
        return f"{self.prefix} {arguments.get('text')}"


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (Watcher, Countdown, Echo):
        register(part)
