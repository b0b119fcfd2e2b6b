"""How a chat template ends the policy's turns: read off renderings of stand-ins, not off a list of known tokens."""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import NamedTuple


class TurnEnd(NamedTuple):
    """The token that ends a turn of the policy, and what a template writes around it.

    Args:
        token: Its text; empty if the template writes no special token after a turn.
        before: What stands between the turn's last text and the token.
        tail: What a rendering that ends with the turn has after the turn's own text.
        ending: What the policy writes in its place, up to the token.
    """

    token: str
    before: str
    tail: str
    ending: str

    @property
    def opens_next(self) -> bool:
        """Whether the token belongs to what follows, such as the next role's marker."""
        return bool(self.token) and self.token not in self.tail

    def text_of(self, rendered: str) -> str | None:
        """Return a turn with its end, from what a rendering that ends with the turn has; None if it ends otherwise."""
        if not rendered.endswith(self.tail):
            return None
        return rendered[: len(rendered) - len(self.tail)] + self.ending


def find_end(alone: str, followed: str, special: re.Pattern[str], stop: re.Pattern[str]) -> TurnEnd:
    """Return how a turn ends, from what follows its last text in two renderings.

    Of the special tokens with which both renderings go on, it is the first that ends turns by the model's files, or
    else the last (`<|im_end|>`). Without one in common, it is the first that `alone` has (`<|return|>`, in whose place
    another is once messages follow), or else the first of `followed`: the marker of the next role.

    Args:
        alone: In a rendering that ends with the turn.
        followed: In one in which others follow, as they do in a conversation.
        special: Matches the text of a special token.
        stop: Matches the text of a token that ends a turn by the model's own files.
    """
    common = common_length(alone, followed, special)
    shared = list(special.finditer(alone[:common]))
    by_files = next((match for match in shared if stop.fullmatch(match.group())), None)
    end = by_files or (shared[-1] if shared else special.search(alone, common))
    marker = special.search(followed, common)
    if marker is not None and not (alone[common:] + followed[common : marker.start()]).strip():
        before = followed[: marker.start()]
        in_its_place = end is None and before == before.rstrip()  # nothing stands between the turn and the marker
        if in_its_place or (by_files is None and stop.fullmatch(marker.group())):
            return TurnEnd(marker.group(), before, alone[common:], followed[common : marker.end()])
    if end is None:
        return TurnEnd("", "", alone, "")
    return TurnEnd(end.group(), alone[: end.start()], alone[end.start() :], end.group())


def common_length(first: str, second: str, special: re.Pattern[str]) -> int:
    """Return the length of what two texts have in common, without the beginning of a special token."""
    length = len(commonprefix((first, second)))  # noqa: RUF071 (no paths)
    cuts = [m.start() for text in (first, second) for m in special.finditer(text) if m.start() < length < m.end()]
    return min((length, *cuts))
