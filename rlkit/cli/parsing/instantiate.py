"""From a composed tree to a recipe: what is missing in it, and the sections and parts that it describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rlkit.base.errors import RecipeError, RlkitError, explain_foreign, with_definition
from rlkit.base.text import part_name
from rlkit.cli.parsing.objects import PYTHON, is_described
from rlkit.cli.parsing.problems import Mistake
from rlkit.cli.parsing.schema import Choice, DictOf, ListOf, Section, options, options_in, shape
from rlkit.cli.parsing.values import describe
from rlkit.registry import Registry


def missing(key: str, hint: object, node: object, registry: Registry) -> Iterator[Mistake]:
    """Yield a mistake for each required option that is not set, and each object that only Python can provide."""
    structure = shape(hint, registry).structure
    if isinstance(structure, Choice) and is_described(node):
        name = str(node).removeprefix(PYTHON)
        yield Mistake(
            key,
            f"{key} is the Python object {name}, which no recipe can name: run it from Python, where "
            f"fit(recipe, resume=FOLDER) goes on with a run, or pass --{key}",
        )
    if isinstance(structure, DictOf | ListOf) and isinstance(node, Mapping | list):
        children: Iterable[tuple[object, object]] = node.items() if isinstance(node, Mapping) else enumerate(node)
        for index_or_name, child in children:
            yield from missing(f"{key}.{index_or_name}", structure.hint, child, registry)
    described = options_in(structure, node)
    if described is None:
        return
    cls, values = described
    owner = key if isinstance(structure, Section) else f"{key} {cls.__name__}"
    for name, option in options(cls).items():
        if name in values:
            yield from missing(f"{key}.{name}", option.hint, values[name], registry)
        elif option.required:
            yield Mistake(
                f"{key}.{name}",
                f"{owner} needs {name!r}, which is not given; expected --{key}.{name} with "
                f"{describe(option.hint, registry)}",
            )


def instantiate(hint: object, node: object, registry: Registry) -> object:
    """Return the section, the part or the plain value that a node describes."""
    structure = shape(hint, registry).structure
    if isinstance(structure, ListOf) and isinstance(node, list):
        return [instantiate(structure.hint, child, registry) for child in node]
    if isinstance(structure, DictOf) and isinstance(node, Mapping):
        return {name: instantiate(structure.hint, child, registry) for name, child in node.items()}
    described = options_in(structure, node)
    if described is None:
        return node
    cls, values = described
    arguments = {name: instantiate(options(cls)[name].hint, child, registry) for name, child in values.items()}
    try:
        return cls(**arguments)
    except RlkitError:
        raise
    except Exception as error:  # a plugin's constructor may raise anything
        problem = f"the recipe cannot be built: {part_name(cls)} raised {explain_foreign(error)}"
        raise RecipeError(
            f"{with_definition(problem, cls, '__init__')}; its constructor only stores options"
        ) from error
