"""Checks of the models beside the policy that read its tokens, and of the prompts that they read."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.model import Tokenizer
from rlkit.interfaces.reward import as_number
from rlkit.models.config import naming
from rlkit.models.load import load_vocabulary
from rlkit.recipe import Recipe
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Prompt

MOST = 10
"""Sources that an error lists."""


def check_tokenizers(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Compare the policy's tokenizer with a teacher's and a critic's, whose ids must mean the same.

    Raises:
        RecipeError: They differ.
    """
    vocabulary, teacher = tokenizer.get_vocab(), recipe.teacher
    paths = {} if teacher is None or teacher.retokenize else teacher.paths()
    if recipe.critic is not None and recipe.critic.path is not None:
        paths["critic.path"] = recipe.critic.path
    for option, path in paths.items():
        with naming(option):
            other_vocabulary = load_vocabulary(recipe.model.at(path))
        if other_vocabulary != vocabulary:
            differ = len(other_vocabulary.items() ^ vocabulary.items())
            kind = option.partition(".")[0]
            alternative = ", or set teacher.retokenize: true" if option == "teacher.path" else ""
            raise RecipeError(
                f"{option} {path!r} has another tokenizer than the policy: {differ} entries of the vocabulary differ, "
                f"so that it reads other tokens; choose a {kind} of the policy's family{alternative}"
            )


def check_retokenize(policy: ChatTemplate, teacher: ChatTemplate) -> None:
    """Check that a conversation of the policy can be read with a teacher's own tokenizer.

    Raises:
        RecipeError: The policy reads pictures, or one of the tokenizers is not in Rust.
    """
    if policy.reader is not None:
        raise RecipeError("teacher.retokenize reads texts alone, but model.path reads pictures; remove it")
    for option, template in (("model.path", policy), ("teacher.path", teacher)):
        if getattr(template.tokenizer, "backend_tokenizer", None) is None:
            name = type(template.tokenizer).__name__
            raise RecipeError(
                f"teacher.retokenize needs fast tokenizers, but that of {option} is a {name}; choose a model that has "
                "a tokenizer.json"
            )


def check_sources(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Check that each source that has a teacher of its own has prompts.

    Args:
        recipe: The run's.
        prompts: Of all training rows.

    Raises:
        RecipeError: A source has none.
    """
    named = set() if recipe.teacher is None else {*(recipe.teacher.sources or ())}
    sources = {prompt.source_name for prompt in prompts} if named else set()
    missing = sorted(named - sources)
    if missing:
        listed = ", ".join(map(show, sorted(sources - {""})[:MOST])) or "none: rows need a column data_source"
        raise RecipeError(f"teacher.sources has {show(missing[0])}, from which no prompt is; the sources are: {listed}")


def reference_rewards(prompt: Prompt) -> list[float]:
    """Return the rewards of the reference's samples of a prompt, which its row has.

    Raises:
        RecipeError: The row has none, or something else.
    """
    values = prompt.meta.get("reference_rewards")
    try:
        rewards = [as_number(value) for value in values] if isinstance(values, list) else []
    except (TypeError, ValueError):
        rewards = []
    if not rewards:
        raise RecipeError(
            f"prompt {prompt.id!r} has reference_rewards {show(values)}, expected a list of finite numbers: the "
            "rewards of the reference's samples; `rlkit data prepare --samples 8` writes rows with them"
        )
    return rewards
