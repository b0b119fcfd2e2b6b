"""Credentials of recipes: references to the environment in place of what a run neither writes nor shows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import yaml

from rlkit.base.errors import RecipeError
from rlkit.base.text import ENVIRONMENTS, REFERENCE, SECRET_NAME, is_secret_flag, redact, replace_literals, substitute
from rlkit.recipe.yaml_text import load_yaml

PREFIX = "RLKIT_"
"""The prefix of the variables that a recipe may read: one of unknown origin must not send other secrets anywhere."""

OPTION_REFERENCE = re.compile(r"(\$?)\$\{([^${}.]*\.[^${}]*)\}")
"""`${section.option}` in a recipe: the value of another option; after a `$` it is literal."""

HEADER = "# Credentials are left out: each ${NAME} is read from the environment when this recipe is run.\n"


def expand(tree: object, key: str = "") -> object:
    """Return a recipe's tree in which `${NAME}` is replaced by the variable's value, and `$${a.b}` by `${a.b}`.

    Args:
        tree: The recipe, or a part of it.
        key: The part's key, for messages.

    Raises:
        RecipeError: Variables are not set, or a recipe may not read them.
    """
    problems: list[str] = []

    def value_of(key: str, text: str, _: bool) -> str:
        problems.extend(_problems(key, text))
        literal = OPTION_REFERENCE.sub(lambda match: match[0].removeprefix(match[1]), text)
        return text if problems else REFERENCE.sub(lambda match: os.environ[match[1]], literal)

    expanded = map_texts(tree, value_of, key)
    if problems:
        raise RecipeError("\n".join(problems))
    return expanded


def _problems(key: str, text: str) -> Iterator[str]:
    """Yield why references in an option's text cannot be replaced."""
    for name in REFERENCE.findall(text):
        if not name.startswith(PREFIX):
            yield (
                f"{key} refers to ${{{name}}}, but a recipe may read only variables whose names begin with {PREFIX}; "
                f"set {PREFIX}{name} and refer to that"
            )
        elif name not in os.environ:
            yield (
                f"{key} refers to ${{{name}}}, which is not set; set it in the environment (a run's recipe leaves "
                f"credentials out), or pass --{key}"
            )


def withhold(tree: object, values: dict[str, str] | None = None, key: str = "") -> object:
    """Return a recipe's tree in which references stand for credentials.

    These are the texts at any depth of mappings for an environment or for headers, of options with the name of a
    credential, the logins and queries of URLs, and what is recognized in other texts.

    Args:
        tree: The recipe, or a part of it.
        values: Receives what each new reference stands for, by the variable's name; a name in it keeps its value.
        key: The part's key.
    """
    values = {} if values is None else values
    taken: set[str] = set()

    def note(_: str, text: str, __: bool) -> str:
        taken.update(REFERENCE.findall(text))
        return text

    def reference(key: str, secret: str) -> str:
        name = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", key).upper()
        numbered = (name if number == 1 else f"{name}_{number}" for number in count(1))
        variable = next(n for n in numbered if n not in taken and values.get(n, secret) == secret)
        values[variable] = secret
        return f"${{{variable}}}"

    def without_credentials(key: str, text: str, is_secret: bool) -> str:
        if text and (is_secret or SECRET_NAME.search(key)):
            return replace_literals(text, lambda secret: reference(key, secret))
        return substitute(text, lambda secret, kind: reference(f"{key}_{kind.variable}", secret))

    map_texts(tree, note)
    *parents, name = key.split(".")
    in_environment = not {*ENVIRONMENTS}.isdisjoint(parents)
    return map_texts(tree, without_credentials, key, in_environment or is_environment(name, tree))


def as_yaml(tree: object) -> str:
    """Return a recipe's tree as YAML without credentials."""
    withheld = withhold(tree)
    text = str(yaml.safe_dump(withheld, sort_keys=False, allow_unicode=True))
    return text if withheld == tree else HEADER + text


def without_credentials(recipe_text: str) -> str:
    """Return the text of a recipe without credentials that an earlier version may have written.

    Of a text that is no recipe, or whose aliases expand to too much, only those are left out that are recognized in any
    text.
    """
    try:
        tree = load_yaml(recipe_text)
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        return redact(recipe_text)
    return recipe_text if withhold(tree) == tree else as_yaml(tree)


def map_texts(
    node: object, change: Callable[[str, str, bool], object], key: str = "", is_secret: bool = False
) -> object:
    """Return a tree whose texts are changed, by their keys and by whether texts at that place are credentials."""
    if isinstance(node, str):
        return change(key, node, is_secret)
    if isinstance(node, Mapping):
        return {k: map_texts(v, change, key_of(key, k), is_secret or is_environment(k, v)) for k, v in node.items()}
    if isinstance(node, list | tuple):
        follows_flag = [False, *map(is_secret_flag, node)]
        return [map_texts(c, change, key_of(key, i), is_secret or follows_flag[i]) for i, c in enumerate(node)]
    return node


def is_environment(name: object, node: object) -> bool:
    """Whether a mapping is of variables or headers, rather than a part."""
    return name in ENVIRONMENTS and isinstance(node, Mapping) and "class_path" not in node


def key_of(parent: str, name: object) -> str:
    """Return the key of an option, as a user writes it."""
    return parent if name in ("class_path", "init_args") else f"{parent}.{name}".lstrip(".")
