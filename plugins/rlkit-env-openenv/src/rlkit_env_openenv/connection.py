"""An episode's connection to an OpenEnv server, whose protocol is JSON over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import aiohttp

from rlkit.base.errors import RecipeError, UnavailableError, explain, show
from rlkit.interfaces.reward import as_number
from rlkit.types import JsonObject

TITLE, VERSION = "OpenEnv Environment HTTP API", "1.0.0"
"""What the servers of OpenEnv 0.10 state about their protocol."""
LARGEST_MESSAGE = 4 * 2**20
"""Bytes."""
PROBE_SECONDS = 30.0
CLOSE_SECONDS = 2.0
OPENER = build_opener(ProxyHandler({}))
"""Opens addresses without a proxy, as aiohttp does."""


class ServerError(Exception):
    """The server refused a message.

    Args:
        message: The reason that it stated.
        code: Its code of the error, such as `VALIDATION_ERROR`.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(f"the server answered {code}: {message}")
        self.code = code


class ServerObservation(NamedTuple):
    """An observation with its reward; `done` ends the episode."""

    observation: JsonObject
    reward: float
    done: bool


class EpisodeConnection:
    """One session of a server, which is one episode. A connection that is lost is not opened again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = aiohttp.ClientSession()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        try:
            self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=LARGEST_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"the server at {self.url} cannot be reached: {error}") from error

    async def ask(self, kind: str, data: JsonObject) -> ServerObservation:
        """Send a `reset` or a `step`; return the observation that follows.

        Raises:
            ServerError: The server refused it.
            ConnectionError: The connection was lost.
            ValueError: The answer is no observation.
        """
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"the connection to {self.url} is lost: {error}") from error
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionError(f"the connection to {self.url} is lost: {message.data}")
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server at {self.url} answered {kind!r} with {message.type.name}, expected text")
        return read_result(message.data)

    async def close(self) -> None:
        """End the session and wait until the server has freed it; the server may be gone."""
        try:
            with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                async with asyncio.timeout(CLOSE_SECONDS):
                    if self._socket is not None:
                        await self._socket.send_str(json.dumps({"type": "close"}))
                        async for _ in self._socket:
                            pass
        finally:
            await self._http.close()


def read_result(text: str) -> ServerObservation:
    """Return an answer of the server.

    Raises:
        ServerError: It is an error.
        ValueError: It is no observation, or its reward is no finite number.
    """
    answer = json.loads(text)
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise ValueError(f"the server answered {show(text)}, expected an observation")
    if answer.get("type") == "error":
        raise ServerError(str(data.get("message")), str(data.get("code")))
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done")
    if answer.get("type") != "observation" or not isinstance(observation, dict) or not isinstance(done, bool):
        raise ValueError(f"the server answered {show(text)}, expected an observation")
    return ServerObservation(observation, 0.0 if reward is None else as_number(reward), done)


def action_schema(url: str) -> Mapping[str, Any]:
    """Return a server's JSON schema of an action.

    Raises:
        UnavailableError: The server cannot be reached.
        RecipeError: It is no OpenEnv server, or of another version.
    """
    try:
        info = _fetch(f"{url}/openapi.json")["info"]
        if (info["title"], info["version"]) != (TITLE, VERSION):
            raise RecipeError(
                f"the server at {url} is {show(info['title'])} {show(info['version'])}, but rlkit-env-openenv "
                f"supports {TITLE!r} {VERSION!r}, as OpenEnv 0.10 serves it"
            )
        schema = _fetch(f"{url}/schema")["action"]
        if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
            raise ValueError(f"its schema of an action is {show(schema)}")
    except (HTTPError, HTTPException, ValueError, RecursionError, LookupError, TypeError) as error:
        raise RecipeError(f"{url} is no OpenEnv server: {explain(error)}") from error
    except OSError as error:
        raise UnavailableError(f"the OpenEnv server at {url} cannot be reached ({error}); start it first") from error
    return schema


def _fetch(url: str) -> Any:
    with OPENER.open(url, timeout=PROBE_SECONDS) as response:
        return json.loads(response.read(LARGEST_MESSAGE))
