"""Servers that die, hang, are slow, or have stale or wrong weights. Each is a real process with a stub of a model; see
`stub_server`."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from rlkit_engine_http import HttpEngine
from rlkit_servers.process import LOCAL_HOST
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState
from torch import Tensor, nn

from rlkit.base.errors import EngineError, RolloutError
from rlkit.interfaces.launcher import ServerCommand, ServerSite
from rlkit.types import Completion, Request, SampleKey, Sampling
from tests.events import gone, until, wait_until

T = TypeVar("T")
VOCABULARY = 5
RETRY = ServerRetryPolicy(request_seconds=120.0, start_seconds=60.0, hang_seconds=60.0, retries=6)
HASTY = replace(RETRY, hang_seconds=0.4)


class StubEngine(HttpEngine):
    """HttpEngine, except for the program of its processes."""

    broken = False

    def command(self, number: int) -> ServerCommand:
        script = str(Path(__file__).with_name("stub_server.py"))

        def words(site: ServerSite) -> list[str]:
            return [site.python, "-S", "-E", script, "broken" if self.broken else str(site.port)]

        return replace(super().command(number), words=words, write_files=lambda _: None)


class Policy(nn.Module):
    """A model whose logits are the sum of two vectors, whatever the tokens are."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, 0.0, -0.5, 0.25, 0.0]))
        self.b = nn.Parameter(torch.zeros(VOCABULARY))

    @torch.no_grad()
    def likeliest(self, token: int) -> None:
        """Make a token the most likely one."""
        self.b.zero_()
        self.b[token] = 2.0


class Weights:
    """The policy's weights, one tensor per bucket."""

    def __init__(self, policy: Policy) -> None:
        self.tensors = {name: x.detach().clone() for name, x in policy.named_parameters()}
        self.specs = {name: (tuple(x.shape), x.dtype) for name, x in self.tensors.items()}

    buffer_names = ()

    def buckets(self, merged: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
        yield from ([item] for item in self.tensors.items())

    def adapter(self) -> None:
        return None


class Trainer:
    """A policy, its engine, and the event loop of both."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.version = 0
        self.runner = asyncio.Runner()
        self.engines: list[StubEngine] = []

    def engine(self, retry: ServerRetryPolicy = RETRY, servers: int = 1) -> StubEngine:
        """Return an engine after its first sync."""
        engine = StubEngine(servers, retry=retry)
        self.engines.append(engine)
        engine.bind(self.runtime)
        self.sync(engine, 1)
        return engine

    @property
    def runtime(self) -> Any:
        return SimpleNamespace(
            policy=self.policy,
            tokenizer=SimpleNamespace(encode=lambda text, **_: [ord(c) % VOCABULARY for c in text]),
            device=torch.device("cpu"),
            context=1000,
            stop_ids=frozenset(),
            autocast=nullcontext,
            logits=lambda tokens: (self.policy.a + self.policy.b).detach().expand(*tokens.shape, VOCABULARY),
            gather_world=lambda value: [value],
            broadcast_tp=lambda value: value,
            host_server=lambda command: None,
        )

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def sync(self, engine: StubEngine, token: int) -> None:
        """Push weights that make a token the most likely one."""
        self.policy.likeliest(token)
        self.version += 1
        self.wait(engine.sync(Weights(self.policy), self.version))

    def ask(self, engine: StubEngine, count: int, meanwhile: Callable[[], None] | None = None) -> list[Completion]:
        """Request ten tokens for each of `count` conversations at once; `meanwhile` is called once all are held."""

        async def together() -> list[Completion]:
            asked = [asyncio.create_task(engine.generate(request(i))) for i in range(count)]
            if meanwhile is not None:
                await held(engine, count)
                meanwhile()
            return list(await asyncio.gather(*asked))

        return self.wait(together())

    def control(self, server: InferenceServer, **what: Any) -> Any:
        return self.wait(server.api.client.post("/control", what, 60.0))


def request(number: int, count: int = 10) -> Request:
    return Request((1, 2), Sampling(max_tokens=count), SampleKey(0, 1, str(number), 0), f"conversation {number}")


async def held(engine: StubEngine, count: int) -> None:
    """Wait until the engine's server holds so many completions, each after its first tokens."""
    [server] = engine.fleet.owned
    while (await server.api.client.post("/control", {}, 60.0))["held"] < count:
        await asyncio.sleep(0.01)


def pid_of(server: InferenceServer) -> int:
    """Return the pid of a server, a child of its supervisor."""
    assert server.process is not None
    assert server.process.supervised.supervisor is not None
    path = Path(
        f"/proc/{server.process.supervised.supervisor.pid}/task/{server.process.supervised.supervisor.pid}/children"
    )
    [pid] = map(int, path.read_text().split())
    return pid


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    for engine in trainer.engines:
        engine.close()
    trainer.runner.close()


def all_written(answers: Sequence[Completion], token: int, version: int) -> bool:
    return all((a.tokens, a.versions) == ([token] * 10, [version] * 10) for a in answers)


def test_a_server_that_dies_in_mid_request_is_replaced(trainer: Trainer) -> None:
    engine = trainer.engine()
    [server] = engine.fleet.owned
    trainer.control(server, holds=5)
    before = pid_of(server)
    answers = trainer.ask(engine, 8, lambda: os.kill(before, signal.SIGKILL))
    check_replaced(trainer, before, answers)


def test_a_server_that_hangs_in_mid_request_is_replaced(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops as its first health check begins; the next server has a minute for its own."""
    engine = trainer.engine(HASTY)
    [server] = engine.fleet.owned
    trainer.control(server, holds=5)
    before, healthy = pid_of(server), InferenceServer.healthy

    async def check(server: InferenceServer, seconds: float) -> bool:
        if server.restarts:
            return await healthy(server, 60.0)
        os.kill(before, signal.SIGSTOP)
        return await healthy(server, seconds)

    monkeypatch.setattr(InferenceServer, "healthy", check)
    check_replaced(trainer, before, trainer.ask(engine, 8))


def check_replaced(trainer: Trainer, before: int, answers: Sequence[Completion]) -> None:
    """Check that the server with that pid was replaced once, and its requests answered."""
    [engine] = trainer.engines
    assert all_written(answers, 1, trainer.version)
    health = engine.health()
    assert (health["restarts"], health["servers_down"]) == (1, 0)
    assert health["retried"] >= 1
    assert pid_of(engine.fleet.owned[0]) != before
    wait_until(lambda: gone(before))


def test_a_server_that_dies_during_training_waits_for_sync(trainer: Trainer) -> None:
    """It is restarted at once, but does not read weights that the trainer is changing."""
    engine = trainer.engine()
    [server] = engine.fleet.owned
    trainer.control(server, holds=5)
    with engine.on_device():
        pass

    async def learn() -> list[Completion]:
        asked = [asyncio.create_task(engine.generate(request(i))) for i in range(3)]
        await held(engine, 3)
        os.kill(pid_of(server), signal.SIGKILL)
        while not engine.needs_weights:
            await asyncio.sleep(0.01)
        assert server.state is ServerState.COLD
        trainer.policy.likeliest(4)
        trainer.version += 1
        await engine.sync(Weights(trainer.policy), trainer.version)
        return list(await asyncio.gather(*asked))

    assert all_written(trainer.wait(learn()), 4, 2)
    assert (engine.health()["restarts"], engine.needs_weights) == (1, False)


def test_the_trainer_does_not_learn_while_a_server_is_restored(trainer: Trainer) -> None:
    engine = trainer.engine()
    locked: list[bool] = []

    class Watched(Weights):
        def buckets(self, merged: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
            locked.append(engine.weights.lock.locked())
            yield from super().buckets(merged)

    trainer.wait(engine.sync(Watched(trainer.policy), 2))
    with engine.on_device():
        trainer.control(engine.fleet.owned[0], holds=5)
        assert all_written(trainer.ask(engine, 2, lambda: os.kill(pid_of(engine.fleet.owned[0]), signal.SIGKILL)), 1, 2)
        assert not engine.weights.lock.locked()
    assert locked == [False, True]
    assert engine.weights.lock.locked()


def test_a_server_that_dies_between_rollouts_is_back_at_sync(trainer: Trainer) -> None:
    engine = trainer.engine()
    [server] = engine.fleet.owned
    os.kill(pid_of(server), signal.SIGKILL)
    wait_until(lambda: server.ended)
    with pytest.warns(UserWarning, match=r"could not pause: its process ended; restarting it"):
        trainer.sync(engine, 3)
    assert all_written(trainer.ask(engine, 4), 3, trainer.version)
    assert engine.health()["restarts"] == 1


def test_a_server_that_dies_again_and_again_ends_the_run(trainer: Trainer) -> None:
    engine = trainer.engine(ServerRetryPolicy(request_seconds=30.0, start_seconds=20.0, restarts=0))
    trainer.control(engine.fleet.owned[0], dies=True)
    with pytest.raises(EngineError, match=r"(?s)could not go on: it failed 1 times since .* ended with exit code 7"):
        trainer.ask(engine, 1)


def test_a_server_that_cannot_start_is_named_with_its_log(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEngine, "broken", True)
    with pytest.raises(EngineError, match=r"(?s)could not start: its process ended.*there is no room for the model"):
        trainer.engine(ServerRetryPolicy(restarts=0))


class Stranger(ThreadingHTTPServer):
    """Another process's server on the port of rlkit's."""

    def __init__(self, port: int, status: int) -> None:
        super().__init__((LOCAL_HOST, port), StrangersHandler)
        self.status = status
        self.bodies: list[bytes] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class StrangersHandler(BaseHTTPRequestHandler):
    server: Stranger

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    strangers: list[Stranger] = []
    yield strangers
    for stranger in strangers:
        stranger.shutdown()
        stranger.server_close()


def test_a_server_whose_port_was_taken_meanwhile_gets_another(trainer: Trainer, strangers: list[Stranger]) -> None:
    engine = trainer.engine()
    [server] = engine.fleet.owned
    before = server.url
    os.kill(pid_of(server), signal.SIGKILL)
    wait_until(lambda: server.ended)
    strangers.append(Stranger(int(before.rpartition(":")[2]), 200))
    trainer.sync(engine, 3)
    assert all_written(trainer.ask(engine, 4), 3, trainer.version)
    assert (server.url != before, server.first_url, strangers[0].bodies) == (True, before, [])


def test_a_server_whose_port_is_taken_in_its_start_gets_another(
    trainer: Trainer, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = StubEngine.command

    def late(engine: StubEngine, number: int) -> ServerCommand:
        def words(site: ServerSite) -> list[str]:
            if not strangers:
                strangers.append(Stranger(site.port, 404))
            return list(original.words(site))

        original = command(engine, number)
        return replace(original, words=words)

    monkeypatch.setattr(StubEngine, "command", late)
    engine = trainer.engine()
    assert all_written(trainer.ask(engine, 4), 1, trainer.version)
    assert engine.fleet.owned[0].url != f"http://{LOCAL_HOST}:{strangers[0].server_port}"
    assert strangers[0].bodies == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, r"; the disk of .* is full \(.* are left\); free some space, or set TMPDIR"),
        (errno.EACCES, "$"),
    ],
)
def test_a_server_whose_files_cannot_be_written_is_not_started(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def write(folder: Path) -> None:
        raise OSError(code, os.strerror(code), str(folder / "model"))

    command = StubEngine.command
    monkeypatch.setattr(StubEngine, "command", lambda engine, n: replace(command(engine, n), write_files=write))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    problem = f"the files of the engine-http server cannot be written: .*{os.strerror(code)}: '.*/model'{advice}"
    with pytest.raises(EngineError, match=problem):
        trainer.engine()
    assert list(tmp_path.iterdir()) == []


def test_stale_weights_are_noticed_and_replaced(trainer: Trainer) -> None:
    engine = trainer.engine()
    [server] = engine.fleet.owned
    trainer.control(server, label="another-run-7", weights={"a": [0.0] * 4 + [9.0], "b": [0.0] * 5})
    assert all_written(trainer.ask(engine, 1), 1, trainer.version)
    assert (engine.health()["stale"], engine.health()["restarts"]) == (1, 0)


def test_a_tensor_that_arrived_wrong_is_named(trainer: Trainer) -> None:
    engine = trainer.engine()
    trainer.control(engine.fleet.owned[0], spoils="b")
    with pytest.raises(EngineError, match=r"other log-probs than the trainer: .* lessens the gap for: b \(now "):
        trainer.sync(engine, 2)
    assert engine.fleet.owned[0].state is ServerState.UNCHECKED
    trainer.sync(engine, 2)
    assert all_written(trainer.ask(engine, 2), 2, trainer.version)


def test_changes_go_to_servers_that_have_their_base(trainer: Trainer) -> None:
    engine = trainer.engine(servers=2)

    def sent() -> tuple[float, float]:
        return engine.health()["full_syncs"], engine.health()["sync_bytes"]

    assert sent() == (1, 40)
    trainer.sync(engine, 2)
    assert sent() == (1, 20)  # one of two vectors
    trainer.control(engine.fleet.owned[0], label="another-run-7", weights={"a": [0.0] * 5, "b": [0.0] * 5})
    trainer.sync(engine, 3)
    assert sent() == (2, 40)
    trainer.sync(engine, 4)
    assert sent() == (2, 20)
    os.kill(pid_of(engine.fleet.owned[1]), signal.SIGKILL)
    wait_until(lambda: engine.fleet.owned[1].ended)
    trainer.sync(engine, 1)
    trainer.wait(until(lambda: engine.health()["servers_down"] == 0))
    assert sent() == (4, 40)  # to both, and again to the one that was restarted
    trainer.sync(engine, 2)
    assert sent() == (4, 20)
    assert all_written(trainer.ask(engine, 4), 2, trainer.version)


def test_what_is_no_answer_costs_its_conversation(trainer: Trainer) -> None:
    engine = trainer.engine(ServerRetryPolicy(request_seconds=30.0, retries=1))
    trainer.control(engine.fleet.owned[0], babbles=True)
    with pytest.raises(RolloutError, match=r"no completion after 2 attempts: .* invalid completion \(KeyError"):
        trainer.ask(engine, 1)
    trainer.control(engine.fleet.owned[0], babbles=False)
    assert all_written(trainer.ask(engine, 1), 1, trainer.version)


def test_requests_are_balanced_over_servers_without_dead_ones(trainer: Trainer) -> None:
    engine = trainer.engine(servers=4)

    def asked() -> list[int]:
        return [0 if server.ended else trainer.control(server)["asked"] for server in engine.fleet.owned]

    assert all_written(trainer.ask(engine, 64), 1, trainer.version)
    assert asked() == [16] * 4
    assert all_written(trainer.ask(engine, 64), 1, trainer.version)  # each where it was before
    assert asked() == [32] * 4
    engine.fleet.balancer._assignments.clear()
    os.kill(pid_of(engine.fleet.owned[2]), signal.SIGKILL)
    wait_until(lambda: engine.fleet.owned[2].ended)
    assert all_written(trainer.ask(engine, 63), 1, trainer.version)
    assert asked() == [53, 53, 0, 53]
    assert engine.health()["restarts"] == 0


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Holds restarts until it is set."""
    allowed, restart = asyncio.Event(), InferenceServer.restart

    async def held_restart(server: InferenceServer) -> None:
        await allowed.wait()
        await restart(server)

    monkeypatch.setattr(InferenceServer, "restart", held_restart)
    return allowed


def test_living_servers_go_on_while_one_is_restarted(trainer: Trainer, restarts: asyncio.Event) -> None:
    engine = trainer.engine(servers=2)
    os.kill(pid_of(engine.fleet.owned[1]), signal.SIGKILL)
    wait_until(lambda: engine.fleet.owned[1].ended)
    for token in (2, 3):
        trainer.sync(engine, token)
        assert all_written(trainer.ask(engine, 4), token, trainer.version)
        assert (engine.health()["servers_down"], engine.needs_weights) == (1, False)
        engine.fleet.balancer._assignments.clear()
    restarts.set()
    trainer.wait(until(lambda: engine.health()["servers_down"] == 0))
    assert all_written(trainer.ask(engine, 4), 3, trainer.version)
    assert [trainer.control(server)["asked"] for server in engine.fleet.owned] == [10, 2]
    trainer.sync(engine, 4)
    assert all_written(trainer.ask(engine, 4), 4, trainer.version)
    assert engine.health()["restarts"] == 1


def test_requests_of_a_dead_server_go_to_a_living_one(trainer: Trainer, restarts: asyncio.Event) -> None:
    engine = trainer.engine(servers=2)
    first, second = engine.fleet.owned
    trainer.control(second, dies=True)
    assert all_written(trainer.ask(engine, 8), 1, trainer.version)
    assert (engine.health()["servers_down"], second.restoring, first.restoring) == (1, True, False)
    restarts.set()
    trainer.wait(until(lambda: not second.restoring))
    assert second.state is ServerState.READY


def test_a_server_that_does_not_come_back_is_warned_of(trainer: Trainer) -> None:
    engine = trainer.engine(replace(RETRY, restarts=0), servers=2)
    os.kill(pid_of(engine.fleet.owned[1]), signal.SIGKILL)
    wait_until(lambda: engine.fleet.owned[1].ended)

    def sync(token: int) -> None:
        trainer.sync(engine, token)
        trainer.wait(until(lambda: not engine.fleet.owned[1].restoring))

    for token in (2, 3):
        with pytest.warns(UserWarning, match=r"(?s)it failed 1 times .*The run goes on with its other servers"):
            sync(token)
        assert all_written(trainer.ask(engine, 4), token, trainer.version)
    assert engine.health()["servers_down"] == 1


def test_weights_that_arrive_in_mid_request_sample_its_rest(trainer: Trainer) -> None:
    engine = trainer.engine()
    [server] = engine.fleet.owned
    trainer.control(server, holds=5)

    async def run() -> list[Completion]:
        asked = [asyncio.create_task(engine.generate(request(i, 20))) for i in range(3)]
        await held(engine, 3)
        trainer.policy.likeliest(4)
        trainer.version += 1
        await engine.sync(Weights(trainer.policy), trainer.version)
        await server.api.client.post("/control", {"holds": 0}, 60.0)
        return list(await asyncio.gather(*asked))

    for answer in trainer.wait(run()):
        assert answer.versions == [1] * 5 + [2] * 15
        assert answer.tokens == [1] * 5 + [4] * 15


def test_the_event_loop_goes_on_while_a_sync_blocks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives, the forward pass, gathering weights and writing them wait for the next turn of the loop."""
    engine, weights = trainer.engine(), Weights(trainer.policy)
    loop, called = trainer.runner.get_loop(), set[str]()

    def patch(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def wait_and_call(*args: Any) -> Any:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert threading.current_thread() is not threading.main_thread()
            assert turned.wait(60)
            called.add(name)
            return function(*args)

        monkeypatch.setattr(owner, name, wait_and_call)

    patch(engine.runtime, "gather_world")
    patch(engine.weights, "_policy_logps")
    patch(engine.weights._push.transport, "prepare")
    patch(weights, "buckets")
    trainer.wait(engine.sync(weights, 2))
    assert called == {"gather_world", "_policy_logps", "prepare", "buckets"}


def test_a_cancelled_sync_ends_after_what_blocks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective in progress must not overlap with those after the sync."""
    engine, entered, opened = trainer.engine(), threading.Event(), threading.Event()

    def held_logps(rows: Any) -> Any:
        entered.set()
        assert opened.wait(60)
        return []

    monkeypatch.setattr(engine.weights, "_policy_logps", held_logps)

    async def cancelled() -> None:
        syncing = asyncio.create_task(engine.sync(Weights(trainer.policy), 2))
        await until(entered.is_set)
        syncing.cancel()
        ended, _ = await asyncio.wait((syncing,), timeout=0.05)
        assert not ended
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await syncing

    trainer.wait(cancelled())


def test_nothing_is_left_of_a_run(trainer: Trainer) -> None:
    engine = trainer.engine(servers=2)
    processes = [server.process for server in engine.fleet.owned if server.process is not None]
    pids = [pid_of(server) for server in engine.fleet.owned]
    folders = [Path(process.log).parent for process in processes]
    engine.close()
    assert not any(folder.exists() for folder in folders)
    wait_until(lambda: all(map(gone, pids)))
