"""What one hostile session costs the others: `python tests/bench/gateway_fairness.py`.

Eight sessions hold conversations at the gateway from one process, with an engine that takes 50 ms a turn. From another
process, of the lowest priority so that the cores are not what is measured, a ninth session sends without pause:
half-sent POSTs, 9 MiB of messages to sample from and to count, small messages, and unknown keys. Printed are the median
and the 95th percentile of the eight sessions' latencies, before and during each attack. Words choose attacks by name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp

SESSIONS, TURN_SECONDS, CONTEXT = 8, 0.05, 2**20
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
LONG = "The quick brown fox jumps over the lazy dog; then it rests. " * (9 * 2**20 // 60)


class SlowEngine:
    """Samples one word a turn, in the time of a real turn."""

    async def generate(self, request: object) -> Any:
        from rlkit.types import Completion, StopReason

        await asyncio.sleep(TURN_SECONDS)
        return Completion([65, 66, 67], [-1.0] * 3, [0] * 3, StopReason.STOP)


def body(text: str) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()


async def half_sent(port: int, key: str) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 100000\r\n\r\n{{"
    connections = []
    while True:
        for _ in range(1024):
            connections.append((await asyncio.open_connection("127.0.0.1", port))[1])
            connections[-1].write(head.encode())
        await asyncio.sleep(0.5)
        while connections:
            connections.pop().close()


def posts(path: str, text: str, at_once: int, unknown: bool = False) -> Callable[[int, str], Awaitable[None]]:
    async def post(port: int, key: str) -> None:
        data, headers = body(text), {"Authorization": "Bearer unknown" if unknown else f"Bearer {key}"}

        async def again() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as client:
                while True:
                    try:
                        async with client.post(f"http://127.0.0.1:{port}{path}", data=data) as reply:
                            await reply.read()
                    except aiohttp.ClientError:
                        pass

        await asyncio.gather(*(again() for _ in range(at_once)))

    return post


ATTACKS: dict[str, Callable[[int, str], Awaitable[None]]] = {
    "1,024 half-sent POSTs": half_sent,
    "9 MiB to sample from": posts(CHAT, LONG, 4),
    "9 MiB to count": posts(COUNT, LONG, 4),
    "300,000 messages": posts(CHAT, '"},{"role":"user","content":"'.join("a" * 300_000), 4),
    "small messages": posts(COUNT, "a", 32),
    "unknown keys": posts(CHAT, "a", 32, unknown=True),
}


async def converse(port: int, key: str, end: float) -> list[float]:
    """Hold conversations of three turns until the end; return the seconds of each turn."""
    seconds = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        while time.monotonic() < end:
            messages: list[Any] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{turn} + {len(seconds)} = ?"})
                start = time.monotonic()
                data = {"model": "policy", "messages": messages}
                async with client.post(f"http://127.0.0.1:{port}{CHAT}", json=data) as reply:
                    reply.raise_for_status()
                    messages.append((await reply.json())["choices"][0]["message"])
                seconds.append(time.monotonic() - start)
    return seconds


async def measure(port: int, keys: list[str], seconds: float) -> None:
    """Run the eight sessions and print their latencies: in a process of its own."""
    end = time.monotonic() + seconds
    latencies = await asyncio.gather(*(converse(port, key, end) for key in keys))
    print(json.dumps([latency for session in latencies for latency in session]))


async def latencies(port: int, keys: list[str], seconds: float) -> tuple[float, float]:
    """Return the median and the 95th percentile, in milliseconds."""
    command = (sys.executable, __file__, "--measure", "--seconds", str(seconds), "--", str(port), *keys)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    cuts = statistics.quantiles(json.loads(output), n=20)
    return 1000 * cuts[9], 1000 * cuts[18]


async def compare(seconds: float, attacks: list[str]) -> None:
    """Measure the eight sessions without and with each attack."""
    from rlkit_agents.server import ChatGateway
    from rlkit_authors.models import build_tokenizer

    from rlkit.interfaces.gateway import SessionLimits
    from rlkit.rollout.agents import TemplateBackend
    from rlkit.rollout.collect import BusyTimer
    from rlkit.rollout.conversation import Limits
    from rlkit.rollout.dialogue import Dialogue
    from rlkit.types import SampleKey, Sampling

    tokenizer = build_tokenizer()
    recipe: Any = SimpleNamespace(model=SimpleNamespace(chat_template_kwargs={}))
    dialogue = Dialogue(recipe, tokenizer, CONTEXT, frozenset({tokenizer.eos_token_id}))
    setup: Any = SimpleNamespace(
        engine=SlowEngine(), gate=None, timer=BusyTimer(), sampling=Sampling(max_tokens=8),
        limits=Limits(context=CONTEXT), template=dialogue.template,
    )  # fmt: skip
    gateway = ChatGateway()
    await gateway.start()

    def key(index: int) -> str:
        backend = TemplateBackend(setup, dialogue, None, SampleKey(0, 1, str(index), 0))
        return gateway.open(backend, SessionLimits(turns=10**6)).id

    for name in attacks:
        keys = [key(index) for index in range(SESSIONS)]
        median, slow = await latencies(gateway.port, keys, seconds)
        command = (sys.executable, __file__, "--attack", name, "--", str(gateway.port), key(SESSIONS))
        hostile = await asyncio.create_subprocess_exec(*command)
        await asyncio.sleep(2)
        attacked, attacked_slow = await latencies(gateway.port, keys, seconds)
        hostile.kill()
        await hostile.wait()
        print(
            f"{name}: median {median:.0f} -> {attacked:.0f} ms ({attacked / median:.2f} times), "
            f"95% {slow:.0f} -> {attacked_slow:.0f} ms ({attacked_slow / slow:.2f} times)",
            flush=True,
        )
    await gateway.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--attack")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.attack:
        os.nice(19)
        asyncio.run(ATTACKS[options.attack](int(options.words[0]), options.words[1]))  # type: ignore[arg-type]
    elif options.measure:
        asyncio.run(measure(int(options.words[0]), options.words[1:], options.seconds))
    else:
        asyncio.run(compare(options.seconds, options.words or list(ATTACKS)))


if __name__ == "__main__":
    main()
