"""One message for each mistake in a recipe: the value, what was expected, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

from rlkit.base.installed import DISABLE_VARIABLE, plugin_command
from rlkit.base.ranges import expected
from rlkit.base.text import HIDDEN, is_credential
from rlkit.recipe import Recipe
from rlkit.recipe.parsing.foreign import FOREIGN, NO_OPTION
from rlkit.recipe.parsing.reader import parse_text
from rlkit.recipe.schema import UNIONS, Choice, DictOf, ListOf, Section, import_paths, options, shape
from rlkit.registry import Registry

NOT_OPTIONS = {
    "fabric.callbacks": "rlkit's callbacks are the recipe's own: `callbacks: [...]`; rlkit calls none of Fabric's",
    "fabric.loggers": "metrics go to `metrics.jsonl` and to what `log.loggers` names; remove it",
    "log.wandb": "loggers are a list: `log: {loggers: [{class_path: Wandb, init_args: {project: ...}}]}`",
}
"""Keys that a user of Lightning Fabric may look for, and what to use instead."""
REMEDIES = {
    "fabric.precision": "in 16 bits most of AdamW's small updates of the weights round to zero, or gradients "
    "overflow: use bf16-mixed"
}
"""Advice about values that an option does not take."""
READERS = {".jsonl": "Jsonl", ".json": "HFDataset", ".parquet": "HFDataset", ".csv": "HFDataset"}
"""The task that reads a file, by its extension."""
PARTS = {
    "rlkit-convert": "AnswerScore",
    "rlkit-engine-http": "HttpEngine",
    "rlkit-engine-vllm": "VllmEngine VllmServer",
    "rlkit-env-games": "CalculatorMaze GuessNumber GuessTask MazeTask",
    "rlkit-env-gym": "GymTask GymText ReasoningGym ReasoningGymScore",
    "rlkit-env-openenv": "OpenEnv OpenEnvTask",
    "rlkit-env-verifiers": "VerifiersAgent VerifiersReward VerifiersTask",
    "rlkit-length-reward": "LengthReward",
    "rlkit-ray": "Ray",
    "rlkit-tool-mcp": "McpTool",
    "rlkit-tool-python": "PythonTool",
    "rlkit-tool-search": "SearchTool",
}
"""The parts of rlkit's own plugins that are installed by themselves."""
PACKAGES = {part: package for package, parts in PARTS.items() for part in parts.split()}
"""The distribution to install for each of these parts."""
SUFFIXES = ("", "Loss", "Reward", "Engine", "Tool", "Task", "Parser")
"""Ends of classes' names, which a user may leave out."""
YAML = {None: "null", True: "true", False: "false"}
WORDS: dict[object, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything",
}  # fmt: skip


def wrong_value(key: str, value: object, hint: object, registry: Registry) -> str:
    """Return the message about a value of another type, or out of its range."""
    remedy = f"; {REMEDIES[key]}" if key in REMEDIES else ""
    if key == "model" and isinstance(value, str):
        remedy = f"; a model's name or folder is --model.path={value}"
    shown = HIDDEN if is_credential(key, str(value)) else quote(value)
    return f"{key} is {shown}, expected {describe(hint, registry, value)}{remedy}{_example(key, value, hint, registry)}"


def wrong_class(key: str, name: object, hint: object, registry: Registry) -> str:
    """Return the message about a class where an option takes none."""
    problem = f"{key} names the class {name!r}, expected {describe(hint, registry)}"
    return problem + _example(key, name, hint, registry)


def _example(key: str, value: object, hint: object, registry: Registry) -> str:
    """Return the list or the mapping that a key takes, with the part that was given; nothing for other keys."""
    structure = shape(hint, registry).structure
    if not isinstance(structure, ListOf | DictOf):
        return ""
    choice = shape(structure.hint, registry).structure
    if not isinstance(choice, Choice):
        return ""
    for _ in range(2):  # a list or a mapping of parts, each of them by its name or with options
        if isinstance(value, Mapping):
            value = value.get("class_path", next(iter(value.values()), None))
        elif isinstance(value, list):
            value = next(iter(value), None)
    named_part = choice.find(value)
    name = next(iter(choice.parts), "MyClass") if named_part is None else named_part.name
    text = f"[{name}]" if isinstance(structure, ListOf) else f"{{{name.lower()}: {name}}}"
    return f"; for example `{key}: {text}`; a class with options is {{class_path: {name}, init_args: {{...}}}}"


def settable(key: str) -> str:
    """Return the option by which the command line sets a key: a list is set as a whole."""
    return re.split(r"\.\d+(?:\.|$)", key, maxsplit=1)[0]


def quote(value: object) -> str:
    """Return a value as a message shows it: numbers bare, other texts in quotes, a long one abbreviated."""
    if value is None or isinstance(value, bool):
        return YAML[value]
    text = str(value)
    if isinstance(value, str) and not re.fullmatch(
        r"[-+]?(\.?\d[\d.e+-]*|\.?inf|\.?nan)|[\[{(].*", value, re.IGNORECASE
    ):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def unknown_option(key: str, tree: Mapping[str, object], registry: Registry, siblings: Sequence[str] = ()) -> str:
    """Return the message about an option that does not exist, with the nearest that this recipe could have.

    Args:
        key: The dotted key.
        tree: The recipe.
        registry: The parts that the recipe may name.
        siblings: The keys of the options beside it.
    """
    for absent, remedy in NOT_OPTIONS.items():
        if key == absent or key.startswith(f"{absent}."):
            return f"{key} is not an option of rlkit: {remedy}"
    remedy = NO_OPTION.get(key.rpartition(".")[2], "")
    if remedy:
        return f"{key} is not an option of rlkit: {remedy}"
    presence = dict.fromkeys(siblings, True) | known_keys(registry, tree)
    return f"unknown option {key!r}; {nearest(key, list(presence), [k for k in presence if presence[k]])}"


def nearest(key: str, keys: Sequence[str], present: Sequence[str] = ()) -> str:
    """Return a hint with the options that `near_keys` finds, or with those that there are."""
    near = near_keys(key, keys, present)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    parent = key.rpartition(".")[0]
    listed = [k for k in keys if k.rpartition(".")[0] == parent] or keys
    names = [k.rpartition(".")[2] if k.rpartition(".")[0] == parent else k for k in listed[:12]]
    return f"known: {', '.join(names)}" if listed else "it has none"


def near_keys(key: str, keys: Sequence[str], present: Sequence[str] = ()) -> list[str]:
    """Return the nearest of the options: the same name elsewhere, another toolkit's name for it, or a similar one."""
    parent, _, name = key.rpartition(".")
    namesakes = [k for k in keys if k.rpartition(".")[2] == name]
    near = [k for k in namesakes if k in present]
    near = [k for k in near if k.partition(".")[0] == key.partition(".")[0]] or near
    if not near and not parent:  # in an optional section of one that is present
        near = [k for k in namesakes if k.partition(".")[0] in present]
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    near = near[:3] or ([FOREIGN[name]] if name in FOREIGN else [])
    near = near or [siblings[n] for n in difflib.get_close_matches(name, siblings, 1, 0.5)]
    return near or difflib.get_close_matches(key, keys, 1, 0.5) or namesakes[:1]


def known_keys(registry: Registry, tree: Mapping[str, object]) -> dict[str, bool]:
    """Return every key that the recipe may have, and whether it lies in a section that the recipe has.

    Of parts, these are the options of the classes that the recipe names.
    """
    return dict(sorted(_keys(Recipe, registry, tree, "")))


def _keys(cls: type, registry: Registry, tree: object, prefix: str, present: bool = True) -> Iterator[tuple[str, bool]]:
    for name, option in options(cls).items():
        allowed = shape(option.hint, registry)
        structure = allowed.structure
        node = tree.get(name) if isinstance(tree, Mapping) else None
        is_optional_section = isinstance(structure, Section) and (allowed.optional or allowed.plain is not None)
        is_present = present and not (is_optional_section and node is None)
        key = f"{prefix}{name}"
        yield key, is_present
        if isinstance(structure, Section):
            yield from _keys(structure.cls, registry, node, f"{key}.", is_present)
        elif isinstance(structure, Choice) and isinstance(node, Mapping):
            part = structure.find(node["class_path"])
            yield from () if part is None else _keys(part.cls, registry, node["init_args"], f"{key}.", is_present)
        elif isinstance(structure, DictOf) and isinstance(node, Mapping):
            section = shape(structure.hint, registry).structure
            if isinstance(section, Section):
                for child_name, child in node.items():
                    yield from _keys(section.cls, registry, child, f"{key}.{child_name}.", is_present)


def unknown_class(key: str, name: object, choice: Choice, registry: Registry) -> str:
    """Explain why a name is none of a key's classes: misspelt, of another kind, disabled or missing; with a remedy."""
    subject = f"{key} is {quote(name)}"
    listed = ", ".join(choice.parts) or "none"
    if not isinstance(name, str):
        return f"{subject}, expected the name of a class: {listed}"
    bare, package = name.rpartition(".")[2], name.partition(".")[0]
    reader = READERS.get(PurePath(name).suffix)
    if choice.kind == "tasks" and reader is not None:
        return f"{subject}, a file, expected a class: write --{key} {reader} --{key}.path {name}"
    for kind, parts in registry.parts.items():
        if kind != choice.kind and bare in parts and name in (bare, *import_paths(parts[bare].cls)):
            return f"{subject}, which is one of the {kind}; known {choice.kind}: {listed}"
    if "." in name and "/" not in name:
        return f"{subject}, {_not_offered(package, registry)}; known {choice.kind}: {listed}"
    distribution = PACKAGES.get(bare)
    if distribution is not None:
        return f"{subject}, which {_state(distribution, registry)}"
    near = [part for part in choice.parts if part.lower() in {f"{bare}{suffix}".lower() for suffix in SUFFIXES}]
    near = near or difflib.get_close_matches(bare, choice.parts, 1, 0.6)
    if near:
        return f"{subject}, which no plugin offers; did you mean {near[0]!r}?"
    disabled = [p.name for p in registry.plugins if p.disabled]
    note = f"; disabled by {DISABLE_VARIABLE}: {', '.join(disabled)}" if disabled else ""
    return f"{subject}, which no plugin offers; known: {listed}{note}"


def _not_offered(package: str, registry: Registry) -> str:
    """Return the reason why a class of a package cannot be named, without importing the package."""
    for plugin in registry.plugins:
        if plugin.module.partition(".")[0] == package:
            if plugin.disabled:
                return f"of the plugin {plugin.name!r}, which {DISABLE_VARIABLE} disables; unset it"
            return f"which the plugin {plugin.name!r} does not register"
    return f"but no plugin of a package {package!r} is installed; rlkit plugins new NAME makes one of your own code"


def _state(distribution: str, registry: Registry) -> str:
    """Return the reason why a class of one of rlkit's plugins cannot be named: a relative clause."""
    for plugin in registry.plugins:
        if plugin.distribution == distribution and plugin.disabled:
            return f"the plugin {plugin.name!r} offers, but {DISABLE_VARIABLE} disables it; unset it"
        if plugin.distribution == distribution:
            return f"{distribution} {plugin.version} does not offer; see rlkit plugins list"
    return f"{distribution} offers, which is not installed: {plugin_command(distribution)}"


def classes_at(key: str, registry: Registry) -> Choice | Section | None:
    """Return the choice or the section of a key, for its help; None if it is neither."""
    structure: object = Section(Recipe)
    for name in key.split("."):
        if not isinstance(structure, Section) or name not in options(structure.cls):
            return None
        structure = shape(options(structure.cls)[name].hint, registry).structure
        if isinstance(structure, DictOf | ListOf):
            structure = shape(structure.hint, registry).structure
    return structure if isinstance(structure, Choice | Section) else None


def describe(hint: object, registry: Registry, value: object = None) -> str:
    """Return in words what a type allows; `value` is the one that it does not allow, if there is one."""
    allowed = shape(hint, registry)
    words = [_plain(allowed.plain, value)] if allowed.plain is not None else []
    structure = allowed.structure
    if isinstance(structure, Section):
        name = "a section" if allowed.plain is None else structure.cls.__name__
        words.append(f"{name} with: {', '.join(sorted(options(structure.cls)))}")
    elif isinstance(structure, Choice):
        words.append(f"the name of a class: {', '.join(structure.parts) or 'none is registered'}")
    elif isinstance(structure, DictOf):
        words.append(f"names, each with {describe(structure.hint, registry)}")
    elif isinstance(structure, ListOf):
        words.append(f"a list, each of it {describe(structure.hint, registry)}")
    text = " or ".join(words) or "nothing that a recipe can hold"
    return f"{text}, or null" if allowed.optional else text


def _plain(hint: object, value: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expected(hint, value if arguments[0] is str else parse_text(value)) or _plain(arguments[0], value)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in UNIONS:
        return " or ".join(_plain(argument, value) for argument in arguments)
    if isinstance(origin, type) and arguments:
        members = [_plain(argument, None) for argument in arguments if argument is not Ellipsis]
        return f"a mapping to {members[-1]}" if issubclass(origin, Mapping) else f"a list, each of it {members[0]}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    return WORDS.get(hint) or str(getattr(hint, "__name__", hint))
