"""Changes of weights in SGLang's own process: `--custom-weight-loader rlkit_servers.sglang.changes.load`.

SGLang's layers hold several tensors of a checkpoint in one, so changes are applied to a copy of the checkpoint in the
server's memory, and the tensors that differ are loaded from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlkit_servers.changes import CheckpointReceiver

LOADER = f"{__name__}.load"
"""The name by which SGLang imports the function."""

_receiver = CheckpointReceiver()


def load(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Apply a bucket to the copy, and load what came into the model.

    Raises:
        RefusedWeights: The bucket is not for the weights that are here; SGLang ends, and is started again.
    """
    names = _receiver.receive(dict(tensors))
    if names is not None:
        model.load_weights([(name, _receiver.copies[name]) for name in names])
