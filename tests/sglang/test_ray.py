"""An SGLang server on a node of a Ray cluster, where other machines can reach it."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import FAST, read_jsonl, rlkit
from tests.ray_cluster import started_cluster


def test_a_server_on_another_node_has_the_weights(tmp_path: Path) -> None:
    """It takes them over a process group, and the calls of the run alone, which have its key."""
    with started_cluster(tmp_path / "site") as cluster:
        on_ray = ("--launcher=Ray", f"--launcher.address={cluster.address}", "--fabric.devices=1")
        words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", *FAST, *on_ray, "--out=out")
        process = rlkit("fit", *words, "--fabric.accelerator=cpu", cwd=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert (row["rollout/failed"], row["engine/servers"]) == (0, 1)
