"""Checks of the models beside the policy that read its tokens."""

from __future__ import annotations

from dataclasses import replace

from rlkit.errors import RecipeError
from rlkit.interfaces.model import Tokenizer
from rlkit.models.load import load_vocabulary, naming
from rlkit.recipe import Recipe


def check_tokenizers(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Compare the policy's tokenizer with a teacher's and a critic's, whose ids must mean the same.

    Raises:
        RecipeError: They differ.
    """
    mine = tokenizer.get_vocab()
    for name, section in (("teacher", recipe.teacher), ("critic", recipe.critic)):
        path = None if section is None else section.path
        if path is None:
            continue
        with naming(f"{name}.path"):
            theirs = load_vocabulary(replace(recipe.model, path=path, lora=None))
        if theirs != mine:
            differ = len(theirs.items() ^ mine.items())
            raise RecipeError(
                f"{name}.path {path!r} has another tokenizer than the policy: {differ} entries of the vocabulary "
                f"differ, so that it reads other tokens; choose a {name} of the policy's family"
            )
