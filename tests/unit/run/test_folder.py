"""What a run folder keeps of the trajectories, and who may read it."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.registry import load_plugins
from rlkit.run.folder import RunFolder
from rlkit.train.saved import first_groups
from rlkit.types import Prompt, Score, StopReason, Trajectory, Turn
from tests.conftest import read_jsonl


def trajectory(group: int, text: str = "7", error: str | None = None) -> Trajectory:
    prompt = Prompt(f"p{group}", [{"role": "user", "content": "?"}])
    score = Score(None, error=error) if error else Score(1.0)
    return Trajectory(
        prompt, group, [5, 6], [False, True], [0.0, -0.5], [-1, 0], StopReason.STOP, text=text, score=score
    )


@pytest.mark.parametrize(
    ("limit", "selected"), [(None, [2, 0, 2, 1]), (4, [2, 0, 2, 1]), (3, [0, 1]), (2, [0, 1]), (1, [0])]
)
def test_whole_groups_are_kept_within_the_limit(limit: int | None, selected: list[int]) -> None:
    """Group 2 has two trajectories, which do not fit beside the others' two in three."""
    assert [t.group for t in first_groups([trajectory(g) for g in (2, 0, 2, 1)], limit)] == selected


def test_one_group_is_kept_though_it_is_larger() -> None:
    assert len(first_groups([trajectory(3) for _ in range(5)], 2)) == 5


def test_a_start_that_made_no_step_leaves_its_folder_free(tmp_path: Path) -> None:
    """As after a refused reward, or an error in the first step: `metrics.jsonl` is empty, and a validation was made."""
    registry, failed, again = (
        load_plugins(entry_points=False),
        RunFolder(tmp_path, "a: 1\n"),
        RunFolder(tmp_path, "a: 2\n"),
    )
    failed.create(registry)
    (tmp_path / "metrics.jsonl").touch()
    failed.dump("validation-before", [trajectory(0)])
    failed.result({"status": "failed", "steps": 0})
    name = failed.run_id()
    again.create(registry)
    assert again.run_id() != name
    assert (tmp_path / "recipe.yaml").read_text() == "a: 2\n"
    assert not (tmp_path / "result.json").exists()
    assert not list((tmp_path / "rollouts").iterdir())


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"step": 1}\n'),
        ("result.json", '{"status": "failed", "steps": 3}'),  # the disk was full: all else is lost
        ("result.json", "{"),
        ("result.json", "[]"),
        ("rollouts/step-00001.jsonl.gz", ""),
        ("rollouts/step-00001.rank1.jsonl.gz", ""),
    ],
)
def test_a_folder_with_a_step_is_refused_and_left_as_it_is(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / file).write_text(text)
    with pytest.raises(RecipeError, match="holds another run"):
        RunFolder(tmp_path, "").create(load_plugins(entry_points=False))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]


def test_a_resumed_run_has_no_result_until_it_ends(tmp_path: Path) -> None:
    """If it is killed, nothing says that it ended well: not to a report, a sweep, an export or the next resume."""
    folder, registry = RunFolder(tmp_path, ""), load_plugins(entry_points=False)
    folder.create(registry)
    folder.dump("validation-before", [trajectory(0)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.result({"status": "ok", "steps": 1})
    folder.create(registry, resumed=True)
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["validation-before.jsonl.gz"]


def test_rollouts_after_a_step_are_removed_on_all_ranks(tmp_path: Path) -> None:
    kept = [
        "media", "step-00001.jsonl.gz", "step-00002.jsonl.gz", "step-00002.rank1.jsonl.gz", "step-00003.mine.jsonl.gz",
        "step-00003.txt", "validation-00002.parquet", "validation-before.jsonl.gz", "validation-before.rank1.parquet",
    ]  # fmt: skip
    removed = (
        "step-00003.jsonl.gz", "step-00003.rank12.jsonl.gz", "step-100000.jsonl.gz", "validation-00004.jsonl.gz",
        "validation-00004.rank1.parquet", "validation-after.jsonl.gz", "validation-after.rank1.parquet",
    )  # fmt: skip
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for name in (*kept, *removed):
        (rollouts / name).touch()
    RunFolder(tmp_path, "").remove_rollouts_after(2)
    assert sorted(path.name for path in rollouts.iterdir()) == kept


def test_a_result_is_written_where_others_have_filled_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes as many bytes as the run's own files had at its start."""
    folder, write = RunFolder(tmp_path / "run", "recipe: here\n"), Path.write_bytes

    def used() -> int:
        return sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())

    def write_bytes(path: Path, data: bytes) -> int:
        if used() + len(data) > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    folder.create(load_plugins(entry_points=False))
    size = used()
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space"):
        folder.dump("step-00001", [trajectory(0)])
    folder.result({"status": "failed", "error": "x" * 5_000})
    folder.result({"status": "failed", "error": "y" * 5_000})
    assert json.loads((folder.path / "result.json").read_text())["error"] == "y" * 5_000
    assert {path.name for path in folder.path.iterdir()} == {
        "recipe.yaml", "environment.json", "rollouts", "result.json",
    }  # fmt: skip


def test_rollouts_are_compressed_and_take_any_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "recipe: here\n")
    folder.create(load_plugins(entry_points=False))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.dump("step-00001", [trajectory(0, "\ud800 猫", "POST http://me:pw@host failed " + "x" * 10**6)])
    [row] = read_jsonl(folder.path / "rollouts" / "step-00001.jsonl.gz")
    assert row["text"] == "\ud800 猫"
    assert row["error"].startswith("POST http://***@host failed xxx")
    assert len(row["error"]) < 2100
    assert [p.name for p in (folder.path / "rollouts").iterdir()] == ["step-00001.jsonl.gz"]


def test_bytes_of_a_step(tmp_path: Path) -> None:
    """64 rollouts of quickstart's shape take 4,475 bytes, and took 4,823 with spaces between values."""
    draw = random.Random(0)
    logps = [draw.random() for _ in range(24)]  # a trained policy repeats itself
    trajectories = []
    for number in range(64):
        group = number // 8
        prompt = Prompt(f"1{group} + 3 = ?", [{"role": "user", "content": f"1{group} + 3 = ?"}], str(13 + group))
        ids = [*range(200, 222), 2, 2, 2, 2, 220, draw.randrange(15, 25), draw.randrange(15, 25), 258]
        values = [0.0] * 22 + draw.choices(logps, k=8)
        advantages = [0.0] * 22 + [draw.choice(logps)] * 8
        credit = {"advantages": advantages, "trainer_logps": [-round(x, 5) for x in values]}
        trajectories.append(
            Trajectory(
                prompt, group, ids, [False] * 22 + [True] * 8, [-x for x in values], [-1] * 22 + [3] * 8,
                StopReason.STOP, [Turn("user", 0, 22), Turn("assistant", 22, 30)], f"#### {number}",
                score=Score(1.0, {"accuracy": 1.0}), credit=credit,
            )
        )  # fmt: skip
    (tmp_path / "rollouts").mkdir()
    RunFolder(tmp_path, "").dump("step-00001", trajectories)
    [path] = (tmp_path / "rollouts").iterdir()
    assert len(read_jsonl(path)) == 64
    assert path.stat().st_size < 4600
