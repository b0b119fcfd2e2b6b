"""`rlkit fit` with SGLang from end to end: it learns, even if its server is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_servers.weight_check import TOLERANCES

from rlkit.engines import SGLangServer
from tests.conftest import FAST, read_jsonl, rlkit
from tests.ends import WAYS, leaves_nothing, supervisors, wait_for_steps
from tests.served import Trainer, children, fit_structured_at

pytestmark = pytest.mark.timeout(1800)  # each start of a server takes minutes on a busy machine


def check_versions(out: Path, steps: int) -> None:
    """Nothing was learned from tokens of other weights than the step's own."""
    for number in range(1, steps + 1):
        for row in read_jsonl(out / "rollouts" / f"step-{number:05d}.jsonl.gz"):
            assert {v for v, chosen in zip(row["versions"], row["mask"], strict=True) if chosen} == {number - 1}


def fit_and_kill(folder: Path, steps: int, step: int, *words: str) -> dict[str, Any]:
    """Run `fit`, kill a server after one of the steps, at any point, and return the validation."""
    options = ("--recipe=quickstart", f"--train.steps={steps}", "--validation.limit=100", "--out=out", *words)
    run = subprocess.Popen((sys.executable, "-m", "rlkit", "fit", *options), cwd=folder)
    metrics = folder / "out" / "metrics.jsonl"
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert run.poll() is None
            time.sleep(0.05)
        os.kill(children(supervisors(run.pid)[-1])[0], signal.SIGKILL)
        assert run.wait(300) == 0
    finally:
        run.kill()
    rows = read_jsonl(metrics)
    assert rows[-1]["engine/restarts"] >= 1  # one that fails by itself is restarted as well, with a warning
    assert sum(row["rollout/failed"] for row in rows) == 0
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    check_versions(folder / "out", steps)
    validation: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())["validation"]
    return validation


def test_sglang_server_learns_while_its_server_is_killed(tmp_path: Path) -> None:
    """Weights travel as changes; the server that is started again gets full ones."""
    validation = fit_and_kill(tmp_path, 24, 10, "--rollout.engine=SGLangServer", "--rollout.engine.transport=changes")
    assert 0.25 <= validation["before"]["sampled_accuracy"] <= 0.5
    assert validation["after"]["sampled_accuracy"] >= validation["before"]["sampled_accuracy"] + 0.2


def test_a_base_in_four_bits_is_sent_again_after_a_restart(tmp_path: Path) -> None:
    """Adapters travel alone over its dequantized weights, also in a run that is resumed with another server."""
    alone = ("--rollout.engine=SGLangServer", "--rollout.engine.launch.adapter_only=true")
    lora = ("--model.quantization=nf4", "--model.lora.rank=16", "--train.lr=0.01", "--train.schedule=Constant")
    validation = fit_and_kill(tmp_path, 16, 5, *alone, *lora)
    assert validation["after"]["sampled_accuracy"] >= validation["before"]["sampled_accuracy"] + 0.1
    words = ("--recipe=quickstart", *alone, *lora, "--validation.limit=100", "--train.steps=18", "--resume=auto")
    process = rlkit("fit", *words, "--out=out", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 19)]
    assert all(row["mismatch/max"] < 1e-4 and row["engine/weight_gap"] < 1e-4 for row in rows)


def fit_while_a_server_is_dead(folder: Path, engine: str) -> None:
    """Run `fit` with two servers and kill one; the new one is stopped until three more steps are made, then joins."""
    options = ("--recipe=quickstart", f"--rollout.engine={engine}", "--rollout.engine.servers=2", *FAST)
    words = ("--train.steps=5000", "--validation=null", "--out=out")
    with subprocess.Popen((sys.executable, "-m", "rlkit", "fit", *options, *words), cwd=folder) as run:
        try:
            wait_for_steps(run, folder, 2)
            before = supervisors(run.pid)
            os.kill(children(before[-1])[0], signal.SIGKILL)
            new = new_server(run, before)
            os.kill(new, signal.SIGSTOP)
            held = len(wait_for_steps(run, folder, 3))
            rows = wait_for_steps(run, folder, held + 3)
            assert [row["engine/servers_down"] for row in rows[held:]] == [1] * len(rows[held:])
            os.kill(new, signal.SIGCONT)
            while rows[-1]["engine/servers_down"]:
                rows = wait_for_steps(run, folder, len(rows) + 1)
            run.send_signal(signal.SIGINT)
            assert run.wait(120) == 130
        finally:
            run.kill()
    assert {row["engine/servers"] for row in rows} == {2}
    assert all(row["rollout/failed"] == 0 for row in rows)
    assert all(row["mismatch/max"] < 1e-3 for row in rows)  # 2e-4 after 200 steps of this policy
    check_versions(folder / "out", len(rows))


def test_steps_go_on_while_one_of_two_servers_is_dead(tmp_path: Path) -> None:
    fit_while_a_server_is_dead(tmp_path, "SGLangServer")


def new_server(run: subprocess.Popen[bytes], supervisors_before: list[int]) -> int:
    """Return the server that a run has started in place of another one."""
    while True:
        for supervisor in supervisors(run.pid):
            if supervisor not in supervisors_before and children(supervisor):
                return children(supervisor)[0]
        assert run.poll() is None
        time.sleep(0.01)


def send_changes(folder: Path, *engine: str) -> None:
    """Run `fit` in bfloat16 at a low rate; a checksum that is not the trainer's would count as a restart."""
    words = ("--recipe=quickstart", *engine, "--rollout.engine.transport=changes", *FAST)
    low = ("--rollout.engine.launch.dtype=bfloat16", "--train.lr=1e-5", "--train.steps=4", "--out=out")
    process = rlkit("fit", *words, *low, cwd=folder)
    assert process.returncode == 0, process.stderr
    rows = read_jsonl(folder / "out" / "metrics.jsonl")
    assert all(row["engine/full_syncs"] == 1 and row["engine/restarts"] == 0 for row in rows)
    assert all(0 < row["engine/changed_share"] < 0.3 for row in rows[1:])
    tolerance = TOLERANCES[torch.bfloat16]
    gaps = [(row["mismatch/mean"], row["engine/weight_gap"]) for row in rows]
    assert all(mean < tolerance.mean and largest < tolerance.max for mean, largest in gaps), gaps
    check_versions(folder / "out", 4)


def test_a_run_sends_only_what_has_changed(tmp_path: Path) -> None:
    send_changes(tmp_path, "--rollout.engine=SGLangServer")


def test_sglang_learns_from_a_sharded_trainer(tmp_path: Path) -> None:
    """Two ranks under FSDP2 with an engine each, one of which is killed, learn as much as with TorchEngine."""
    ranks = ("--fabric.devices=2", "--fabric.strategy=fsdp2", "--rollout.engine.launch.release_memory=true")
    words = ("--rollout.engine=SGLangEngine", "--train.prompts_per_step=24")
    validation = fit_and_kill(tmp_path, 14, 6, *words, *ranks)
    assert validation["after"]["sampled_accuracy"] >= validation["before"]["sampled_accuracy"] + 0.08


def sharded_lora(folder: Path, *engine: str) -> None:
    """Run `fit` on two ranks with adapters; check that servers sample from the trainer's weights."""
    words = ("--recipe=quickstart", *engine, *FAST, "--fabric.devices=2", "--out=out")
    lora = ("--model.lora.rank=4", "--train.lr=0.01")
    process = rlkit("fit", *words, "--fabric.strategy=fsdp2", *lora, cwd=folder)
    assert process.returncode == 0, process.stderr
    for row in read_jsonl(folder / "out" / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/failed"] == 0
    check_versions(folder / "out", 2)


@pytest.mark.parametrize(("alone", "quantization"), [("false", "null"), ("true", "null"), ("true", "nf4")])
def test_a_server_samples_for_sharded_lora(tmp_path: Path, alone: str, quantization: str) -> None:
    words = (f"--rollout.engine.launch.adapter_only={alone}", f"--model.quantization={quantization}")
    sharded_lora(tmp_path, "--rollout.engine=SGLangServer", *words)


def test_ranks_share_a_server_that_releases_its_memory(tmp_path: Path) -> None:
    """The server gets the weights once per rollout, and once for greedy and sampled completions."""
    words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", *FAST, "--fabric.devices=2", "--out=out")
    release = ("--rollout.engine.launch.release_memory=true", "--train.offload_during_rollout=true")
    process = rlkit("fit", *words, *release, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/failed"] == row["engine/restarts"] == row["engine/retried"] == 0
    check_versions(tmp_path / "out", 2)


def run_ahead(folder: Path, *engine: str) -> None:
    """Run `fit` with rollouts up to two versions behind; check the versions of tokens, and that no prompt is lost."""
    words = ("--recipe=quick_tool", *engine, "--train.prompts_per_step=4", "--out=out")
    few = ("--train.steps=5", "--rollout.group_size=4", "--validation=null", "--log.rollouts.limit=null")
    process = rlkit("fit", *words, *few, "--rollout.max_staleness=2", "--correction.high=2.0", cwd=folder)
    assert process.returncode == 0, process.stderr
    prompts: Counter[str] = Counter()
    for number in range(1, 6):
        for row in read_jsonl(folder / "out" / "rollouts" / f"step-{number:05d}.jsonl.gz"):
            prompts[row["prompt"]] += 1
            assert {v for v in row["versions"] if v >= 0} <= {number - 3, number - 2, number - 1}
    assert prompts == dict.fromkeys(prompts, 4)
    rows = read_jsonl(folder / "out" / "metrics.jsonl")
    assert len(prompts) == 4 * len(rows) == 20
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    assert all(row["rollout/failed"] == row["engine/restarts"] == row["engine/retried"] == 0 for row in rows)


@pytest.mark.parametrize("engine", ["SGLangServer", "SGLangEngine"])
def test_rollouts_run_ahead(tmp_path: Path, engine: str) -> None:
    """Beside the trainer, weights arrive during requests; on its device, requests are interrupted and continue."""
    run_ahead(tmp_path, f"--rollout.engine={engine}")


def test_structured_answers_train_on_a_running_server(tmp_path: Path, trainer: Trainer, engine: SGLangServer) -> None:
    fit_structured_at(trainer, engine, tmp_path)


def test_without_sglang_the_error_names_the_extra(tmp_path: Path) -> None:
    hide = "import importlib.metadata as m, sys; found = m.version\n"
    hide += "def version(name):\n    if name == 'sglang': raise m.PackageNotFoundError(name)\n    return found(name)\n"
    hide += "m.version = version\nfrom rlkit.cli.main import main; sys.exit(main())"
    words = (sys.executable, "-c", hide, "fit", "--recipe=quickstart", "--rollout.engine=SGLangServer", "--out=out")
    process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 1
    assert "sglang is not installed in this environment: pip install -e '.[sglang]'" in process.stderr
    assert "Traceback" not in process.stderr


def test_what_is_stopped_by_over_sampling_costs_no_other_request(tmp_path: Path) -> None:
    """The last step is then repeated bit for bit from the saved completions."""
    words = ("--recipe=quickstart", "--rollout.engine=SGLangServer", "--rollout.oversample=1.5", "--out=out")
    few = ("--train.steps=4", "--train.prompts_per_step=8", "--validation=null", "--save.every=2")
    process = rlkit("fit", *words, *few, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [(row["rollout/postponed"], row["rollout/samples"], row["rollout/failed"]) for row in rows] == [
        (4, 64, 0)
    ] * 4
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    check_versions(tmp_path / "out", 4)
    again = rlkit("replay", "out", "--step=4", "--phase=learn", "--out=again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "tensors: the same in step-000004" in again.stdout


@pytest.mark.parametrize(("end", "moment"), WAYS)
def test_a_server_leaves_no_files_and_no_memory(tmp_path: Path, end: str, moment: str) -> None:
    leaves_nothing(tmp_path, end, moment, "--rollout.engine=SGLangServer")
