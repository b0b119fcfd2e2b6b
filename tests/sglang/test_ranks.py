"""Two-by-two tensor- and data-parallel trainers with real SGLang servers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import FAST, read_jsonl, rlkit
from tests.sglang.test_fit import check_versions

FOUR = ("--fabric.devices=4", "--fabric.strategy=FSDP2", "--fabric.strategy.tensor_parallel=2")
LORA = ("--model.lora.rank=4", "--train.lr=0.01", "--rollout.engine.launch.adapter_only=true")


def test_four_ranks_train_two_by_two(tmp_path: Path) -> None:
    """Weights are checked at each sync, by passes in which all ranks take part.

    The base is sent to a server that has none, which ranks without a server must know.
    """
    words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", *FAST, "--validation.limit=4", "--out=out")
    best = ("--save.every=1", "--save.keep_best=validation/reward", "--validation.every=1")
    process = rlkit("fit", *words, *FOUR, *LORA, *best, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["engine/weight_gap"] < 1e-4
        assert row["engine/servers"] == 1
        assert row["rollout/failed"] == row["engine/restarts"] == row["engine/retried"] == 0
        assert row["rollout/samples"] == 16
    check_versions(tmp_path / "out", 2)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["validation"]["after"]["failed"] == 0
    assert (tmp_path / "out" / "checkpoints" / "step-000002").is_dir()
