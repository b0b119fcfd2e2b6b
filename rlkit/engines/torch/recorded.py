"""An engine that samples nothing in training: the data set has the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlkit.engines.torch.engine import TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.runtime import Runtime, WeightStream
from rlkit.types import Completion, Request


class Recorded(RolloutEngine):
    """Trains on the answers that the data set has: supervised and preference training, and reward models.

    Each prompt brings its own answers (`Prompt.recorded`), however many: `rollout.group_size` does not count.
    Validation samples as in any run.

    Args:
        validation: Samples where the run validates; null for `TorchEngine`.
    """

    recorded = True

    def __init__(self, validation: RolloutEngine | None = None) -> None:
        self.validation = TorchEngine() if validation is None else validation
        self.reads_policy, self.reserved = self.validation.reads_policy, self.validation.reserved
        self._outdated = True

    @property
    def capacity(self) -> int | None:
        return self.validation.capacity

    @property
    def environment(self) -> Mapping[str, str]:
        return self.validation.environment

    def bind(self, runtime: Runtime) -> None:
        self.validation.bind(runtime)

    async def generate(self, request: Request) -> Completion:
        return await self.validation.generate(request)

    async def sync(self, stream: WeightStream, version: int) -> None:
        await self.validation.sync(stream, version)
        self._outdated = False

    @property
    def needs_weights(self) -> bool:
        """Whether weights must be synced before a validation: they are not sent after each step."""
        return self._outdated or self.validation.needs_weights

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with self.validation.on_device():
            yield
        self._outdated = True

    def health(self) -> dict[str, float]:
        return self.validation.health()

    def close(self) -> None:
        self.validation.close()
