"""From a policy's text to an action of a space, and from a rendering for terminals to plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymnasium.spaces import Discrete, Space, Text

from rlkit.base.errors import RecipeError, shorten
from rlkit.interfaces.parser import after_thinking

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
INTEGER = re.compile(r"-?[0-9]{1,18}")
BOLD, REVERSE = 1, 7


class Actions:
    """Reads the actions of a space from text.

    Args:
        space: Discrete or Text.
        names: The names of a discrete space's actions, in order; None for their numbers.

    Raises:
        RecipeError: The space is another, or has another number of actions than names.
    """

    def __init__(self, space: Space[Any], names: Sequence[str] | None = None) -> None:
        if not isinstance(space, Discrete | Text):
            raise RecipeError(f"the action space is {space}, expected Discrete or Text")
        if names is not None and isinstance(space, Text):
            raise RecipeError(f"`actions` names {len(names)} actions, but the action space is {space}; remove it")
        if names is not None and isinstance(space, Discrete) and len(names) != space.n:
            raise RecipeError(f"`actions` has {len(names)} names, expected {space.n}: one for each action of {space}")
        self.space = space
        self.names = None if names is None else [name.strip().casefold() for name in names]
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise RecipeError(f"`actions` has a name twice: {', '.join(self.names)}")
        self.description = f"one of {', '.join(names)}" if names is not None else _describe(space)

    def read(self, text: str) -> int | str | None:
        """Return the action that a turn states, None if there is none.

        It is the content of the last `<action>`, else all of the text after the policy's thinking.
        """
        text = after_thinking(text)
        marked = ACTION.findall(text)
        action = (marked[-1] if marked else text).strip()
        if isinstance(self.space, Text):
            return action if self.space.contains(action) else None
        first = int(self.space.start)
        if self.names is not None:
            name = action.casefold()
            return first + self.names.index(name) if name in self.names else None
        if INTEGER.fullmatch(action) is None:
            return None
        return int(action) if first <= int(action) < first + int(self.space.n) else None


def _describe(space: Discrete | Text) -> str:
    if isinstance(space, Discrete):
        return f"a number from {space.start} to {int(space.start) + int(space.n) - 1}"
    return f"{space.min_length} to {space.max_length} of the characters {shorten(space.characters, 100)}"


def plain(rendering: str) -> str:
    """Return a rendering without escape sequences.

    Coloured text, which may be the only sign of where a player is, becomes `[x]` on another background, `*x*` in bold
    and `<x>` in any other colour; several of these are nested.
    """
    pieces: list[str] = []
    codes: set[int] = set()
    for index, piece in enumerate(COLOUR.split(rendering)):
        if index % 2 == 0:
            pieces.append(_marked(ESCAPE.sub("", piece), codes))
            continue
        numbers = {int(number or 0) for number in piece.split(";")}
        codes = numbers - {0} if 0 in numbers else codes | numbers
    return "".join(pieces).strip("\n")


def _marked(text: str, codes: set[int]) -> str:
    if not text or not codes:
        return text
    background = any(code == REVERSE or 40 <= code <= 47 or 100 <= code <= 107 for code in codes)
    coloured = any(30 <= code <= 37 or 90 <= code <= 97 for code in codes)
    if BOLD in codes:
        text = f"*{text}*"
    elif coloured:
        text = f"<{text}>"
    return f"[{text}]" if background else text
