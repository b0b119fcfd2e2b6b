"""What ranks decide together about their servers; each rank is a thread here, and SGLang is not needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_servers.api import ServerOutput
from rlkit_servers.push import Mismatch, Push
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.sglang.launch import Launch
from rlkit_servers.states import ServerState
from rlkit_servers.weight_check import TOLERANCES

from rlkit.base.errors import EngineError
from rlkit.engines import SGLangEngine, SGLangServer

RANKS, TENSOR_PARALLEL = 4, 2
PATIENCE = 20.0
"""Seconds after which a rank that waits for its peers fails."""


class Group:
    """Ranks that exchange values; each must be a separate thread."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=PATIENCE), [None] * size

    def gather(self, index: int, value: Any) -> list[Any]:
        self.values[index] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class World:
    """Four ranks in two tensor-parallel groups, and the runtime of each."""

    def __init__(self) -> None:
        self.all, self.pairs = Group(RANKS), [Group(TENSOR_PARALLEL) for _ in range(RANKS // TENSOR_PARALLEL)]

    def runtime(self, rank: int) -> Any:
        pair, index = self.pairs[rank // TENSOR_PARALLEL], rank % TENSOR_PARALLEL
        return SimpleNamespace(
            device=torch.device("cpu"),
            tensor_parallel=TENSOR_PARALLEL,
            sequence_parallel=1,
            gather_world=lambda value: self.all.gather(rank, value),
            broadcast_tp=lambda value: pair.gather(index, value)[0],
        )

    def run(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """Return the result or the exception of a function on every rank."""
        results: list[Any] = [None] * RANKS

        def work_on(rank: int) -> None:
            try:
                results[rank] = work(rank, self.runtime(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work_on, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Pushes(Push):
    """Pushes nothing, but records whether the base would have been pushed."""

    def __init__(self, error: EngineError | None = None) -> None:
        super().__init__(SimpleNamespace(), torch.float32, TOLERANCES[torch.float32])  # type: ignore[arg-type]
        self.bases: list[bool] = []
        self.error = error

    async def push(
        self, stream: Any, servers: Any, label: str, expected: Any, base: bool = True
    ) -> dict[InferenceServer, EngineError]:
        self.bases.append(base)
        return {} if self.error is None else dict.fromkeys(servers, self.error)

    async def diagnose(self, stream: Any, wrong: Any, label: str, expected: Any) -> EngineError | None:
        return next(iter(wrong.values()), None)


def engine_of(rank: int, runtime: Any, push: Push) -> SGLangServer:
    """Return the engine of a rank; only the first rank has a server, without weights."""
    engine = SGLangServer(launch=Launch(adapter_only=True), check_weights=False)
    engine.weights.bind(runtime, push, "run")
    engine.fleet.owned = [engine.connect("http://127.0.0.1:1")] if rank == 0 else []
    return engine


def test_all_ranks_read_the_base_where_one_server_needs_it() -> None:
    """Ranks 1 and 3 have no data-parallel peer with a server, but must read the stream too."""

    def work(rank: int, runtime: Any) -> list[bool]:
        push = Pushes()
        engine = engine_of(rank, runtime, push)
        for version, state in enumerate((ServerState.COLD, ServerState.READY)):
            for server in engine.fleet.owned:
                server.state = state
            asyncio.run(engine.sync(SimpleNamespace(), version))  # type: ignore[arg-type]
        return push.bases

    assert World().run(work) == [[True, False]] * RANKS


@pytest.mark.parametrize("error", [Mismatch("wrong weights"), EngineError("it never came up")])
def test_all_ranks_fail_with_a_server_of_one(error: EngineError) -> None:
    def work(rank: int, runtime: Any) -> None:
        asyncio.run(engine_of(rank, runtime, Pushes(error)).sync(SimpleNamespace(), 0))  # type: ignore[arg-type]

    first, *peer_errors = World().run(work)
    assert first is error
    assert all("another rank" in str(peer_error) for peer_error in peer_errors)


def test_a_tensor_parallel_group_asks_about_the_same_rows() -> None:
    asked: dict[int, Any] = {}

    def work(rank: int, runtime: Any) -> None:
        async def probe(rows: Any, count: int, deadline: float) -> list[ServerOutput]:
            return [ServerOutput([2, 3, *[7] * count], [0.0] * (2 + count))]

        def ask(rows: Any) -> list[torch.Tensor]:
            asked[rank] = rows
            return [torch.zeros(len(row), 10) for row in rows]

        push = Push(SimpleNamespace(), torch.float32, TOLERANCES[torch.float32], False, runtime.broadcast_tp)  # type: ignore[arg-type]
        api: Any = SimpleNamespace(probe=probe, client=SimpleNamespace(url="http://127.0.0.1:1"))
        servers = [InferenceServer(api, ServerRetryPolicy())] if rank == 0 else []
        assert not asyncio.run(push.check_sampling(servers, [1, 2, 3], ask))

    assert World().run(work) == [None] * RANKS
    assert asked == {0: [[1, 2, 3, *[7] * 16]], 1: [[1, 2, 3, *[7] * 16]], 2: [[1, 2, 3]], 3: [[1, 2, 3]]}


@pytest.mark.parametrize(("engine_ranks", "first"), [(1, [0, 0, 2, 2]), (2, [0, 0, 2, 2]), (4, [0, 0, 0, 0])])
def test_engines_are_started_where_somebody_samples(
    engine_ranks: int, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first rank of a tensor-parallel group, the only one that samples."""
    monkeypatch.setattr("rlkit_servers.sglang.engine.require_sglang", lambda: None)
    monkeypatch.setattr(SGLangEngine, "command", lambda self, gpu: gpu)
    monkeypatch.setattr(SGLangEngine, "launch_server", lambda self, gpu, here: gpu)
    urls = []
    for rank in range(RANKS):
        engine = SGLangEngine(Launch(tensor_parallel=engine_ranks))
        engine.runtime = World().runtime(rank)
        engine.runtime.device = torch.device("cuda", rank)
        urls.append([str(gpu) for gpu in engine.start(rank)])
    assert [engine.sampling_urls(urls, rank) for rank in range(RANKS)] == [[str(gpu)] for gpu in first]
