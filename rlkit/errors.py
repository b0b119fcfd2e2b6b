"""What rlkit raises. A message says what was given, what was expected and what to do."""


class RlkitError(Exception):
    """An error that is explained by its message: the command line prints it without a traceback."""

    exit_code = 1


class RecipeError(RlkitError):
    """The recipe, an option or the data that they name is wrong; nothing has been trained yet."""

    exit_code = 2


class PluginError(RlkitError):
    """A plugin cannot be loaded, or what it offers is not what its role asks for."""

    exit_code = 2


class EngineError(RlkitError):
    """A rollout engine failed, or cannot do what it was asked."""


class RolloutError(RlkitError):
    """Rollouts or rewards failed in a way that the run's policy does not tolerate."""


class CheckpointError(RlkitError):
    """A model or checkpoint cannot be read or written."""


class RankError(RlkitError):
    """Another rank of the run failed or cannot be reached; the message says which, and why where that is known."""
