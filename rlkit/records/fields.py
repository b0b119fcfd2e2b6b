"""Fields of trajectories as JSON, and back: tensors keep their type and every bit."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from rlkit.interfaces.fields import MOST_NUMBERS, RANGES

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.types import JsonObject

MAX_BYTES = 2**24
"""Bytes of a sample's fields; those beyond are named in `fields_left_out`."""


def stored_fields(fields: Mapping[str, object]) -> JsonObject:
    """Return tensors by name as entries of a row: numbers as a list, several numbers of a token in base64."""
    import torch

    stored: JsonObject = {}
    left_out: list[str] = []
    room = MAX_BYTES
    for name, tensor in fields.items():
        if not isinstance(tensor, torch.Tensor) or tensor.nbytes > room:
            left_out.append(name)
            continue
        room -= tensor.nbytes
        is_plain = tensor.dim() < 2 and bool(tensor.isfinite().all())
        raw = b"" if is_plain else tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        values = tensor.tolist() if is_plain else b64encode(raw).decode()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        stored[name] = {"dtype": dtype, "shape": shape, "values": values}
    return ({"fields": stored} if stored else {}) | ({"fields_left_out": left_out} if left_out else {})


def read_fields(stored: object) -> dict[str, Tensor]:
    """Return the tensors of a row's `fields`.

    Raises:
        ValueError: They are not what `stored_fields` returns.
    """
    import torch

    if not isinstance(stored, dict):
        raise ValueError("no object")
    fields = {}
    for name, entry in stored.items():
        if not isinstance(entry, dict) or entry.get("dtype") not in RANGES or not isinstance(entry.get("shape"), list):
            raise ValueError(f"{name!r} has no dtype and shape")
        shape, values, dtype = entry["shape"], entry.get("values"), getattr(torch, entry["dtype"])
        if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape) or len(shape) > MOST_NUMBERS:
            raise ValueError(f"{name!r} has the shape {shape}")
        if isinstance(values, str):
            raw = bytearray(b64decode(values, validate=True))
            if len(raw) != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name!r} has {len(raw)} bytes")
            fields[name] = (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
        else:
            fields[name] = torch.tensor(values, dtype=dtype).reshape(shape)
    return fields
