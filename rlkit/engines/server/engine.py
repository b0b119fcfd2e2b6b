"""A rollout engine over servers: requests, retries, versions, syncs and their weight checks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from rlkit.engines.server.api import Answer, ServerApi
from rlkit.engines.server.http import Client, Fault
from rlkit.engines.server.interruption import Interruption
from rlkit.engines.server.node import Hung, Node
from rlkit.engines.server.process import ServerProcess
from rlkit.engines.server.push import Failures, Mismatch, Push
from rlkit.engines.server.retry import ServerRetryPolicy
from rlkit.engines.server.routing import Balance
from rlkit.engines.server.states import State
from rlkit.engines.server.threads import beside_loop, detached
from rlkit.engines.server.transports import Transport
from rlkit.engines.server.weight_check import TOLERANCES, Expected, ask_policy, probe_rows
from rlkit.errors import EngineError, RolloutError
from rlkit.interfaces.engine import RolloutEngine
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream

OWNER_SECONDS = 0.5
"""How often a rank checks whether another rank has restored a server."""


class ServerEngine(RolloutEngine):
    """Rollouts from servers that hold the trainer's weights: all ranks share those that the first one names.

    A product's engine says how servers are called (`api`), which servers exist (`start`) and how weights travel
    (`make_transport`).

    Args:
        retry: How long servers are waited for, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
        dtype: The weights' type in the engine; `auto` is the type in which the trainer computes.
        adapter_only: Push the base to servers once and then the adapters alone.
        release_memory: Release servers' memory while the trainer learns.
    """

    def __init__(
        self,
        retry: ServerRetryPolicy,
        check_weights: bool,
        *,
        dtype: str = "auto",
        adapter_only: bool = False,
        release_memory: bool = False,
    ) -> None:
        self.retry = retry
        self.check_weights = check_weights
        self.dtype = dtype
        self.adapter_only = adapter_only
        self.release_memory = release_memory
        self.version = -1
        self._own: list[Node] = []
        self._nodes: list[Node] = []
        self._balance = Balance({})
        self._expected: Expected | None = None
        self._stream: WeightStream | None = None
        self._counts = {"retried": 0, "stale": 0, "restarts": 0}
        self._sync_seconds = 0.0
        self._starved = False
        self._weights = threading.Lock()  # held by the trainer while it learns, by a restoration while that reads them
        self._learning = contextlib.ExitStack()
        self._restoring = asyncio.Lock()
        self._interruption = Interruption()

    @abstractmethod
    def api(self, client: Client) -> ServerApi:
        """Return the calls of a server."""

    @abstractmethod
    def start(self, rank: int) -> list[Node]:
        """Return the servers to which this rank pushes weights; those of rlkit have been started."""

    @abstractmethod
    def make_transport(self) -> Transport[Any]:
        """Return the way in which weights travel."""

    def serving(self, urls: Sequence[Sequence[str]], rank: int) -> list[str]:
        """Return the servers that this rank sends requests to, of those that each rank pushes weights to."""
        return list(urls[0])

    def fronts(self) -> dict[Node, list[Node]]:
        """Return what requests are sent to, each with the servers behind it: itself, if it is no router."""
        return {node: [node] for node in self._nodes}

    def node(self, url: str, process: ServerProcess | None = None, owned: bool = True) -> Node:
        """Return the server at an address."""
        return Node(self.api(Client(url)), self.retry, process, owned)

    def started(self, process: ServerProcess) -> Node:
        """Start a server."""
        process.start()
        return self.node(process.url, process)

    def bind(self, runtime: Runtime) -> None:
        from rlkit.models.lora import adapted_layers

        self._runtime = runtime
        self._stop_ids = runtime.stop_ids
        self._vocabulary = int(runtime.policy.config.get_text_config().vocab_size)
        self._dtype = self._engine_dtype(runtime)
        self._ask = partial(ask_policy, runtime)
        self._rows = probe_rows(runtime.tokenizer, runtime.context)
        rank, world = _rank()
        if self.adapter_only and not adapted_layers(runtime.policy):
            raise EngineError("launch.adapter_only is true, but there are no adapters; set model.lora, or leave it out")
        self._sharded = world > 1 and any(hasattr(p, "full_tensor") for p in runtime.policy.parameters())
        try:
            self._own, problem = self.start(rank), ""
        except EngineError as error:
            problem = str(error)
        here = {"run": uuid.uuid4().hex[:8], "urls": [node.url for node in self._own], "problem": problem}
        ranks = self._runtime.gather_world(here)
        for number, other in enumerate(ranks):
            if other["problem"]:
                raise EngineError(problem or f"rank {number}: {other['problem']}")
        self._run = ranks[0]["run"]
        own = {node.url: node for node in self._own}
        urls = self.serving([other["urls"] for other in ranks], rank)
        self._nodes = [own.get(url) or self.node(url, owned=False) for url in urls]
        self._balance = Balance(self.fronts())
        if self.adapter_only:
            for node in {*self._own, *self._nodes, *self._balance.fronts}:
                node.api.adapter = f"rlkit-{self._run}"
        tolerance = TOLERANCES[self._dtype]
        self._push = Push(
            self.make_transport(), self._dtype, tolerance, self.adapter_only, runtime.broadcast_tp, runtime.device
        )

    def _engine_dtype(self, runtime: Runtime) -> torch.dtype:
        if self.dtype != "auto":
            chosen: torch.dtype = getattr(torch, self.dtype)
            return chosen
        device = runtime.device.type
        with runtime.autocast():
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32

    async def generate(self, request: Request) -> Completion:
        room = self._runtime.context - len(request.tokens)
        if room <= 0:
            return Completion([], [], [], StopReason.CONTEXT)
        if not request.tokens or not all(0 <= token < self._vocabulary for token in request.tokens):
            raise RolloutError(
                f"{type(self).__name__} got the token ids {str(request.tokens)[:80]}, expected one or more from 0 to "
                f"{self._vocabulary - 1}; others crash servers"
            )
        sampling = request.sampling
        stop_ids = tuple(sorted(self._stop_ids.union(sampling.stop_ids)))
        wanted = replace(sampling, max_tokens=min(sampling.max_tokens, room), stop_ids=stop_ids)
        attempts = count()

        async def attempt(limit: float) -> tuple[Answer, list[int]]:
            self._counts["retried"] += next(attempts) > 0
            return await self._attempt(replace(request, sampling=wanted, deadline=limit))

        try:
            found = await self._interruption.watch(self.retry.call(attempt, request.deadline))
        except Fault as fault:
            text = f"{type(self).__name__} had no completion after {fault.attempts} attempts: {fault}"
            raise RolloutError(text) from fault
        return Completion([], [], [], StopReason.INTERRUPTED) if found is None else self._completion(request, *found)

    async def _attempt(self, request: Request) -> tuple[Answer, list[int]]:
        """Return a server's answer, and the version of each token.

        Raises:
            Fault: There was none, or some of its tokens were sampled from weights that are not this run's, or older
                than those at the time of the request.
        """
        node = self._balance.choose(request.session)
        with node.assign():
            behind, begun = self._balance.fronts[node], max(self.version, 0)  # a sync may begin in any `await`
            await asyncio.gather(*map(self._ready, behind))
            repairs = [server.repairs for server in behind]
            try:
                with self._interruption.in_server():
                    answer = await node.ask(request)
                if answer.aborted and not request.resumable:
                    raise Fault("the request was aborted")
                return answer, self._versions(answer, begun)
            except Fault as fault:
                if fault.status is None or not 400 <= fault.status < 500:  # it may be the server's fault
                    firsts = await asyncio.gather(
                        *(self._repair(*one, fault) for one in zip(behind, repairs, strict=True))
                    )
                    if not any(firsts):  # the first brings it back, others go elsewhere
                        self._balance.leave_lost(request.session)
                raise

    def _versions(self, answer: Answer, begun: int) -> list[int]:
        versions = [self._version_of(label) for label in answer.labels]
        if len(versions) != len(answer.tokens) or any(version < begun for version in versions):
            self._counts["stale"] += 1
            labels = ", ".join(sorted(set(answer.labels)))
            raise Fault(f"tokens came from weights {labels}, expected {self._label(begun)}")
        return versions

    def _completion(self, request: Request, answer: Answer, versions: list[int]) -> Completion:
        whole = len(answer.tokens) >= request.sampling.max_tokens
        stop = StopReason.STOP if answer.stopped else StopReason.LENGTH if whole else StopReason.CONTEXT
        return Completion(answer.tokens, answer.logps, versions, StopReason.INTERRUPTED if answer.aborted else stop)

    def _label(self, version: int) -> str:
        return f"{self._run}-{version}"

    def _version_of(self, label: str) -> int:
        """Return the version that a label of this run names; -1 for any other."""
        run, _, version = label.partition("-")
        return int(version) if run == self._run and version.isdecimal() else -1

    # faults

    async def _ready(self, node: Node) -> None:
        """Wait until a server can serve: a sync is over, memory is resumed, a fault is repaired.

        This rank cannot restore a server to which another rank pushes weights, or which takes those of a sharded
        trainer, nor any while the trainer changes the weights: the engine then `needs_weights`, and this waits.

        Raises:
            EngineError: It cannot be brought back, and the run cannot go on.
        """
        # agreed: only a server of an unsharded policy is restored here, whose weights are all on this rank
        while node.lock.locked() or node.state is not State.READY:
            if self._stream is None:
                raise EngineError("a request came before the first sync: there are no weights yet")
            await detached(self._bring_back(node))
            if node.state is State.READY:  # others may hold the lock for a moment, one after another without an end
                return
            self._starved = True
            await asyncio.sleep(OWNER_SECONDS)

    async def _bring_back(self, node: Node) -> None:
        """Restore a server, or note that the rank has that pushes weights to it."""
        async with node.lock:
            lost = node.state is not State.READY
            # agreed: as above
            if lost and node.owned and not self._sharded:
                await self._restore(node)
            elif lost and not node.owned and await node.weight_version() == self._label(self.version):
                node.state = State.READY

    async def _repair(self, node: Node, repairs: int, fault: Fault) -> bool:
        """Check a server after a fault; of many requests that failed on it, the first does so for all.

        Returns:
            Whether this was the first.
        """
        async with node.lock:
            if node.repairs != repairs:
                return False
            well = not isinstance(fault, Hung) and await node.healthy(self.retry.hang_seconds)
            if not well and node.owned:
                node.broken("answer", fault)
            elif not well or await node.weight_version() != self._label(self.version):
                node.state = State.COLD
            node.repairs += 1
            return True

    async def _restore(self, node: Node) -> None:
        """Push the current weights to a server again, unless the trainer learns, which will sync it."""
        assert self._stream is not None
        while True:
            if node.state is State.BROKEN:
                self._counts["restarts"] += 1
                await node.restart()
            async with self._restoring:
                # agreed: as in `_ready`, all weights are on this rank
                if not self._weights.acquire(blocking=False):
                    return
                try:
                    failed = await self._push.push(self._stream, [node], self._label(self.version), self._expected)
                finally:
                    self._weights.release()
            if not failed:
                return
            if isinstance(failed[node], Mismatch) or node.state is not State.BROKEN:
                raise failed[node]

    # weights

    async def sync(self, stream: WeightStream, version: int) -> None:
        started = time.perf_counter()
        first = self._stream is None
        self._stream = stream
        if self.check_weights:
            logps = await beside_loop(self._runtime.device, lambda: self._ask(self._rows))
            self._expected = Expected(self._rows, logps)
        async with contextlib.AsyncExitStack() as stack:
            for node in {*self._own, *self._nodes}:  # of others too, or requests would begin with weights of before
                await stack.enter_async_context(node.lock)
                node.restarts = 0 if version != self.version else node.restarts
            self.version, self._starved = version, False
            label = self._label(version)
            wrong = await self._push_until_well(stream, label)
            if first and self.check_weights:
                right = [node for node in self._own if node not in wrong]
                wrong |= await self._push.try_canary(right, self._rows[0], self._ask)
            if await self._anywhere(bool(wrong)):
                error = await self._push.diagnose(stream, wrong, label, self._expected)
                raise error or EngineError("the weights of another rank's server are wrong; see its error")
            for node in self._nodes:
                if not node.owned:
                    node.state = State.READY
        self._sync_seconds = time.perf_counter() - started

    async def _push_until_well(self, stream: WeightStream, label: str) -> Failures:
        """Push to all servers, again to those that failed once they are back; return those with the wrong weights.

        All ranks read the stream the same number of times.
        """
        waiting = list(self._own)
        wrong: Failures = {}
        while True:
            base = not self.adapter_only or await self._anywhere(any(n.state is not State.READY for n in waiting))
            failed = await self._push.push(stream, waiting, label, self._expected, base)
            wrong |= {node: error for node, error in failed.items() if isinstance(error, Mismatch)}
            waiting = [node for node in failed if node not in wrong]
            if not await self._anywhere(bool(waiting)):
                return wrong
            fatal: EngineError | None = None
            for node in waiting:
                try:
                    if node.state is not State.BROKEN:  # it never came up, so trying again is no use
                        raise failed[node]
                    self._counts["restarts"] += 1
                    await node.restart()
                except EngineError as error:
                    fatal = error
            if await self._anywhere(fatal is not None):
                raise fatal or EngineError("a server of another rank failed; see its error")

    async def _anywhere(self, here: bool) -> bool:
        """Whether something holds on any rank; every rank must call this. The event loop runs on meanwhile."""
        return any(await beside_loop(self._runtime.device, lambda: self._runtime.gather_world(here)))

    # the run

    @property
    def needs_weights(self) -> bool:
        return self._stream is None or self._starved or any(node.state is State.OFFLOADED for node in self._own)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the trainer's weights readable; release servers' memory afterwards, where the recipe says so.

        All ranks are done with sampling when one leaves, so a shared server's memory is free then, too.
        """
        self._learning.close()
        whole = False
        try:
            yield
            self._learning.enter_context(self._weights)  # waits for a restoration in progress
            whole = True
        finally:
            for node in self._own if self.release_memory else ():
                node.release()
            if whole and self.release_memory:  # the trainers of all ranks wait, whose GPUs a server may have shared
                self._runtime.gather_world(None)

    def health(self) -> dict[str, float]:
        return {
            "servers": float(len(self._nodes)),
            "servers_down": float(sum(n.state not in {State.READY, State.OFFLOADED} for n in self._nodes)),
            "weight_gap": self._push.gap.most,
            "sync_seconds": self._sync_seconds,
            **{name: float(count) for name, count in self._counts.items()},
        }

    def close(self) -> None:
        for node in {*self._own, *self._nodes, *self._balance.fronts}:
            node.close()
        if hasattr(self, "_push"):
            self._push.transport.close()


def _rank() -> tuple[int, int]:
    """Return this process's number and the count of all."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
