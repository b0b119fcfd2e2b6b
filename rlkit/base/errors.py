"""rlkit's errors: a message has the actual value, the expected one and the remedy."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import traceback
from pathlib import Path
from types import FrameType, FunctionType, ModuleType

PACKAGE = str(Path(__file__).parents[1]) + "/"
LIBRARY = str(Path(os.__file__).parent) + "/"

INTERRUPTED = 130
"""The exit status of a run that a signal ended, whichever it was."""

LONGEST = 2000
"""Maximum characters of a line of a message."""

LOCATED = re.compile(r", line \d+: ")
"""Where a message names a line."""

DEFINITION = re.compile(r"\s*(async def|def|class)\b")

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

    It is the innermost line of the package, or of the file, that rlkit or a package that comes with it has called.
    """
    if isinstance(error, SyntaxError) and error.lineno and os.path.isfile(error.filename or ""):
        return f"{type(error).__name__}: {error.msg}{_location(str(error.filename), error.lineno)}"
    frames = [pair for pair in traceback.walk_tb(error.__traceback__) if is_foreign(pair[0])]
    frames = [pair for pair in frames if not _comes_with_rlkit(_package(pair[0]))] or frames
    if not frames:
        return explain(error)
    package = _package(frames[0][0])
    frame, line = next(pair for pair in reversed(frames) if _package(pair[0]) == package)
    return explain(error) + _location(frame.f_code.co_filename, line)


def _comes_with_rlkit(package: str) -> bool:
    from rlkit.base.text import source_of  # which imports this module

    try:
        return not source_of(package)
    except Exception:  # what has failed may have replaced what lists the installed packages
        return False


def with_definition(text: str, owner: object, method: str = "") -> str:
    """Return a message with the file, the line and the code at which a plugin defines what it is about.

    Args:
        text: A message; one that names a line already is returned as it is.
        owner: A function, a part, its class, or a module; nothing is added for those of rlkit.
        method: The part's or the module's; a part's class is named if it does not define the method itself.
    """
    if LOCATED.search(text):
        return text
    named = owner if isinstance(owner, type | FunctionType | ModuleType) else type(owner)
    for member in (getattr(named, method, None), named):
        path, line = _definition(member)
        if path and not _is_ours(path):
            return text + _location(path, line)
    return text


def _definition(member: object) -> tuple[str, int]:
    """Return the file and the line of a function or a class; an empty name if there is none, as for code in C."""
    try:
        function = inspect.unwrap(member)  # type: ignore[arg-type]
        lines, first = inspect.getsourcelines(function)
        decorators = next((i for i, line in enumerate(lines) if DEFINITION.match(line)), 0)
        return inspect.getsourcefile(function) or "", first + decorators
    except (TypeError, OSError, ValueError):
        return "", 0


def locate_frame(frame: FrameType) -> str:
    """Return the file, the line and the code at which a frame runs."""
    return _location(frame.f_code.co_filename, frame.f_lineno)


def _location(path: str, line: int) -> str:
    return f" ({path}, line {line}: {shorten(linecache.getline(path, line).strip(), 200)})"


def is_foreign(frame: FrameType) -> bool:
    """Whether a frame is of a file that is neither rlkit's nor of the standard library."""
    return not _is_ours(frame.f_code.co_filename)


def _is_ours(path: str) -> bool:
    in_library = path.startswith(LIBRARY) and "site-packages" not in path
    return path.startswith((PACKAGE, "<")) or in_library


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


class PoolError(RlkitError):
    """A pool of `placement:` failed, or its process died; the message names it, its roles and its log."""


class LaunchError(RlkitError):
    """A launcher cannot reach its cluster, or its processes have ended otherwise than by themselves."""


class TrainingError(RlkitError):
    """Training makes no progress; all ranks raise this error after the same step."""


class CheckpointError(RlkitError):
    """A model or checkpoint cannot be read or written."""


class RankError(RlkitError):
    """Another rank of the run failed or cannot be reached; the message names it, and the cause if known."""
