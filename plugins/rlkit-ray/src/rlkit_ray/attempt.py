"""One start of a run on reserved nodes: its agents, its ranks, and how they ended."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlkit.base.errors import INTERRUPTED, LaunchError, RecipeError
from rlkit.interfaces.launcher import LaunchedRun
from rlkit_ray.agent import NodeAgent, NodeInfo
from rlkit_ray.cluster import Reservation, Resources, alive_nodes
from rlkit_ray.servers import CLUSTER, RESERVED

T = TypeVar("T")

POLL_SECONDS = 0.5
START_SECONDS = 300.0
"""How long an agent may take to start: a node may first have to read its packages."""

REPLY_SECONDS = 30.0
"""An agent that does not answer for as long is lost, with its node."""

SEEN_SECONDS = 30.0
"""How long Ray may take to notice that a node has died, once a rank has failed that may have missed its peers."""


class End(NamedTuple):
    """How an attempt ended.

    Args:
        status: The exit status: that of rank 0, or 1.
        lost_nodes: Ids of nodes whose agents were lost.
        may_go_on: Whether a node or a rank died, rather than the run failed.
        reason: What happened, for people.
    """

    status: int
    lost_nodes: frozenset[str] = frozenset()
    may_go_on: bool = False
    reason: str = ""


class Attempt:
    """A start of a run.

    Args:
        run: The run, for as many nodes as are reserved.
        reservation: The nodes.
        resources: Of each node.
        grace_seconds: Time in which other ranks end by themselves once one has failed.
    """

    def __init__(self, run: LaunchedRun, reservation: Reservation, resources: Resources, grace_seconds: float) -> None:
        self._run = run
        self._reservation = reservation
        self._grace_seconds = grace_seconds
        self._nodes = [reservation.nodes[bundle] for bundle in reservation.order]
        self._lost: set[int] = set()
        self._shown = 0
        actor = ray.remote(NodeAgent)
        self._agents: list[Any] = [
            actor.options(
                name=f"{reservation.name}-{index}" if index else reservation.name,
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, bundle),
            ).remote(os.getcwd(), str(run.out))
            for index, bundle in enumerate(reservation.order)
        ]

    def start(self, variables: Mapping[str, str], *, restarted: bool) -> None:
        """Start all ranks.

        Args:
            variables: Environment variables of the command.
            restarted: Whether the run was started before.

        Raises:
            RecipeError: A node lacks a folder, or does not share the run folder.
            LaunchError: An agent does not start.
        """
        cluster = {CLUSTER: ray.get_runtime_context().gcs_address, RESERVED: self._reservation.name}
        try:
            nodes = self._inspect()
            calls = []
            for index, (agent, node) in enumerate(zip(self._agents, nodes, strict=True)):
                ranks = {}
                for local_rank in range(self._run.ranks_per_node):
                    own = self._run.variables(index, local_rank, nodes[0].host, nodes[0].port)
                    ranks[int(own["RANK"])] = {**variables, **cluster, **own}
                command = self._run.command(restarted=restarted, python=node.python)
                calls.append(agent.start.remote(command, ranks))
            ray.get(calls, timeout=START_SECONDS)
        except (RayActorError, GetTimeoutError) as error:
            raise LaunchError(f"an agent did not start on its node: {error}") from error

    def _inspect(self) -> list[NodeInfo]:
        """Inspect the nodes.

        Raises:
            RecipeError: A node lacks a folder, or does not share the run folder.
        """
        files = [f"node-{index}-{uuid.uuid4().hex[:8]}" for index in range(len(self._agents))]
        calls = [agent.inspect.remote(file) for agent, file in zip(self._agents, files, strict=True)]
        inspected: list[tuple[NodeInfo, str]] = ray.get(calls, timeout=START_SECONDS)
        problems = [f"node {node.host}: {problem}" for node, problem in inspected if problem]
        if not problems:
            missing = ray.get([agent.missing.remote(files) for agent in self._agents], timeout=START_SECONDS)
            problems = [
                f"node {node.host} does not share the run folder {self._run.out} with the others"
                for (node, _), names in zip(inspected, missing, strict=True)
                if names
            ]
        if problems:
            raise RecipeError("\n".join((*problems, "start the command in a folder that all nodes share")))
        for file in files:
            (self._run.out / "launcher" / file).unlink(missing_ok=True)
        return [node for node, _ in inspected]

    def watch(self, signals: list[int]) -> End:
        """Show the output of rank 0 until all ranks have ended; pass signals on.

        Args:
            signals: Signals that the command has received; grows meanwhile.
        """
        passed_on, kill_at = 0, float("inf")
        statuses: dict[int, int | None] = {}
        while True:
            statuses |= self._statuses()
            self._show_output()
            ended = [status for status in statuses.values() if status is not None]
            if self._lost or any(ended):
                kill_at = min(kill_at, time.monotonic() + self._grace_seconds)
            if len(ended) == self._run.world_size or time.monotonic() > kill_at:
                break
            if len(signals) > passed_on:
                passed_on += 1
                if passed_on > 2:
                    return End(INTERRUPTED)
                self._tell("signal", signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        return self._end(statuses, interrupted=bool(signals))

    def stop(self) -> None:
        """Kill what is left, and give the nodes back."""
        self._tell("kill")
        for agent in self._agents:
            ray.kill(agent)
        self._reservation.release()

    def _end(self, statuses: Mapping[int, int | None], interrupted: bool) -> End:
        """Return the attempt's end; ranks may have missed peers on a node whose death Ray has not noticed yet."""
        failed = [status for status in statuses.values() if status != 0]
        code = next((status for status in failed if status is not None and status > 0), 1) if failed else 0
        if not failed or interrupted:
            return End(INTERRUPTED if interrupted and failed else code)
        killed = {rank: status for rank, status in statuses.items() if status is not None and status < 0}
        lost_servers: dict[int, int | None] = self._answer(0, self._agents[0].lost_servers.remote()) or {}
        deadline = time.monotonic() + SEEN_SECONDS
        while len(self._agents) > 1 and not (killed or lost_servers or self._lost) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._statuses()
        if self._lost:
            lost = frozenset(self._nodes[index] for index in self._lost)
            return End(code, lost, True, f"{len(lost)} of {len(self._nodes)} nodes died")
        lost = frozenset(self._reservation.nodes[bundle] for bundle, status in lost_servers.items() if status is None)
        if lost:
            return End(code, lost, True, f"{len(lost)} nodes with processes of pools died")
        ended = [(f"rank {rank}", status) for rank, status in killed.items()]
        ended += [("a process of a pool", status) for status in lost_servers.values() if status is not None]
        for name, status in ended:
            return End(code, frozenset(), True, f"{name} was ended by {signal.Signals(-status).name}")
        return End(code)

    def _statuses(self) -> dict[int, int | None]:
        """Return the exit statuses of the ranks of all living nodes; note which nodes are lost."""
        alive = {node["NodeID"] for node in alive_nodes()}
        calls = {index: agent.statuses.remote() for index, agent in self._living()}
        statuses: dict[int, int | None] = {}
        for index, call in calls.items():
            answer = self._answer(index, call) if self._nodes[index] in alive else None
            if answer is None:
                self._lost.add(index)
            else:
                statuses |= answer
        return statuses

    def _show_output(self) -> None:
        """Print what rank 0 has written since; any node can read its file."""
        for index, agent in self._living():
            output = self._answer(index, agent.output.remote(0, self._shown))
            if output is None:
                continue
            complete = output[: output.rfind(b"\n") + 1]
            self._shown += len(complete)
            own, _, _ = complete.partition(b"\n[rlkit] the process ended")  # what follows is the supervisor's
            sys.stdout.write(own.decode("utf-8", "replace"))
            sys.stdout.flush()
            return

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of all living agents, whether they answer or not."""
        calls = {index: getattr(agent, method).remote(*arguments) for index, agent in self._living()}
        for index, call in calls.items():
            self._answer(index, call)

    def _living(self) -> list[tuple[int, Any]]:
        return [(index, agent) for index, agent in enumerate(self._agents) if index not in self._lost]

    def _answer(self, index: int, call: Any) -> Any:
        """Return an agent's answer; None if it is lost."""
        try:
            return ray.get(call, timeout=REPLY_SECONDS)
        except (RayActorError, GetTimeoutError):
            self._lost.add(index)
            return None
