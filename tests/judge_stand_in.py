"""A judge's server for tests: OpenAI's and Anthropic's forms, and the faults of real servers."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]
Respond = Callable[[Body], "str | web.StreamResponse | Awaitable[str | web.StreamResponse]"]

RESPONSE = re.compile(r"<response(?:-\d+)?-([0-9a-f]{8})>\n(.*?)\n</response(?:-\d+)?-\1>", re.DOTALL)


def responses(body: Body) -> list[str]:
    """Return the responses in a question, in its order."""
    return [match[2] for match in RESPONSE.finditer(body["messages"][0]["content"])]


class StandIn:
    """What the server received, and how it answers."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.bodies: list[Body] = []
        self.headers: list[Mapping[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self.usage: object = {"prompt_tokens": 100, "completion_tokens": 10, "input_tokens": 100, "output_tokens": 10}
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.respond(body)
            answer = await answer if isinstance(answer, Awaitable) else answer
        finally:
            self.in_flight -= 1
        if not isinstance(answer, str):
            return answer
        if request.path.endswith("/messages"):
            content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": answer}]
            return web.json_response({"content": content, "stop_reason": "end_turn", "usage": self.usage})
        choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": self.usage})


@contextmanager
def serving(respond: Respond) -> Iterator[StandIn]:
    """Serve on a free port of this machine, in another thread."""
    stand_in, loop, started = StandIn(respond), asyncio.new_event_loop(), threading.Event()

    async def start() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/{path:.*}", stand_in.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        stop.append(runner)
        started.set()

    def work() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(stop[0].cleanup())
        loop.close()

    stop: list[web.AppRunner] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield stand_in
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
