"""Rows in the form that verl trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlkit.base.errors import RecipeError, show
from rlkit.types import JsonObject, Prompt, Row
from rlkit_tasks.files import KnownColumns

PHASES = {
    "create_kwargs": "create",
    "execute_kwargs": "call",
    "calc_reward_kwargs": "reward",
    "release_kwargs": "release",
}
"""verl's names of the arguments of a tool, and the methods of `Tool` that take them."""


class Verl(KnownColumns):
    """verl's rows: `prompt`, `data_source`, `reward_model.ground_truth` and `extra_info`, as its scripts write them.

    `extra_info.tools_kwargs` has the tools of the row's conversations by name, with the arguments of their methods; a
    row without this key has all tools of the recipe. `extra_info.interaction_kwargs` has the `name` of one of the
    interactions of `InteractionRouter`, with what it reads. Columns, `extra_info` and `reward_model` too, are in the
    prompt's `meta`.

    Args:
        path: The training file, a pattern, a list, a folder, or a name on the Hugging Face hub; see `HFDataset`.
        validation_path: The validation files, where `path` is a file.
        name: The data set's configuration.
        train_split: The split to train on.
        validation_split: The split to validate on, or the share of the training rows to hold out.
        system: A system message to put before each prompt.
        split_seed: Seed of the selection of held-out rows.
    """

    ANSWER = "reward_model.ground_truth"

    def _answer(self, row: Row, location: str) -> str | None:
        """Return the ground truth; rows that a model grades have none."""
        graded = row.get("reward_model")
        if not isinstance(graded, Mapping) or "ground_truth" not in graded:
            return None
        return super()._answer(row, location)

    def _make(self, row: Row, location: str, name: str) -> Prompt:
        prompt = super()._make(row, location, name)
        extra = _object(row, "extra_info", location)
        tools_kwargs = _object(extra, "tools_kwargs", location)
        tools = {
            name: _object(tools_kwargs, name, location) for name, value in tools_kwargs.items() if value is not None
        }
        if extra.get("need_tools_kwargs") and not tools:
            raise RecipeError(
                f"{location}: extra_info.need_tools_kwargs is true, but extra_info.tools_kwargs has no tool"
            )
        chosen: JsonObject = {
            name: {PHASES[key]: _object(phases, key, location) for key in phases.keys() & PHASES.keys()}
            for name, phases in tools.items()
        }
        has_tools = "tools_kwargs" in (row.get("extra_info") or {})  # a table has a null there in rows without tools
        meta: JsonObject = {key: value for key, value in prompt.meta.items() if key != "tools"}
        meta |= {"tools": chosen, "interaction": _object(extra, "interaction_kwargs", location)}
        return replace(prompt, meta=meta, tools=[*tools] if has_tools else prompt.tools)


def _object(row: Row, key: str, location: str) -> JsonObject:
    """Return an object in a row, without the nulls that tables hold for missing keys.

    Raises:
        RecipeError: It is something else.
    """
    value = row.get(key)
    if not isinstance(value, Mapping | None):
        raise RecipeError(f"{location}: {key!r} is {show(value)}, expected an object")
    return {name: field for name, field in (value or {}).items() if field is not None}
