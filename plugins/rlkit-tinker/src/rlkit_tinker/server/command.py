"""The verb: `rlkit serve tinker --model PATH` serves the Tinker API."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from rlkit.base.errors import RecipeError, show
from rlkit.models.source import base_name, locate
from rlkit_tinker.server.app import KEY, TinkerApp
from rlkit_tinker.server.connections import raise_file_limit
from rlkit_tinker.server.coordinator import Coordinator
from rlkit_tinker.server.executor import ServiceExecutor
from rlkit_tinker.server.folders import ModelFolders
from rlkit_tinker.server.journal import Journal
from rlkit_tinker.server.routes import Routes
from rlkit_tinker.service import Service

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CLOSE_SECONDS = 1.0
"""In which polls are answered when the server ends; the SDK polls again, also a server that starts later."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlkit serve tinker",
        description="Serve the Tinker API: loops that use its SDK train LoRA adapters over one base here.",
        epilog="`rlkit docs tinker` has an example.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="the base: a folder, a name on the hub, or tiny")
    add("--alias", action="append", default=[], metavar="NAME", help="another name of the base for clients; repeatable")
    add("--folder", type=Path, default=Path("tinker"), help="the folder of all states; `tinker` by default")
    add("--host", default="127.0.0.1", help="the address; another than 127.0.0.1 needs --keys")
    add("--port", type=int, default=8765, help="the port; 0 for a free one")
    add("--keys", type=Path, metavar="FILE", help="a file with the keys of clients, one a line; each is a tenant")
    add("--precision", choices=["32-true", "bf16-mixed"], default="32-true", help="bf16-mixed computes in bfloat16")
    add("--device", default="cpu", help="the device of the base, such as cuda")
    add("--alpha", type=float, default=32.0, help="the scale of adapters is alpha / rank")
    add("--max-adapters", type=int, default=64, help="the most training clients at once")
    add("--max-rank", type=int, default=128, help="the largest rank")
    add("--tenant-gib", type=float, default=100.0, help="the most GiB of states that a key has under names")
    add("--session-seconds", type=float, default=300.0, help="a session without a heartbeat for so long ends")
    return parser


def run(argv: Sequence[str]) -> int:
    """Serve until a signal ends it; return the exit status."""
    if list(argv) in (["-h"], ["--help"]):
        _parser().print_help()
        return 0
    if list(argv[:1]) != ["tinker"]:
        words = "" if not argv else f", not {show(argv[0], 60)}"
        raise RecipeError(f"rlkit serve takes what is served{words}: rlkit serve tinker --model PATH")
    options = _parser().parse_args(argv[1:])
    if not 0 <= options.port <= 65535:
        raise RecipeError(f"--port is {options.port}, expected 0 to 65535; 0 for a free one")
    if not options.session_seconds >= 30:
        raise RecipeError(
            f"--session-seconds is {options.session_seconds}, expected at least 30: the SDK sends every 10"
        )
    if not options.tenant_gib > 0:
        raise RecipeError(f"--tenant-gib is {options.tenant_gib}, expected a positive number")
    keys = _read_keys(options.keys)
    if options.host not in LOOPBACK and not keys:
        raise RecipeError(f"--host {options.host} is reached from other machines; add --keys FILE, one key a line")
    journal = Journal(options.folder)
    try:
        _check_server(options.folder, {"model": options.model, "alpha": options.alpha})
        asyncio.run(_serve(options, keys, journal))
    except KeyboardInterrupt:
        pass
    return 0


async def _serve(options: argparse.Namespace, keys: frozenset[str], journal: Journal) -> None:
    service = Service(
        options.model,
        precision=options.precision,
        max_adapters=options.max_adapters,
        max_rank=options.max_rank,
        alpha=options.alpha,
        folder=options.folder,
        device=options.device,
    )
    names = [*options.alias, options.model]
    folders = ModelFolders(options.folder, base_name(options.model), names, options.tenant_gib * 2**30)
    coordinator = Coordinator(journal, ServiceExecutor(service, folders), options.folder)
    coordinator.recover()
    tokenizer = locate(options.model).tokenizer
    tokenizer = os.path.abspath(tokenizer) if os.path.isdir(tokenizer) else tokenizer
    routes = Routes(coordinator, folders, service.context, tokenizer, options.session_seconds)
    app = TinkerApp(routes, keys)
    runner = web.AppRunner(app.build(), access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    raise_file_limit()
    try:
        listener = await app.listen(runner, options.host, options.port)
    except OSError as error:
        raise RecipeError(f"--host {options.host} --port {options.port} cannot be used: {error}") from error
    port = listener.sockets[0].getsockname()[1]
    url = f"http://{options.host}:{port}"
    names = " and ".join(folders.names)
    print(f"Serving {names} at {url}, with states in {options.folder}/. Clients need:", flush=True)
    print(f"  export TINKER_BASE_URL={url} TINKER_API_KEY=tml-local", flush=True)
    await _run_until_signal(coordinator, routes)
    listener.close()
    await runner.cleanup()
    await coordinator.close()


async def _run_until_signal(coordinator: Coordinator, routes: Routes) -> None:
    """Run what clients send until a signal comes, or the journal cannot be written."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tasks = [asyncio.create_task(work) for work in (coordinator.run(), routes.sweep(), stopped.wait())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


def _read_keys(file: Path | None) -> frozenset[str]:
    """Return the keys in a file.

    Raises:
        RecipeError: It cannot be read, has none, or one that the SDK does not take.
    """
    if file is None:
        return frozenset()
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RecipeError(f"--keys {file} cannot be read: {error}") from error
    wrong = [number for number, key in enumerate(keys, 1) if not KEY.fullmatch(key)]
    if wrong or not keys:
        problem = f"key {wrong[0]} is none" if wrong else "it is empty"
        raise RecipeError(f"--keys {file}: {problem}; expected keys such as tml-alice, one a line")
    return frozenset(keys)


def _check_server(folder: Path, settings: dict[str, object]) -> None:
    """Check that a folder's states are of this base.

    Raises:
        RecipeError: They are of another.
    """
    file = folder / "server.json"
    if os.path.isfile(file):
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if earlier != settings:
            raise RecipeError(f"{folder} has states of {earlier}, not of {settings}; choose another --folder")
    else:
        file.write_text(json.dumps(settings), encoding="utf-8")
