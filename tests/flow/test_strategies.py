"""One rank or two, DDP, FSDP2 or tensor parallel: the same recipe makes the same first step and learns the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_report.comparison import compare
from safetensors.torch import load_file

from rlkit.models.load import load_policy
from rlkit.recipe import Model
from tests import forks
from tests.conftest import read_jsonl, rlkit, rlkit_in_process, write_plugin

pytestmark = pytest.mark.slow

BASE = (
    "fit", "--recipe", "quickstart", "--train.steps=2", "--train.prompts_per_step=5", "--rollout.group_size=4",
    "--validation.limit=3", "--validation.samples=0", "--fabric.accelerator=cpu", "--save.every=1",
    "--mix.old={weight: 0.1, task: {class_path: Arithmetic, init_args: {max_operand: 9}}, prompts_per_step: 3}",
)  # fmt: skip
TWO = {
    "ddp": ("--fabric.devices=2", "--fabric.strategy=ddp", "--train.max_tokens_per_micro_batch=64"),
    "fsdp2": (
        "--fabric.devices=2", "--fabric.strategy=fsdp2", "--train.checkpoint_activations=true",
        "--train.offload_during_rollout=true",
    ),
    "offload": ("--fabric.devices=2", "--fabric.strategy=FSDP2", "--fabric.strategy.offload=true"),
}  # fmt: skip
REPLICATED = ("--fabric.devices=4", "--fabric.strategy=FSDP2", "--fabric.strategy.replicate=2")
TENSOR = ("--fabric.devices=2", "--fabric.strategy=FSDP2", "--fabric.strategy.tensor_parallel=2")
LORA = (
    "--model.lora.rank=8",
    "--mix.pairs={weight: 0.5, loss: DPO, task: {class_path: Arithmetic, init_args: {mistakes: 2}}}",
    "--mix.pairs.prompts_per_step=1",
)


def run(folder: Path, name: str, *args: str, site: str = "") -> Path:
    """Train; one rank without a plugin needs no process of its own."""
    out = folder / name
    own = site or {"--fabric.devices=2", "--fabric.devices=4"} & set(args)
    start = partial(rlkit, site=site) if own else rlkit_in_process
    done = start(*BASE, "--out", str(out), *args, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def rollouts(out: Path, step: int = 1) -> dict[tuple[str, tuple[int, ...]], float | None]:
    """All that was sampled in a step, whichever rank trained on it."""
    rows = [row for path in out.glob(f"rollouts/step-{step:05d}*.jsonl.gz") for row in read_jsonl(path)]
    return {(row["prompt"], tuple(row["tokens"])): row["reward"] for row in rows}


def first(out: Path) -> dict[str, Any]:
    return read_jsonl(out / "metrics.jsonl")[0]


def weights(out: Path) -> dict[str, torch.Tensor]:
    [path] = (out / "final").glob("*.safetensors")
    return load_file(path)


def assert_same(one: Path, other: Path) -> None:
    assert rollouts(one) == rollouts(other)
    assert len(rollouts(one)) > 10
    for name in ("policy/loss", "grad_norm", "policy/entropy", "reward/mean", "rollout/tokens", "mix/old/loss"):
        assert first(other)[name] == pytest.approx(first(one)[name], abs=1e-4), name
    assert first(one)["grad_norm"] > 0.1
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    return run(folder, "alone")


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_make_the_first_step_of_one(name: str, folder: Path, alone: Path) -> None:
    out = run(folder, name, *TWO[name])
    assert_same(alone, out)
    assert 1 <= first(out)["imbalance/after"] <= first(out)["imbalance/before"]


def test_two_groups_that_hold_all_shards_make_the_step_of_one(folder: Path, alone: Path) -> None:
    assert_same(alone, run(folder, "replicated", *REPLICATED))


def test_groups_that_do_not_divide_the_ranks_are_refused(folder: Path) -> None:
    options = (*TWO["fsdp2"][:1], "--fabric.strategy=FSDP2", "--fabric.strategy.replicate=3")
    for words in (("recipe", "check", "quickstart", "--fabric.accelerator=cpu"), (*BASE, "--out", str(folder / "no"))):
        done = rlkit(*words, *options, cwd=folder)
        assert done.returncode == 2
        assert "FSDP2 has replicate=3, which does not divide the 2 ranks; choose one of [1, 2]" in done.stderr


def test_lora_and_preferences_under_fsdp2(folder: Path) -> None:
    one, two = run(folder, "lora", *LORA), run(folder, "lora2", *LORA, *TWO["fsdp2"])
    assert_same(one, two)
    assert all("lora_" in name for name in weights(two))
    for mine, theirs in zip(*(read_jsonl(out / "metrics.jsonl") for out in (one, two)), strict=True):
        assert theirs["mix/pairs/margin"] == pytest.approx(mine["mix/pairs/margin"], abs=1e-4)


def test_a_sharded_teacher_has_the_distributions_of_a_whole_one(folder: Path, alone: Path) -> None:
    words = ("--loss=Distillation", "--advantage=null", f"--teacher.path={alone}", *LORA)
    one, two = (first(run(folder, name, *words, *more)) for name, more in (("one", ()), ("two", TWO["fsdp2"])))
    assert one["policy/divergence"] > 1e-5
    for name in ("policy/divergence", "policy/teacher_mass", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name


RECORDER = """
import json, time
from rlkit import hookimpl
from rlkit.interfaces.callback import Callback

class Recorder(Callback):
    budgets = {"on_step_end": 0.0, "on_run_end": 5.0}

    def write(self, method, *row):
        with open(f"calls.{self.rank}", "a") as file:
            file.write(json.dumps([method, *row]) + "\\n")

    def on_run_start(self, event):
        self.rank = event.rank
        self.write("on_run_start", event.world_size)

    def on_rollouts(self, event):
        self.write("on_rollouts", event.step, len(event.trajectories))

    def on_batch(self, event):
        self.write("on_batch", event.step, len(event.batch.advantages))

    def on_step_end(self, event):
        self.write("on_step_end", event.step, dict(event.metrics))
        if event.step == 2 and self.rank == 1:
            raise ValueError("enough")

    def on_validation(self, event):
        self.write("on_validation", event.step, event.metrics["accuracy"])

    def on_checkpoint(self, event):
        self.write("on_checkpoint", event.step, event.place)

    def on_run_end(self, event):
        self.write("on_run_end", event.status, event.steps, event.error)
        time.sleep(600)
        self.write("slept")

@hookimpl
def rlkit_register(register):
    register(Recorder)
"""
MUON = ("--train.optimizer=Muon", "--train.schedule=Constant")


def test_muon_and_callbacks_on_two_ranks(folder: Path) -> None:
    """Muon's updates of shards are those of whole matrices, but for its bfloat16; a callback of rank 1 ends both."""
    one, two = run(folder, "muon", *MUON), folder / "muon2"
    site = str(write_plugin(folder / "recorder", "recorder", RECORDER))
    callback = '--callbacks=[{"class_path": "Recorder"}]'
    done = rlkit(*BASE, "--out", str(two), *MUON, *TWO["fsdp2"], callback, cwd=folder, site=site)
    assert done.returncode == 1, done.stdout + done.stderr
    assert rollouts(one) == rollouts(two)
    for name in ("policy/loss", "grad_norm", "reward/mean", "rollout/tokens"):
        assert first(two)[name] == pytest.approx(first(one)[name], abs=1e-4), name
    before, mine, theirs = load_policy(Model("tiny")).state_dict(), weights(one), weights(two)
    for name, tensor in mine.items():
        moved, apart = (tensor - before[name]).norm(), (theirs[name] - tensor).norm()
        assert moved > 1e-3
        assert apart < moved * (0.5 if ".layers." in name and tensor.dim() == 2 else 1e-3), name
    check_calls(two, done)


def check_calls(out: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Both ranks see every event, each its own rows, and how the run ended; neither waits for the end's callback."""
    part = "Recorder of plugin 'recorder' (rlkit-recorder 2.1)"
    raised = f"rank 1: {part}: `on_step_end` raised ValueError: enough"
    error = json.loads((out / "result.json").read_text())["error"]
    assert error["type"] == "CallbackError"
    assert error["message"].startswith(raised)
    calls = [read_jsonl(out.parent / f"calls.{rank}") for rank in (0, 1)]
    names = ["on_run_start", "on_validation", *("on_rollouts", "on_batch", "on_step_end") * 2, "on_run_end"]
    for rank in calls:
        assert [row[0] for row in rank if row[0] != "on_checkpoint"] == names
        assert [row[1:] for row in rank if row[0] == "on_checkpoint"] in ([], [[1, f"{out}/checkpoints/step-000001"]])
        assert rank[-1][1:3] == ["failed", 2]
        assert rank[-1][3].startswith(raised)
    for mine, theirs in zip(*([row for row in rank if row[0] != "on_checkpoint"] for rank in calls), strict=True):
        if mine[0] in ("on_rollouts", "on_batch"):
            assert mine[2] > 0 < theirs[2]
            assert mine[2] + theirs[2] == 20
        else:
            assert mine == theirs
    printed = done.stdout + done.stderr
    assert printed.count(f"warning: {part}: `on_step_end` took") == 1
    assert f"{part}: `on_run_end` has not ended after 5 s, its budget" in printed


FAKE = """
from rlkit import hookimpl
from rlkit.testing import FakeEngine

@hookimpl
def rlkit_register(register):
    register(FakeEngine)
"""


def test_tensor_parallel(folder: Path) -> None:
    """With an engine without a model, whose answers a reward tells apart."""
    (folder / "longer.py").write_text("def longer(text):\n    return len(text) / 10\n")
    site = str(write_plugin(folder / "site", "fake", FAKE))
    by_length = (
        "--rollout.engine=FakeEngine", '--rollout.engine.texts=["4", "23", "178", "1999"]', "--rollout.max_gap=100",
        "--reward=PythonReward", f"--reward.function={folder}/longer.py:longer",
        "--reward.allow_code=true",
    )  # fmt: skip
    one = run(folder, "fake", *by_length, site=site)
    assert_same(one, run(folder, "tensor", *by_length, *TENSOR, site=site))
    lora = run(folder, "fake-lora", *by_length, *LORA, site=site)
    assert_same(lora, run(folder, "tensor-lora", *by_length, *TENSOR, *LORA, site=site))


def test_the_embedded_engine_refuses_tensor_parallel(folder: Path) -> None:
    done = rlkit(*BASE, "--out", str(folder / "refused"), *TENSOR, cwd=folder)
    assert done.returncode == 2
    assert "TorchEngine cannot sample from a policy under tensor_parallel=2" in done.stderr


def test_a_run_goes_on_under_another_number_of_ranks(folder: Path) -> None:
    """Two steps on one rank and two on two ranks end where four on one do, and the other way round."""
    whole = run(folder, "four", "--train.steps=4", "--train.schedule=Constant")
    for name, before, after in (
        ("grown", (), TWO["fsdp2"]),
        ("shrunk", TWO["fsdp2"], ("--fabric.devices=1",)),
        ("replicating", (), REPLICATED),
        ("regrouped", REPLICATED, TWO["fsdp2"]),
    ):
        run(folder, name, "--train.schedule=Constant", *before)
        out = run(folder, name, "--train.steps=4", "--train.schedule=Constant", *after, "--resume=auto")
        for key, tensor in weights(whole).items():
            torch.testing.assert_close(weights(out)[key], tensor, atol=1e-4, rtol=1e-3, msg=key)
        assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_rank_that_dies_ends_the_run_and_is_named(name: str, folder: Path) -> None:
    out = folder / f"dies-{name}"
    options = ("--train.steps=1000", "--train.schedule=Constant", "--save.every=0", "--out", str(out))
    process = forks.start(("-m", "rlkit", *BASE, *TWO[name], *options), folder)
    while not (out / "rollouts" / "step-00002.jsonl.gz").exists():
        assert process.poll() is None
        time.sleep(0.05)
    pid = json.loads((out / "ranks" / "1.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    errors, _ = process.communicate(timeout=400)
    assert process.returncode == 1, errors
    assert f"rank 1 (process {pid} on " in errors
    assert "was killed" in errors
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"]["type"] == "RankError"


def test_the_error_of_another_rank_is_told(folder: Path) -> None:
    """Rank 1 learns from a row whose reward raises there only: rank 0 says what rank 1 said."""
    (folder / "fails.py").write_text(
        "import os\n\ndef fails(text):\n    if os.environ.get('LOCAL_RANK') == '1':\n"
        "        raise ValueError('no reward on this one')\n    return 1.0\n"
    )
    done = rlkit(
        *BASE, "--out", str(folder / "fails"), *TWO["ddp"], "--reward=PythonReward", "--reward.allow_code=true",
        f"--reward.function={folder}/fails.py:fails", "--reward.on_error=raise", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 1
    result = json.loads((folder / "fails" / "result.json").read_text())
    assert "rank 1: RolloutError" in result["error"]["message"]
    assert "no reward on this one" in result["error"]["message"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_conversation_is_printed_by_several_ranks(strategy: str, tmp_path: Path) -> None:
    two = ("--fabric.devices=2", "--fabric.accelerator=cpu", f"--fabric.strategy={strategy}")
    done = rlkit("generate", "quickstart", *two, "--prompt", "28 + 14 = ?", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("28 + 14 = ?") == 1
    assert done.stdout.count("####") == 1


def test_two_ranks_draw_alike_with_curriculum_and_oversampling(tmp_path: Path) -> None:
    """And go on from a checkpoint with the same prompts: each rank stops its own slowest ones."""
    options = (*TWO["ddp"], "--task.max_operand=4", "--curriculum=SuccessRate", "--rollout.oversample=1.4")
    every = ("--validation=null", "--train.schedule=Constant", *options)
    whole = run(tmp_path, "whole", *every, "--train.steps=5")
    run(tmp_path, "parted", *every, "--train.steps=3")
    parted = run(tmp_path, "parted", *every, "--train.steps=5", "--resume=auto")
    for step in range(1, 6):
        prompts = {prompt for prompt, _ in rollouts(whole, step)}
        assert {prompt for prompt, _ in rollouts(parted, step)} == prompts
        assert 3 <= len(prompts) <= 5  # of seven that are started; a prompt may come in two epochs
    metrics = read_jsonl(parted / "metrics.jsonl")
    assert [row["rollout/postponed"] for row in metrics] == [2] * 5
    assert metrics[-1]["curriculum/epoch"] > 0


def test_two_ranks_run_ahead_alike(tmp_path: Path) -> None:
    """Each rank learns from its own groups that are whole first, and again from some; a repetition is the same."""
    ahead = ("--rollout.max_staleness=2", "--rollout.replay.size=3", "--correction.high=2.0", "--validation=null")
    one, other = (run(tmp_path, name, *TWO["fsdp2"], *ahead, "--train.steps=4") for name in ("one", "other"))
    assert not compare(one, other).differs
    metrics = read_jsonl(one / "metrics.jsonl")
    assert 0 < max(row["staleness/max"] for row in metrics) <= 2
    prompts = []
    for step in range(1, 5):
        rows = [row for path in one.glob(f"rollouts/step-{step:05d}*.jsonl.gz") for row in read_jsonl(path)]
        prompts += list({row["prompt"] for row in rows if "again" not in row})
        again = {row["group"] for row in rows if "again" in row}
        assert again <= {5, 6, 7}
        assert len(again) == metrics[step - 1]["replay/groups"]
    assert metrics[-1]["replay/groups"] > 0
    assert len(prompts) == len(set(prompts)) == 4 * 5
