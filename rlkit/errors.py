"""What rlkit raises. A message says what was given, what was expected and what to do."""

from __future__ import annotations

LONGEST = 2000
"""Characters of a text that rlkit did not write, in a message."""


def shorten(text: str, limit: int = LONGEST) -> str:
    """Return a text that can be written anywhere, without its middle where it is longer than `limit` characters."""
    if len(text) > limit:
        half = (limit - 40) // 2  # the note takes the rest
        text = f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def show(value: object, limit: int = 200) -> str:
    """Return a value as Python writes it, whatever it is and however long that would be."""
    try:
        return shorten(repr(value), limit)
    except Exception as error:  # a `__repr__` may raise anything, and that of an integer of 5,000 digits does
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def explain(error: BaseException) -> str:
    """Return the type and the text of an error that foreign code raised."""
    try:
        text = str(error)
    except Exception as second:
        text = f"its text cannot be read ({type(second).__name__})"
    return shorten(f"{type(error).__name__}: {text}")


class RlkitError(Exception):
    """An error that is explained by its message: the command line prints it without a traceback."""

    exit_code = 1


class RecipeError(RlkitError):
    """The recipe, an option or the data that they name is wrong; nothing has been trained yet."""

    exit_code = 2


class UnavailableError(RecipeError):
    """A model or data set is not on this machine, and the hub that may have it cannot be reached."""


def unreachable(error: BaseException) -> bool:
    """Whether a network that cannot be reached, or must not be asked, is behind an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError) or type(cause).__name__ in ("LocalEntryNotFoundError", "ConnectError"):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class PluginError(RlkitError):
    """A plugin cannot be loaded, or what it offers is not what its interface asks for."""

    exit_code = 2


class PartError(RlkitError):
    """A part raised, or returned what its interface does not allow; the message names it and its plugin."""


class EngineError(RlkitError):
    """A rollout engine failed, or cannot do what it was asked."""


class RolloutError(RlkitError):
    """Rollouts or rewards failed in a way that the run's policy does not tolerate."""


class TrainingError(RlkitError):
    """The run's steps teach the policy nothing; all ranks raise it after the same step."""


class CheckpointError(RlkitError):
    """A model or checkpoint cannot be read or written."""


class RankError(RlkitError):
    """Another rank of the run failed or cannot be reached; the message says which, and why where that is known."""
