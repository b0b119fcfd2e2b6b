"""Who is on the device when: an engine that gives its memory back takes it again once the trainer has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.cli.main import main
from rlkit.distributed import offload
from rlkit.distributed.offload import HostOffload
from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import Capability
from rlkit.rollout import service
from rlkit.run.preflight import memory
from rlkit.train import phases
from rlkit.types import Completion, Request
from tests.conftest import FAST, read_jsonl


class Colocated:
    """Turns `TorchEngine` into an engine beside the trainer that gives its memory back, and notes what happens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.offloaded = True
        sync, ask, off_device, back = TorchEngine.sync, TorchEngine.generate, HostOffload.off_device, HostOffload.back

        async def synced(engine: TorchEngine, stream: Any, version: int) -> None:
            self.note("take memory" if self.offloaded else "take weights")
            self.offloaded = False
            await sync(engine, stream, version)

        async def asked(engine: TorchEngine, request: Request) -> Completion:
            self.note("sample")
            return await ask(engine, request)

        @contextmanager
        def on_device(engine: TorchEngine) -> Iterator[None]:
            yield
            self.note("give memory back")
            self.offloaded = True

        @contextmanager
        def away(resting: HostOffload) -> Iterator[None]:
            with off_device(resting):
                self.note("trainer leaves")
                yield
            self.note("trainer returns")

        @contextmanager
        def returned(resting: HostOffload, module: torch.nn.Module) -> Iterator[None]:
            with back(resting, module):
                yield
            self.note("policy leaves")

        update = phases.update_models

        def updated(*args: Any) -> Any:
            self.note("update")
            return update(*args)

        patch.setattr(TorchEngine, "capabilities", TorchEngine.capabilities & ~Capability.READS_POLICY)
        patch.setattr(TorchEngine, "needs_weights", property(lambda _: self.offloaded))
        patch.setattr(TorchEngine, "sync", synced)
        patch.setattr(TorchEngine, "generate", asked)
        patch.setattr(TorchEngine, "on_device", on_device)
        patch.setattr(HostOffload, "off_device", away)
        patch.setattr(HostOffload, "back", returned)
        patch.setattr(phases, "update_models", updated)
        for module in (service, offload):
            patch.setattr(module, "free_cached", lambda _: self.note("free"))

    def note(self, event: str) -> None:
        if self.events[-1:] != [event]:
            self.events.append(event)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_engine_takes_its_memory_once_the_trainer_has_left(
    leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step and the validation after it, whose greedy and sampled answers share one push of the weights."""
    found = Colocated(monkeypatch)
    out = tmp_path / "out"
    options = ("--train.steps=1", f"--train.offload_during_rollout={leaves}", f"--out={out}")
    assert main(["fit", "--recipe=quickstart", *FAST, *options]) == 0
    if leaves:
        rollout = ["free", "trainer leaves", "take memory", "free", "policy leaves", "sample", "give memory back"]
        rollout += ["trainer returns"]
    else:
        rollout = ["free", "take memory", "sample", "give memory back"]
    proof, before, step, after = rollout, rollout, [*rollout, "update"], rollout
    assert found.events == [*proof, *before, *step, *after]
    [row] = read_jsonl(out / "metrics.jsonl")
    assert row["version"] == 1


def test_an_engine_on_its_device_gets_weights_at_the_steps_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Colocated(monkeypatch)
    monkeypatch.setattr(TorchEngine, "needs_weights", False)
    options = ("--train.steps=1", "--validation=null", f"--out={tmp_path / 'out'}")
    assert main(["fit", "--recipe=quickstart", *FAST, *options]) == 0
    sampled = ["free", "sample", "give memory back"]
    assert found.events == ["take memory", *sampled, *sampled, "update", "take memory"]


def test_an_engines_memory_is_freed_before_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: freed.append(name))
    offload.free_cached(torch.device("cpu"))
    assert freed == []
    offload.free_cached(torch.device("cuda", 0))
    assert freed == ["ipc_collect", "empty_cache"]


@pytest.mark.parametrize(("others", "share"), [(0, 0.5), (40, 0.8)])
def test_the_trainers_share_is_of_what_others_leave(others: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB the trainer had 50 or 48 at most and holds 30, caches included; an engine beside it has `others`."""
    gib = 2**30
    monkeypatch.setattr(memory, "rss_mb", lambda: 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((100 - others - 30) * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: (50 if not others else 48) * gib)
    assert memory.metrics(torch.device("cuda", 0))["memory/share"] == pytest.approx(share)
