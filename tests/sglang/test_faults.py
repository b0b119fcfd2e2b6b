"""Servers that die, hang and fail at any point: no completion is lost, and no stale one is used."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rlkit_servers.api import ServerOutput
from rlkit_servers.http import Fault
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.engines import SGLangServer
from rlkit.models.weights import PolicyWeights
from rlkit.types import Request
from tests.served import PROMPTS, RETRY, Trainer, request, server_pid


def rollout_with(trainer: Trainer, engine: SGLangServer, number: signal.Signals) -> None:
    """Send a signal to the server while it samples; check that all completions arrive, from the current weights."""

    async def run() -> list[Any]:
        running = [
            asyncio.create_task(engine.generate(request(PROMPTS[i % 5], i, session=str(i), max_tokens=400)))
            for i in range(32)
        ]
        await asyncio.sleep(0.3)
        os.kill(server_pid(engine), number)
        return await asyncio.gather(*running)

    restarts = engine.health()["restarts"]
    with pytest.warns(UserWarning, match="could not answer.*; restarting it"):
        answers = trainer.wait(run())
    assert all(a.tokens and set(a.versions) == {trainer.version} for a in answers)
    assert engine.health()["restarts"] == restarts + 1
    assert engine.health()["retried"] > 0
    assert trainer.is_served_by(engine)


def test_a_server_that_dies_in_a_rollout_costs_time_only(trainer: Trainer, engine: SGLangServer) -> None:
    trainer.learn(21)
    trainer.publish(engine)
    rollout_with(trainer, engine, signal.SIGKILL)


def test_a_server_that_hangs_in_a_rollout_is_replaced(trainer: Trainer, engine: SGLangServer) -> None:
    rollout_with(trainer, engine, signal.SIGSTOP)


def test_a_server_that_dies_in_a_sync_is_synced_again(trainer: Trainer, engine: SGLangServer) -> None:
    class Deadly(PolicyWeights):
        readings = 0

        def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
            Deadly.readings += 1
            for i, bucket in enumerate(super().buckets()):
                if (Deadly.readings, i) == (1, 2):
                    os.kill(server_pid(engine), signal.SIGKILL)
                yield bucket

    trainer.learn(22)
    trainer.version += 1
    trainer.wait(engine.sync(Deadly(trainer.policy, 8192), trainer.version))
    assert Deadly.readings == 2
    assert trainer.is_served_by(engine)


def test_a_server_that_dies_before_sync_takes_part_in_it(trainer: Trainer, engine: SGLangServer) -> None:
    os.kill(server_pid(engine), signal.SIGKILL)
    trainer.learn(23)
    trainer.publish(engine)
    assert trainer.is_served_by(engine)


def test_a_server_that_dies_too_often_ends_the_run_with_its_log(
    trainer: Trainer, engine: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.fleet.owned[0], "_retry", replace(RETRY, restarts=0))
    os.kill(server_pid(engine), signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)could not go on: it failed .* times since the last sync: .* its log "):
        trainer.ask(engine, [request(PROMPTS[0])])


def test_a_restoration_that_is_given_up_halfway_is_made_again(trainer: Trainer, engine: SGLangServer) -> None:
    class Slow(PolicyWeights):
        def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
            hasty.get_loop().call_soon_threadsafe(hasty.cancel)  # weights are read in a thread
            yield from super().buckets()

    async def cancelled() -> None:
        nonlocal hasty
        hasty = asyncio.create_task(engine.generate(request(PROMPTS[0])))
        await asyncio.wait([hasty])

    hasty: Any = None
    stream, engine.weights._stream = engine.weights._stream, Slow(trainer.policy, 8192)
    engine.fleet.owned[0].state = ServerState.COLD
    trainer.wait(cancelled())
    assert hasty.cancelled()
    assert engine.fleet.owned[0].state is ServerState.BROKEN
    engine.weights._stream = stream
    assert trainer.is_served_by(engine)


def test_an_error_of_the_server_is_tried_again(trainer: Trainer, engine: SGLangServer) -> None:
    ask, asked = InferenceServer.ask, []

    async def failing(server: InferenceServer, request: Request) -> ServerOutput:
        asked.append(request)
        if len(asked) == 1:
            raise Fault("answered 500: no luck", 500)
        return await ask(server, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InferenceServer, "ask", failing)
        [answer] = trainer.ask(engine, [request(PROMPTS[0], temperature=0.0)])
    assert len(asked) == 2
    assert answer.tokens == trainer.greedy(PROMPTS[0], 24)


def test_nothing_is_sampled_before_the_first_sync(trainer: Trainer, second: Any) -> None:
    fresh = second()
    with pytest.raises(EngineError, match="before the first sync"):
        trainer.ask(fresh, [request(PROMPTS[0])])
