"""Checkpoints: what is written and read back, which ones stay, and what a process that is killed leaves behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from rlkit_authors.contracts import example_batch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.base.files import MANIFEST
from rlkit.cli.main import main
from rlkit.distributed.ranks import Ranks
from rlkit.models.checkpoint_schema import Numbers, RunState
from rlkit.models.checkpoints import load_checkpoint, newest_intact, open_checkpoint, tensor_shapes, verify
from rlkit.models.store import Store, name_of
from rlkit.models.tensor_files import TensorReader, TensorWriter, _sync, file_of, read_header
from rlkit.recipe import Save
from rlkit.run.checkpoint.write import Best, Saver, Writer
from rlkit.run.folder import RunFolder
from rlkit.run.metrics_log import MetricsLog
from rlkit.run.record import RunRecord
from rlkit.run.session import Session
from tests.conftest import read_jsonl

SHORT = (
    "--recipe=quickstart", "--train.steps=1", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation.limit=1", "--validation.samples=0", "--fabric.accelerator=cpu", "--train.schedule=Constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks(Fabric(accelerator="cpu", devices=1))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "checkpoints"))


def state(step: int, best: Best | None = None) -> RunState:
    return RunState(step=step, recipe={}, numbers=Numbers(version=step), best=best)


def content(step: int) -> Callable[[Best | None], tuple[dict[str, torch.Tensor], RunState]]:
    return lambda best: ({"w": torch.full((3,), float(step))}, state(step, best))


def writer_after(store: Store, ranks: Ranks, *steps: int, **section: Any) -> Writer:
    """Write checkpoints of these steps, all of which stay."""
    writer = Writer(store, Save(**{"keep_last": 99, **section}), ranks)
    for step in steps:
        writer.save(*content(step)(None))
        writer.finish()
    writer.close()
    return writer


def steps(store: Store) -> list[int]:
    return [int(name[5:]) for name in store.names()]


def loaded(store: Store, name: str) -> float:
    into = {"w": torch.zeros(3, requires_grad=True)}  # as weights have it that are trained
    load_checkpoint(store, name, into)
    return float(into["w"][0].detach())


def test_tensors_of_every_type_come_back_bit_for_bit(store: Store, ranks: Ranks) -> None:
    tensors = {
        "a.f32": torch.randn(4, 3),
        "b.bf16": torch.randn(5).bfloat16(),
        "c.i64": torch.tensor([1 << 60, -7]),
        "d.bool": torch.tensor([True, False, True]),
        "e.scalar": torch.tensor(3.5),
        "f.empty": torch.zeros(0, 4),
        "g.transposed": torch.randn(3, 4).T,
        "h.nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    writer = Writer(store, Save(), ranks)
    writer.save(tensors, state(7))
    writer.finish()
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(store, "step-000007", into)
    for name, tensor in tensors.items():
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (into[name], tensor))), name
    file_tensors = load_file(Path(store.root) / "step-000007" / file_of(0))
    assert torch.equal(file_tensors["a.f32"], tensors["a.f32"])
    assert sorted(p.name for p in (Path(store.root) / "step-000007").iterdir()) == [
        "manifest.json", file_of(0), "state.json",
    ]  # fmt: skip


def write_part(store: Store, rank: int, tensor: torch.Tensor, start: int, end: int) -> None:
    """Write rows of a tensor as a rank of a sharded run does."""
    part = tensor[start:end]
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size([start, 0]), part.shape), TensorProperties(dtype=tensor.dtype), tensor.shape
    )
    item = WriteItem(MetadataIndex("w", [start, 0]), WriteItemType.SHARD, tensor_data=data)
    folder = store.path("step-000001")
    store.fs.makedirs(folder, exist_ok=True)
    planner: Any = SimpleNamespace(resolve_data=lambda item: part)
    TensorWriter(store.fs, folder).write_data(SavePlan([item], storage_data=rank), planner)


def test_parts_of_several_ranks_make_the_whole(store: Store) -> None:
    """Five rows over four ranks: two, two, one and none; then a rank's file is missing, and one overlaps another."""
    tensor = torch.arange(15.0).reshape(5, 3)
    for rank, (start, end) in enumerate(((0, 2), (2, 4), (4, 5), (5, 5))):
        write_part(store, rank, tensor, start, end)
    files = [file_of(rank) for rank in range(4)]
    [metadata] = TensorReader(store.fs, store.path("step-000001"), files).read_metadata().state_dict_metadata.values()
    assert metadata.size == tensor.shape  # type: ignore[union-attr]
    (Path(store.path("step-000001")) / MANIFEST).write_text(
        json.dumps({"format": 2, "files": dict.fromkeys((*files, "state.json"), "0" * 32)})
    )
    into = {"w": torch.zeros(5, 3)}
    load_checkpoint(store, "step-000001", into)
    assert torch.equal(into["w"], tensor)
    for wrong in (files[:1] + files[2:], files[:2]):
        if wrong == files[:2]:
            write_part(store, 1, tensor, 1, 5)
        with pytest.raises(CheckpointError, match="the chunks of w in its files make no full tensor"):
            TensorReader(store.fs, store.path("step-000001"), wrong).read_metadata()


@pytest.mark.parametrize(
    ("size", "length", "problem"),
    [
        (10, 3, "its header would have 3 bytes"),
        (10, 2, "KeyError('__metadata__')"),
        (1 << 40, 100_000_001, "its header would have 100000001 bytes"),
        (1 << 40, 100_000_000, "KeyError('__metadata__')"),
    ],
)
def test_a_header_is_shorter_than_its_file_and_100_megabytes(size: int, length: int, problem: str) -> None:
    """Of all these only `{}` is there to be read."""
    content = struct.pack("<Q", length) + b"{}"
    fs: Any = SimpleNamespace(size=lambda path: size, open=lambda path, mode: io.BytesIO(content))
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        read_header(fs, "folder", file_of(0))


@pytest.mark.parametrize("kept", [8, 7])
def test_a_tensor_lies_within_its_file(kept: int) -> None:
    """Two numbers of four bytes each, of which the file has all or all but the last byte."""
    sharding_info = json.dumps({"w": {"saved_offsets": [0]}})
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"w": entry, "__metadata__": {"DCP_SHARDING_INFO": sharding_info}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(kept)
    fs: Any = SimpleNamespace(size=lambda path: len(content), open=lambda path, mode: io.BytesIO(content))
    if kept == 8:
        assert read_header(fs, "folder", file_of(0))["w"].start == 8 + len(header)
    else:
        with pytest.raises(CheckpointError, match=r"bytes 0 to 8 of \d+ cannot hold F32 of the shape \[2\]"):
            read_header(fs, "folder", file_of(0))


def test_writes_are_on_disk_before_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync writes what the file has, which without a flush is not all that was written to the stream."""
    sizes: list[int] = []
    monkeypatch.setattr("os.fsync", lambda number: sizes.append(os.fstat(number).st_size))
    with open(tmp_path / "file", "wb") as stream:
        stream.write(b"tensor")
        _sync(stream)
    assert sizes == [6]
    _sync(io.BytesIO())  # of an object store, which writes when it is closed


def test_a_process_without_ranks_is_not_warned_of_them(store: Store, ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer_after(store, ranks, 1)
        assert loaded(store, "step-000001") == 1


def test_names_are_ordered_by_step_and_nothing_else_is_one(store: Store, ranks: Ranks) -> None:
    writer_after(store, ranks, 9, 99_999, 100_000, 1_000_000)
    for folder_name in (os.fsdecode("step-²²²²²²".encode()), "step-12", "step-000011.partial", "step-abcdef"):
        shutil.copytree(Path(store.root) / "step-000009", Path(store.root) / folder_name)
    (Path(store.root) / "step-000012").mkdir()
    assert store.names() == ["step-1000000", "step-100000", "step-099999", "step-000009"]
    assert Store(f"{store.url}/").url == store.url


def test_no_rank_takes_a_checkpoint_without_a_list_of_files(store: Store, ranks: Ranks) -> None:
    """Each of three ranks alone refuses what lists nothing, whatever its share of the files would be."""
    writer_after(store, ranks, 1)
    manifest = Path(store.root) / "step-000001" / MANIFEST
    for text in ('{"format": 2, "files": {}}', '{"format": 2}', "", "[]"):
        manifest.write_text(text)
        for rank in range(3):
            fabric = SimpleNamespace(global_rank=rank, world_size=3)
            alone: Any = SimpleNamespace(fabric=fabric, gather_world=lambda value: [value])
            with pytest.raises(CheckpointError, match="step-000001"):
                verify(store, "step-000001", alone)
    manifest.unlink()
    assert newest_intact(store) == (None, [])


def test_files_that_are_not_as_they_were_written_are_named(store: Store, ranks: Ranks) -> None:
    writer_after(store, ranks, 1, 2)
    tensors = Path(store.root) / "step-000002" / file_of(0)
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    newest, damaged = newest_intact(store)
    assert newest is not None
    assert newest.name == "step-000001"
    assert damaged == [f"{store.url}/step-000002 is damaged: {file_of(0)} does not match its checksum"]
    with pytest.raises(CheckpointError, match="does not match its checksum; .*intact .*step-000001"):
        open_checkpoint(store.url)


def test_later_steps_of_another_run_go_at_the_first_checkpoint(store: Store, ranks: Ranks) -> None:
    """Resumed from step 90 of 100: until step 95 is written 100 stays, and afterwards 95 is the newest."""
    writer_after(store, ranks, 80, 90, 100)
    writer = Writer(store, Save(keep_last=2), ranks, step=90)
    assert steps(store) == [100, 90, 80]
    writer.save(*content(95)(None))
    writer.finish()
    assert steps(store) == [95, 90]
    assert sorted(store.entries()) == ["step-000090", "step-000095"]


def test_a_fresh_run_over_damaged_checkpoints_keeps_its_own(store: Store, ranks: Ranks) -> None:
    writer_after(store, ranks, 5, 6)
    writer = Writer(store, Save(keep_last=1), ranks)
    writer.save(*content(1)(None))
    writer.finish()
    assert steps(store) == [1]


def test_what_a_link_points_to_is_left_alone(store: Store, ranks: Ranks, tmp_path: Path) -> None:
    """Steps 1 and 9 are another run's, linked: 1 is old, 9 abandoned."""
    abandoned = Store(str(tmp_path / "other"))
    writer_after(abandoned, ranks, 1, 9)
    Path(store.root).mkdir()
    for name in abandoned.names():
        (Path(store.root) / name).symlink_to(Path(abandoned.root) / name)
    writer = Writer(store, Save(keep_last=1), ranks, step=1)
    writer.save(*content(2)(None))
    writer.finish()
    assert [p.name for p in Path(store.root).iterdir()] == ["step-000002"]
    assert [loaded(abandoned, name) for name in abandoned.names()] == [9.0, 1.0]


class Killed(BaseException):
    """Stands for the end of the process, which nothing can catch."""


def killed_at(moment: int, url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Go on from 90 of 100 to 95 and another 100, killed before the `moment`-th change of the folder; say if it was."""
    remaining = [moment]

    def tick() -> None:
        if remaining[0] == 0:
            raise Killed
        remaining[0] -= 1

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            tick()
            value = original(*args)
            tick()
            return value

        return wrapped

    with monkeypatch.context() as patch:
        for change in ("write", "withdraw", "finalize", "remove"):
            patch.setattr(Store, change, watched(getattr(Store, change)))
        writer = Writer(Store(url), Save(keep_last=1), ranks, step=90)
        try:
            for step in (95, 100):
                writer.save({"w": torch.full((3,), step + 0.5)}, state(step))
                writer.finish()
        except Killed:
            return True
        finally:
            writer.close()
    return False


def test_a_killed_run_always_has_a_complete_checkpoint(
    store: Store, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is the old run's 100 as long as there is no 95, then what this run was resumed from or wrote."""
    writer_after(store, ranks, 90, 100)
    loads = []
    for moment in range(99):
        url = str(tmp_path / f"killed-{moment}")
        shutil.copytree(store.root, url)
        killed = killed_at(moment, url, ranks, monkeypatch)
        newest, damaged = newest_intact(Store(url))
        assert newest is not None
        assert damaged == []
        loads.append((newest.state.step, loaded(newest.store, newest.name)))
        again = Writer(Store(url), Save(keep_last=1), ranks, step=newest.state.step)
        again.save(*content(101)(None))
        again.finish()
        again.close()
        assert [p.name for p in Path(url).iterdir()] == ["step-000101"]
        if not killed:
            break
    assert [key for key, _ in groupby(loads)] == [(100, 100.0), (90, 90.0), (95, 95.5), (100, 100.5)]
    assert len(loads) > 20


class Slow(Store):
    """A store in which a checkpoint gets its name only once `gate` is open, or not at all while `full`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.gate.set()
        self.full = False

    def finalize(self, partial: str, name: str) -> None:
        self.gate.wait()
        if self.full:
            raise OSError("No space left on device")
        super().finalize(partial, name)


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(str(tmp_path / "slow"))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def saver(slow: Slow, ranks: Ranks, notes: list[str]) -> Iterator[Saver]:
    saver = Saver(Writer(slow, Save(every=0, keep_last=1, keep_best="accuracy"), ranks), notes.append)
    yield saver
    slow.gate.set()
    saver.writer.close()


def after(saver: Saver, step: int, accuracy: float | None) -> dict[str, float]:
    return saver.after(step, {} if accuracy is None else {"accuracy": accuracy}, content(step))


def test_the_last_and_the_best_that_was_written_stay(slow: Slow, saver: Saver) -> None:
    saver.writer.section.every = 1
    for step, accuracy in enumerate((0.5, 0.9, None, 0.7, float("nan"), 0.9), 1):
        assert after(saver, step, accuracy) == {}
        saver.writer.finish()
    assert steps(slow) == [6, 2]
    assert slow.state("step-000006").best == (0.9, 2)


def test_an_unknown_metric_is_refused_after_the_first_scores(saver: Saver) -> None:
    saver.writer.section.keep_best = "reward/men"
    assert saver.after(1, {"reward/failed": 4.0}, content(1)) == {}
    with pytest.raises(RecipeError, match="'reward/men', expected a metric of a step: reward/mean, rollout/length"):
        saver.after(2, {"reward/mean": 0.5, "rollout/length": 3.0}, content(2))


@pytest.mark.parametrize("scored", [{"validation/reward": 0.5, "validation/failed": 0.0}, {"validation/loss": 0.5}])
def test_an_unknown_metric_of_validation_is_refused_after_the_first_scores(
    saver: Saver, scored: dict[str, float]
) -> None:
    """A loss beside completions that all failed says nothing of their metrics."""
    saver.writer.section.keep_best = "validation/lost"
    assert saver.after(1, {"validation/loss": 0.5, "validation/failed": 4.0}, content(1)) == {}
    with pytest.raises(RecipeError, match="'validation/lost', expected a metric of a step"):
        saver.after(2, scored, content(2))


def test_a_checkpoint_that_could_not_be_written_is_not_the_best(slow: Slow, saver: Saver, notes: list[str]) -> None:
    """Steps of 0.5, 0.9 (the disk is full) and 0.7: the best that there is has 0.7."""
    after(saver, 1, 0.5)
    saver.writer.finish()
    slow.full = True
    assert after(saver, 2, 0.9) == {}
    slow.gate.wait()
    assert not saver._attempt(saver.writer.finish)
    assert "No space left" in notes[0]
    assert steps(slow) == [1]
    slow.full = False
    after(saver, 3, 0.7)
    saver.end(4, content(4))
    assert steps(slow) == [4, 3]
    assert slow.state("step-000004").best == (0.7, 3)


def test_the_best_checkpoint_waits_and_others_are_skipped(slow: Slow, saver: Saver) -> None:
    """0.5 is being written when 0.4 comes, which is skipped, and then 0.9, which is not."""
    saver.writer.section.every = 1
    slow.gate.clear()
    after(saver, 1, 0.5)
    saver.writer.best = (0.45, 0)
    assert after(saver, 2, 0.4) == {"checkpoint/skipped": 1.0}
    threading.Timer(0.1, slow.gate.set).start()
    assert after(saver, 3, 0.9) == {}
    saver.end(3, content(3))
    assert steps(slow) == [3]
    assert saver.writer.best == (0.9, 3)


def test_what_is_being_written_may_be_the_better_one(slow: Slow, saver: Saver) -> None:
    slow.gate.clear()
    after(saver, 1, 0.9)
    threading.Timer(0.1, slow.gate.set).start()
    assert after(saver, 2, 0.7) == {}
    assert saver.writer.best == (0.9, 1)
    assert steps(slow) == [1]


@pytest.mark.parametrize("every", [0, 100])
def test_the_last_step_always_has_a_checkpoint(slow: Slow, saver: Saver, every: int) -> None:
    saver.writer.section.every = every
    assert after(saver, 2, None) == {}
    saver.end(2, content(2))
    assert steps(slow) == [2]
    saver.end(2, lambda best: pytest.fail("step 2 is saved already"))


def test_the_last_step_is_tried_again(slow: Slow, saver: Saver, notes: list[str]) -> None:
    """It is due, but its writing fails; then there is room."""
    saver.writer.section.every = 1
    slow.full = True
    after(saver, 1, None)
    assert not saver._attempt(saver.writer.finish)
    slow.full = False
    slow.gate.clear()
    after(saver, 2, None)
    threading.Timer(0.1, slow.gate.set).start()
    saver.end(3, content(3))
    assert steps(slow) == [3]
    slow.full = True
    with pytest.raises(CheckpointError, match=r"step-000004 cannot be written: No space .*newest complete .*3"):
        saver.end(4, content(4))


def test_three_failures_in_a_row_end_the_run(slow: Slow, saver: Saver, notes: list[str]) -> None:
    saver.writer.section.every = 1
    metrics = []
    for step, full in enumerate((True, True, False, True, True, True), 1):
        slow.full = full
        metrics.append(after(saver, step, None))
        saver.writer._thread.submit(lambda: None).result()  # the write before it has ended
        assert slow.entries(".partial") == []
    assert [bool(f) for f in metrics] == [False, True, True, False, True, True]
    assert len(notes) == 4
    with pytest.raises(CheckpointError, match="No space left"):
        after(saver, 7, None)


def test_a_folder_error_of_one_rank_keeps_all_from_writing(store: Store) -> None:
    """As the second of two ranks sees it, which has no trouble itself."""
    problems = ["PermissionError: denied", None]
    second: Any = SimpleNamespace(
        fabric=SimpleNamespace(world_size=1, is_global_zero=False, global_rank=1),
        gather_world=lambda problem: problems,
        from_first=lambda work: work(),
    )
    writer = Writer(store, Save(), second)
    with pytest.raises(CheckpointError, match="cannot be written: PermissionError: denied; there is none before it"):
        writer.save(*content(1)(None))
    assert not writer.finish()


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_what_a_rank_could_not_write_is_removed_by_the_first(store: Store, when: str) -> None:
    """As the first of two ranks sees it, which has no trouble itself."""
    first: Any = SimpleNamespace(
        fabric=SimpleNamespace(world_size=1, is_global_zero=True, global_rank=0),
        gather_world=lambda problem: [problem, "the other is full" if when == "before" else None],
        from_first=lambda work: work(),
    )
    writer = Writer(store, Save(), first)
    writer._group = SimpleNamespace(group=None, gather_world=lambda note: [note, ("the other is full", {})])  # type: ignore[assignment]

    def save() -> None:
        writer.save(*content(1)(None))
        writer.finish()

    with pytest.raises(CheckpointError, match="the other is full"):
        save()
    assert store.entries(".partial") == []


def test_a_batch_without_a_finite_gradient_is_kept_as_data(tmp_path: Path) -> None:
    """Fields that share their memory, as old and trainer's log-probs do, are written apart."""
    batch = example_batch()
    batch.old_logps = batch.trainer_logps = batch.rollout_logps
    notes: list[str] = []
    record = RunRecord(RunFolder(tmp_path, ""), SimpleNamespace(note=notes.append), first=True)  # type: ignore[arg-type]
    record.outcome.steps = 2
    session = Session(record)
    progress: Any = SimpleNamespace(
        failed=lambda metrics: False,
        see=lambda *_: (),
        diagnosed=False,
        diagnosis=lambda: None,
        rewards=SimpleNamespace(change=lambda: None),
    )
    session.progress = progress
    result: Any = SimpleNamespace(batch=batch, rollouts=SimpleNamespace(errors={}))
    session._check_step(None, result, {"memory/share": 0.0, "update/not_finite": 1.0})  # type: ignore[arg-type]
    [file] = tmp_path.iterdir()
    assert file.name == "not-finite-00002.rank0.safetensors"
    kept = load_file(file)
    assert kept.keys() == batch.tensors().keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in batch.tensors().items())
    assert notes == [f"warning: step 2 had a gradient that is not finite; its batch is kept: {file.name}"]


def test_metrics_are_cut_by_step_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    """Steps 3 to 5 are there (the run was resumed into this folder); it goes on from step 4."""
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "x": step / 2}) for step in (3, 4, 4, 2, 5)]
    path.write_text("\n".join([rows[0], '{"x": 1}', *rows[1:4], "[4]", rows[4], '{"step": 4, "x"']))
    log = MetricsLog(path, [], last_step=4)
    log.write(5, {"x": 9.0})
    log.close("ok")
    assert read_jsonl(path) == [{"step": 3, "x": 1.5}, {"step": 4, "x": 2.0}, {"step": 5, "x": 9.0}]


@pytest.mark.slow
def test_a_run_resumed_into_another_folder_has_each_step_once(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert main(["fit", *SHORT, f"--out={old}"]) == 0
    assert main(["fit", *SHORT, f"--out={new}", f"--resume={old}", "--train.steps=2"]) == 0
    assert main(["fit", *SHORT, f"--out={new}", "--resume=auto", "--train.steps=3"]) == 0
    assert [row["step"] for row in read_jsonl(new / "metrics.jsonl")] == [2, 3]
    assert steps(Store(str(new / "checkpoints"))) == [3, 2]
    assert steps(Store(str(old / "checkpoints"))) == [1]


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "final" / "model.safetensors")


@pytest.mark.slow
def test_without_optimizer_state_moments_start_from_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW's first step changes a weight by lr * g / (|g| + eps): by 1e-3. The second, after a first, does not."""
    changes = {}
    for held in ("true", "false"):
        out = tmp_path / held
        fit = ["fit", *SHORT, "--train.warmup_steps=0", f"--out={out}", f"--save.optimizer={held}"]
        assert main(fit) == 0
        before = final_weights(out)
        capsys.readouterr()
        assert main([*fit, "--resume=auto", "--train.steps=2"]) == 0
        warned = capsys.readouterr().out.count("warning: the checkpoint has no optimizer state (save.optimizer: false)")
        assert warned == (held == "false")
        after = final_weights(out)
        changes[held] = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    restarted = {held: ((change - 1e-3).abs() < 1e-5).float().mean() for held, change in changes.items()}
    assert restarted["false"] > 0.8
    assert restarted["true"] < 0.1
    sizes = {}
    for held in changes:
        store = Store(str(tmp_path / held / "checkpoints"))
        assert any("/optimizer." in name for name in tensor_shapes(store, "step-000001")) == (held == "true")
        sizes[held] = (Path(store.root) / "step-000001" / file_of(0)).stat().st_size
    assert sizes["true"] / sizes["false"] == pytest.approx(3, abs=0.05)  # weights and AdamW's two moments


def test_going_back_leaves_the_abandoned_steps_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 1 to 3, then from step 1 with another learning rate to step 2: that is what goes on and is exported."""
    out = tmp_path / "run"
    fit = ["fit", *SHORT, f"--out={out}", "--save.every=1", "--save.keep_last=3"]
    assert main([*fit, "--train.steps=3"]) == 0
    back = [*fit, f"--resume={out}/checkpoints/step-000001", "--train.steps=2", "--train.lr=0.5"]
    assert main(back) == 0
    assert (
        "changed: train.lr: 0.001 in the checkpoint, 0.5 now; it holds from the next step on\n"
        in capsys.readouterr().out
    )
    assert steps(Store(str(out / "checkpoints"))) == [2, 1]
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    (out / "final").rename(tmp_path / "final")
    assert main(["export", f"--checkpoint={out}", f"--out={tmp_path / 'exported'}"]) == 0
    assert "step-000002 is exported" in capsys.readouterr().out
    exported, final = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", tmp_path / "final")
    )
    assert all(torch.equal(exported[name], final[name]) for name in final)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["use_cache"] is True  # answers of the saved model are as fast as the base's


def test_an_unreachable_file_system_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(url: str) -> None:
        raise ImportError("no client for it\nTraceback of the client")

    monkeypatch.setattr("fsspec.core.url_to_fs", unreachable)
    with pytest.raises(CheckpointError, match=r"^'s3://kept/' cannot hold checkpoints: no client for it\. Use"):
        Store("s3://kept/")


def test_runs_do_not_mix_their_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert main(["fit", *SHORT, f"--out={tmp_path / 'a'}", f"--save.folder={kept}"]) == 0
    assert main(["fit", *SHORT, f"--out={tmp_path / 'b'}", f"--save.folder={kept}"]) == 2
    assert (
        f"{kept} holds another run; choose a new folder, or continue from its step-000001 with"
        in capsys.readouterr().err
    )
    assert main(["fit", *SHORT, f"--out={tmp_path / 'c'}", "--save.folder=hdfs://nowhere/kept"]) == 2
    message = capsys.readouterr().err
    assert "save.folder: 'hdfs://nowhere/kept' cannot hold checkpoints: " in message
    assert not (tmp_path / "c").exists()
    assert name_of(1) == "step-000001"
