"""Pushing weights to several servers at once, checking that they have them, and finding what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from rlkit.engines.server.api import Answer
from rlkit.engines.server.http import UNREADABLE, Fault
from rlkit.engines.server.node import Node
from rlkit.engines.server.states import DEADLINES, State, Step
from rlkit.engines.server.threads import beside_loop
from rlkit.engines.server.transports import Adapter, Bucket, Transport
from rlkit.engines.server.weight_check import CANARY_TOKENS, Ask, Expected, Gap, Tolerance, gap_between
from rlkit.errors import EngineError

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import WeightStream

T = TypeVar("T")

SUSPECTS = 256
"""Tensors are sent again in at most so many portions."""

NAMED = 5
MENDS = 0.05
"""A tensor is to blame if sending it again takes this share off the gap."""


class Mismatch(EngineError):
    """A server has weights, but other log-probs than the trainer."""


Failures = dict[Node, EngineError]


@dataclass
class Push:
    """A way to push the trainer's weights to servers.

    Args:
        transport: How tensors travel.
        dtype: The engine's type; tensors are rounded to it before they travel.
        tolerance: How far log-probs may be apart.
        adapter_only: Adapters travel by themselves, and servers apply them.
        broadcast_tp: Returns what the first rank of this rank's tensor-parallel group has.
        device: The trainer's.
    """

    transport: Transport[object]
    dtype: torch.dtype
    tolerance: Tolerance
    adapter_only: bool = False
    broadcast_tp: Callable[[list[list[int]]], list[list[int]]] = lambda rows: rows
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gap: Gap = field(default_factory=lambda: Gap(0.0, 0.0))

    async def push(
        self, stream: WeightStream, nodes: Sequence[Node], label: str, expected: Expected | None, base: bool = True
    ) -> Failures:
        """Push all weights to the servers, or the adapters but not the `base`, and check them.

        A failure of one server is none of the others. The stream is read to its end whatever happens to them, since
        other ranks may read it with this one.
        """
        try:
            return await self._push(stream, nodes, label, expected, base)
        except BaseException as error:  # cancelled halfway, or the stream itself failed
            for node in nodes:
                node.broken("finish the update", error)
            raise
        finally:
            self.transport.end()

    async def _push(
        self, stream: WeightStream, nodes: Sequence[Node], label: str, expected: Expected | None, base: bool
    ) -> Failures:
        failed: Failures = {}

        async def each(step: Callable[[Node], Coroutine[object, None, None]]) -> None:
            await _each([n for n in nodes if n not in failed], step, failed)

        await each(lambda node: node.wait_ready())
        targets = [node.api for node in nodes if node not in failed]
        if base and targets:
            try:
                await self.transport.open(targets)
            except (Fault, OSError, RuntimeError, TimeoutError) as error:
                failed |= {n: n.broken("prepare for new weights", error) for n in nodes if n not in failed}
        await each(lambda node: node.prepare(self.transport, base))
        buckets = self._buckets(stream) if base else iter(())  # agreed: `base` is the same in every rank's call
        while (bucket := await self._beside_loop(lambda: next(buckets, None))) is not None:
            alive = [node for node in nodes if node not in failed]
            if alive:
                await self._load(bucket, alive, failed)
        adapter = await self._beside_loop(lambda: self._adapter(stream))
        await each(lambda node: node.finish(self.transport, label, adapter))
        if expected is not None:
            await each(lambda node: self.check_weights(node, expected))
        else:
            await each(lambda node: node.perform(Step.CHECK, lambda: asyncio.sleep(0)))
        if failed:
            self.transport.close_group()
        return failed

    async def _load(self, bucket: Bucket, nodes: Sequence[Node], failed: Failures) -> None:
        """Send one bucket to the servers."""
        try:
            parcel = await self._beside_loop(lambda: self.transport.prepare(bucket))
        except (OSError, RuntimeError) as error:
            failed |= {node: _broken(node, error) for node in nodes}
            return
        sending = asyncio.create_task(self.transport.send(parcel))
        await _each(nodes, lambda node: node.load(self.transport, parcel), failed)
        if any(node in failed for node in nodes):
            sending.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            if not sending.cancelled():
                raise
        except (OSError, RuntimeError, TimeoutError) as error:
            failed |= {node: _broken(node, error) for node in nodes if node not in failed}

    async def _beside_loop(self, function: Callable[[], T]) -> T:
        return await beside_loop(self.device, function)

    def _buckets(self, stream: WeightStream) -> Iterator[Bucket]:
        # agreed: an option of the recipe
        for bucket in stream.buckets(merged=False) if self.adapter_only else stream.buckets():
            yield [(name, x.to(self.dtype) if x.is_floating_point() else x) for name, x in bucket]

    def _adapter(self, stream: WeightStream) -> Adapter | None:
        found = stream.adapter() if self.adapter_only else None  # agreed: an option of the recipe
        return None if found is None else (found[0], [(name, x.to(self.dtype)) for name, x in found[1]])

    async def check_weights(self, node: Node, expected: Expected) -> None:
        """Compare a server's log-probs with the trainer's.

        Raises:
            Mismatch: They differ.
        """
        self.gap = await node.perform(Step.CHECK, lambda: self._probe(node, expected))
        if not self.gap.within(self.tolerance):
            node.state = State.UNCHECKED
            raise Mismatch(self._explain(node, self.gap))

    async def try_canary(self, nodes: Sequence[Node], row: Sequence[int], ask: Ask) -> Failures:
        """Have servers write some tokens greedily, and compare them with what the trainer finds likeliest.

        Every rank runs the trainer's forward pass once, also where it has no servers; those of a tensor-parallel group
        on the rows of its first rank, which alone has some.
        """
        wrong: Failures = {}
        written: dict[Node, Answer] = {}
        for node in nodes:
            try:
                [written[node]] = await self._probes(node, [row], CANARY_TOKENS)
            except Fault as fault:
                wrong[node] = node.error("answer after the first sync", fault)
        rows = [[*row[:1], *answer.tokens] for answer in written.values()] or [list(row)]
        logps = await self._beside_loop(lambda: ask(self.broadcast_tp(rows)))
        for (node, answer), expected in zip(written.items(), logps, strict=False):
            new = slice(len(row) - 1, None)
            gap = gap_between([expected[:-1][new]], [Answer(answer.tokens[new], answer.logps[new])], CANARY_TOKENS)
            if not gap.within(self.tolerance):
                node.state = State.UNCHECKED
                wrong[node] = Mismatch(
                    f"{node.api.product} server {node.url} writes other tokens than the trainer after the first sync: "
                    f"{gap.mean:.3g} nats apart on average, {gap.most:.3g} at most."
                )
        return wrong

    async def _probe(self, node: Node, expected: Expected) -> Gap:
        return gap_between(expected.logps, await self._probes(node, expected.rows, 1), 1)

    async def _probes(self, node: Node, rows: Sequence[Sequence[int]], count: int) -> list[Answer]:
        """Return the log-probs that a server has for rows of tokens and `count` tokens that it adds to each.

        Raises:
            Fault: It returned none, or of other tokens.
        """
        try:
            answers = await node.api.probe(rows, count, DEADLINES[Step.CHECK])
        except UNREADABLE as error:
            raise Fault(f"its log-probs cannot be read ({type(error).__name__}: {error})") from error
        lengths = [(len(answer.tokens), len(answer.logps)) for answer in answers]
        if lengths != [(len(row) - 1 + count,) * 2 for row in rows]:
            raise Fault(f"it returned {lengths} tokens and log-probs for {len(rows)} rows of tokens")
        return answers

    def _explain(self, node: Node, gap: Gap) -> str:
        limit = self.tolerance
        return (
            f"{node.api.product} server {node.url} has taken the weights, but has other log-probs than the trainer: "
            f"{gap.mean:.3g} nats apart on average and {gap.most:.3g} at most, expected {limit.mean:g} and "
            f"{limit.most:g} for {self.dtype}."
        )

    async def diagnose(
        self, stream: WeightStream, wrong: Failures, label: str, expected: Expected | None
    ) -> EngineError | None:
        """Send tensors again, one by one, to the first server that is wrong; return an error that names those to blame.

        The stream is read to its end on every rank, also where no server is wrong.
        """
        node = next(iter(wrong), None)
        before, stopped = self.gap, ""
        worst: list[tuple[float, str]] = []
        for name, part, adapter in self._portions(stream):
            if node is None or expected is None or stopped:
                continue
            try:
                gap = await self._again(node, part, adapter, label, expected)
            except EngineError as error:
                stopped = f" The search ended early: {error}"
                continue
            if not before.within(self.tolerance) and gap.mean < (1 - MENDS) * before.mean:
                worst.append((before.mean - gap.mean, f"{name} (now {gap.mean:.3g})"))
            before = gap
        if node is None or expected is None:
            return None if node is None else wrong[node]
        if worst:
            named = "; ".join(name for _, name in sorted(worst, reverse=True)[:NAMED])
            return EngineError(f"{wrong[node]} Sending a tensor again lessens the gap for: {named}.{stopped}")
        return EngineError(
            f"{wrong[node]} Sending all tensors again changes nothing, so {node.api.product} reads some of them, or "
            f"computes, otherwise than transformers does for this model; choose rollout.engine: TorchEngine.{stopped}"
        )

    def _portions(self, stream: WeightStream) -> Iterator[tuple[str, Bucket, Adapter | None]]:
        """Return what can be sent again by itself, with its name: the adapters, then a few tensors at a time."""
        if adapter := self._adapter(stream):
            yield "the adapters", [], adapter
        size = max(1, len(stream.specs) // SUSPECTS)
        for bucket in self._buckets(stream):
            for start in range(0, len(bucket), size):
                part = bucket[start : start + size]
                yield ", ".join(name for name, _ in part), part, None

    async def _again(self, node: Node, part: Bucket, adapter: Adapter | None, label: str, expected: Expected) -> Gap:
        """Send some tensors again, or the adapters; return the gap that is left."""
        failed: Failures = {}
        if part:
            await self.transport.open([node.api])
        await node.prepare(self.transport, base=bool(part))
        if part:
            await self._load(part, [node], failed)
        if failed:
            raise failed[node]
        await node.finish(self.transport, label, adapter)
        gap: Gap = await node.perform(Step.CHECK, lambda: self._probe(node, expected))
        node.state = State.UNCHECKED
        return gap


async def _each(nodes: Sequence[Node], step: Callable[[Node], Coroutine[object, None, None]], failed: Failures) -> None:
    """Run a step on all servers concurrently; record those that fail."""
    results = await asyncio.gather(*(step(node) for node in nodes), return_exceptions=True)
    for node, result in zip(nodes, results, strict=True):
        if isinstance(result, EngineError):
            failed[node] = result
        elif result is not None:
            node.state = State.BROKEN
            raise result


def _broken(node: Node, error: BaseException) -> EngineError:
    return node.broken("take a bucket of weights", Fault(f"{type(error).__name__}: {error}"))
