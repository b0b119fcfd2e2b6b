"""Fields of trajectories as JSON, and back: tensors keep their type and every bit."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.types import JsonObject

MOST_BYTES = 2**24
"""Bytes of a sample's field; a larger one is named in `fields_left_out`."""


def stored_fields(fields: Mapping[str, Tensor]) -> JsonObject:
    """Return tensors by name as entries of a row: files of safetensors in base64."""
    if not fields:
        return {}
    from safetensors.torch import save

    stored = {name: b64encode(save({name: x})).decode() for name, x in fields.items() if x.nbytes <= MOST_BYTES}
    return {"fields": stored, "fields_left_out": sorted(fields.keys() - stored)}


def read_fields(stored: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a row's `fields`.

    Raises:
        Exception: They are not what `stored_fields` returns.
    """
    from safetensors.torch import load

    return {name: load(b64decode(values, validate=True))[name] for name, values in stored.items()}
