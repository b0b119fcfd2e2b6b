"""Rollout engines: `Recorded`, and by name those of packages that come with rlkit.

What belongs here: training without sampling. What does not: engines that sample, which are packages in `plugins/`, and
conversations (`rlkit.rollout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlkit.interfaces.engine import Capability, RolloutEngine
from rlkit.interfaces.runtime import Runtime, WeightStream
from rlkit.interfaces.teacher import ServedTeacher
from rlkit.registry import calling
from rlkit.registry.shelf import attribute_of
from rlkit.types import Completion, Request

__all__ = ["Recorded"]

__getattr__ = attribute_of("engines")


class Recorded(RolloutEngine):
    """Trains on recorded completions (SFT, preferences, reward models).

    Each prompt brings any number of completions (`Prompt.recorded`): `rollout.group_size` does not apply. Validation
    samples as in any run; an engine that reads the policy is bound before the first one.

    Args:
        validation: The engine that samples in validation; null for `TorchEngine`.
    """

    def __init__(self, validation: RolloutEngine | None = None) -> None:
        self.validation = validation
        self._engine = __getattr__("TorchEngine")() if self.validation is None else self.validation
        self.capabilities = Capability.VALIDATION_ONLY | self._engine.capabilities & Capability.READS_POLICY
        self.reserved = self._engine.reserved
        self.fills = self._engine.fills
        self._outdated = True
        self._unbound: Runtime | None = None

    @property
    def capacity(self) -> int | None:
        return self._engine.capacity

    @property
    def environment(self) -> Mapping[str, str]:
        return self._engine.environment

    def bind(self, runtime: Runtime) -> None:
        if Capability.READS_POLICY in self._engine.capabilities:
            self._unbound = runtime
        else:
            self._engine.bind(runtime)

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)

    async def sync(self, stream: WeightStream, version: int) -> None:
        if self._unbound is not None:
            with calling(self._engine, "bind"):
                self._engine.bind(self._unbound)
            self._unbound = None
        await self._engine.sync(stream, version)
        self._outdated = False

    @property
    def needs_weights(self) -> bool:
        """Whether weights must be synced before a validation, since they are not synced after each step."""
        return self._outdated or self._engine.needs_weights

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with self._engine.on_device():
            yield
        self._outdated = True

    def health(self) -> dict[str, float]:
        return self._engine.health() if self._unbound is None else {}

    def close(self) -> None:
        self._engine.close()


def connect_teacher(urls: Sequence[str], engine: RolloutEngine | None) -> ServedTeacher:
    """Return the teacher at a recipe's `teacher.urls`, on servers of an engine's product, or else of SGLang."""
    return (engine or __getattr__("SGLangServer")()).teacher(urls)
