"""Environments of verifiers by their configuration, each loaded once in a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.base.errors import RecipeError, explain, show
from rlkit.base.imports import require_package

if TYPE_CHECKING:
    from verifiers.v1 import Env, Task

SUPPORTED = ">=0.4,<0.5"
CHAT_HARNESS = {"id": "verifiers-rlkit-chat"}
"""The harness of a role if neither recipe nor environment names one: a chat loop in this process."""
LOCAL_RUNTIME = {"type": "subprocess"}
"""Where a role runs unless the recipe says where; verifiers' own default is a hosted sandbox."""


class LoadedEnvironment(NamedTuple):
    """An environment and its tasks, by the index of their row."""

    name: str
    env: Env[Any]
    tasks: list[Task]


_loaded: dict[str, LoadedEnvironment] = {}


def load(config: Mapping[str, Any], limit: int | None) -> tuple[str, LoadedEnvironment]:
    """Return an environment and the key under which `loaded` returns it.

    Args:
        config: Of verifiers' `EnvConfig`.
        limit: Most tasks; None for all.

    Raises:
        RecipeError: verifiers is missing or of another version, or cannot load the environment.
    """
    require_package("verifiers", SUPPORTED, "rlkit-env-verifiers")
    key = json.dumps([config, limit], sort_keys=True, default=str)
    if key not in _loaded:
        try:
            _loaded[key] = _load(config, limit)
        except RecipeError:
            raise
        except Exception as error:  # the environment's own code
            raise RecipeError(f"verifiers cannot load the environment {show(config)}: {explain(error)}") from error
    return key, _loaded[key]


def loaded(key: str) -> LoadedEnvironment | None:
    """Return an environment that a task of this process has loaded; no row of data makes one load."""
    return _loaded.get(key)


def _load(config: Mapping[str, Any], limit: int | None) -> LoadedEnvironment:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(_with_roles(config)))
    if not (limit or env.taskset.bounded):
        raise RecipeError(f"the tasks of {env.config.env_id} never end; set `rows`")
    taskset = env.taskset if limit is None else env.taskset.take(limit)
    return LoadedEnvironment(env.config.env_id, env, list(taskset))


def _with_roles(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose roles run on this machine, unless they say where and by which program."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    taskset = config.get("taskset") or {}
    bundled = default_harness_id(taskset.get("id", "")) != "bash"
    roles = env_config_type(taskset.get("id", ""), config.get("id", "")).model_fields
    filled = dict(config)
    for name, field in roles.items():
        if isinstance(field.default, AgentConfig):
            unset = {} if "runtime" in field.default.model_fields_set else {"runtime": LOCAL_RUNTIME}
            if field.default.harness is None and not bundled:
                unset["harness"] = CHAT_HARNESS
            filled[name] = {**unset, **(config.get(name) or {})}
    return filled
