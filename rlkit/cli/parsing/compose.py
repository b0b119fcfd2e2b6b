"""Composes recipe files and options into one tree of plain data, in which only what hooks registered is named.

Nothing that a recipe names is imported, called or built here: a name is looked up among the registered parts of the
key's kind, a value is compared with its option's type. All mistakes are collected, to be shown at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.cli.parsing import suggest
from rlkit.cli.parsing.objects import PYTHON, as_data, is_described
from rlkit.cli.parsing.reader import load
from rlkit.cli.parsing.schema import (
    Choice,
    Items,
    Names,
    Option,
    Section,
    Shape,
    Untyped,
    describe,
    fits,
    import_paths,
    options,
    shape,
)
from rlkit.hooks import kinds_of
from rlkit.names import is_user_only
from rlkit.ranges import expected
from rlkit.recipe import Recipe
from rlkit.registry import Part, Registry

Path = Sequence[str]
Entry = tuple[str, Path, object]
"""An option's name, the path inside of it, and a value."""
ABSENT: object = object()
"""The value of an option that is not set."""
SPEC = ("class_path", "init_args")


class Place(NamedTuple):
    """Where a value goes: the key and type of an option, and the path inside of it."""

    key: str
    hint: object
    path: Path = ()


class Composer:
    """A recipe in the making.

    Args:
        registry: The parts that can be named.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.tree: dict[str, object] = {}
        self.problems: list[str] = []
        self._wrong: list[str] = []
        self._by_user = True
        self._set_by_files: dict[str, object] = {}
        self.override("rollout.engine", "TorchEngine")

    def add(self, sections: Mapping[str, object], by_user: bool = True) -> None:
        """Lay a recipe's sections over what is there; `by_user` allows options that no recipe file may set."""
        self._by_user = by_user
        self.tree = self._fill(dict(self.tree), options(Recipe), "", _entries((), sections))
        self._by_user = True

    def override(self, key: str, value: str) -> None:
        """Set one option, named by its dotted key, to the value that a text represents."""
        self.tree = self._fill(dict(self.tree), options(Recipe), "", _entries(key.split("."), value))

    def finish(self) -> dict[str, object]:
        """Return the tree, after noting what it lacks."""
        missing = [name for name, option in options(Recipe).items() if option.required and name not in self.tree]
        if missing := [name for name in missing if not self._failed(name)]:
            self.problems.append(f"the recipe has no {', '.join(missing)}; add it to the recipe or pass --{missing[0]}")
        for key, value in self._set_by_files.items():
            if value is not None and value != []:
                self._complain(
                    key,
                    f"{key} is {suggest.shown(value)}, which no recipe file may set: it reaches beyond the run folder; "
                    f"leave it out, or pass --{suggest.settable(key)}=... on the command line",
                )
        for name, node in self.tree.items():
            self._require(node, options(Recipe)[name].hint, name)
        return self.tree

    def _complain(self, key: str, problem: str) -> None:
        if not any(key.startswith(f"{wrong}.") for wrong in self._wrong):  # or it follows from that
            self.problems.append(problem)
        self._wrong.append(key)

    def _failed(self, key: str) -> bool:
        return any(wrong == key or wrong.startswith(f"{key}.") for wrong in self._wrong)

    def _set(self, place: Place, old: object, value: object) -> object:
        """Return a node with a value laid over it, or with one of the options inside of it changed."""
        self._note_source(place, value)
        allowed = shape(place.hint, self.registry)
        inside, path = allowed.inside, place.path
        if isinstance(inside, Choice) and not path and (_is_kind(value, inside.kind) or is_described(value)):
            return value
        if not path and isinstance(value, str) and inside is not None:
            value = _structured(value)
        if not path and value is None and allowed.optional:
            return None
        if isinstance(inside, Section) and not path and _names_section(value, inside):
            value = value.get("init_args") or {} if isinstance(value, Mapping) else {}
            if not value and not any(option.required for option in options(inside.cls).values()):
                value = as_data(inside.cls(), self.registry)  # jsonargparse does not take an empty section
        if isinstance(value, Mapping) and "class_path" in value and not path and not isinstance(inside, Choice):
            self._complain(
                place.key, f"{place.key} names the class {value['class_path']!r}, expected {self._describe(place)}"
            )
            return old
        named = isinstance(inside, Choice) and isinstance(value, str) and value in inside.parts
        if inside is not None and allowed.plain is not None and not (path or named or isinstance(value, Mapping)):
            return self._plain(allowed, place, old, value)
        if isinstance(inside, Choice):
            return self._choice(inside, place, old, value)
        if isinstance(inside, Section):
            return self._section(inside, place, old, value)
        if isinstance(inside, Names):
            return self._names(inside, place, old, value)
        if isinstance(inside, Items):
            return self._items(inside, place, old, value)
        if path:
            self._unknown(".".join((place.key, *path)))
            return old
        return self._plain(allowed, place, old, value)

    def _note_source(self, place: Place, value: object) -> None:
        """Note an option that is only for the user to set, while a recipe file sets it; a later value replaces it."""
        if not place.path:
            inside = f"{place.key}."
            self._set_by_files = {k: v for k, v in self._set_by_files.items() if not f"{k}.".startswith(inside)}
            if is_user_only(place.hint) and not self._by_user:
                self._set_by_files[place.key] = value

    def _plain(self, allowed: Shape, place: Place, old: object, value: object) -> object:
        if value == "null" and (allowed.optional or not fits(value, allowed.plain)):
            value = None
        if value is None and allowed.optional:
            return None
        if allowed.plain is None:
            self._complain(place.key, f"{place.key} takes an object, which no recipe can hold; leave it out")
        elif (name := _class_in(value)) is not None:
            self._complain(place.key, f"{place.key} names the class {name!r}, expected {self._describe(place)}")
        elif value is None or not fits(value, allowed.plain):
            self._wrong_value(place, value)
        else:
            return value
        return old

    def _section(self, inside: Section, place: Place, old: object, value: object) -> object:
        if not place.path and not isinstance(value, Mapping):
            return self._wrong_value(place, value, old)
        node = dict(old) if isinstance(old, Mapping) else {}
        return self._fill(node, options(inside.cls), place.key, _entries(place.path, value))

    def _choice(self, inside: Choice, place: Place, old: object, value: Any) -> object:
        key, path = place.key, tuple(place.path)
        before = old if isinstance(old, dict) else {"class_path": None, "init_args": {}}
        if len(path) > 1 and path[0] == "init_args":
            path = path[1:]
        elif len(path) == 1 and path[0] in SPEC:
            value = {path[0]: _structured(value) if path[0] == "init_args" else value}
            path = ()
        name, given = before["class_path"], value
        if not path and isinstance(value, str):
            name, given = value, {}
        elif not path and isinstance(value, Mapping) and set(value) & set(SPEC):
            if beside := [str(k) for k in value if k not in SPEC]:
                self._complain(key, f"{key} has {beside[0]!r} beside class_path; a class's options stand in init_args")
                return old
            name, given = value.get("class_path", name), {} if value.get("init_args") is None else value["init_args"]
        if not isinstance(given, Mapping) and not path:
            return self._wrong_value(place, given, old)
        if name is None:
            what = ".".join((key, *path))
            self._complain(key, f"{what} is given, but {key} names no class; expected {self._describe(place)}")
            return old
        part = inside.find(name)
        if part is None:
            self._complain(key, suggest.unknown_class(key, name, inside, self.registry))
            return old
        if untyped := [n for n, option in options(part.cls).items() if option.required and option.hint is Untyped]:
            whose = f"{part.name} of the plugin {part.plugin.name!r}"
            self._complain(
                key, f"{key} cannot be {whose}, whose argument {untyped[0]!r} has no type; annotate it there"
            )
            return old
        class_path = import_paths(part.cls)[0]
        kept = before["init_args"] if before["class_path"] == class_path else {}
        return {"class_path": class_path, "init_args": self._fill(dict(kept), part, key, _entries(path, given))}

    def _names(self, inside: Names, place: Place, old: object, value: Any) -> object:
        if not place.path and not isinstance(value, Mapping):
            return self._wrong_value(place, value, old)
        before = old if isinstance(old, Mapping) else {}
        node = dict(before) if place.path else {}
        entries = (
            [(place.path[0], place.path[1:], value)] if place.path else [(str(k), (), v) for k, v in value.items()]
        )
        for name, rest, given in entries:
            words = expected(inside.key, name) if name else "a name that is not empty"
            if words is not None:
                self._complain(place.key, f"{place.key} has the name {suggest.shown(name)}, expected {words}")
            new = self._set(Place(f"{place.key}.{name}", inside.hint, rest), before.get(name, ABSENT), given)
            if new is not ABSENT:
                node[name] = new
        return node

    def _items(self, inside: Items, place: Place, old: object, value: object) -> object:
        if place.path or not isinstance(value, list):
            return self._wrong_value(place, value, old)
        new = [self._set(Place(f"{place.key}.{i}", inside.hint), ABSENT, item) for i, item in enumerate(value)]
        return [node for node in new if node is not ABSENT]

    def _fill(
        self, node: dict[str, object], owner: Part | Mapping[str, Option], key: str, entries: Iterable[Entry]
    ) -> dict[str, object]:
        """Set options of a section, or of a part, in its node."""
        known = options(owner.cls) if isinstance(owner, Part) else owner
        for missing in known.keys() - node.keys():  # a default part is written out, as if the recipe named it
            if (part := known[missing].part) is not None:
                node[missing] = self._set(Place(f"{key}.{missing}", known[missing].hint), ABSENT, part.__name__)
        for name, rest, value in entries:
            inner = f"{key}.{name}" if key else name
            if name in known:
                new = self._set(Place(inner, known[name].hint, rest), node.get(name, ABSENT), value)
                if new is not ABSENT:
                    node[name] = new
            elif isinstance(owner, Part):
                option = ".".join((name, *rest))
                near = suggest.nearest(option, list(known))
                self._complain(inner, f"{key} {owner.name} has no option {option!r}; {near}")
            elif inner not in suggest.GONE or value is not None:
                self._unknown(".".join((inner, *rest)))
        return node

    def _unknown(self, key: str) -> None:
        self._complain(key, suggest.unknown_option(key, self.tree, self.registry))

    def _wrong_value(self, place: Place, value: object, old: object = None) -> object:
        """Complain, and return what stays."""
        self._complain(place.key, suggest.wrong_value(place.key, value, place.hint, self.registry))
        return old

    def _describe(self, place: Place) -> str:
        return describe(place.hint, self.registry)

    def _require(self, node: object, hint: object, key: str) -> None:
        """Note the options without a default that are not set."""
        inside = shape(hint, self.registry).inside
        if isinstance(inside, Choice) and is_described(node):
            name = str(node).removeprefix(PYTHON)
            problem = f"{key} is the Python object {name}, which no recipe can name: run it from Python, where"
            self._complain(key, f"{problem} fit(recipe, resume=FOLDER) goes on with a run, or pass --{key}")
        elif isinstance(inside, Names) and isinstance(node, Mapping):
            for name, inner in node.items():
                self._require(inner, inside.hint, f"{key}.{name}")
        elif isinstance(inside, Items) and isinstance(node, list):
            for index, inner in enumerate(node):
                self._require(inner, inside.hint, f"{key}.{index}")
        elif isinstance(inside, Section | Choice) and isinstance(node, Mapping):
            part = inside.find(node["class_path"]) if isinstance(inside, Choice) else None
            cls = part.cls if part is not None else inside.cls if isinstance(inside, Section) else type
            given = node["init_args"] if part is not None else node
            for name, option in options(cls).items():
                inner = f"{key}.{name}"
                if name in given:
                    self._require(given[name], option.hint, inner)
                elif option.required and not self._failed(inner):
                    who = f"{key} {part.name}" if part is not None else key
                    expected = describe(option.hint, self.registry)
                    self._complain(
                        inner, f"{who} needs {name!r}, which is not given; expected --{inner} with {expected}"
                    )


def _is_kind(value: object, kind: str) -> bool:
    """Whether a value is a part of a kind, handed over in Python."""
    return kind in kinds_of(type(value))


def _entries(path: Path, value: Any) -> list[Entry]:
    """Return what is set as (name, the path inside of it, value): one option, or those of a mapping."""
    if path:
        return [(path[0], path[1:], value)]
    dotted = [(str(key).split("."), inner) for key, inner in value.items()]
    return [(names[0], names[1:], inner) for names, inner in dotted]


def _names_section(value: object, inside: Section) -> bool:
    """Whether a value names a section's class, as `FSDP2` does."""
    name = value.get("class_path") if isinstance(value, Mapping) and set(value) <= set(SPEC) else value
    if not isinstance(name, str):
        return False
    return name in (inside.cls.__name__, *import_paths(inside.cls))


def _structured(value: str) -> object:
    """Return the list or mapping that a text holds, or null; any other text stays as it is."""
    try:
        loaded = load(value)
    except ValueError:
        return value
    return loaded if isinstance(loaded, dict | list) or loaded is None else value


def _class_in(value: object) -> str | None:
    """Return the class that a plain value names somewhere in it."""
    value = _structured(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        if "class_path" in value:
            return str(value["class_path"])
        return next((name for name in map(_class_in, value.values()) if name), None)
    if isinstance(value, list):
        return next((name for name in map(_class_in, value) if name), None)
    return None
