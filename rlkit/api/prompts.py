"""A recipe's prompts, as a run reads them; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from rlkit.data.data import Data, load_data, make_dialogue
from rlkit.data.measure import AnswerSizes
from rlkit.data.mixtures import recipe_of as mixture_recipe
from rlkit.data.prompts import held_out, make_prompt, rows_of
from rlkit.models.config import load_config
from rlkit.recipe import Recipe
from rlkit.rollout.participants import Participants
from rlkit.rollout.recorded import recorded_group
from rlkit.train.setup import bound_without_policy
from rlkit.types import Prompt, Trajectory

__all__ = [
    "AnswerSizes", "Data", "load_data", "make_prompt", "mixture_recipe", "recorded_answers", "unchecked_data",
]  # fmt: skip


@contextmanager
def unchecked_data(recipe: Recipe) -> Iterator[Data]:
    """Load tokenizer and prompts as a run does, with its tools, but whatever their lengths.

    Raises:
        RecipeError: There are no rows, or a row cannot become a prompt.
    """
    dialogue, rows = make_dialogue(recipe, load_config(recipe.model)), rows_of(recipe.task, "train")
    pictures = dialogue.reader is not None
    validation = held_out(recipe, pictures=pictures)
    data = Data(recipe, dialogue, rows, validation, show=Console(stderr=True).is_terminal)
    with ExitStack() as stack:
        if recipe.tools:  # some describe themselves only once they are bound
            stack.enter_context(bound_without_policy(recipe, *recipe.tools.values()))
            dialogue.participants = Participants(recipe.tools, pictures=pictures)
        yield data


def recorded_answers(data: Data, prompt: Prompt) -> list[Trajectory]:
    """Return the recorded answers of a prompt as supervised training reads them, or why it cannot in their `error`."""
    return recorded_group(data.dialogue.template, prompt, 0, data.dialogue.context)
