"""verl's files of tools and interactions: read as data, with rlkit's equivalents of the classes that verl ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlkit.base.errors import RecipeError, show
from rlkit.recipe.yaml_text import load
from rlkit_convert.conversion import Conversion
from rlkit_convert.source import read_text
from rlkit_convert.values import boolean, integer, text
from rlkit_convert.verl_method import WRITE_TOOL
from rlkit_convert.verl_runtime import ROLLOUT

MULTI_TURN = f"{ROLLOUT}.multi_turn"
TOOLS = {
    "SandboxFusionTool": ("PythonTool", {"default_timeout": "timeout", "memory_limit_mb": "memory_mb"}),
    "SearchTool": ("SearchTool", {"retrieval_service_url": "url", "timeout": "timeout", "topk": "top_k"}),
}
"""verl's classes of tools, with rlkit's and its names of their options."""
PACKAGES = {"PythonTool": "rlkit-tool-python", "SearchTool": "rlkit-tool-search, whose server's answers differ"}
INTERACTIONS = {"Gsm8kInteraction": "Retry"}
SCORERS = ("Gsm8kTool", "Geo3kTool")
"""Tools of verl that report the score of an answer."""


def tools(conversion: Conversion) -> None:
    """Set the tools, the interaction and the number of turns."""
    key = f"{MULTI_TURN}.tool_config_path"
    parts: dict[str, object] = {}
    for entry in _entries(conversion, key, "tools"):
        name, part, remark = _tool(entry)
        if part is not None:
            parts[name] = part
        else:
            conversion.by_hand.add(key)
        if remark:
            conversion.notes[key] = "; ".join(filter(None, (conversion.notes.get(key), f"{name}: {remark}")))
    if parts:
        conversion.set("tools", parts, key)
    interaction = _interaction(conversion)
    several = f"{MULTI_TURN}.enable"
    if conversion.get(several, boolean, False) and not parts and not interaction:
        conversion.ask(several, "a conversation has one turn until `tools:`, `interaction:` or `environment:` is set")
    _limit_turns(conversion, bool(parts) or interaction)


def _limit_turns(conversion: Conversion, is_multi_turn: bool) -> None:
    """Set the limit of the policy's turns: it takes one more than the replies that verl allows the other side."""
    spare_turns = {f"{MULTI_TURN}.max_assistant_turns": 0, f"{MULTI_TURN}.max_user_turns": 1}
    limits = {key: conversion.get(key, integer, 0) + spare for key, spare in spare_turns.items()}
    limits = {key: limit for key, limit in limits.items() if limit > spare_turns[key]}  # null and 0 limit nothing
    if limits and is_multi_turn:
        conversion.set("conversation.turns", min(limits.values()), *spare_turns)
    for key, limit in limits.items():
        if not is_multi_turn:
            conversion.ask(key, f"conversation.turns: {limit}, beside the tools")


def _entries(conversion: Conversion, key: str, section: str) -> Iterator[Mapping[str, object]]:
    """Yield the entries of a file that an option names; without the file, note what to do."""
    if not conversion.has(key):
        return
    path = conversion.get(key, text, "")
    try:
        content = load(read_text(path))
    except (RecipeError, ValueError) as error:
        conversion.ask(key, f"{error}; convert where the file is, or name its parts under `{section}:`")
        return
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        conversion.ask(key, f"{path} has {section}={show(entries)}, expected a list of classes")
        return
    yield from entries


def _class(entry: Mapping[str, object]) -> str:
    return str(entry.get("class_name")).rpartition(".")[2]


def _config(entry: Mapping[str, object]) -> Mapping[str, object]:
    config = entry.get("config")
    return config if isinstance(config, dict) else {}


def _tool(entry: Mapping[str, object]) -> tuple[str, object | None, str]:
    """Return a tool's name, its part if rlkit has one, and a remark."""
    cls, config, schema = _class(entry), _config(entry), entry.get("tool_schema")
    function = schema.get("function") if isinstance(schema, dict) else None
    name = str(function.get("name")) if isinstance(function, dict) else cls
    if cls in TOOLS:
        part, names = TOOLS[cls]
        options = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
        return name, {"class_path": part, "init_args": options}, f"{part} of {PACKAGES[part]}"
    if config.get("type") == "mcp":
        return name, None, "McpTool of rlkit-tool-mcp, one for each tool of the server"
    if cls in SCORERS:
        return name, {"class_path": "AnswerScore", "init_args": _descriptions(function)}, "AnswerScore of rlkit-convert"
    return name, None, f"a tool of your own in place of {cls}, with the same name: {WRITE_TOOL}"


def _descriptions(function: object) -> dict[str, object]:
    """Describe a tool and its answer to the policy, in the schema of a function."""
    description = _entry(function, "description")
    answer = _entry(_entry(_entry(_entry(function, "parameters"), "properties"), "answer"), "description")
    return {name: text for name, text in (("description", description), ("answer", answer)) if isinstance(text, str)}


def _entry(node: object, key: str) -> object:
    return node.get(key) if isinstance(node, Mapping) else None


def _interaction(conversion: Conversion) -> bool:
    """Set the interaction; return whether there is one."""
    key = f"{MULTI_TURN}.interaction_config_path"
    entries = {
        str(entry.get("name") or _class(entry)): _class(entry) for entry in _entries(conversion, key, "interaction")
    }
    others = [cls for cls in entries.values() if cls not in INTERACTIONS]
    if others:
        conversion.ask(
            key, f"an interaction of your own in place of {', '.join(others)}: rlkit docs plugins/interaction"
        )
    if not entries or others:
        return False
    conversion.set("interaction", "Retry" if len(entries) == 1 else "InteractionRouter", key)
    if len(entries) > 1:
        parts = {name: {"class_path": INTERACTIONS[cls], "init_args": {}} for name, cls in entries.items()}
        conversion.set("interaction.interactions", parts, key)
    return True
