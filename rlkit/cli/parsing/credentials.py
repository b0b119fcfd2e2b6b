"""Credentials in recipes: texts may refer to the environment; what a run writes has references in their place."""

from __future__ import annotations

import os
import re

from rlkit.base.errors import RecipeError
from rlkit.base.text import SECRET_NAME, SECRETS, USERINFO

REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
"""`${NAME}` in an option that is a text: the value of an environment variable."""

PREFIX = "RLKIT_"
"""The prefix of the variables that a recipe may read: one of unknown origin must not send other secrets anywhere."""

HEADER = "# Credentials are left out: each ${NAME} is read from the environment when this recipe is run.\n"


def expand(node: object, key: str = "") -> object:
    """Return a recipe's tree in which references are replaced by the variables' values.

    Raises:
        RecipeError: A variable is not set, or a recipe may not read it.
    """
    if isinstance(node, str):
        return REFERENCE.sub(lambda match: _value(match[1], key), node)
    if isinstance(node, dict):
        return {name: expand(child, _key_of(key, name)) for name, child in node.items()}
    if isinstance(node, list):
        return [expand(child, _key_of(key, index)) for index, child in enumerate(node)]
    return node


def withhold(node: object, key: str = "") -> object:
    """Return a recipe's tree in which references stand for credentials: in options of such names, and in URLs."""
    if isinstance(node, dict):
        return {name: withhold(child, _key_of(key, name)) for name, child in node.items()}
    if isinstance(node, list):
        return [withhold(child, _key_of(key, index)) for index, child in enumerate(node)]
    if not isinstance(node, str) or not node or REFERENCE.search(node):
        return node
    name = PREFIX + re.sub(r"\W", "_", key).upper()
    if SECRET_NAME.search(key):
        return f"${{{name}}}"
    if "://" not in node:
        return node
    text = USERINFO.sub(f"${{{name}_LOGIN}}", node)
    for pattern in SECRETS:
        text = pattern.sub(rf"\1${{{name}_KEY}}", text)
    return text


def _key_of(parent: str, name: object) -> str:
    """Return the key of an option, as a user writes it."""
    return parent if name in ("class_path", "init_args") else f"{parent}.{name}".lstrip(".")


def _value(name: str, key: str) -> str:
    if not name.startswith(PREFIX):
        raise RecipeError(
            f"{key} refers to ${{{name}}}, but a recipe may read only variables whose names begin with {PREFIX}; "
            f"set {PREFIX}{name} and refer to that"
        )
    value = os.environ.get(name)
    if value is None:
        raise RecipeError(
            f"{key} refers to ${{{name}}}, which is not set; set it in the environment (a run's recipe leaves "
            f"credentials out), or pass --{key}"
        )
    return value
