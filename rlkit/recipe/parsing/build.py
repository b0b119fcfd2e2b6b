"""Builds the sections and parts of a composed recipe; all that fails is reported at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlkit.base.errors import RlkitError, explain_foreign, show, with_definition
from rlkit.base.files import no_such
from rlkit.base.text import part_name
from rlkit.interfaces.runtime import RunPart
from rlkit.recipe.parsing.problems import Problems
from rlkit.recipe.schema import DictOf, ListOf, options, options_in, shape
from rlkit.registry import Registry


@dataclass
class Builder:
    """Builds what a recipe's nodes describe.

    Args:
        registry: The parts that can be named.
        problems: Receives what fails.
        needs_files: Whether the files that parts read must be there.
    """

    registry: Registry
    problems: Problems
    needs_files: bool

    def build(self, key: str, hint: object, node: object) -> object:
        """Return the section, the part or the plain value that a node describes; None if something in it fails."""
        structure, count = shape(hint, self.registry).structure, len(self.problems)
        if isinstance(structure, ListOf) and isinstance(node, list):
            return [self.build(f"{key}.{index}", structure.hint, child) for index, child in enumerate(node)]
        if isinstance(structure, DictOf) and isinstance(node, Mapping):
            return {name: self.build(f"{key}.{name}", structure.hint, child) for name, child in node.items()}
        described = options_in(structure, node)
        if described is None:
            return node
        cls, values = described
        hints = {name: option.hint for name, option in options(cls).items()}
        arguments = {n: self.build(f"{key}.{n}".lstrip("."), hints[n], child) for n, child in values.items()}
        return None if len(self.problems) > count else self.construct(key, cls, arguments)

    def construct(self, key: str, cls: type, arguments: Mapping[str, object]) -> object:
        """Return a section or a part; None if its constructor fails or a file of it is missing."""
        try:
            built = cls(**arguments)
            is_read = self.needs_files if isinstance(built, RunPart) else cls.__module__.startswith("rlkit.recipe.")
            files = getattr(built, "files", None)
            pairs = files() if is_read and callable(files) else ()
            missing = [(f"{key}.{name}", path) for name, path in pairs if not os.path.lexists(os.path.expanduser(path))]
        except RlkitError as error:
            self.problems.note(key, str(error))
            return None
        except Exception as error:  # a plugin may raise anything
            problem = f"the recipe cannot be built: {part_name(cls)} raised {explain_foreign(error)}"
            self.problems.note(key, f"{with_definition(problem, cls, '__init__')}; its constructor only stores options")
            return None
        for option, path in missing:
            self.problems.note(option, f"{option} is {show(path)}, {no_such(path)}")
        return built
