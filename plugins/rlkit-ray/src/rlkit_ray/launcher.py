"""Starts the processes of a run on a Ray cluster; Ray itself is imported where a run is launched."""

from __future__ import annotations

from typing import Annotated

from rlkit.base.names import USER_ONLY
from rlkit.base.ranges import Count, NonNegativeInt, PositiveFloat
from rlkit.interfaces.launcher import HostedServer, LaunchedRun, Launcher, ServerCommand


class Ray(Launcher):
    """Starts the ranks on the nodes of a Ray cluster, and goes on with the nodes that are left when one dies.

    Rollout servers that the run starts (SGLangServer, HttpEngine) get devices of their own on any node. If their node
    dies, they are started on another one and get the weights again, while the run goes on. The processes of pools
    (`placement:`) get devices on any node, too; if one is lost, the run goes on from its newest checkpoint.

    The nodes need rlkit and this package, and the file systems of the current folder and of the run folder, where each
    rank's output is in `launcher/`. The command shows that of rank 0; Ctrl-C ends the run as without a launcher. When
    the command ends in whatever way, all processes of the run end.

    Args:
        address: The cluster: `auto` for that of this machine or of `RAY_ADDRESS`, `host:port`, `ray://host:port`, or
            `local` for a new one of this machine alone. No recipe file may set it.
        cpus_per_rank: CPUs of each rank; on CPUs, also its threads.
        cpus_per_server: CPUs of each rollout server that the run starts, and of each process of a pool.
        restarts: How often the run goes on from its newest checkpoint after a node has died, or a rank or a process of
            a pool was killed.
        wait_seconds: Seconds to wait for devices that others use.
        grace_seconds: Seconds in which the other ranks end by themselves once one has failed.
    """

    def __init__(
        self,
        *,
        address: Annotated[str, USER_ONLY] = "auto",
        cpus_per_rank: Count = 1,
        cpus_per_server: Count = 1,
        restarts: NonNegativeInt = 3,
        wait_seconds: PositiveFloat = 600.0,
        grace_seconds: PositiveFloat = 60.0,
    ) -> None:
        self.address = address
        self.cpus_per_rank = cpus_per_rank
        self.cpus_per_server = cpus_per_server
        self.restarts = restarts
        self.wait_seconds = wait_seconds
        self.grace_seconds = grace_seconds
        self._hosted = 0

    def launch(self, run: LaunchedRun) -> int:
        from rlkit_ray.driver import ClusterDriver

        return ClusterDriver(self).launch(run)

    def host_server(self, command: ServerCommand) -> HostedServer:
        from rlkit_ray.cluster import server_resources
        from rlkit_ray.servers import RayServer

        resources = server_resources(command.gpus, self.cpus_per_server)
        self._hosted += 1
        return RayServer(command, self._hosted - 1, resources, self.wait_seconds)
