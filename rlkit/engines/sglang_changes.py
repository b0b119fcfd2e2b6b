"""Changes of weights in SGLang's own process: `--custom-weight-loader rlkit.engines.sglang_changes.load`.

SGLang's layers hold several tensors of a checkpoint in one, so changes are applied to a copy of the checkpoint in the
server's memory, and the tensors that differ are loaded from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.server.changes import WeightReceiver, without_suffix

LOADER = f"{__name__}.load"
"""The name by which SGLang imports the function."""

METADATA = "rlkit:metadata"
"""The tensor with a bucket's metadata, as JSON in UTF-8."""

_copies: dict[str, Tensor] = {}
_receiver = WeightReceiver(_copies)


def load(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Apply a bucket to the copy, and load what came into the model; a bucket with `finish` ends the update.

    Raises:
        RefusedWeights: The bucket is not for the weights that are here; SGLang ends, and is started again.
    """
    named = dict(tensors)
    metadata = json.loads(bytes(named.pop(METADATA).tolist()))
    if "finish" in metadata:
        _receiver.finish(metadata["finish"])
        return
    if not metadata.get("base"):
        for name, tensor in named.items():
            _copies.setdefault(name, torch.empty_like(tensor, device="cpu"))
    _receiver.load(named, metadata)
    names = dict.fromkeys(map(without_suffix, named))
    model.load_weights([(name, _copies[name]) for name in names])


def metadata_tensor(metadata: dict[str, str]) -> tuple[str, Tensor]:
    """Return metadata as a named tensor."""
    return METADATA, torch.tensor(list(json.dumps(metadata).encode()), dtype=torch.uint8)
