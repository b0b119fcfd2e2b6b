"""Messages between a run's processes: a header as JSON, then tensors as safetensors, in parts of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

from safetensors.torch import load, save
from torch import Tensor

from rlkit.types import JsonObject

TOGETHER, ANY_TIME = "together", "any time"
"""What a connection is for: requests that all ranks make in the same order, or those of rewards."""

KEY = "RLKIT_POOL_KEY"
"""The environment variable of a pool's processes with the run's random key, in hexadecimal digits."""

HEADER_BYTES = 1 << 24
PART_BYTES = 1 << 30
"""Tensors of a part take so much, or the part is a single tensor."""
LARGEST_PART = 1 << 35
"""Bytes of a part that are still read."""


def send(connection: Connection, header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Send a message; no two tensors may share memory."""
    parts = list(_parts(tensors))
    connection.send_bytes(json.dumps({**header, "parts": len(parts)}).encode())
    for names in parts:
        connection.send_bytes(save({name: tensors[name].detach().cpu().contiguous() for name in names}))


def receive(connection: Connection, seconds: float | None = None) -> tuple[JsonObject, dict[str, Tensor]]:
    """Wait for a message and return it.

    Raises:
        TimeoutError: It does not begin within so many seconds.
        EOFError: The other process has closed the connection, or is gone.
        OSError: The connection is broken, or the message too large; BlockingIOError if it does not go on.
    """
    if not connection.poll(seconds):
        raise TimeoutError(f"no message within {seconds:g} s")
    header: JsonObject = json.loads(connection.recv_bytes(HEADER_BYTES))
    tensors: dict[str, Tensor] = {}
    for _ in range(header["parts"]):
        tensors |= load(connection.recv_bytes(LARGEST_PART))
    return header, tensors


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each part."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > PART_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names
