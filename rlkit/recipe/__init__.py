"""The recipe: the typed sections and parts of a run, and the checks of how they fit together.

`Recipe` is the built recipe, `check` refuses options that contradict each other, a module for each topic. Values of
single options are not checked here: their types do that, in `rlkit.cli.parsing` (see `rlkit.base.ranges`). Nothing here
reads data or loads a model.
"""

from rlkit.recipe.check import check
from rlkit.recipe.model import FLASH
from rlkit.recipe.recipe import Recipe
from rlkit.recipe.validation import VALIDATION_METRICS

__all__ = ["FLASH", "VALIDATION_METRICS", "Recipe", "check"]
