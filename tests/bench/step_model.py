"""A discrete-event model of a training step: event loops, rollout servers, gather, update, weight sync, checkpoint.

A conversation passes through the event loop of its rank (render, send), a server (prefill, decode in a continuous
batch) and the loop again (parse, score). When all conversations have ended, ranks exchange trajectories, learn and
send weights. Times are seconds, work is the seconds it takes on a core of its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from math import sqrt
from typing import NamedTuple

Action = Callable[[], None]


class Simulation:
    """Runs actions in the order of their times; those of equal times in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._order = count()

    def after(self, seconds: float, action: Action) -> None:
        """Run an action later."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


class Work:
    """Work on a core, and what follows it."""

    def __init__(self, process: Hashable, seconds: float, then: Action) -> None:
        self.process = process
        self.left = seconds
        self.then = then


class Cores:
    """Cores that processes share equally; the threads of a process share one core, as under Python's lock.

    Args:
        simulation: The clock.
        number: The number of cores.
    """

    def __init__(self, simulation: Simulation, number: float) -> None:
        self._simulation = simulation
        self._number = number
        self._processes: dict[Hashable, list[Work]] = {}
        self._last = 0.0
        self._version = 0

    def start(self, process: Hashable, seconds: float, then: Action) -> Work:
        """Start work in a process."""
        self._advance()
        work = Work(process, seconds, then)
        self._processes.setdefault(process, []).append(work)
        self._plan()
        return work

    def stop(self, work: Work) -> float:
        """Stop work; return the seconds of it that are left."""
        self._advance()
        self._remove(work)
        self._plan()
        return work.left

    def _rate(self, process: Hashable) -> float:
        return min(1.0, self._number / len(self._processes)) / len(self._processes[process])

    def _advance(self) -> None:
        elapsed, self._last = self._simulation.now - self._last, self._simulation.now
        for process, running in self._processes.items():
            for work in running:
                work.left -= elapsed * self._rate(process)

    def _remove(self, work: Work) -> None:
        running = self._processes[work.process]
        running.remove(work)
        if not running:
            del self._processes[work.process]

    def _plan(self) -> None:
        self._version += 1
        version = self._version
        if not self._processes:
            return
        seconds, work = min(
            ((w.left / self._rate(p), w) for p, running in self._processes.items() for w in running),
            key=lambda pair: pair[0],
        )
        self._simulation.after(max(seconds, 0.0), lambda: self._end(version, work))

    def _end(self, version: int, work: Work) -> None:
        if version == self._version:
            self._advance()
            self._remove(work)
            self._plan()
            work.then()


class EventLoop:
    """One thread that does jobs one after another, in the order in which they come."""

    def __init__(self, cores: Cores, process: Hashable) -> None:
        self._cores = cores
        self._process = process
        self._jobs: deque[tuple[float, Action]] = deque()
        self._running = False
        self.busy = 0.0

    def submit(self, seconds: float, then: Action) -> None:
        """Queue a job of so many seconds of work."""
        self._jobs.append((seconds, then))
        if not self._running:
            self._next()

    def _next(self) -> None:
        self._running = bool(self._jobs)
        if self._jobs:
            seconds, then = self._jobs.popleft()
            self.busy += seconds
            self._cores.start(self._process, seconds, lambda: self._end(then))

    def _end(self, then: Action) -> None:
        then()
        self._next()


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of a server's work: a decode step takes `step + row * rows + context * (tokens in the cache)`.

    Args:
        step: Of a decode step, whatever its rows.
        row: Of each row in a decode step.
        context: Of each token in the key-value cache in a decode step.
        prefill: Of each token of a prompt.
        max_rows: Rows of the batch at most; further requests wait.
    """

    step: float
    row: float
    context: float = 0.0
    prefill: float = 0.0
    max_rows: int = 256

    def seconds(self, steps: int, rows: int, cached: int) -> float:
        """Return the work of so many steps of a batch that begins with `cached` tokens in its cache."""
        return steps * (self.step + self.row * rows + self.context * (cached + rows * (steps - 1) / 2))

    def steps_within(self, seconds: float, rows: int, cached: int) -> int:
        """Return how many complete steps fit into so many seconds of work."""
        growth = self.context * rows / 2
        first = self.step + self.row * rows + self.context * cached - growth
        steps = seconds / first if growth == 0 else (sqrt(first**2 + 4 * growth * seconds) - first) / (2 * growth)
        return int(steps + 1e-9)


@dataclass
class Row:
    """A request: tokens to sample, tokens in the cache, and what follows."""

    left: int
    cached: int
    then: Action


class Server:
    """Continuous batching: requests join between two decode steps, and leave when they have all their tokens."""

    def __init__(self, cores: Cores, process: Hashable, cost: DecodeCost) -> None:
        self._cores = cores
        self._process = process
        self._cost = cost
        self._waiting: deque[tuple[Row, int]] = deque()
        self._rows: list[Row] = []
        self._prompts: set[int] = set()
        self._work: Work | None = None
        self._steps = 0  # that the current work makes; 0 while it cannot be interrupted
        self.busy = 0.0

    def ask(self, group: int, context: int, prompt: int, tokens: int, then: Action) -> None:
        """Sample tokens after a context; the prompt of a group, with which that begins, is prefilled once.

        What follows the prompt is in the cache from the conversation's turns before.
        """
        prefilled = 0 if group in self._prompts else prompt
        self._prompts.add(group)
        self._waiting.append((Row(tokens, context, then), prefilled))
        if self._work is None:
            self._start(0.0, self._begin)  # with all requests that come at the same time
        elif self._steps > 1 and len(self._rows) < self._cost.max_rows:
            self._finish_step()

    def _begin(self) -> None:
        self._work = None
        self._admit()

    def _finish_step(self) -> None:
        """End the current work with the decode step that is running."""
        assert self._work is not None
        planned = self._seconds(self._steps)
        spent = planned - self._cores.stop(self._work)
        made = self._cost.steps_within(spent, len(self._rows), sum(row.cached for row in self._rows))
        steps = min(made + 1, self._steps)
        self.busy -= planned - self._seconds(steps)
        self._steps = 0
        self._start(self._seconds(steps) - spent, lambda: self._advance(steps))

    def _admit(self) -> None:
        seconds = 0.0
        while self._waiting and len(self._rows) < self._cost.max_rows:
            row, prefilled = self._waiting.popleft()
            self._rows.append(row)
            seconds += self._cost.prefill * prefilled
        self.busy += seconds
        if seconds:
            self._start(seconds, self._decode)
        elif self._rows:
            self._decode()

    def _decode(self) -> None:
        steps = self._steps = min(row.left for row in self._rows)
        self.busy += self._seconds(steps)
        self._start(self._seconds(steps), lambda: self._advance(steps))

    def _advance(self, steps: int) -> None:
        self._work, self._steps = None, 0
        for row in self._rows:
            row.left -= steps
            row.cached += steps
        ended = [row for row in self._rows if row.left == 0]
        self._rows = [row for row in self._rows if row.left]
        for row in ended:
            row.then()
        if self._work is None:
            self._admit()

    def _start(self, seconds: float, then: Action) -> None:
        self._work = self._cores.start(self._process, max(seconds, 0.0), then)

    def _seconds(self, steps: int) -> float:
        return self._cost.seconds(steps, len(self._rows), sum(row.cached for row in self._rows))


@dataclass(frozen=True)
class Linear:
    """Seconds that are `fixed`, and for each token or byte `each`."""

    fixed: float
    each: float

    def of(self, amount: float) -> float:
        """Return the seconds for an amount."""
        return self.fixed + self.each * amount


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step.

    Args:
        decode: Of a server.
        request: Of an event loop before a conversation's request, by tokens of its prompt.
        reply: Of an event loop after it, by tokens of the completion; scoring included.
        pack: Of a rank, to send a trajectory to another one, by its tokens.
        unpack: Of a rank, to receive one.
        sent_bytes: Bytes of a trajectory (not seconds), by its tokens.
        agree: Of the collectives around the exchange, by the number of ranks.
        update: Of a rank, by the tokens that it learns from.
        reduce: Of a reduction of all gradients among the ranks, which takes no core.
        sync: Of a weight sync, which takes no core.
        checkpoint: Of a checkpoint that training waits for.
        record: Of a rank at the end of a step, by its trajectories: metrics and the rows that are written.
        collectives: Of all collectives of small values in a step, which take no core.
        bandwidth: Bytes a second of a rank in the exchange.
    """

    decode: DecodeCost
    request: Linear
    reply: Linear
    pack: Linear
    unpack: Linear
    sent_bytes: Linear
    agree: Linear
    update: Linear
    reduce: float
    sync: float
    record: Linear
    collectives: float = 0.0
    checkpoint: float = 0.0
    bandwidth: float = 1e9


@dataclass(frozen=True)
class Cluster:
    """Where a run takes place.

    Args:
        ranks: Data-parallel ranks, each with an event loop.
        servers: Rollout servers; 0 for an engine in each rank's process.
        cores: Cores that the ranks' processes share.
    """

    ranks: int
    servers: int
    cores: float


@dataclass(frozen=True)
class Workload:
    """The conversations of a step.

    Args:
        prompt: Tokens of each prompt.
        groups: The tokens that the policy samples in each conversation, by prompt.
        turns: Turns of a conversation, which divide these tokens; each request has all tokens up to it.
        checkpoint_every: Steps between checkpoints; 0 for none.
    """

    prompt: int
    groups: Sequence[Sequence[int]]
    turns: int = 1
    checkpoint_every: int = 0


class Step(NamedTuple):
    """Seconds of a step's parts; shares of the sampling time in which servers and event loops were busy."""

    sample: float
    gather: float
    update: float
    sync: float
    checkpoint: float
    record: float
    servers_busy: float
    loops_busy: float

    @property
    def seconds(self) -> float:
        """Seconds of the complete step."""
        return sum(self[:6])


class _Rank:
    """An event loop, and the servers that it asks: each conversation goes to the one with the fewest of its own."""

    def __init__(self, loop: EventLoop, servers: Sequence[Server]) -> None:
        self.loop = loop
        self._least = [(0, i, server) for i, server in enumerate(servers)]

    def server(self) -> Server:
        """Return the server of a new conversation."""
        conversations, i, server = self._least[0]
        heapq.heapreplace(self._least, (conversations + 1, i, server))
        return server


def simulate(cluster: Cluster, costs: Costs, work: Workload) -> Step:
    """Return the parts of a step."""
    sample, servers_busy, loops_busy = _sample(cluster, costs, work)
    gather = sum(_gather(cluster, costs, work))
    shares = _balanced([sum(group) + work.prompt * len(group) for group in work.groups], cluster.ranks)
    update = _together(cluster, [costs.update.of(share) for share in shares])
    update += costs.reduce if cluster.ranks > 1 else 0.0
    rows = sum(map(len, work.groups)) / cluster.ranks
    record = _together(cluster, [costs.record.of(rows)] * cluster.ranks) + costs.collectives
    checkpoint = costs.checkpoint / work.checkpoint_every if work.checkpoint_every else 0.0
    return Step(sample, gather, update, costs.sync, checkpoint, record, servers_busy, loops_busy)


def _sample(cluster: Cluster, costs: Costs, work: Workload) -> tuple[float, float, float]:
    """Return the seconds until all conversations have ended, and the busy shares of servers and event loops."""
    simulation = Simulation()
    shared = cluster.ranks > cluster.cores
    host = Cores(simulation, cluster.cores)
    hosts = [host if shared else Cores(simulation, 1) for _ in range(cluster.ranks)]
    if cluster.servers:
        servers = [Server(Cores(simulation, 1), i, costs.decode) for i in range(cluster.servers)]
        firsts = [i * len(servers) // cluster.ranks for i in range(cluster.ranks)]  # each rank begins with another one
        own = [servers[first:] + servers[:first] for first in firsts]
    else:
        servers = [Server(hosts[i], i, costs.decode) for i in range(cluster.ranks)]
        own = [[server] for server in servers]
    ranks = [_Rank(EventLoop(hosts[i], i), own[i]) for i in range(cluster.ranks)]
    for i, group in enumerate(work.groups):
        for tokens in group:
            _converse(ranks[i % len(ranks)], costs, work, i, tokens)
    simulation.run()
    seconds = simulation.now
    servers_busy = sum(server.busy for server in servers) / (len(servers) * seconds)
    return seconds, servers_busy, max(rank.loop.busy for rank in ranks) / seconds


def _converse(rank: _Rank, costs: Costs, work: Workload, group: int, tokens: int) -> None:
    server = rank.server()
    turns = [len(turn) for turn in _divided(range(tokens), min(work.turns, tokens))]

    def turn(number: int) -> None:
        context = work.prompt + sum(turns[:number])
        after = (lambda: turn(number + 1)) if number + 1 < len(turns) else (lambda: None)

        def reply() -> None:
            rank.loop.submit(costs.reply.of(turns[number]), after)

        rank.loop.submit(
            costs.request.of(context), lambda: server.ask(group, context, work.prompt, turns[number], reply)
        )

    turn(0)


def _divided(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Divide items into parts of nearly equal length."""
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]


def _gather(cluster: Cluster, costs: Costs, work: Workload) -> tuple[float, float]:
    """Return the seconds of sending trajectories to the ranks that learn from them: of cores, and of the network."""
    if cluster.ranks == 1:
        return 0.0, 0.0
    lengths = [tokens + work.prompt for group in work.groups for tokens in group]
    rows, tokens = len(lengths) / cluster.ranks, sum(lengths) / cluster.ranks
    packed = (costs.pack, costs.unpack)
    cpu = costs.agree.of(cluster.ranks) + sum(cost.fixed * rows + cost.each * tokens for cost in packed)
    network = (costs.sent_bytes.fixed * rows + costs.sent_bytes.each * tokens) / costs.bandwidth
    return _together(cluster, [cpu] * cluster.ranks), network


def _together(cluster: Cluster, seconds: Sequence[float]) -> float:
    """Return when all ranks have done their work, which begins at once and shares the cores."""
    simulation = Simulation()
    if cluster.cores >= cluster.ranks:
        return max(seconds)
    cores = Cores(simulation, cluster.cores)
    for rank, work in enumerate(seconds):
        cores.start(rank, work, lambda: None)
    simulation.run()
    return simulation.now


def _balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the tokens of each rank: largest groups first, each to the rank with the fewest tokens."""
    loads = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
    return [load for load, _ in loads]
