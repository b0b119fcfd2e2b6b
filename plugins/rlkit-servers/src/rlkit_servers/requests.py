"""Requests to servers: which one takes them, how often they are attempted, which weights they must come from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from rlkit.base.errors import EngineError, RolloutError
from rlkit.ops.routes import ROUTES
from rlkit.types import Completion, Request, StopReason
from rlkit_servers.api import ServerOutput
from rlkit_servers.fleet import Fleet
from rlkit_servers.http import Fault
from rlkit_servers.interruption import Interruption
from rlkit_servers.recovery import Recovery
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.weights import WeightSync

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class Requests:
    """Samples completions on servers.

    Args:
        engine: The engine's name in errors.
        fleet: The servers.
        weights: Their weights.
        recovery: Brings servers back.
        retry: How often, and for how long, requests are attempted.
    """

    def __init__(
        self, engine: str, fleet: Fleet, weights: WeightSync, recovery: Recovery, retry: ServerRetryPolicy
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._weights = weights
        self._recovery = recovery
        self._retry = retry
        self._interruption = Interruption()
        self._retried = 0
        self._stale = 0

    def bind(self, runtime: Runtime) -> None:
        """Read the model's context, stop ids and vocabulary."""
        self.context = runtime.context
        self.stop_ids = runtime.stop_ids
        self.vocabulary = int(runtime.policy.config.get_text_config().vocab_size)

    async def generate(self, request: Request) -> Completion:
        """Return a server's completion of a request.

        Raises:
            RolloutError: No attempt succeeded, or the request's token ids are invalid.
            TimeoutError: The request's deadline passed.
            EngineError: A server cannot be brought back, or cannot continue a text that has a structure.
        """
        has_structure = request.sampling.structure is not None
        if has_structure and request.resumed:
            raise EngineError(
                f"sampling has stop texts and a structure, which {self._engine} begins anew in each request; remove "
                "one of them, or choose rollout.engine: TorchEngine"
            )
        budget = self.context - len(request.tokens)
        if budget <= 0:
            return Completion([], [], [], StopReason.CONTEXT)
        if not request.tokens or not all(0 <= token < self.vocabulary for token in request.tokens):
            raise RolloutError(
                f"{self._engine} got the token ids {str(request.tokens)[:80]}, expected one or more from 0 to "
                f"{self.vocabulary - 1}; other ids crash servers"
            )
        stop_ids = tuple(sorted(self.stop_ids.union(request.sampling.stop_ids)))
        max_tokens = min(request.sampling.max_tokens, budget)
        top_k = min(request.sampling.top_k, self.vocabulary)  # servers crash if asked for more log-probs
        sampling = replace(request.sampling, max_tokens=max_tokens, stop_ids=stop_ids, top_k=top_k)
        attempts = count()

        async def attempt(seconds: float) -> tuple[ServerOutput, list[int]]:
            self._retried += next(attempts) > 0
            return await self._attempt(replace(request, sampling=sampling, deadline=seconds))

        try:
            result = await self._interruption.watch(self._retry.call(attempt, request.deadline))
        except Fault as fault:
            text = f"{self._engine} had no completion after {fault.attempts} attempts: {fault}"
            raise RolloutError(text) from fault
        if result is None or (result[0].aborted and has_structure):  # such a text is sampled again from its beginning
            return Completion([], [], [], StopReason.INTERRUPTED)
        output, versions = result
        fields: dict[str, object] = {} if output.expert_routes is None else {ROUTES: output.expert_routes}
        return Completion(
            output.tokens, output.logps, versions, _stop_reason(output, request), output.candidates, fields
        )

    async def _attempt(self, request: Request) -> tuple[ServerOutput, list[int]]:
        """Return a server's output, and the version of each token.

        Raises:
            Fault: The request failed, or some of its tokens were sampled from weights that are not this run's, or are
                older than those at the time of the request.
        """
        endpoint = self._fleet.balancer.choose(request.session)
        with endpoint.assign():
            servers = self._fleet.balancer.endpoints[endpoint]
            oldest = max(self._weights.version, 0)  # read here: a sync may begin in any `await`
            await asyncio.gather(*map(self._recovery.wait_ready, servers))
            repairs = [server.repairs for server in servers]
            try:
                with self._interruption.in_server():
                    output = await endpoint.ask(request)
                if output.aborted and not request.resumable:
                    raise Fault("the request was aborted")
                return output, self._versions(output, oldest)
            except Fault as fault:
                if fault.status is None or not 400 <= fault.status < 500:  # it may be the server's fault
                    checks = zip(servers, repairs, strict=True)
                    firsts = await asyncio.gather(*(self._recovery.check(s, repairs, fault) for s, repairs in checks))
                    has_living = self._fleet.balancer.has_living
                    if has_living:
                        self._recovery.restore_in_background()
                    if has_living or not any(firsts):  # otherwise the first one brings the server back
                        self._fleet.balancer.reassign_if_lost(request.session)
                raise

    def _versions(self, output: ServerOutput, oldest: int) -> list[int]:
        versions = [self._weights.version_of(label) for label in output.labels]
        if len(versions) != len(output.tokens) or any(version < oldest for version in versions):
            self._stale += 1
            labels = ", ".join(sorted(set(output.labels)))
            raise Fault(f"tokens came from weights {labels}, expected {self._weights.label(oldest)}")
        return versions

    def interrupt(self) -> None:
        """Interrupt all requests: they return the tokens sampled so far."""
        self._interruption.interrupt(self._fleet.servers)

    def health(self) -> dict[str, float]:
        """Return the number of repeated attempts, and of those with tokens from old weights."""
        return {"retried": float(self._retried), "stale": float(self._stale)}


def _stop_reason(output: ServerOutput, request: Request) -> StopReason:
    if output.aborted:
        return StopReason.INTERRUPTED
    if output.stopped:
        return StopReason.STOP
    return StopReason.LENGTH if len(output.tokens) >= request.sampling.max_tokens else StopReason.CONTEXT
