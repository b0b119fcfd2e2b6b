"""The model of a step against closed forms, and the page on scaling against what the model says."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
from rlkit_inspect.docs import page

from tests.bench.scaling import load, tables
from tests.bench.step_model import (
    Cluster,
    Cores,
    Costs,
    DecodeCost,
    EventLoop,
    Linear,
    Server,
    Simulation,
    Step,
    Workload,
    simulate,
)

FREE = Linear(0.0, 0.0)
DECODE = DecodeCost(step=0.5, row=0.25)


def step(groups: list[list[int]], decode: DecodeCost = DECODE, cluster: Cluster | None = None, **costs: Any) -> Step:
    """Return a step in which nothing takes time but what is named."""
    names = ("request", "reply", "pack", "unpack", "sent_bytes", "agree", "update", "record")
    parts = dict.fromkeys(names, FREE) | costs
    return simulate(cluster or Cluster(1, 1, 1), Costs(decode, **parts, reduce=0.0, sync=0.0), Workload(10, groups))


def serve(lengths: list[int], decode: DecodeCost = DECODE) -> float:
    """Return the seconds in which a server answers requests with one prompt of 10 tokens that come together."""
    simulation = Simulation()
    server = Server(Cores(simulation, 1), 0, decode)
    for tokens in lengths:
        server.ask(0, 10, 10, tokens, lambda: None)
    simulation.run()
    assert server.busy == pytest.approx(simulation.now)
    return simulation.now


def test_equal_lengths_on_one_server_end_together() -> None:
    assert serve([7] * 4) == pytest.approx(7 * (0.5 + 0.25 * 4))


def test_the_cache_is_read_as_it_grows() -> None:
    """3 decode steps of two rows with 10, 11 and 12 tokens each, after a prompt that is prefilled once."""
    decode = DecodeCost(step=1.0, row=0.0, context=0.01, prefill=0.1)
    assert serve([3, 3], decode) == pytest.approx(0.1 * 10 + 3 + 0.01 * 2 * (10 + 11 + 12))


def test_the_longest_completion_decides() -> None:
    decode = DecodeCost(step=0.5, row=0.0)
    assert serve([3, 9, 40, 5], decode) == pytest.approx(40 * 0.5)
    busy = (40 + 9) / 2 / 40  # the other server ends after 9 steps
    assert step([[40, 9]], decode, Cluster(1, 2, 1)).servers_busy == pytest.approx(busy)


def test_rows_leave_the_batch_when_they_end() -> None:
    """3 steps of three rows, 2 of two, 4 of one."""
    assert serve([3, 5, 9]) == pytest.approx(9 * 0.5 + 0.25 * (3 * 3 + 2 * 2 + 4))


def test_two_servers_halve_the_work_of_rows() -> None:
    decode = DecodeCost(step=0.0, row=0.25)
    one, two = (step([[8] * 8], decode, Cluster(1, servers, 1)).sample for servers in (1, 2))
    assert two == pytest.approx(one / 2)


def test_requests_beyond_the_batch_wait() -> None:
    decode = DecodeCost(step=0.5, row=0.25, max_rows=4)
    assert serve([6] * 8, decode) == pytest.approx(2 * 6 * (0.5 + 0.25 * 4))


def test_a_request_joins_after_the_running_decode_step() -> None:
    """It comes in the third step: 3 steps of one row, 3 of two, 4 of one."""
    simulation = Simulation()
    server, ends = Server(Cores(simulation, 1), 0, DECODE), []
    server.ask(0, 10, 0, 10, lambda: ends.append(simulation.now))
    simulation.after(2.5 * 0.75, lambda: server.ask(1, 10, 0, 3, lambda: ends.append(simulation.now)))
    simulation.run()
    assert ends == pytest.approx([3 * 0.75 + 3 * 1.0, 3 * 0.75 + 3 * 1.0 + 4 * 0.75])
    assert server.busy == pytest.approx(ends[-1])


def test_an_event_loop_is_a_queue_with_one_server() -> None:
    """With Poisson arrivals and equal jobs of 1 s, M/D/1: the mean wait is load / (2 (1 - load))."""
    simulation, rng, load, waits = Simulation(), random.Random(0), 0.7, []
    loop, count = EventLoop(Cores(simulation, 1), 0), 40_000

    def arrive(left: int) -> None:
        start = simulation.now
        loop.submit(1.0, lambda: waits.append(simulation.now - start - 1.0))
        if left:
            simulation.after(rng.expovariate(load), lambda: arrive(left - 1))

    arrive(count - 1)
    simulation.run()
    assert sum(waits) / count == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert loop.busy == pytest.approx(count)


def test_conversations_wait_for_the_event_loop() -> None:
    """64 requests of 1 s leave the loop one after another; the last is sampled in one step of 0.5 s."""
    decode = DecodeCost(step=0.5, row=0.0)
    result = step([[1] * 64], decode, request=Linear(1.0, 0.0))
    assert result.sample == pytest.approx(64.5)
    assert result.loops_busy == pytest.approx(64 / 64.5)


@pytest.mark.parametrize(("processes", "threads", "seconds"), [(2, 1, 1.0), (4, 1, 2.0), (1, 2, 2.0), (3, 2, 3.0)])
def test_processes_share_cores_and_threads_a_process(processes: int, threads: int, seconds: float) -> None:
    simulation, ends = Simulation(), []
    cores = Cores(simulation, 2)
    for i in range(processes * threads):
        cores.start(i % processes, 1.0, lambda: ends.append(simulation.now))
    simulation.run()
    assert ends == pytest.approx([seconds] * processes * threads)


def test_ranks_exchange_and_learn_from_equal_shares() -> None:
    """4 groups of 2 x 30 tokens and prompts of 10: 80 tokens each, 160 on each of two ranks."""
    cluster = Cluster(2, 2, 2)
    result = step(
        [[30, 30]] * 4, cluster=cluster, update=Linear(1.0, 0.1), pack=Linear(0.5, 0.0), unpack=Linear(0, 0.01)
    )
    assert result.update == pytest.approx(1.0 + 0.1 * 160)
    assert result.gather == pytest.approx(0.5 * 4 + 0.01 * 160)


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_measured_costs() -> None:
    """The last table takes a minute to simulate, and is left out."""
    text = page("scaling")
    for rows in islice(tables(load()), 3):
        assert "\n".join(rows) in text
