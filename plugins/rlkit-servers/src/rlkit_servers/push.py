"""Pushing weights to several servers at once, checking that they arrived, and finding the tensors that did not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from rlkit.base.errors import EngineError
from rlkit_servers.api import ServerOutput
from rlkit_servers.http import UNREADABLE, Fault
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import DEADLINES, ServerState, UpdateStep
from rlkit_servers.threads import off_loop
from rlkit_servers.transports import Adapter, Bucket, Transport
from rlkit_servers.update import finish, load, perform, prepare
from rlkit_servers.weight_check import CANARY_TOKENS, ExpectedLogps, LogpGap, PolicyLogps, Tolerance, gap_between

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import WeightStream

T = TypeVar("T")

MAX_PORTIONS = 256
"""Tensors are resent in at most this many portions."""

MAX_SUSPECTS = 5
"""Suspects that an error names."""

SUSPECT_SHARE = 0.05
"""A tensor is suspect if resending it reduces the gap by this share."""


class Mismatch(EngineError):
    """A server has taken the weights, but has other log-probs than the trainer."""


Failures = dict[InferenceServer, EngineError]


@dataclass
class Push:
    """Pushes the trainer's weights to servers.

    Args:
        transport: Sends tensors.
        dtype: The engine's dtype; tensors but buffers are rounded to it before they are sent.
        tolerance: The accepted difference of log-probs.
        adapter_only: Whether adapters are sent by themselves, and servers apply them.
        broadcast_tp: Returns the value of the first of the ranks that have this rank's rows.
        device: The trainer's device.
    """

    transport: Transport[object]
    dtype: torch.dtype
    tolerance: Tolerance
    adapter_only: bool = False
    broadcast_tp: Callable[[list[list[int]]], list[list[int]]] = lambda rows: rows
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gap: LogpGap = field(default_factory=lambda: LogpGap(0.0, 0.0))
    """The gap of the last check."""

    async def push(
        self,
        stream: WeightStream,
        servers: Sequence[InferenceServer],
        label: str,
        expected: ExpectedLogps | None,
        base: bool = True,
    ) -> Failures:
        """Push all weights to the servers, or the adapters without the `base`, and check them.

        Servers fail independently. The stream is read to its end even if all servers fail, since other ranks may read
        it together with this one.
        """
        try:
            return await self._push(stream, servers, label, expected, base)
        except BaseException as error:  # cancelled halfway, or the stream itself failed
            for server in servers:
                server.mark_broken("finish the update", error)
            raise
        finally:
            self.transport.end()
            if self.transport.sent is not None:
                self.transport.sent.abandon()

    async def _push(
        self,
        stream: WeightStream,
        servers: Sequence[InferenceServer],
        label: str,
        expected: ExpectedLogps | None,
        base: bool,
    ) -> Failures:
        failed: Failures = {}

        async def on_all(step: Callable[[InferenceServer], Coroutine[object, None, None]]) -> None:
            await _concurrently([s for s in servers if s not in failed], step, failed)

        await on_all(lambda server: server.wait_ready())
        targets = [server.api for server in servers if server not in failed]
        if base and targets:
            try:
                await self.transport.open(targets)
                await self._begin_changes([server for server in servers if server not in failed], label)
            except (Fault, OSError, RuntimeError, TimeoutError) as error:
                failed |= {s: s.mark_broken("prepare for new weights", error) for s in servers if s not in failed}
        await on_all(lambda server: prepare(server, self.transport, base))
        buckets = self._buckets(stream) if base else iter(())  # agreed: `base` is the same in every rank's call
        while (bucket := await self._off_loop(lambda: next(buckets, None))) is not None:
            alive = [server for server in servers if server not in failed]
            if alive:
                await self._load(bucket, alive, failed)
        if self.transport.sent is not None and base and any(server not in failed for server in servers):
            self.transport.sent.end()
        adapter = await self._off_loop(lambda: self._adapter(stream))
        await on_all(lambda server: finish(server, self.transport, label, adapter))
        if expected is not None:
            await on_all(lambda server: self.check_weights(server, expected))
        else:
            await on_all(lambda server: perform(server, UpdateStep.CHECK, lambda: asyncio.sleep(0)))
        if failed:
            self.transport.close_group()
        return failed

    async def _begin_changes(self, servers: Sequence[InferenceServer], label: str) -> None:
        """Send changes if all servers have the weights that were sent last, and full weights otherwise."""
        if self.transport.sent is None:
            return
        versions = await asyncio.gather(*(server.weight_version() for server in servers))
        ready = all(server.state is ServerState.READY for server in servers)
        self.transport.sent.begin(label, ready and set(versions) == {self.transport.sent.label})

    async def _load(self, bucket: Bucket, servers: Sequence[InferenceServer], failed: Failures) -> None:
        """Send one bucket to the servers."""
        try:
            parcel = await self._off_loop(lambda: self.transport.prepare(bucket))
        except (OSError, RuntimeError) as error:
            failed |= {server: _bucket_error(server, error) for server in servers}
            return
        sending = asyncio.create_task(self.transport.send(parcel))
        await _concurrently(servers, lambda server: load(server, self.transport, parcel), failed)
        if any(server in failed for server in servers):
            sending.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            if not sending.cancelled():
                raise
        except (OSError, RuntimeError, TimeoutError) as error:
            failed |= {server: _bucket_error(server, error) for server in servers if server not in failed}

    async def _off_loop(self, function: Callable[[], T]) -> T:
        return await off_loop(self.device, function)

    def _buckets(self, stream: WeightStream) -> Iterator[Bucket]:
        exact = stream.buffer_names
        for bucket in stream.buckets(merged=False) if self.adapter_only else stream.buckets():
            yield [(n, x.to(self.dtype) if x.is_floating_point() and n not in exact else x) for n, x in bucket]

    def _adapter(self, stream: WeightStream) -> Adapter | None:
        adapter = stream.adapter() if self.adapter_only else None
        if adapter is None:
            return None
        config, tensors = adapter
        return config, [(name, x.to(self.dtype)) for name, x in tensors]

    # checks

    async def check_weights(self, server: InferenceServer, expected: ExpectedLogps) -> None:
        """Compare a server's log-probs with the trainer's.

        Raises:
            Mismatch: They differ.
        """
        self.gap = await perform(server, UpdateStep.CHECK, partial(self._measure_gap, server, expected))
        if not self.gap.within(self.tolerance):
            server.state = ServerState.UNCHECKED
            raise Mismatch(
                f"{server.api.product} server {server.url} has taken the weights, but has other log-probs than the "
                f"trainer: {self.gap.mean:.3g} nats apart on average and {self.gap.max:.3g} at most, expected "
                f"{self.tolerance.mean:g} and {self.tolerance.max:g} for {self.dtype}."
            )

    async def check_sampling(
        self, servers: Sequence[InferenceServer], row: Sequence[int], policy_logps: PolicyLogps
    ) -> Failures:
        """Let servers continue a row greedily, and compare their tokens with those that the trainer finds most likely.

        Every rank runs the trainer's forward pass once, even without servers; those of a tensor-parallel group on the
        rows of its first rank, the only one with servers.
        """
        wrong: Failures = {}
        outputs: dict[InferenceServer, ServerOutput] = {}
        for server in servers:
            try:
                [outputs[server]] = await self._probe(server, [row], CANARY_TOKENS)
            except Fault as fault:
                wrong[server] = await server.error("answer after the first sync", fault)
        rows = [[*row[:1], *output.tokens] for output in outputs.values()] or [list(row)]
        logps = await self._off_loop(lambda: policy_logps(self.broadcast_tp(rows)))
        new = slice(len(row) - 1, None)
        for (server, output), expected in zip(outputs.items(), logps, strict=False):
            sampled = ServerOutput(output.tokens[new], output.logps[new])
            gap = gap_between([expected[:-1][new]], [sampled], CANARY_TOKENS)
            if not gap.within(self.tolerance):
                server.state = ServerState.UNCHECKED
                wrong[server] = Mismatch(
                    f"{server.api.product} server {server.url} samples other tokens than the trainer after the first "
                    f"sync: {gap.mean:.3g} nats apart on average, {gap.max:.3g} at most."
                )
        return wrong

    async def _measure_gap(self, server: InferenceServer, expected: ExpectedLogps) -> LogpGap:
        return gap_between(expected.logps, await self._probe(server, expected.rows, 1), 1)

    async def _probe(self, server: InferenceServer, rows: Sequence[Sequence[int]], count: int) -> list[ServerOutput]:
        """Return a server's log-probs of rows of tokens and of `count` tokens that it adds to each.

        Raises:
            Fault: The server returned none, or those of other tokens.
        """
        try:
            outputs = await server.api.probe(rows, count, DEADLINES[UpdateStep.CHECK])
        except UNREADABLE as error:
            raise Fault(f"its log-probs cannot be read ({type(error).__name__}: {error})") from error
        lengths = [(len(output.tokens), len(output.logps)) for output in outputs]
        if lengths != [(len(row) - 1 + count,) * 2 for row in rows]:
            raise Fault(f"it returned {lengths} tokens and log-probs for {len(rows)} rows of tokens")
        return outputs

    # diagnosis

    async def diagnose(
        self, stream: WeightStream, wrong: Failures, label: str, expected: ExpectedLogps | None
    ) -> EngineError | None:
        """Resend tensors one by one to the first server that is wrong; return an error that names the suspects.

        The stream is read to its end on every rank, even if no server is wrong.
        """
        server = next(iter(wrong), None)
        before = self.gap
        stopped = ""
        suspects: list[tuple[float, str]] = []
        for name, portion, adapter in self._portions(stream):
            if server is None or expected is None or stopped:
                continue
            try:
                gap = await self._resend(server, portion, adapter, label, expected)
            except EngineError as error:
                stopped = f" The search ended early: {error}"
                continue
            if not before.within(self.tolerance) and gap.mean < (1 - SUSPECT_SHARE) * before.mean:
                suspects.append((before.mean - gap.mean, f"{name} (now {gap.mean:.3g})"))
            before = gap
        if server is None or expected is None:
            return None if server is None else wrong[server]
        if suspects:
            names = "; ".join(name for _, name in sorted(suspects, reverse=True)[:MAX_SUSPECTS])
            return EngineError(f"{wrong[server]} Resending a tensor lessens the gap for: {names}.{stopped}")
        return EngineError(
            f"{wrong[server]} Resending all tensors changes nothing, so {server.api.product} reads some of them, or "
            f"computes, differently from transformers for this model; choose rollout.engine: TorchEngine.{stopped}"
        )

    def _portions(self, stream: WeightStream) -> Iterator[tuple[str, Bucket, Adapter | None]]:
        """Yield what can be resent by itself, with its name: the adapters, then a few tensors at a time."""
        adapter = self._adapter(stream)
        if adapter is not None:
            yield "the adapters", [], adapter
        size = max(1, len(stream.specs) // MAX_PORTIONS)
        for bucket in self._buckets(stream):
            for start in range(0, len(bucket), size):
                portion = bucket[start : start + size]
                yield ", ".join(name for name, _ in portion), portion, None

    async def _resend(
        self, server: InferenceServer, portion: Bucket, adapter: Adapter | None, label: str, expected: ExpectedLogps
    ) -> LogpGap:
        """Resend some tensors, or the adapters; return the gap that remains."""
        failed: Failures = {}
        if portion:
            await self.transport.open([server.api])
        await prepare(server, self.transport, base=bool(portion))
        if portion:
            await self._load(portion, [server], failed)
        if failed:
            raise failed[server]
        await finish(server, self.transport, label, adapter)
        gap = await perform(server, UpdateStep.CHECK, partial(self._measure_gap, server, expected))
        server.state = ServerState.UNCHECKED
        return gap


async def _concurrently(
    servers: Sequence[InferenceServer],
    step: Callable[[InferenceServer], Coroutine[object, None, None]],
    failed: Failures,
) -> None:
    """Run a step on all servers concurrently; record those that fail."""
    results = await asyncio.gather(*(step(server) for server in servers), return_exceptions=True)
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, EngineError):
            failed[server] = result
        elif result is not None:
            server.state = ServerState.BROKEN
            raise result


def _bucket_error(server: InferenceServer, error: BaseException) -> EngineError:
    return server.mark_broken("take a bucket of weights", Fault(f"{type(error).__name__}: {error}"))
