"""Rollouts of environments of verifiers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rlkit.base.ranges import Seconds
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit_env_verifiers.environments import loaded
from rlkit_env_verifiers.server import EnvironmentServer, address

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Trace

OUTCOME = "verifiers.json"
"""The file in a rollout's folder that states its rewards and metrics."""


class VerifiersAgent(Agent):
    """Plays the environment that `VerifiersTask` has loaded; its model is the policy.

    A role that names no harness is a chat loop in this process, which calls the environment's tools. Other harnesses
    and runtimes run as verifiers runs them. One role is trained: any other has `trainable` false and a model of its
    own. The environment scores the episode; `VerifiersReward` reads its scores.

    Args:
        timeout: Seconds for one rollout, without the time in which the engine samples.
    """

    def __init__(self, timeout: Seconds = 600.0) -> None:
        self.timeout = timeout
        self._servers: dict[str, EnvironmentServer] = {}

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        meta = task.prompt.meta
        key, index = str(meta.get("environment")), meta.get("index")
        environment = loaded(key)
        if environment is None or not isinstance(index, int) or not 0 <= index < len(environment.tasks):
            return AgentResult(1, "the prompt is of no environment of verifiers; use `task: VerifiersTask`")
        if key not in self._servers:
            self._servers[key] = EnvironmentServer(environment.env)
        episode = await self._servers[key].play(environment.tasks[index], client)
        try:
            trace = trained(episode, address(client))
        except ValueError as error:
            return AgentResult(1, str(error))
        scores = {
            "rewards": {name: (reward.score, reward.weight) for name, reward in trace.rewards.items() if reward},
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        }
        (task.folder / OUTCOME).write_text(json.dumps(scores), encoding="utf-8")
        return AgentResult(0, trace.last_reply)

    def close(self) -> None:
        servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()


def trained(episode: Episode, policy: str) -> Trace:
    """Return the trace that is trained on.

    Args:
        episode: A finished episode.
        policy: The policy's base URL.

    Raises:
        ValueError: The episode failed, or the policy played another role too.
    """
    failures = [error for part in (episode, *episode.traces) for error in part.errors]
    if not episode.ok and failures:
        raise ValueError(f"{failures[-1].type}: {failures[-1].message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise ValueError(f"the episode has {len(traces)} trained traces, expected 1; one role can be trained")
    for trace in episode.traces:
        client = trace.agent.config.client
        if trace is not traces[0] and client is not None and client.base_url == policy:
            raise ValueError(f"the role {trace.agent.name!r} is not trained; set its `model` and its `client`")
    return traces[0]
