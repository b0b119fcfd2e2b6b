"""How weights are sent to servers: what is serialized, how often, and in which group; SGLang is not needed."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rlkit_servers.api import ServerApi
from rlkit_servers.changes import CheckpointReceiver
from rlkit_servers.push import Push
from rlkit_servers.sglang import changes as sglang_changes
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.sglang.transports import SGLangChanges, SGLangGroup, SGLangTensors
from rlkit_servers.transports import FileTransport, save
from rlkit_servers.weight_check import Tolerance
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from rlkit.base.errors import EngineError

BUCKET = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2))]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.device]:
    """The GPU that each thread has selected; by default it is the machine's first."""
    devices: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))
    return devices


class Recorder:
    """A stub of a server that records its calls."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any, deadline: float) -> None:
        self.calls.append((path, body))


@pytest.mark.parametrize("tp", [1, 4])
def test_each_process_of_a_server_has_handles_of_its_own(tp: int) -> None:
    """If several processes opened one handle, its memory would be reused too early."""
    transport, client = SGLangTensors(CPU), Recorder()
    api = SGLangApi(client)  # type: ignore[arg-type]
    api.tensor_parallel, api.adapter = tp, "adapter"
    asyncio.run(transport.load(api, transport.prepare(BUCKET)))
    asyncio.run(transport.adapt(api, ({}, BUCKET)))
    texts = [body["serialized_named_tensors"] for _, body in client.calls if "serialized_named_tensors" in body]
    assert [len(sent) for sent in texts] == [tp, tp]
    assert [len(set(sent)) for sent in texts] == [1, 1]  # by name of the same memory, on a CPU
    assert len({id(text) for text in texts[0]}) == tp  # and yet serialised one by one


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_ipc_cannot_hand_over_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    SGLangTensors(CPU)
    with pytest.raises(EngineError, match=f"{name} is .* cannot be shared with servers by CUDA IPC; unset"):
        SGLangTensors(GPU)
    monkeypatch.setenv(name, "expandable_segments:False")
    SGLangTensors(GPU)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_lent_is_collected_after_a_push(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: freed.append("ipc"))

    def buckets() -> Iterator[Any]:
        if fails:
            raise RuntimeError("the stream broke")
        return iter(())

    stream: Any = SimpleNamespace(specs={}, buffer_names=(), buckets=buckets)
    for device in (CPU, GPU):
        push = Push(SGLangTensors(device), torch.float32, Tolerance(1.0, 1.0))
        work = push.push(stream, [], "run-1", None)
        if fails:
            with pytest.raises(RuntimeError, match="the stream broke"):
                asyncio.run(work)
        else:
            assert asyncio.run(work) == {}
    assert freed == ["ipc"]


def test_weights_in_host_memory_move_to_the_groups_device() -> None:
    meta = torch.device("meta")  # stands for the GPU
    sent = SGLangGroup(meta).prepare([("a", torch.ones(2, 3).T)])
    assert [(name, x.device, x.is_contiguous()) for name, x in sent] == [("a", meta, True)]


def test_the_group_is_made_and_used_on_the_trainers_gpu(
    chosen: dict[int, torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    second, used = torch.device("cuda", 1), []

    class Group:
        def __init__(self, *_: object) -> None:
            used.append(("made", chosen.get(threading.get_ident())))

        def broadcast(self, tensors: Iterator[torch.Tensor]) -> None:
            used.append((len(list(tensors)), chosen.get(threading.get_ident())))

    monkeypatch.setattr("rlkit_servers.transports.SenderGroup", Group)
    transport = SGLangGroup(second)

    async def use() -> None:
        await transport.open([])
        await transport.send(BUCKET)

    asyncio.run(use())
    assert used == [("made", second), (2, second)]


@pytest.mark.parametrize("tp", [1, 2])
def test_sglangs_processes_load_what_came(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process gets the changes, and loads the tensors that they belong to in full."""
    monkeypatch.setattr(sglang_changes, "_receiver", CheckpointReceiver())
    transport, client, loaded = SGLangChanges(), Recorder(), []
    model = SimpleNamespace(load_weights=lambda tensors: loaded.append({name: x.tolist() for name, x in tensors}))
    api = SGLangApi(client)  # type: ignore[arg-type]
    api.tensor_parallel = tp
    matrix = torch.arange(6.0).view(3, 2).T
    for number in range(2):
        transport.sent.begin(str(number), shared=number == 1)
        asyncio.run(transport.load(api, transport.prepare([("a", matrix), ("b", torch.ones(2))])))
        transport.sent.end()
        asyncio.run(transport.finish(api))
        matrix[1, 2] = 9.0
    for _, body in client.calls:
        assert body["load_format"] == "rlkit_servers.sglang.changes.load"
        assert len(body["serialized_named_tensors"]) == tp
        sglang_changes.load(model, pickle.loads(base64.b64decode(body["serialized_named_tensors"][-1])))
    changed = [[0.0, 2.0, 4.0], [1.0, 3.0, 9.0]]
    assert loaded == [{"a": [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], "b": [1.0, 1.0]}, {"a": changed}]


class Files(FileTransport):
    async def load(self, api: ServerApi, parcel: Path) -> None: ...


def test_a_buckets_file_lasts_until_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit_servers.transports.SHARED_MEMORY", tmp_path)
    transport = Files()
    first = transport.prepare(BUCKET)
    assert first.parents[1] == tmp_path
    assert {name: x.tolist() for name, x in load_file(first).items()} == {name: x.tolist() for name, x in BUCKET}
    second = transport.prepare(BUCKET[:1])
    assert list(tmp_path.glob("*/*")) == [second]
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_that_shared_memory_has_no_room_for_go_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr("rlkit_servers.transports.SHARED_MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    transport = Files()
    assert transport.prepare(BUCKET).parents[1] == disk
    memory.mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=32))  # BUCKET has 24 + 8 bytes
    assert transport.prepare(BUCKET).parents[1] == disk
    assert transport.prepare(BUCKET[1:]).parents[1] == memory
    transport.close()
    assert [*memory.iterdir(), *disk.iterdir()] == []


def test_an_unwritable_file_is_an_os_error(tmp_path: Path) -> None:
    """A push reports it for its servers; safetensors raises an exception of its own."""
    with pytest.raises(OSError, match="cannot be written: "):
        save(BUCKET, tmp_path / "absent" / "file")


@pytest.fixture
def trainers() -> Iterator[Any]:
    """A trainer's own group of one rank, bound to a GPU as Lightning binds it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    own = c10d._get_default_group()
    own.bound_device_id = GPU
    yield own
    own.bound_device_id = None
    dist.destroy_process_group()


def test_the_group_with_servers_is_none_of_the_trainers(trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the default group is bound to a device, torch splits new groups off it, which all ranks would have to join.

    The store is served here, even under torchrun.
    """
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    make, bound = c10d._new_process_group_helper, []

    def helper(*args: Any, **options: Any) -> Any:
        bound.append(trainers.bound_device_id)
        return make(*args, **options)

    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    transport = SGLangGroup(CPU)

    async def use() -> None:
        await transport.open([])
        await transport.send(transport.prepare(BUCKET))

    asyncio.run(use())
    assert bound == [None]
    assert trainers.bound_device_id == GPU
    transport.close()
