"""References of a recipe to its own options: `${section.option}` has the value of that option.

They are resolved when all recipes and options are laid over each other, so an override changes what refers to it. Only
a number, a text, a boolean or null is referred to, and nothing that is a reference itself: each is resolved once.
References neither read nor set what is secret or asks for trust. `$${section.option}` is the text `${section.option}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from rlkit.base.errors import RecipeError, shorten
from rlkit.base.text import HIDDEN, REFERENCE, SECRET_NAME, redact, redact_option
from rlkit.recipe.credentials import OPTION_REFERENCE, is_environment, key_of, map_texts
from rlkit.recipe.parsing import suggest
from rlkit.recipe.parsing.problems import Mistake
from rlkit.recipe.trust import TRUST
from rlkit.recipe.yaml_text import MAX_BYTES
from rlkit.registry import Registry


class ReferringText(str):
    """A text with references, in place of an option's value while a recipe is composed.

    Args:
        text: The text.
        hint: The type of the option.
    """

    hint: object

    def __new__(cls, text: str, hint: object) -> ReferringText:
        reference = super().__new__(cls, text)
        reference.hint = hint
        return reference


class References:
    """What the options of a composed recipe refer to.

    Args:
        tree: The recipe.
        registry: The parts that it may name.
    """

    def __init__(self, tree: Mapping[str, object], registry: Registry) -> None:
        self._tree, self._registry = tree, registry
        self._characters_left = MAX_BYTES

    @cached_property
    def _options(self) -> dict[str, tuple[object, bool]]:
        return {key: (value, is_secret) for key, value, is_secret in _single_values(self._tree)}

    def resolve(self, key: str, text: str, is_secret: bool) -> object:
        """Return the value of the option that is all of a text, or else the text with values in place of references.

        Args:
            key: The option that has the text.
            text: A text with references.
            is_secret: Whether no reference may set the option, whatever its name.

        Raises:
            Mistake: A reference is not allowed here, or what it names has no value that can be referred to.
        """
        if _is_protected(key, text, is_secret):
            raise Mistake(key, f"{key} is secret, asks for trust or leads out of the run folder; write its value")
        single = OPTION_REFERENCE.fullmatch(text)
        value = self._value(key, single[2]) if single else OPTION_REFERENCE.sub(lambda m: self._text(key, m), text)
        if isinstance(value, str) and (refers(value) or _is_protected(key, value, False)):
            raise Mistake(key, f"{key} would become a reference, a login or a credential; write its value")
        return value

    def _text(self, key: str, match: re.Match[str]) -> str:
        value = match[0] if match[1] else self._value(key, match[2])
        return suggest.YAML[value] if value is None or isinstance(value, bool) else str(value)

    def _value(self, key: str, name: str) -> object:
        subject = f"{key} refers to {suggest.quote(f'${{{name}}}')}"
        if name not in self._options:
            problem = suggest.unknown_option(shorten(name, 200), self._tree, self._registry)
            if name in suggest.known_keys(self._registry, self._tree):
                problem = "it has no single value in this recipe; set it, or refer to another"
            raise Mistake(key, f"{subject}: {problem} (a text is written $${{...}})")
        value, is_secret = self._options[name]
        self._characters_left -= len(str(value))
        if self._characters_left < 0:
            raise Mistake(key, f"{subject}, but all references have more than {MAX_BYTES:,} characters; write less")
        if _is_protected(name, value if isinstance(value, str) else "", is_secret):
            raise Mistake(key, f"{subject}, which is secret or asks for trust; refer to another")
        if refers(value):
            raise Mistake(key, f"{subject}, which refers to {suggest.quote(value)}; refer to that")
        return value


def refers(value: object) -> bool:
    """Whether a value is a text with references, or has one in it."""
    if isinstance(value, str):
        return any(not match[1] for match in OPTION_REFERENCE.finditer(value))
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(refers, children))


def refuse_references(tree: Mapping[str, object], folder: Path) -> None:
    """Check that the recipe of a run folder has values alone, as a run saves it.

    Raises:
        RecipeError: It has a reference, whose value an override could change after the recipe is found to be harmless.
    """

    def refuse(key: str, text: str, is_secret: bool) -> None:
        if refers(text):
            shown = HIDDEN if is_secret else suggest.quote(redact_option(key, text))
            problem = f"{folder}: {key} is {shown}, but the recipe of a run folder has no references"
            raise RecipeError(f"{problem}; write the value, or $${{...}} for a text")

    map_texts(tree, refuse)


def _single_values(node: object, key: str = "", is_secret: bool = False) -> Iterator[tuple[str, object, bool]]:
    """Yield options with a number, a text, a boolean or null, and whether they are of an environment or of headers."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            if name != "class_path":
                yield from _single_values(child, key_of(key, name), is_secret or is_environment(name, child))
    elif node is None or isinstance(node, bool | int | float | str):
        yield key, node, is_secret


def _is_protected(key: str, text: str, is_secret: bool) -> bool:
    """Whether an option is a credential, reads one from the environment, or asks whether a recipe is trusted."""
    by_name = is_secret or SECRET_NAME.search(key) or key.rpartition(".")[2] in TRUST
    return bool(by_name or REFERENCE.search(text) or redact(text) != text)
