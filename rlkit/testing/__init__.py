"""The kit for plugins' tests.

What belongs here: the contract of each kind of part (`contracts`, `conversations`), all checks of a plugin
(`conformance`), vectors computed by hand (`golden`), engines without a model (`engine`), tiny models (`models`) and a
runtime (`runtime`). What does not: tests of rlkit itself, and `rlkit plugins test`, which calls it.
"""

from rlkit.testing import golden
from rlkit.testing.agents import ScriptedClient, check_agent
from rlkit.testing.conformance import Finding, check_options, check_plugin
from rlkit.testing.contracts import (
    check_advantage,
    check_curriculum,
    check_filter,
    check_loss,
    check_parser,
    check_reward,
    check_task,
    example_batch,
    example_train_batch,
    example_trajectory,
)
from rlkit.testing.conversations import check_engine, check_environment, check_interaction, check_schema, check_tool
from rlkit.testing.engine import FakeEngine, ScriptedEngine
from rlkit.testing.models import random_model, save_random_model
from rlkit.testing.runtime import ExampleRuntime

__all__ = [
    "ExampleRuntime",
    "FakeEngine",
    "Finding",
    "ScriptedEngine",
    "check_advantage",
    "check_engine",
    "ScriptedClient",
    "check_agent",
    "check_environment",
    "check_curriculum",
    "check_filter",
    "check_interaction",
    "check_loss",
    "check_options",
    "check_parser",
    "check_plugin",
    "check_reward",
    "check_schema",
    "check_task",
    "check_tool",
    "example_batch",
    "example_train_batch",
    "example_trajectory",
    "golden",
    "random_model",
    "save_random_model",
]
