"""The server as a process: SIGKILL at several points is nothing that a client notices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
from rlkit_tinker import Service
from test_tinker_log import check_equal, requests, run_plainly, state
from tinker_wire import BASE, Wire, json_body, sample_body

from rlkit.base.errors import RecipeError

START = "import sys; from rlkit_tinker.server.command import run; sys.exit(run(sys.argv[1:]))"


class ServerOfTest:
    """A server in a process, at one port from one start to the next."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        words = ["tinker", "--model", "tiny", "--alias", BASE, "--port", str(self.port), "--folder", self._folder]
        threads = str(torch.get_num_threads())  # for equal bits
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", START, *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        assert f"at http://127.0.0.1:{self.port}" in self.process.stdout.readline()

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait()


class PatientWire(Wire):
    """A client that sends a request again while there is no server."""

    async def send(self, path: str, raw: bytes = b"{}", method: str = "POST") -> tuple[int, bytes]:
        while True:
            try:
                return await super().send(path, raw, method)
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


async def drive(server: ServerOfTest, kills: Sequence[int], seed: int) -> tuple[list[bytes], str]:
    """Send all requests before a result is read; kill the server after some; return the answers and the session."""
    order = random.Random(seed)
    async with aiohttp.ClientSession() as http:
        wire = PatientWire(http, f"http://127.0.0.1:{server.port}", routes=None)
        session = await wire.session()
        accepted = []
        for number, (route, raw) in enumerate(requests(session)):
            accepted.append(await wire.json(route, raw))
            if number in kills:
                await asyncio.sleep(order.choice((0, 0.005, 0.02, 0.05)))
                server.stop(signal.SIGKILL)
                await asyncio.to_thread(server.start)
        answers = [await wire.result(each["request_id"]) for each in accepted]
        sample = await wire.json("asample", sample_body(f"{session}:sample:0", 0, sampling_params={"seed": 1}))
        answers.append(await wire.result(sample["request_id"]))
        return [answer.replace(session.encode(), b"s") for answer in answers], session


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path: Path) -> None:
    """Answers, weights, moments and the retained gradient are those of a server in this process, which lives on."""
    server = ServerOfTest(tmp_path / "killed")
    try:
        answers, session = asyncio.run(drive(server, kills=(1, 4, 8), seed=1))
        assert server.stop(signal.SIGTERM) == 0
    finally:
        server.process.kill()
    expected = run_plainly(Service("tiny", max_adapters=4), tmp_path / "plain")
    assert answers == expected
    check_equal(state(tmp_path / "killed", f"{session}:train:0"), state(tmp_path / "plain"))


@pytest.fixture
def serve() -> Callable[[list[str]], int]:
    from rlkit_tinker.server.command import run

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "rlkit serve takes what is served: rlkit serve tinker --model PATH"),
        (["vllm"], "rlkit serve takes what is served, not 'vllm'"),
        (["tinker", "--model", "tiny", "--host", "0.0.0.0"], "is reached from other machines; add --keys FILE"),
        (["tinker", "--model", "tiny", "--keys", "none"], "--keys none cannot be read"),
        (["tinker", "--model", "tiny", "--keys", "wrong"], "--keys wrong: key 2 is none; expected keys such as"),
        (["tinker", "--model", "tiny", "--keys", "empty"], "--keys empty: it is empty"),
        (["tinker", "--model", "tiny", "--port", "70000"], "--port is 70000, expected 0 to 65535"),
        (["tinker", "--model", "tiny", "--session-seconds", "nan"], "--session-seconds is nan, expected at least"),
    ],
)
def test_wrong_words_are_refused(
    serve: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong").write_text("tml-good\nsk-wrong\n", encoding="utf-8")
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        serve(words)
    assert not (tmp_path / "tinker").exists()


def test_a_folder_is_of_one_base(serve: Callable[[list[str]], int], tmp_path: Path) -> None:
    (tmp_path / "server.json").write_bytes(json_body(model="other", alpha=32.0))
    with pytest.raises(RecipeError, match="has states of .*'other'.*; choose another --folder"):
        serve(["tinker", "--model", "tiny", "--folder", str(tmp_path)])
