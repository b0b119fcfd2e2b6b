"""A server that is killed between any two changes of its files goes on where it was, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_tinker import Service
from rlkit_tinker.server import coordinator as coordinators
from rlkit_tinker.server.coordinator import Coordinator
from rlkit_tinker.server.executor import ServiceExecutor
from rlkit_tinker.server.journal import Journal
from rlkit_tinker.server.requests import read_request
from safetensors.torch import load_file
from test_tinker_log import ADAM, check_equal
from tinker_oracle import random_data
from tinker_wire import create_body, folders_of, json_body, pass_body, sample_body, served

POINTS = 20
MODEL, LOADED = "s:train:0", "s:train:1"
END = f"tinker://{MODEL}/weights/end"


class Killed(BaseException):
    """Stands for the end of the process."""


class KillSwitch:
    """Ends the process at one of the changes of files: appends to the journal, renames and removals.

    Args:
        at: The number of the change; none for a process that lives on.
        seed: How much of an append is written.
    """

    def __init__(self, at: int | None, seed: int = 0) -> None:
        self.changes = 0
        self._at = at
        self._part = random.Random(seed).random()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch the changes until the patches are undone."""
        monkeypatch.setattr(os, "write", self._watched(os.write, self._write_a_part))
        monkeypatch.setattr(Path, "rename", self._watched(Path.rename))
        monkeypatch.setattr(shutil, "rmtree", self._watched(shutil.rmtree))

    def _watched(self, change: Callable[..., Any], begin: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.changes += 1
            if self._at is None or self.changes <= self._at:
                return change(*args, **options)
            if begin is not None and self.changes == self._at + 1:
                begin(change, *args)
            raise Killed

        return watched

    def _write_a_part(self, write: Callable[[int, memoryview], int], file: int, content: memoryview) -> None:
        write(file, content[: int(self._part * len(content))])


def script() -> list[tuple[str, bytes]]:
    """Return what a client sends: passes, steps, states that are overwritten, loaded and trained on, and samples."""
    rows = [random_data(seed, rows=1) for seed in range(3)]
    step = {"adam_params": ADAM}
    calls: list[tuple[str, Any]] = [
        ("forward_backward", rows[0]),
        ("forward_backward", rows[1]),
        ("optim_step", step),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 0}),
        ("forward_backward", rows[2]),
        ("save_weights", {"path": "end"}),
        ("optim_step", step),
        ("save_weights", {"path": "twice"}),
        ("save_weights", {"path": "twice", "overwrite": True}),
        ("load_weights", {"path": END, "optimizer": True}),  # with the gradient that the step then uses up
        ("optim_step", step),
        ("save_weights", {"path": "end", "overwrite": True}),
        ("forward_backward", rows[0]),
        ("save_weights", {"path": "retained"}),
        ("save_weights_for_sampler", {"path": "named"}),
    ]
    requests = [("create_model", create_body("s"))]
    for seq, (route, content) in enumerate(calls, 1):
        if route == "forward_backward":
            requests.append((route, pass_body(MODEL, seq, content)))
        else:
            requests.append((route, json_body(model_id=MODEL, seq_id=seq, **content)))
    load = {"session_id": "s", "model_seq_id": 1, "path": f"tinker://{MODEL}/weights/retained", "optimizer": True}
    requests += [("load_weights", json_body(**load)), ("optim_step", json_body(model_id=LOADED, seq_id=1, **step))]
    requests.append(("save_weights", json_body(model_id=LOADED, seq_id=2, path="end")))
    requests += [("asample", sample_body("s:sample:0", seq)) for seq in range(2)]
    return requests


class PatientClient:
    """Sends the script, and what was not accepted once more after a kill; a future is asked for its result twice."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self._accepted: set[str] = set()

    async def drive(self, coordinator: Coordinator) -> None:
        """Send what was not accepted yet, and ask for all results."""
        if "s" not in coordinator.state.sessions:
            coordinator.open_session("s", "alice")
        for _ in range(2):
            for route, raw in script():
                request = read_request(route, raw)
                if request.id == f"{MODEL}/14" or route == "asample":  # these need the results before
                    await self._read_all(coordinator)
                if request.id not in self._accepted:
                    await coordinator.submit(request, "alice")
                    self._accepted.add(request.id)
            await self._read_all(coordinator)

    async def _read_all(self, coordinator: Coordinator) -> None:
        for name in sorted(self._accepted):
            result = await coordinator.retrieve(name, coordinator.session(name, "alice"), 60)
            assert result is not None
            assert self.answers.setdefault(name, result.content) == result.content


async def run_server(folder: Path, client: PatientClient) -> None:
    """Start a server in a folder, and let a client drive it to the end of its script.

    Raises:
        Killed: The server was killed before.
    """
    service, journal = Service("tiny", max_adapters=2, max_rank=4), Journal(folder)
    service.folder = folder
    coordinator = Coordinator(journal, ServiceExecutor(service, folders_of(folder)), folder)
    try:
        coordinator.recover()
        tasks = [asyncio.ensure_future(work) for work in (client.drive(coordinator), coordinator.run())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ends:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
    finally:
        await coordinator.close()


def states_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of all states that were saved, by their paths."""
    files = folder.glob("s:train:*/*/*/*.safetensors")
    return {str(file.relative_to(folder)): load_file(file) for file in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Path, int]:
    """The answers without a kill, the folder, and how often its files change."""
    folder, client, switch = tmp_path_factory.mktemp("undisturbed"), PatientClient(), KillSwitch(None)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(coordinators, "COMPACT_PASSES", 2)
        switch.install(patches)
        asyncio.run(run_server(folder, client))
    assert not any(b'"error"' in answer for answer in client.answers.values())
    return client.answers, folder, switch.changes


@pytest.mark.parametrize("point", [pytest.param(i, marks=[pytest.mark.slow] if i % 7 else []) for i in range(POINTS)])
def test_a_kill_at_any_change_of_its_files_is_not_noticed(
    undisturbed: tuple[dict[str, bytes], Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """Futures that were accepted are answered without being sent again; every second server is killed twice."""
    answers, folder, changes = undisturbed
    draw = random.Random(point)
    first = int((point + draw.random()) / POINTS * changes)
    client = PatientClient()
    monkeypatch.setattr(coordinators, "COMPACT_PASSES", 2)
    for at in (first, draw.randrange(4) if point % 2 else None, None):
        with monkeypatch.context() as patches:
            KillSwitch(at, seed=point).install(patches)
            try:
                asyncio.run(run_server(tmp_path, client))
            except Killed:
                continue
            break
    assert client.answers == answers
    states, expected = states_of(tmp_path), states_of(folder)
    assert states.keys() == expected.keys()
    for name, tensors in states.items():
        check_equal(tensors, expected[name])


def test_a_state_that_was_loaded_is_removed_once_it_need_not_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = asyncio.Event()

    async def compact_late(coordinator: Coordinator) -> None:
        await saving.wait()
        await compact(coordinator)

    async def work() -> None:
        async with served(Service("tiny", max_adapters=2), tmp_path) as wire:
            model = await wire.model()
            path = (await wire.call("save_weights", json_body(model_id=model, seq_id=1, path="a")))["path"]
            await wire.call("load_weights", json_body(model_id=model, seq_id=2, path=path, optimizer=True))
            route = f"training_runs/{model}/checkpoints/weights/a"
            removing = asyncio.ensure_future(wire.send(route, method="DELETE"))
            for _ in range(3):
                await wire.json("healthz", method="GET")
            assert not removing.done()
            saving.set()
            assert (await removing)[0] == 204

    compact = Coordinator.compact
    monkeypatch.setattr(Coordinator, "compact", compact_late)
    asyncio.run(work())
