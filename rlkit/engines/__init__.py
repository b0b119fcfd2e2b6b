"""Rollout engines: TorchEngine and replays in `torch`, and by name those of packages that come with rlkit.

What belongs here: engines in the trainer's process. What does not: conversations (`rlkit.rollout`), and servers, whose
engines are a package on `rlkit_servers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.engines.torch.engine import TorchEngine
from rlkit.engines.torch.recorded import Recorded
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.teacher import ServedTeacher
from rlkit.registry.shelf import attribute_of

__all__ = ["Recorded", "TorchEngine"]

__getattr__ = attribute_of("engines")


def connect_teacher(urls: Sequence[str], engine: RolloutEngine | None) -> ServedTeacher:
    """Return the teacher at a recipe's `teacher.urls`, on servers of an engine's product, or else of SGLang."""
    return (engine or __getattr__("SGLangServer")()).teacher(urls)
