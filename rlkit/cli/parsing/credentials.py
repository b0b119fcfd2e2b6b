"""Credentials in recipes: texts may refer to the environment, and what a run writes refers to nothing else."""

from __future__ import annotations

import os
import re

import yaml
from jsonargparse import Namespace

from rlkit.errors import RecipeError
from rlkit.text import SECRET_NAME, SECRETS, USERINFO

REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
"""`${NAME}` in an option that is a text: the value of the environment's variable, one of rlkit's own."""

PREFIX = "RLKIT_"
"""The prefix of the variables that a recipe may read: a recipe of unknown origin must not send the values of others."""

HEADER = "# Credentials are left out: each ${NAME} is read from the environment when this recipe is run.\n"


def expand(section: object, key: str = "") -> object:
    """Return a parsed section in which references are replaced, in place where it can be.

    Raises:
        RecipeError: A variable is not set, or is none that a recipe may read.
    """
    if isinstance(section, str):
        return REFERENCE.sub(lambda found: _value(found[1], key), section)
    if isinstance(section, Namespace):
        for name, value in vars(section).items():
            setattr(section, name, expand(value, _under(key, name)))
    elif isinstance(section, dict):
        return {name: expand(value, _under(key, name)) for name, value in section.items()}
    elif isinstance(section, list):
        return [expand(value, _under(key, i)) for i, value in enumerate(section)]
    return section


def withhold(recipe_yaml: str) -> str:
    """Return a recipe in which references stand for credentials: options of such names, and logins and keys in URLs."""
    recipe = yaml.safe_load(recipe_yaml)
    clean = _clean(recipe, "")
    if clean == recipe:
        return recipe_yaml
    return HEADER + str(yaml.safe_dump(clean, sort_keys=False, allow_unicode=True))


def _clean(section: object, key: str) -> object:
    if isinstance(section, dict):
        return {name: _clean(value, _under(key, name)) for name, value in section.items()}
    if isinstance(section, list):
        return [_clean(value, _under(key, i)) for i, value in enumerate(section)]
    if not isinstance(section, str) or not section or REFERENCE.search(section):
        return section
    name = PREFIX + re.sub(r"\W", "_", key).upper()
    if SECRET_NAME.search(key):
        return f"${{{name}}}"
    if "://" not in section:
        return section
    text = USERINFO.sub(f"${{{name}_LOGIN}}", section)
    for pattern in SECRETS:
        text = pattern.sub(rf"\1${{{name}_KEY}}", text)
    return text


def _under(key: str, name: object) -> str:
    """Return the key of an option, as a user writes it."""
    return key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")


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
