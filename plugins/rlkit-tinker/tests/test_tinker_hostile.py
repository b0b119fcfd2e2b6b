"""Many tenants, and hostile ones: nobody loses anything, or sees anything of another's."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rlkit_tinker import Service
from rlkit_tinker.bank import Adapter
from rlkit_tinker.server import connections
from rlkit_tinker.server.requests import CREATE, LOAD, PASS, SAMPLE, SAVE, SAVE_SAMPLER, STEP
from test_tinker_log import ADAM, check_equal, requests, state
from test_tinker_wire import failure, step_body
from tinker_oracle import random_data
from tinker_wire import BASE, Wire, create_body, json_body, pass_body, sample_body, served

DATA = random_data(0, rows=1)
SECRET = "the-secret-of-alice"
FUTURES = (CREATE, LOAD, PASS, STEP, SAVE, SAVE_SAMPLER, SAMPLE)
ROUTES = (
    *FUTURES, "create_session", "session_heartbeat", "create_sampling_session", "get_info", "weights_info",
    "retrieve_future", "telemetry", "client/config", "usage", "training_runs/{}", "training_runs/{}/checkpoints",
    "training_runs/{}/checkpoints/weights/end", "samplers/{}", "sessions/{}/finish", "../../lock", "%2e%2e/journal", "",
)  # fmt: skip
METHODS = ("POST",) * 12 + ("GET", "GET", "DELETE", "PUT")


def test_a_flood_of_samples_holds_nobody_up_and_ends_with_its_session(service: Service, tmp_path: Path) -> None:
    """Half a million tokens are asked for: another tenant trains and samples meanwhile, and then they are dropped."""

    async def work() -> None:
        async with served(service, tmp_path) as wire:
            fields = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = (await wire.json("create_sampling_session", json_body(**fields)))["sampling_session_id"]
            endless = {"max_tokens": 4000, "stop": []}
            for seq in range(130):
                body = sample_body(sampler, seq, num_samples=1, sampling_params=endless)
                flood = await wire.json("asample", body)
            bob = wire.of("tml-bob")
            model = await bob.model()
            for seq in (1, 3):
                await bob.call("forward_backward", pass_body(model, seq, DATA))
                assert "grad_norm:mean" in (await bob.call("optim_step", step_body(model, seq + 1)))["metrics"]
            body = json_body(model_id=model, seq_id=5, sampling_session_seq_id=0)
            own = (await bob.call("save_weights_for_sampler", body))["sampling_session_id"]
            assert isinstance(await bob.call("asample", sample_body(own, 0)), bytes)
            coordinator = wire.routes._coordinator
            assert len(coordinator._sampling) == 128
            assert flood["request_id"] not in coordinator._sampling
            assert (await wire.send(f"sessions/{fields['session_id']}/finish"))[0] == 204
            assert isinstance(await bob.call("asample", sample_body(own, 1)), bytes)
            assert not coordinator._sampling

    asyncio.run(work())


def bytes_by_parameter(adapter: Adapter) -> float:
    """Return the bytes of all tensors of an adapter by the number of its parameters."""
    moments = [x for state in adapter.optimizer.state.values() for x in state.values() if x.dim()]
    tensors = [*adapter.parameters, *moments, *(p.grad for p in adapter.parameters if p.grad is not None)]
    return sum(tensor.nbytes for tensor in tensors) / sum(p.numel() for p in adapter.parameters)


def test_64_tenants_learn_side_by_side_and_the_next_is_refused(tmp_path: Path) -> None:
    """Each has steps of its own after mixed passes. A parameter has 4 bytes, its moments 8, and its gradient 4."""
    service = Service("tiny", max_adapters=64)

    async def work() -> None:
        async with served(service, tmp_path) as wire:
            tenants = [wire.of(f"tml-{number}") for number in range(64)]
            models = [await tenant.model(rank=2) for tenant in tenants]
            late = wire.of("tml-64")
            message = failure(await late.call("create_model", create_body(await late.session())))
            assert message == "all 64 adapters are in use; close a training client, or raise max_adapters"
            for seq in (1, 3):
                bodies = [pass_body(model, seq, random_data(i, rows=1)) for i, model in enumerate(models)]
                passes = [t.call("forward_backward", body) for t, body in zip(tenants, bodies, strict=True)]
                await asyncio.gather(*passes)
                bodies = [step_body(model, seq + 1) for model in models]
                steps = [t.call("optim_step", body) for t, body in zip(tenants, bodies, strict=True)]
                assert all(step["metrics"]["grad_norm:mean"] > 0 for step in await asyncio.gather(*steps))
            await tenants[0].call("forward_backward", pass_body(models[0], 5, DATA))
            await tenants[7].send(f"sessions/{models[7].partition(':')[0]}/finish")
            assert "model_id" in await late.call("create_model", create_body(await late.session(), rank=2))
            assert [bytes_by_parameter(adapter) for adapter in service.bank._adapters] == [16, *[12] * 62, 4]

    asyncio.run(work())


class HostileTenant:
    """Makes requests of all routes with values that do not fit, and with the names of another tenant.

    Args:
        draw: The random numbers.
        names: Names of another tenant's session, models, samplers, futures and paths.
        own: Names of this one's.
    """

    def __init__(self, draw: random.Random, names: list[str], own: list[str]) -> None:
        self._draw = draw
        self._names = names
        self._own = own

    def request(self) -> tuple[str, bytes, str]:
        """Return a route, a body and a method."""
        draw = self._draw
        route = draw.choice(ROUTES).replace("{}", draw.choice([*self._names, "..", "%00", "x" * 300]))
        return route, draw.choice((self._object, self._object, self._message, self._bytes))(), draw.choice(METHODS)

    def _value(self, depth: int = 0) -> Any:
        draw = self._draw
        values = (
            None, True, -1, 0, 1, 2**63, 10**400, 1e308, float("nan"), float("-inf"), "", "\x00", "\ud800", "../../etc",
            "x" * 10_000, [], {}, BASE, *self._names, *self._own,
        )  # fmt: skip
        nested = (lambda: [self._value(depth + 1)] * draw.randint(1, 9), lambda: self._fields(depth + 1))
        return draw.choice(nested)() if depth < 3 and draw.random() < 0.3 else draw.choice(values)

    def _fields(self, depth: int = 0) -> dict[str, Any]:
        names = (
            "session_id", "model_id", "seq_id", "model_seq_id", "base_model", "lora_config", "adam_params", "path",
            "optimizer", "overwrite", "ttl_seconds", "sampling_session_id", "sampling_session_seq_id", "prompt",
            "num_samples", "sampling_params", "request_id", "tinker_path", "model_path", "rank", "seed",
        )  # fmt: skip
        return {name: self._value(depth) for name in self._draw.sample(names, self._draw.randint(0, 3))}

    def _object(self) -> bytes:
        """Return what is right but for some fields."""
        model, session, _ = self._own
        numbers = {"model_seq_id": self._draw.randint(0, 3), "seq_id": self._draw.randint(0, 9)}
        right = {
            "session_id": session, "model_id": model, "base_model": BASE, "lora_config": {"rank": 2}, "path": "end",
            "adam_params": ADAM, "optimizer": True, "sampling_session_id": f"{session}:sample:0", **numbers,
        }  # fmt: skip
        return json.dumps(right | self._fields()).encode()

    def _message(self) -> bytes:
        """Return a pass in which bytes are changed, or the end is cut off."""
        draw = self._draw
        body = bytearray(pass_body(draw.choice([*self._names, *self._own]), draw.randint(0, 9), random_data(1, rows=2)))
        for _ in range(draw.randint(0, 5)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        return bytes(body[: draw.choice((len(body), draw.randrange(len(body))))])

    def _bytes(self) -> bytes:
        return self._draw.choice((b"", b"{", b"[" * 100_000, b"null", b"\xff" * 64, self._draw.randbytes(200)))


async def alices_script(wire: Wire, model: str) -> list[bytes]:
    """Send two steps and more of a tenant; return the answers."""
    session = model.partition(":")[0]
    answers = []
    for route, raw in requests(session)[1:]:
        answers.append(await wire.result((await wire.json(route, raw))["request_id"]))
    sample = await wire.json("asample", sample_body(f"{session}:sample:0", 0, sampling_params={"seed": 1}))
    return [*answers, await wire.result(sample["request_id"])]


def secret_body(session: str) -> bytes:
    return json_body(**json.loads(create_body(session)), user_metadata={"note": SECRET})


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=8, max_rank=16)


def test_200_hostile_requests_change_nothing_and_show_nothing(service: Service, tmp_path: Path) -> None:
    """A tenant's answers and bits are those without them; the server starts again on the same folder after them."""
    draw = random.Random(0)
    answers: dict[str, list[bytes]] = {}

    async def work(folder: str, attacks: int) -> str:
        async with served(service, tmp_path / folder) as wire:
            mallory = wire.of("tml-mallory")
            session = await wire.session()
            model = (await wire.call("create_model", secret_body(session)))["model_id"]
            names = [session, model, f"{session}:sample:0", f"{model}/1", f"tinker://{model}/weights/end"]
            own = await mallory.model(rank=2)
            hostile = HostileTenant(draw, names, [own, own.partition(":")[0], f"tinker://{own}/weights/end"])

            async def attack() -> None:
                for _ in range(attacks):
                    route, raw, method = hostile.request()
                    status, content = await mallory.send(route, raw, method)
                    assert status < 500, (route, raw, content)
                    assert status != 200 or SECRET.encode() not in content
                    if status == 200 and route in FUTURES:
                        name = json.loads(content)["request_id"]
                        assert name.startswith(own.partition(":")[0])
                        if not name.startswith(f"{own}/"):  # before which none is missing
                            assert b"the server failed" not in await mallory.result(name)

            attacking = asyncio.ensure_future(attack())
            answers[folder] = [x.replace(session.encode(), b"s") for x in await alices_script(wire, model)]
            await attacking
            usage = await wire.json("usage", method="GET")
            assert usage["requests.forward_backward"] == 4
            assert usage["tokens.trained"] == 4 * 9
            assert usage["tokens.sampled"] <= 8
            assert (usage["models"], usage["requests.failed"], usage["requests.pending"]) == (1, 0, 0)
            assert (await mallory.json("usage", method="GET"))["tenant"] != usage["tenant"]
        return model

    plain, attacked = asyncio.run(work("plain", 0)), asyncio.run(work("attacked", 200))
    assert answers["attacked"] == answers["plain"]
    check_equal(state(tmp_path / "attacked", attacked), state(tmp_path / "plain", plain))

    async def again() -> None:
        async with served(service, tmp_path / "attacked") as wire:
            session = attacked.partition(":")[0]
            name = json_body(request_id=f"{attacked}/1")
            assert (await wire.send("retrieve_future", name))[1].replace(session.encode(), b"s") == answers["plain"][0]

    asyncio.run(again())


async def connect(wire: Wire, sent: bytes, opened: list[asyncio.StreamWriter]) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(wire._url.rpartition(":")[2]))
    opened.append(writer)
    writer.write(sent)
    await writer.drain()
    return reader


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until there is something to read; return whether it is the end."""
    try:
        return not await reader.read(1)
    except ConnectionResetError:
        return True


def test_idle_connections_are_bounded(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent requests and idle connections of a tenant: the oldest are closed, and none of another tenant."""
    monkeypatch.setattr(connections, "STRANGERS", 4)
    monkeypatch.setattr(connections, "IDLE", 3)
    whole = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-%b\r\n\r\n"
    opened: list[asyncio.StreamWriter] = []

    async def work() -> None:
        async with served(service, tmp_path) as wire:
            other = await connect(wire, whole % b"carol", opened)
            assert await other.readuntil(b"}")
            half_sent = [await connect(wire, (whole % b"bob")[:40], opened) for _ in range(6)]
            assert [await is_closed(reader) for reader in half_sent[:2]] == [True, True]
            idle = []
            for _ in range(5):
                idle.append(await connect(wire, whole % b"bob", opened))
                assert await idle[-1].readuntil(b"}")
            assert [await is_closed(reader) for reader in idle[:2]] == [True, True]
            await wire.json("healthz", method="GET")
            assert not any(reader.at_eof() for reader in (other, *half_sent[3:], *idle[2:]))

    asyncio.run(work())
