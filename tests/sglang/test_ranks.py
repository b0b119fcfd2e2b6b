"""Trainers that divide matrices and data, two by two, with real SGLang servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import FAST, read_jsonl, rlkit
from tests.sglang.test_fit import check_versions

FOUR = ("--fabric.devices=4", "--fabric.strategy=FSDP2", "--fabric.strategy.tensor_parallel=2")
LORA = ("--model.lora.rank=4", "--train.lr=0.01", "--rollout.engine.launch.adapter_only=true")


@pytest.mark.parametrize(
    ("engine", "servers", "options"), [("SGLangServer", 1, LORA), ("SGLangEngine", 1, ())], ids=["adapters", "engines"]
)
def test_four_ranks_train_two_by_two(engine: str, servers: int, options: tuple[str, ...], tmp_path: Path) -> None:
    """Weights are checked at each sync, by passes in which all ranks take part.

    The base is sent to a server that has none, which ranks without a server must know; an engine is started for each
    tensor-parallel group, whose first rank alone samples.
    """
    words = ("--recipe=quickstart", f"--rollout.engine={engine}", *FAST, "--validation.limit=4", "--out=out")
    done = rlkit("fit", *words, *FOUR, *options, "--save.every=1", "--save.keep_best=validation/reward",
                 "--validation.every=1", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["engine/proof_gap"] < 1e-4
        assert row["engine/servers"] == servers
        assert row["rollout/failed"] == row["engine/restarts"] == row["engine/retried"] == 0
        assert row["rollout/samples"] == 16
    check_versions(tmp_path / "out", 2)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["validation"]["after"]["failed"] == 0
    [best] = (tmp_path / "out" / "checkpoints").glob("step-000002")
    assert best.is_dir()
