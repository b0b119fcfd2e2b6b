"""What a run folder keeps of the trajectories, and who may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.registry import load_plugins
from rlkit.run.folder import RunFolder, first_groups
from rlkit.types import Prompt, Score, StopReason, Trajectory
from tests.conftest import read_jsonl


def trajectory(group: int, text: str = "7", error: str | None = None) -> Trajectory:
    prompt = Prompt(f"p{group}", [{"role": "user", "content": "?"}])
    score = Score(None, error=error) if error else Score(1.0)
    return Trajectory(
        prompt, group, [5, 6], [False, True], [0.0, -0.5], [-1, 0], StopReason.STOP, text=text, score=score
    )


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [2, 0, 2, 1]), (4, [2, 0, 2, 1]), (3, [0, 1]), (2, [0, 1]), (1, [0])]
)
def test_whole_groups_are_kept_within_the_limit(limit: int | None, kept: list[int]) -> None:
    """Group 2 has two trajectories, which do not fit beside the others' two in three."""
    assert [t.group for t in first_groups([trajectory(g) for g in (2, 0, 2, 1)], limit)] == kept


def test_one_group_is_kept_though_it_is_larger() -> None:
    assert len(first_groups([trajectory(3) for _ in range(5)], 2)) == 5


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
