"""For the tests of plugins: contracts to check a part against, an engine without a model, tiny models."""

from rlkit.testing import golden
from rlkit.testing.contracts import (
    check_advantage,
    check_loss,
    check_reward,
    check_task,
    example_batch,
    example_trajectory,
)
from rlkit.testing.engine import FakeEngine, ScriptedEngine
from rlkit.testing.models import random_model, save_random_model

__all__ = [
    "FakeEngine",
    "ScriptedEngine",
    "check_advantage",
    "check_loss",
    "check_reward",
    "check_task",
    "example_batch",
    "example_trajectory",
    "golden",
    "random_model",
    "save_random_model",
]
