"""What needs no OpenEnv: hostile servers, actions, options. tests/hubs has the real package."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from rlkit_authors.runtime import ExampleRuntime
from rlkit_env_openenv import OpenEnv, OpenEnvTask
from rlkit_env_openenv.actions import ActionReader, text_of
from rlkit_env_openenv.connection import TITLE, VERSION, ServerObservation, read_result

from rlkit.base.errors import RecipeError, UnavailableError
from rlkit.interfaces.environment import Observation
from rlkit.rollout.guard import GuardError, guard
from rlkit.testing import check_environment, check_task
from rlkit.types import Prompt

PROMPT = Prompt("game", [])
SCHEMA = {"properties": {"metadata": {}, "move": {"type": "integer"}}, "required": ["move"]}
Handler = Callable[[web.WebSocketResponse, dict[str, Any]], Awaitable[None]]


def observation(text: object = "here", reward: object = None, done: object = False) -> str:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@contextmanager
def serve(on_step: Handler, info: object = None, sessions: int = 100) -> Iterator[str]:
    """Run a stand-in of a server whose resets are sound; `on_step` answers the steps."""
    used = 0

    async def socket(request: web.Request) -> web.WebSocketResponse:
        nonlocal used
        response = web.WebSocketResponse()
        await response.prepare(request)
        if used >= sessions:
            error = {"message": "no more sessions", "code": "CAPACITY_REACHED"}
            await response.send_str(json.dumps({"type": "error", "data": error}))
            return response
        used += 1
        try:
            async for message in response:
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    await asyncio.sleep(0.05)  # a server frees a session before it closes the connection
                    break
                if asked["type"] == "reset":
                    await response.send_str(observation(f"seed {asked['data'].get('seed', 0) % 2}"))
                else:
                    await on_step(response, asked["data"])
        finally:
            used -= 1
        return response

    async def openapi(request: web.Request) -> web.Response:
        return web.json_response({"info": {"title": TITLE, "version": VERSION} if info is None else info})

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA})

    app = web.Application()
    app.add_routes([web.get("/ws", socket), web.get("/openapi.json", openapi), web.get("/schema", schema)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    loop = asyncio.new_event_loop()
    site = loop.run_until_complete(_listen(runner))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{site.port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _listen(runner: web.AppRunner) -> web.TCPSite:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return site


async def echo(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    if not isinstance(action.get("move"), int) or set(action) != {"move"}:
        await socket.send_str(json.dumps({"type": "error", "data": {"message": "x", "code": "VALIDATION_ERROR"}}))
        return
    await socket.send_str(observation(f"moved {action['move']}", True, action["move"] == 9))


def bound(url: str, **options: Any) -> OpenEnv:
    environment = OpenEnv(url, **options)
    environment.bind(ExampleRuntime())
    return environment


async def play(environment: OpenEnv, *actions: str) -> list[Observation]:
    state: dict[str, Any] = {}
    try:
        await guard(lambda: environment.reset(PROMPT, 2**40, state), environment, str)
        return [
            await guard(lambda a=action: environment.step(a, state), environment, Observation) for action in actions
        ]
    finally:
        await environment.finish(state)


def test_an_episode_has_the_servers_rewards() -> None:
    with serve(echo) as url:
        answers = asyncio.run(play(bound(url), "3", "<think>8</think> <action>4</action>", '{"move": 9}'))
    assert answers == [Observation("moved 3", 1.0), Observation("moved 4", 1.0), Observation("moved 9", 1.0, True)]


def test_three_unreadable_turns_end_an_episode() -> None:
    """The first is thinking that never ends; the second is refused by the server: it has another field."""
    with serve(echo) as url:
        answers = asyncio.run(
            play(bound(url, unreadable_reward=-0.5), "<think><action>3</action>", '{"move": 1, "turn": 2}', "3", "{}")
        )
    refused = Observation("That is no action, expected an integer.", -0.5)
    assert answers == [refused, refused, Observation("moved 3", 1.0), refused._replace(done=True)]


async def garbage(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_str("{nonsense")


async def binary(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_bytes(b"\x00\xff")


async def huge(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_str("x" * (5 * 2**20))


async def deep(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_str("[" * 200_000)


async def not_a_number(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_str(observation(reward=float("nan")))


async def endless(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    while not socket.closed:
        await socket.ping()
        await asyncio.sleep(0.01)


async def closing(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.close()


async def dropped(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    assert socket._req is not None
    assert socket._req.transport is not None
    socket._req.transport.abort()


async def broken(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
    await socket.send_str(json.dumps({"type": "error", "data": {"message": "oh", "code": "EXECUTION_ERROR"}}))


@pytest.mark.parametrize(
    ("on_step", "problem"),
    [
        (garbage, "JSONDecodeError"),
        (binary, "answered 'step' with BINARY, expected text"),
        (huge, "is lost: .*exceeds limit"),
        (deep, "RecursionError|JSONDecodeError"),
        (not_a_number, "got nan, expected a finite number"),
        (endless, "did not finish within 0.3 s"),
        (closing, "answered 'step' with CLOSE"),
        (dropped, "answered 'step' with CLOSED"),
        (broken, "the server answered EXECUTION_ERROR: oh"),
    ],
)
def test_a_hostile_server_costs_its_episode(on_step: Handler, problem: str) -> None:
    """The next episode, whose steps the server answers, has the only session."""
    answer = on_step

    async def once(socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
        nonlocal answer
        this, answer = answer, echo
        await this(socket, action)

    async def both(environment: OpenEnv) -> list[Observation]:
        with pytest.raises(GuardError, match=f"(?s)^OpenEnv of .*env.openenv.*: .*({problem})"):
            await play(environment, "1", "2")
        return await play(environment, "3")

    with serve(once) as url:
        assert asyncio.run(both(bound(url, timeout=0.3))) == [Observation("moved 3", 1.0)]


def test_episodes_wait_for_a_session() -> None:
    """Eight at once share two sessions, which the server frees a while after an episode ends; a ninth is too many."""

    async def all_of(environment: OpenEnv) -> list[list[Observation]]:
        return await asyncio.gather(*(play(environment, str(number)) for number in range(8)))

    with serve(echo, sessions=2) as url:
        answers = asyncio.run(all_of(bound(url, sessions=2, timeout=0.3)))
        assert [answer[0].text for answer in answers] == [f"moved {number}" for number in range(8)]
        with pytest.raises(GuardError, match="set `sessions` of OpenEnv to what the server allows"):
            asyncio.run(all_of(bound(url, sessions=3)))


def test_a_lost_server_is_named() -> None:
    with serve(echo) as url:
        environment = bound(url)
    with pytest.raises(GuardError, match=f"^OpenEnv of .*env.openenv.*: .*the server at {url} cannot be reached"):
        asyncio.run(play(environment, "1"))
    with pytest.raises(UnavailableError, match="cannot be reached .*; start it first"):
        bound(url)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"title": TITLE, "version": "2.0.0"}, f"is '{TITLE}' '2.0.0', but rlkit-env-openenv supports"),
        ({"title": "Shop"}, "is no OpenEnv server: KeyError"),
        ([], "is no OpenEnv server: TypeError"),
    ],
)
def test_other_servers_are_refused_by_name(info: object, message: str) -> None:
    with serve(echo, info) as url, pytest.raises(RecipeError, match=message):
        bound(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://127.0.0.1", "", "http://"])
def test_an_address_is_http(url: str) -> None:
    with pytest.raises(RecipeError, match="expected such as http://127"):
        OpenEnv(url)


FIELDS = {"text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("field", "text", "action"),
    [
        ("text", " go left ", {"text": "go left"}),
        ("text", "", None),
        ("text", "[1]", {"text": "[1]"}),
        ("text", '{"n": 3}', {"n": 3}),
        ("n", "-7", {"n": -7}),
        ("n", "7.0", None),
        ("n", "9" * 5000, None),
        ("x", "0.5", {"x": 0.5}),
        ("x", "2", {"x": 2}),
        ("x", "true", None),
        ("x", "NaN", None),
        ("x", "Infinity", None),
        ("b", "true", {"b": True}),
        ("b", "1", None),
        ("b", "<action>false</action> or <action>true</action>", {"b": True}),
        ("n", "[" * 100_000, None),
    ],
)
def test_actions_are_read_by_their_schema(field: str, text: str, action: object) -> None:
    assert ActionReader({"properties": FIELDS}, field).read(text) == action


def test_an_action_of_several_fields_is_json() -> None:
    actions = ActionReader({"properties": FIELDS, "required": ["text", "n"]}, None)
    assert actions.expected == "a JSON object with text, n"
    assert actions.read("left") is None
    assert actions.read('{"text": "left", "n": 2}') == {"text": "left", "n": 2}
    with pytest.raises(RecipeError, match="OpenEnv has action='z', but the server's actions have the fields: text, n"):
        ActionReader({"properties": FIELDS}, "z")


def test_an_observation_is_its_text_or_json() -> None:
    assert text_of({"text": "hi", "metadata": {}, "note": None}, None) == "hi"
    assert text_of({"board": [1, 2], "metadata": {}}, None) == '{"board": [1, 2]}'
    assert text_of({"text": "hi", "board": [1, 2]}, "board") == "[1, 2]"
    assert read_result(observation()) == ServerObservation({"text": "here", "metadata": {}}, 0.0, False)
    for nonsense in ("[]", '{"type": "state", "data": {}}', observation(done=1), observation(reward="1")):
        with pytest.raises(ValueError, match="got|expected"):
            read_result(nonsense)


def test_the_parts_keep_their_contracts() -> None:
    with serve(echo) as url:
        check_environment(lambda: OpenEnv(url, sessions=8))
    check_task(OpenEnvTask())


def test_rows_take_turns_with_the_arguments_of_reset() -> None:
    task = OpenEnvTask(rows=3, resets=[{"level": 1}, {"level": 2}])
    prompts = [task.prompt(row, index) for index, row in enumerate(task.rows("train"))]
    assert [prompt.id for prompt in prompts] == ["openenv-train-0", "openenv-train-1", "openenv-train-2"]
    assert [prompt.meta["reset"] for prompt in prompts] == [{"level": 1}, {"level": 2}, {"level": 1}]
    with pytest.raises(RecipeError, match=r"resets=\[\], expected arguments of a reset"):
        OpenEnvTask(resets=[])
