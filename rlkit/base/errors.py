"""rlkit's errors: a message has the actual value, the expected one and the remedy."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1]) + "/"
LIBRARY = str(Path(os.__file__).parent) + "/"

INTERRUPTED = 130
"""The exit status of a run that a signal ended, whichever it was."""

LONGEST = 2000
"""Maximum characters of a line of a message."""

LONG_WORD = re.compile(r"\S{301,}")
"""A word without spaces that a message shortens, such as a flag of some kilobytes."""


def shorten(text: str, limit: int = LONGEST) -> str:
    """Return a printable text, without its middle if it is longer than `limit` characters."""
    if len(text) > limit:
        half = (limit - 40) // 2  # the remaining characters are for the note
        text = f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def show(value: object, limit: int = 200) -> str:
    """Return the `repr` of any value, shortened."""
    try:
        return shorten(repr(value), limit)
    except Exception as error:  # a `__repr__` may raise, as that of an integer of 5,000 digits
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def explain(error: BaseException) -> str:
    """Return the type and the text of an error that foreign code raised."""
    try:
        text = str(error)
    except Exception as second:
        text = f"its text cannot be read ({type(second).__name__})"
    return shorten(f"{type(error).__name__}: {text}")


def explain_foreign(error: BaseException) -> str:
    """Return `explain` of an error, and the file, the line and the code at which a plugin or a user's file raised it.

    It is the innermost line of the package, or of the file, that rlkit has called.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_foreign(frame)]
    if not frames:
        return explain(error)
    package = _package(frames[0][0])
    frame, line = next(pair for pair in reversed(frames) if _package(pair[0]) == package)
    path = frame.f_code.co_filename
    return f"{explain(error)} ({path}, line {line}: {shorten(linecache.getline(path, line).strip(), 200)})"


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame is of a file that is neither rlkit's nor of the standard library."""
    path = frame.f_code.co_filename
    in_library = path.startswith(LIBRARY) and "site-packages" not in path
    return not (path.startswith((PACKAGE, "<")) or in_library)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] or frame.f_code.co_filename


class RlkitError(Exception):
    """An error whose message is sufficient: the command line prints it without a traceback.

    Args:
        message: Lines; one that is longer than `LONGEST` loses its middle, and so does a `LONG_WORD`.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        lines = LONG_WORD.sub(lambda word: shorten(word[0], 200), str(message)).split("\n")
        super().__init__("\n".join(map(shorten, lines)))


class RecipeError(RlkitError):
    """The recipe, an option or the data is wrong; raised before anything is trained."""

    exit_code = 2


class UnavailableError(RecipeError):
    """A model or data set is not on this machine, and the hub cannot be reached."""


def unreachable(error: BaseException) -> bool:
    """Whether an error is caused by a network that is unreachable or switched off."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError) or type(cause).__name__ in ("LocalEntryNotFoundError", "ConnectError"):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class PluginError(RlkitError):
    """A plugin cannot be loaded, or what it registers does not implement its interface."""

    exit_code = 2


class PartError(RlkitError):
    """A part raised, or violated its interface; the message names it and its plugin."""


class CommandError(RlkitError):
    """A plugin's verb raised; the message names the verb, the plugin and its distribution."""


class CallbackError(PartError):
    """A callback raised; all ranks raise this error after the same call."""


class EngineError(RlkitError):
    """A rollout engine failed, or cannot serve the run."""


class RolloutError(RlkitError):
    """Rollouts or rewards failed beyond what the recipe tolerates."""


class LaunchError(RlkitError):
    """A launcher cannot reach its cluster, or its processes have ended otherwise than by themselves."""


class TrainingError(RlkitError):
    """Training makes no progress; all ranks raise this error after the same step."""


class CheckpointError(RlkitError):
    """A model or checkpoint cannot be read or written."""


class RankError(RlkitError):
    """Another rank of the run failed or cannot be reached; the message names it, and the cause if known."""
