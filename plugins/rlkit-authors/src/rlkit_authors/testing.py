"""The kit for plugins' tests, which plugins import as `rlkit.testing`."""

from rlkit_authors import golden
from rlkit_authors.agents import ScriptedClient, check_agent
from rlkit_authors.conformance import Finding, check_options, check_plugin
from rlkit_authors.contracts import (
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
from rlkit_authors.conversations import check_engine, check_environment, check_interaction, check_schema, check_tool
from rlkit_authors.engine import FakeEngine, ScriptedEngine
from rlkit_authors.models import random_model, save_random_model
from rlkit_authors.runtime import ExampleRuntime

__all__ = [
    "check_advantage", "check_agent", "check_curriculum", "check_engine", "check_environment", "check_filter",
    "check_interaction", "check_loss", "check_options", "check_parser", "check_plugin", "check_reward", "check_schema",
    "check_task", "check_tool", "example_batch", "example_train_batch", "example_trajectory", "ExampleRuntime",
    "FakeEngine", "Finding", "golden", "random_model", "save_random_model", "ScriptedClient", "ScriptedEngine",
]  # fmt: skip
