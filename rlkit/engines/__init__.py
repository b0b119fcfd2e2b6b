"""Rollout engines, one product or method each, and what the rest of rlkit asks of products without naming them.

What belongs here: the engines by name; SGLang's, in the modules `sglang*`; rooms for TorchEngine (`torch`) and for
what any server engine shares (`server`). What does not: conversations (`rlkit.rollout`). Nothing outside of this room
names a product; an engine for another one is a package on `rlkit.engines.server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlkit.engines.sglang import SGLangEngine, SGLangServer
from rlkit.engines.sglang_launch import describe_installation
from rlkit.engines.torch.engine import TorchEngine
from rlkit.engines.torch.recorded import Recorded
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.teacher import ServedTeacher

__all__ = ["Recorded", "SGLangEngine", "SGLangServer", "TorchEngine"]

OPTIONAL_PACKAGES: Mapping[str, Callable[[str], str]] = {"sglang": describe_installation}
"""Packages that engines need, by distribution: each describes an installed version, and what it lacks."""


def connect_teacher(urls: Sequence[str], engine: RolloutEngine | None) -> ServedTeacher:
    """Return the teacher at a recipe's `teacher.urls`, on servers of an engine's product, or else of SGLang."""
    return (engine or SGLangServer()).teacher(urls)
