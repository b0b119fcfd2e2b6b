"""The log of a model: requests in any order, sent twice or after a kill, leave the bits of the plain order."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rlkit_tinker import Service
from rlkit_tinker.server import state as state_module
from rlkit_tinker.server.coordinator import Coordinator, RefusedError
from rlkit_tinker.server.journal import Journal, JournalError, JournalRecord
from rlkit_tinker.server.requests import read_request
from rlkit_tinker.server.state import Sessions
from safetensors.torch import load_file
from tinker_oracle import random_data
from tinker_wire import ask, coordinator_of, create_body, json_body, pass_body, running, sample_body

MODEL = "s:train:0"
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 1.0}


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=4, max_rank=16)


def requests(session: str = "s") -> list[tuple[str, bytes]]:
    """Return what a client sends: two steps of two passes, a snapshot, and a state with a retained gradient."""
    model = f"{session}:train:0"
    rows = [random_data(seed, rows=1) for seed in range(3)]
    return [
        ("create_model", create_body(session)),
        ("forward_backward", pass_body(model, 1, rows[0])),
        ("forward_backward", pass_body(model, 2, rows[1], "ppo")),
        ("optim_step", json_body(model_id=model, seq_id=3, adam_params=ADAM)),
        ("forward_backward", pass_body(model, 4, rows[2])),
        ("save_weights_for_sampler", json_body(model_id=model, seq_id=5, sampling_session_seq_id=0)),
        ("optim_step", json_body(model_id=model, seq_id=6, adam_params=ADAM)),
        ("forward_backward", pass_body(model, 7, rows[0])),
        ("save_weights", json_body(model_id=model, seq_id=8, path="end")),
    ]


async def finish(coordinator: Coordinator) -> list[bytes]:
    """Send all requests in order, and samples of the snapshot; return what their futures answer."""
    answers = [await ask(coordinator, route, raw) for route, raw in requests()]
    return [*answers, await ask(coordinator, "asample", sample_body("s:sample:0", 0, sampling_params={"seed": 1}))]


def state(folder: Path, model: str = MODEL) -> dict[str, torch.Tensor]:
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    saved = [load_file(folder / model / "weights" / "end" / file) for file in files]
    assert any(name.endswith(".grad") for name in saved[1])
    return saved[0] | saved[1]


def check_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def run_plainly(service: Service, folder: Path) -> list[bytes]:
    """Run all requests in order on a server that nothing interrupts."""

    async def run() -> list[bytes]:
        async with running(coordinator_of(service, folder)) as coordinator:
            coordinator.open_session("s", "alice")
            return await finish(coordinator)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def plain(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], Path]:
    """The answers in the plain order, and the folder that it leaves."""
    folder = tmp_path_factory.mktemp("plain")
    return run_plainly(service, folder), folder


@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_repetition_is_the_plain_order(
    service: Service, plain: tuple[list[bytes], Path], tmp_path: Path, seed: int
) -> None:
    """Each request comes once to three times, in any order, while others run."""
    order = random.Random(seed)

    async def run() -> list[bytes]:
        async with running(coordinator_of(service, tmp_path)) as coordinator:
            coordinator.open_session("s", "alice")
            first, *others = requests()
            await ask(coordinator, *first)
            deliveries = [request for request in others for _ in range(order.randint(1, 3))]
            order.shuffle(deliveries)
            for route, raw in deliveries:
                await coordinator.submit(read_request(route, raw), "alice")
                await asyncio.sleep(order.choice((0, 0, 0.01)))
            return await finish(coordinator)

    answers, folder = plain
    assert asyncio.run(run()) == answers
    check_equal(state(tmp_path), state(folder))


def record_ends(journal: bytes) -> list[int]:
    ends, size = [], 0
    while size < len(journal):
        header, payload = (int.from_bytes(journal[size + at : size + at + 4], "little") for at in (0, 4))
        size += 12 + header + payload
        ends.append(size)
    return ends


def test_a_journal_that_ends_anywhere_goes_on(
    service: Service, plain: tuple[list[bytes], Path], tmp_path: Path
) -> None:
    """After a kill at the end of a record, or in the middle of it, the client sends everything once more."""
    answers, folder = plain
    journal = (folder / "journal").read_bytes()
    ends = record_ends(journal)
    for size in [end - cut for end in ends[:-5:9] for cut in (0, 3)]:  # before the state is saved
        after = tmp_path / str(size)
        shutil.copytree(folder, after)
        (after / "journal").write_bytes(journal[:size])
        shutil.rmtree(after / MODEL / "weights", ignore_errors=True)

        async def run(after: Path = after) -> list[bytes]:
            async with running(coordinator_of(service, after)) as coordinator:
                if "s" not in coordinator.state.sessions:
                    coordinator.open_session("s", "alice")
                return await finish(coordinator)

        assert asyncio.run(run()) == answers
        check_equal(state(after), state(folder))


def test_a_journal_is_written_anew_with_all_that_counts(
    service: Service, plain: tuple[list[bytes], Path], tmp_path: Path
) -> None:
    """Results, pending requests, moments and gradients are there after it, and earlier bodies and states are not."""
    answers, folder = plain

    async def run(count: int) -> list[bytes]:
        async with running(coordinator_of(service, tmp_path)) as coordinator:
            if not coordinator.state.sessions:
                coordinator.open_session("s", "alice")
            for route, raw in requests()[:count]:
                await ask(coordinator, route, raw)
            await coordinator.submit(read_request(*requests()[8]), "alice")
            before = coordinator._journal.size
            await coordinator.compact()
            assert coordinator._journal.size < before
            assert len(list(tmp_path.glob("states-*"))) == 1
            return await finish(coordinator) if count == 7 else []

    for count in (3, 5, 7):
        results = asyncio.run(run(count))
    assert results == answers
    check_equal(state(tmp_path), state(folder))


def test_a_number_names_one_content(service: Service, tmp_path: Path) -> None:
    """A repeated nameless save may count its sampling session on, as the SDK does; nothing else may differ."""

    def save(seq: int, sampler: int, **options: object) -> bytes:
        return json_body(model_id=MODEL, seq_id=seq, sampling_session_seq_id=sampler, **options)

    async def run() -> None:
        async with running(coordinator_of(service, tmp_path)) as coordinator:
            coordinator.open_session("s", "alice")
            await ask(coordinator, "create_model", create_body("s"))
            answers = {await ask(coordinator, "save_weights_for_sampler", save(1, sampler)) for sampler in (0, 1, 2)}
            assert len(answers) == 1
            assert list(coordinator.state.sessions["s"].samplers) == ["s:sample:0"]
            with pytest.raises(RefusedError, match="was sent before with another content"):
                await ask(coordinator, "save_weights_for_sampler", save(1, 0, kind="inflight"))
            with pytest.raises(RefusedError, match="seq_id is 99999, expected 2 to 4098"):
                await ask(coordinator, "save_weights_for_sampler", save(99999, 0))

    asyncio.run(run())


def test_a_damaged_journal_is_refused_and_a_cut_one_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    records = [JournalRecord({"kind": "session", "id": "s", "tenant": str(i)}, bytes(i)) for i in range(3)]
    for record in records:
        journal.append(record)
    with pytest.raises(JournalError, match="another server uses"):
        Journal(tmp_path)
    journal.close()
    content = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(content[:-1])
    again = Journal(tmp_path)
    assert again.records == records[:2]
    again.append(records[2])
    again.close()
    assert (tmp_path / "journal").read_bytes() == content
    (tmp_path / "journal").write_bytes(content[:20] + b"x" + content[21:])
    with pytest.raises(JournalError, match="is damaged at byte 0; move it away"):
        Journal(tmp_path)


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    record = JournalRecord({"kind": "end", "id": "s"}, b"x" * 100)
    journal.append(record)

    def write_a_part(file: int, content: Sequence[int]) -> int:
        if len(content) < 100:
            raise OSError(28, "No space left on device")
        return real(file, content[:50])

    real = os.write
    monkeypatch.setattr("rlkit_tinker.server.journal.os.write", write_a_part)
    with pytest.raises(JournalError, match="No space left.*free space on its disk"):
        journal.append(record)
    monkeypatch.undo()
    journal.append(record)
    journal.close()
    assert Journal(tmp_path).records == [record, record]


def test_passes_of_tenants_run_in_turn_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of a tenant with passes of 5 rows, and two tenants with passes of 1 row, in rounds of a few rows."""
    monkeypatch.setattr(state_module, "ROUND_BYTES", len(pass_body("x:train:0", 1, random_data(0, rows=5))))
    sessions = Sessions()

    def submit(session: str, model: int, seq: int, rows: int) -> None:
        raw = pass_body(f"{session}:train:{model}", seq, random_data(0, rows=rows))
        sessions.apply(JournalRecord({"kind": "request", "route": "forward_backward"}, raw))

    for session in "abf":
        sessions.apply(JournalRecord({"kind": "session", "id": session, "tenant": session}))
        for model in range(1 + (session == "f")):
            sessions.apply(JournalRecord({"kind": "model", "id": f"{session}:train:{model}", "next_seq": 1}))
            for seq in range(1, 4):
                submit(session, model, seq, 5 if session == "f" else 1)
    rounds = []
    while requests := sessions.next_round():
        sessions.apply(JournalRecord({"kind": "round", "ids": [request.id for request in requests]}))
        rounds.append(sorted(request.session for request in requests))
    assert rounds[:3] == [["a", "b"], ["f"], ["a", "b"]]
    assert rounds[3:] == [["a", "b"], ["f"], ["f"], ["f"], ["f"], ["f"]]


def test_a_session_may_end_while_its_requests_run(service: Service, tmp_path: Path) -> None:
    """Ended twice, with a pass that runs and samples that wait: others go on, also after a restart."""

    async def run() -> None:
        async with running(coordinator_of(service, tmp_path)) as coordinator:
            for name in ("s", "t"):
                coordinator.open_session(name, "alice")
            for route, raw in requests()[:6]:
                await ask(coordinator, route, raw)
            session = coordinator.session("s", "alice")
            together = (requests()[6], ("asample", sample_body("s:sample:0", 1)))
            await asyncio.gather(*(coordinator.submit(read_request(*request), "alice") for request in together))
            while MODEL not in coordinator.state.sessions["s"].models or session.models[MODEL].next_seq < 7:
                await asyncio.sleep(0)  # until the step runs
            await asyncio.gather(coordinator.end_session(session), coordinator.end_session(session))
            with pytest.raises(RefusedError, match="there is no session of 's:train:0', or it has ended"):
                await ask(coordinator, *requests()[7])
            assert b"model_id" in await ask(coordinator, "create_model", create_body("t"))
            assert not (tmp_path / MODEL).exists()

    asyncio.run(run())
    again = coordinator_of(service, tmp_path)
    assert list(again.state.sessions) == ["t"]
    asyncio.run(close(again))


async def close(coordinator: Coordinator) -> None:
    async with running(coordinator):
        pass
