"""The recipe: a run's typed parts, and the relations between them that must hold before anything is loaded."""

from rlkit.recipe.check import check
from rlkit.recipe.model import FLASH
from rlkit.recipe.recipe import Recipe
from rlkit.recipe.validation import VALIDATION_METRICS

__all__ = ["FLASH", "VALIDATION_METRICS", "Recipe", "check"]
