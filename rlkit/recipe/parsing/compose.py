"""Composes recipe files and options into one tree of plain data that names only registered parts, and builds these.

Nothing that a recipe names is imported: a name is looked up among the registered parts of the key's kind, a value is
converted to its option's type. All mistakes are collected, and reported at once before anything is built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import MISSING
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlkit.base.errors import RecipeError, with_definition
from rlkit.base.files import recipe_folders
from rlkit.base.names import is_user_only
from rlkit.base.ranges import expected, is_checked, outside
from rlkit.base.text import part_name
from rlkit.hooks import kinds_of
from rlkit.recipe import Recipe
from rlkit.recipe.credentials import expand, map_texts
from rlkit.recipe.parsing import suggest
from rlkit.recipe.parsing.build import Builder
from rlkit.recipe.parsing.problems import Mistake, Problems
from rlkit.recipe.parsing.reader import convert, locations, parse_text, read_recipe, structured
from rlkit.recipe.parsing.references import References, ReferringText, refers
from rlkit.recipe.schema import (
    Choice,
    DictOf,
    ListOf,
    Option,
    Section,
    Shape,
    as_data,
    import_paths,
    options,
    options_in,
    shape,
)
from rlkit.registry import Part, Registry

Tree = dict[str, object]
PYTHON = "python object: "
"""The prefix, in a written recipe, of the text that stands for an object that no recipe can name."""
SPEC = ("class_path", "init_args")


class SingleOption(dict[str, object]):
    """A mapping of one name, from a dotted key: it changes this option and keeps those beside it.

    Args:
        key: The dotted key.
        value: The value at its end.
    """

    def __init__(self, key: str, value: object) -> None:
        name, dot, inner_key = key.partition(".")
        super().__init__({name: SingleOption(inner_key, value) if dot else value})
        self.key = key
        self.value = value


class Composer:
    """A recipe in the making.

    Args:
        registry: The parts that can be named.
        needs_files: Whether the files that parts read must be there.
    """

    def __init__(self, registry: Registry, needs_files: bool = False) -> None:
        self.registry = registry
        self.needs_files = needs_files
        self.tree: Tree = {}
        self.values: object = None
        self.problems = Problems()
        self._by_user = True
        self._set_by_files: Tree = {}
        self.add({"rollout.engine": "TorchEngine"})
        self._default_engine = self._engine()

    @property
    def has_default_engine(self) -> bool:
        """Whether no recipe names the rollout engine: its node is then the same object."""
        return self._engine() is self._default_engine

    def _engine(self) -> object:
        rollout = self.tree["rollout"]
        assert isinstance(rollout, dict)
        return rollout["engine"]

    def add(self, sections: Mapping[str, object]) -> None:
        """Lay sections over the tree, or single options by their dotted keys, whose values may be texts."""
        self.problems.sources.append(dict)
        self.tree = self._node(Recipe, "", self.tree, sections)

    def add_file(self, path: Path, by_user: bool = True) -> None:
        """Lay the sections of a recipe file over the tree.

        Args:
            path: The file.
            by_user: Whether options are allowed that no recipe file may set.

        Raises:
            RecipeError: The file cannot be read, or does not hold sections.
        """
        sections = read_recipe(path)
        recipe_folders.add(path.absolute().parent)
        self.problems.sources.append(cache(partial(locations, path)))
        self._by_user = by_user
        self.tree = self._node(Recipe, "", self.tree, sections)
        self._by_user = True

    def finish(self) -> Recipe:
        """Return the recipe that the tree describes, its parts built.

        Raises:
            RecipeError: There are problems, or the environment lacks what the recipe refers to.
        """
        unset = [name for name, option in options(Recipe).items() if option.required and name not in self.tree]
        absent = [name for name in unset if not self.problems.concern(name)]
        if absent:
            self.problems.append(f"the recipe has no {', '.join(absent)}; add it to the recipe or pass --{absent[0]}")
        for key, value in self._set_by_files.items():
            self.problems.note(
                key,
                f"{key} is {suggest.quote(value)}, which no recipe file may set: it reaches beyond the run folder; "
                f"leave it out, or pass --{suggest.settable(key)}=... on the command line",
            )
        for name, node in self.tree.items():
            for key, problem in missing(name, options(Recipe)[name].hint, node, self.registry):
                if not self.problems.concern(key):
                    self.problems.note(key, problem)
        self.values = map_texts(self.tree, partial(self._resolve, References(self.tree, self.registry)))
        if self.problems:
            raise RecipeError("\n".join(self.problems))
        recipe = Builder(self.registry, self.problems, self.needs_files).build("", Recipe, expand(self.values))
        if self.problems:
            raise RecipeError("\n".join(self.problems))
        assert isinstance(recipe, Recipe)
        return recipe

    def _resolve(self, references: References, key: str, text: str, is_secret: bool) -> object:
        """Return a text as it is, or the value of the option that it refers to."""
        if not isinstance(text, ReferringText):
            return text
        try:
            value = references.resolve(key, text, is_secret or is_user_only(text.hint))
            data = value if text.hint is Any else self._convert(key, text.hint, shape(text.hint, self.registry), value)
            if isinstance(data, Collection) and not isinstance(data, str):
                raise Mistake(key, f"{key} takes more than one value, which no reference has; write them")
            return data
        except Mistake as mistake:
            self.problems.note(mistake.key, mistake.problem)
            return text

    def _node(self, cls: type, key: str, old: object, values: Mapping[str, object], part: Part | None = None) -> Tree:
        """Return a complete node of a section, or of a part, with values laid over it."""
        by_name = options(cls)
        before = old if isinstance(old, Mapping) else {}
        if not before:
            self.problems.replaced(key)
        node = {
            name: before[name] if name in before else self._default(f"{key}.{name}", option)
            for name, option in by_name.items()
            if name in before or not option.required
        }
        for dotted_key, value in values.items():
            name, dot, inner_key = str(dotted_key).partition(".")
            option_key = f"{key}.{name}" if key else name
            option_value = SingleOption(inner_key, value) if dot else value
            if name in by_name:
                self._set_option(node, name, option_key, by_name[name], option_value)
            else:
                self._note_unknown(option_key, option_value, by_name, part)
        return {name: node[name] for name in by_name if name in node}

    def _default(self, key: str, option: Option) -> object:
        """Return an option's default as a node: a default part is written out, as if the recipe named it."""
        default = option.default
        structure = shape(option.hint, self.registry).structure
        if isinstance(structure, Section) and isinstance(default, structure.cls):
            hints = {name: field.hint for name, field in options(structure.cls).items()}
            return {n: self._default(f"{key}.{n}", Option(hint, getattr(default, n))) for n, hint in hints.items()}
        if isinstance(structure, Choice) and default is not None:
            return self._merge(key, option.hint, None, as_data(default, self.registry))
        return copy(default) if isinstance(default, list | dict) else default

    def _set_option(self, node: Tree, name: str, key: str, option: Option, value: object) -> None:
        """Lay a value over the one at a name; a mistake leaves it as it is, and a new value has a new source."""
        if not isinstance(value, SingleOption):
            self.problems.set_by_last(key)
            self._set_by_files = {k: v for k, v in self._set_by_files.items() if not f"{k}.".startswith(f"{key}.")}
            if is_user_only(option.hint) and not self._by_user and value not in (None, [], option.default):
                self._set_by_files[key] = value
        try:
            node[name] = self._merge(key, option.hint, node.get(name), value)
        except Mistake as mistake:
            remedy = "" if option.untyped_in is None else f"; {_without_type(name, option.untyped_in)}"
            self.problems.note(mistake.key, mistake.problem + remedy)

    def _note_unknown(self, key: str, value: object, siblings: Mapping[str, Option], part: Part | None) -> None:
        parent = key.rpartition(".")[0]
        full_key = _full_key(key, value)
        self.problems.set_by_last(full_key)
        if part is not None:
            name = full_key.removeprefix(f"{parent}.")
            near = suggest.nearest(name, list(siblings))
            self.problems.note(key, f"{parent} {part.name} has no option {name!r}; {near}")
        elif key not in suggest.NOT_OPTIONS or value is not None:
            sibling_keys = [f"{parent}.{sibling}" for sibling in siblings] if parent else []
            self.problems.note(full_key, suggest.unknown_option(full_key, self.tree, self.registry, sibling_keys))

    def _merge(self, key: str, hint: object, old: object, value: object) -> object:
        """Return a value laid over the old one.

        Raises:
            Mistake: The option does not take the value.
        """
        allowed = shape(hint, self.registry)
        structure = allowed.structure
        is_object_text = isinstance(value, str) and value.startswith(PYTHON)
        if isinstance(structure, Choice) and (structure.kind in kinds_of(type(value)) or is_object_text):
            self.problems.extend(outside(value, key))
            return value
        is_plain = structure is None
        if structure is not None and not isinstance(value, SingleOption):
            value = structured(value)
            if isinstance(structure, Section):
                value = _without_class(value, structure.cls)
            is_name = isinstance(structure, Choice) and isinstance(value, str) and value in structure.parts
            is_plain = allowed.plain is not None and not is_name and not isinstance(value, Mapping)
            if isinstance(value, Mapping) and "class_path" in value and not isinstance(structure, Choice):
                raise Mistake(key, suggest.wrong_class(key, value["class_path"], hint, self.registry))
        if value is None and allowed.optional:
            return None
        if hint is Any and isinstance(value, SingleOption):
            return self._merge_dict(key, DictOf(Any), old, value)
        if is_plain:
            return self._convert(key, hint, allowed, value)
        if isinstance(structure, Choice):
            return self._merge_part(key, hint, structure, old, value)
        if isinstance(structure, ListOf):
            return self._convert_list(key, hint, structure, value)
        if not isinstance(value, Mapping):
            raise self._wrong_value(key, hint, value)
        if isinstance(structure, DictOf):
            return self._merge_dict(key, structure, old, value)
        assert isinstance(structure, Section)
        return self._node(structure.cls, key, old, value)

    def _convert(self, key: str, hint: object, allowed: Shape, value: object) -> object:
        if isinstance(value, SingleOption):
            full_key = _full_key(key, value)
            raise Mistake(full_key, suggest.unknown_option(full_key, self.tree, self.registry))
        if value in (None, "null") and allowed.optional:
            return None
        if refers(value):
            if isinstance(value, str):
                return ReferringText(value, hint)
            raise Mistake(key, f"{key} has a reference in a list or mapping; write its value, or $${{...}} for a text")
        if allowed.plain is None:
            raise Mistake(key, f"{key} takes an object, which no recipe can hold; leave it out")
        data = parse_text(value)
        class_name = _class_in(data) if isinstance(data, Mapping | list) else None
        if class_name is not None:
            raise Mistake(key, suggest.wrong_class(key, class_name, hint, self.registry))
        if value is None:
            raise self._wrong_value(key, hint, value)
        try:
            return convert(value, allowed.plain)
        except ValueError as error:
            raise self._wrong_value(key, hint, None if value == "null" else value) from error

    def _merge_part(self, key: str, hint: object, choice: Choice, old: object, value: object) -> Tree:
        before: Mapping[str, object] = old if isinstance(old, dict) else {"class_path": None, "init_args": {}}
        name, arguments = (value, {}) if isinstance(value, str) else (before["class_path"], value)
        if isinstance(value, Mapping) and not value.keys().isdisjoint(SPEC):
            unexpected = [str(name) for name in value if name not in SPEC]
            if unexpected:
                problem = f"{key} has {unexpected[0]!r} beside class_path; a class's options stand in init_args"
                raise Mistake(key, problem)
            name, arguments = value.get("class_path", name), value.get("init_args")
            if isinstance(value, SingleOption):
                arguments = structured(arguments)
            arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise self._wrong_value(key, hint, arguments)
        if name is None:
            problem = f"{_full_key(key, value)} is given, but {key} names no class"
            raise Mistake(key, f"{problem}; expected {suggest.describe(hint, self.registry)}")
        part = choice.find(name)
        if part is None:
            raise Mistake(key, suggest.unknown_class(key, name, choice, self.registry))
        class_path = import_paths(part.cls)[0]
        options = before["init_args"] if before["class_path"] == class_path else {}
        options_before: Mapping[str, object] = options if isinstance(options, Mapping) else {}
        _check_constructor(key, part, {*options_before, *(str(name).partition(".")[0] for name in arguments)})
        return {"class_path": class_path, "init_args": self._node(part.cls, key, options_before, arguments, part)}

    def _merge_dict(self, key: str, structure: DictOf, old: object, value: Mapping[str, object]) -> Tree:
        before = dict(old) if isinstance(old, Mapping) else {}
        node = before if isinstance(value, SingleOption) else {}
        for name, child in value.items():
            words = expected(structure.key, str(name)) if name != "" else "a name that is not empty"
            if words is not None:
                self.problems.note(key, f"{key} has the name {suggest.quote(str(name))}, expected {words}")
            if str(name) in before:
                node[str(name)] = before[str(name)]
            self._set_option(node, str(name), f"{key}.{name}", Option(structure.hint), child)
        return node

    def _convert_list(self, key: str, hint: object, structure: ListOf, value: object) -> list[object]:
        if not isinstance(value, list):
            raise self._wrong_value(key, hint, value)
        self.problems.replaced(key)
        nodes: Tree = {}
        for index, child in enumerate(value):
            self._set_option(nodes, str(index), f"{key}.{index}", Option(structure.hint), child)
        return list(nodes.values())

    def _wrong_value(self, key: str, hint: object, value: object) -> Mistake:
        value = value.value if isinstance(value, SingleOption) else value
        return Mistake(key, suggest.wrong_value(key, value, hint, self.registry))


def _full_key(key: str, value: object) -> str:
    """Return the key of an option, including the rest of a dotted key."""
    return f"{key}.{value.key}" if isinstance(value, SingleOption) else key


def _without_class(value: object, cls: type) -> object:
    """Return the options of a value that names its section's class, as `FSDP2` does; any other value as it is."""
    spec = value if isinstance(value, Mapping) and value.keys() <= set(SPEC) else {"class_path": value}
    if spec.get("class_path") in (cls.__name__, *import_paths(cls)):
        return spec.get("init_args") or {}
    return value


def _class_in(value: object) -> str | None:
    """Return the class that a plain value names anywhere in it; None if it names none."""
    value = structured(value)
    if isinstance(value, Mapping) and "class_path" in value:
        return str(value["class_path"])
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((name for name in map(_class_in, children) if name), None)


def _check_constructor(key: str, part: Part, set_options: Collection[str]) -> None:
    """Check a part's arguments, and the defaults of those that are not given.

    Raises:
        Mistake: A required argument has no type, or a default is out of its range.
    """
    for name, option in options(part.cls).items():
        if option.required and option.untyped_in is not None:
            raise Mistake(key, f"{key} cannot be {part.name}: {_without_type(name, option.untyped_in)}")
        if name in set_options or option.default is MISSING or not is_checked(option.hint):
            continue
        words = expected(option.hint, option.default)
        if words is not None:
            problem = (
                f"the default of {name!r} of {part_name(part.cls)} is {option.default!r}, expected {words}; change it"
            )
            raise Mistake(key, with_definition(problem, part.cls, "__init__"))


def _without_type(name: str, cls: type) -> str:
    """Return the message about an argument of a class that has no type."""
    problem = f"the argument {name!r} of {part_name(cls)} has no type; annotate it"
    return with_definition(problem, cls, "__init__")


def plain_data(value: object) -> object:
    """Return a recipe's tree as data that YAML can hold; a text stands for each Python object."""
    if isinstance(value, Mapping):
        is_bare = "class_path" in value and not value.get("init_args")
        return {name: plain_data(child) for name, child in value.items() if not (is_bare and name == "init_args")}
    if isinstance(value, list | tuple | Set):
        return [plain_data(child) for child in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    return _object_text(value) if kinds_of(type(value)) else str(value)


def _object_text(part: object) -> str:
    """Return the text that stands for an object: its `repr`, or its class if the `repr` is an address in memory."""
    cls = type(part)
    has_repr = cls.__repr__ is not object.__repr__
    return PYTHON + (repr(part) if has_repr else f"{cls.__qualname__} of {cls.__module__}")


def missing(key: str, hint: object, node: object, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield key and problem of each required option that is not set, and each object that only Python can provide."""
    structure = shape(hint, registry).structure
    if isinstance(structure, Choice) and isinstance(node, str) and node.startswith(PYTHON):
        name = node.removeprefix(PYTHON)
        problem = f"{key} is the Python object {name}, which no recipe can name: run it from Python, where "
        yield key, f"{problem}fit(recipe, resume=FOLDER) goes on with a run, or pass --{key}"
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
            words = suggest.describe(option.hint, registry)
            where = "it" if isinstance(structure, Section) else "its init_args"
            remedy = f"write `{name}: ...` with {words} in {where}, or pass --{suggest.settable(f'{key}.{name}')}"
            yield f"{key}.{name}", f"{owner} needs {name!r}, which is not given: {remedy}"
