"""`rlkit fit` with vLLM from end to end: it learns, even if its server is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlkit_engine_vllm import VllmServer

from tests.conftest import read_jsonl
from tests.ends import WAYS, leaves_nothing
from tests.served import Trainer, fit_structured_at, save_teacher, served_as_loaded
from tests.sglang.test_fit import (
    fit_and_kill,
    fit_while_a_server_is_dead,
    run_ahead,
    send_changes,
    sharded_lora,
)

pytestmark = pytest.mark.timeout(1800)  # each start of a server takes minutes on a busy machine


def test_vllm_server_learns_while_its_server_is_killed(tmp_path: Path) -> None:
    """Weights travel as changes, of the layers that adapters change; a server that is started again gets full ones."""
    lora = ("--model.lora.rank=16", "--model.lora.targets=[down_proj]", "--train.lr=0.01")
    validation = fit_and_kill(
        tmp_path, 24, 10, "--rollout.engine=VllmServer", "--rollout.engine.transport=changes", *lora
    )
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    restarts = rows[-1]["engine/restarts"]
    assert 2 <= rows[-1]["engine/full_syncs"] <= restarts + 1
    assert sum(0 < row["engine/changed_share"] < 0.3 for row in rows) >= len(rows) - restarts
    assert 0.25 <= validation["before"]["sampled_accuracy"] <= 0.5
    assert validation["after"]["sampled_accuracy"] >= validation["before"]["sampled_accuracy"] + 0.2


def test_steps_go_on_while_one_of_two_servers_is_dead(tmp_path: Path) -> None:
    fit_while_a_server_is_dead(tmp_path, "VllmServer")


def test_rollouts_run_ahead_on_a_running_server(tmp_path: Path, engine: VllmServer) -> None:
    run_ahead(tmp_path, *at(engine))


def test_a_run_sends_only_what_has_changed(tmp_path: Path, engine: VllmServer) -> None:
    send_changes(tmp_path, *at(engine))


@pytest.mark.parametrize("quantization", ["null", "nf4"])
def test_two_ranks_with_adapters_share_a_running_server(tmp_path: Path, engine: VllmServer, quantization: str) -> None:
    sharded_lora(tmp_path, *at(engine), f"--model.quantization={quantization}")


def test_structured_answers_train_on_a_running_server(tmp_path: Path, trainer: Trainer, engine: VllmServer) -> None:
    fit_structured_at(trainer, engine, tmp_path)


@pytest.mark.parametrize(("end", "moment"), WAYS)
def test_a_server_leaves_no_files_and_no_memory(tmp_path: Path, end: str, moment: str) -> None:
    leaves_nothing(tmp_path, end, moment, "--rollout.engine=VllmServer")


@pytest.mark.parametrize("loss", ["PolicyGradient", "Distillation"])
def test_a_teacher_on_vllm_teaches_as_one_that_is_loaded(
    tmp_path: Path, trainer: Trainer, engine: VllmServer, loss: str
) -> None:
    trainer.publish(engine)  # other runs may have used the server
    save_teacher(trainer.policy, tmp_path)
    served_as_loaded(tmp_path, engine.fleet.owned[0].url, loss, "--teacher.engine=VllmServer")


def at(engine: VllmServer) -> tuple[str, ...]:
    """Return the options by which a run uses a server that another one has started."""
    return ("--rollout.engine=VllmServer", f"--rollout.engine.urls=[{engine.fleet.owned[0].url}]")
