"""Checkpoints: what survives, what a resumed run may change, and what transformers reads of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.models.checkpoints import tensor_shapes
from rlkit.models.store import Store
from tests import forks
from tests.conftest import ROOT, read_jsonl, rlkit, rlkit_in_process

pytestmark = pytest.mark.slow

BASE = (
    "fit", "--recipe=quickstart", "--train.steps=3", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--validation.limit=3", "--validation.samples=0", "--save.every=1", "--train.schedule=Constant",
)  # fmt: skip


def chaos(*words: str) -> str:
    """Return what `chaos.py` prints; its first line has the seed."""
    script = str(ROOT / "tests" / "flow" / "chaos.py")
    done = subprocess.run((sys.executable, script, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_chaos() -> None:
    """Twenty kills, damaged checkpoints and a full disk; see `chaos.py`."""
    assert re.search(r"survived 26/26: 20 kills in 10 stages", chaos())


def test_a_killed_run_ahead_trains_on_each_prompt_once() -> None:
    """Twenty kills at random moments, with tools and rollouts two steps ahead."""
    assert re.search(r"20 kills of \d+ runs: each prompt was trained on once", chaos("--ahead"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    done = rlkit_in_process(*BASE, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def answer(folder: Path) -> list[int]:
    """Let a Hugging Face folder answer through transformers alone, its chat template included."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "28 + 14 = ?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return model.generate(**asked, max_new_tokens=10, do_sample=False)[0].tolist()  # type: ignore[no-any-return]


def test_an_exported_checkpoint_answers_as_the_trained_model(run: Path) -> None:
    done = rlkit_in_process("export", "--checkpoint", "run", "--out", "exported", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert answer(run.parent / "exported") == answer(run / "final")
    again = rlkit_in_process("export", "--checkpoint", "run", "--out", "exported", cwd=run.parent)
    assert (again.returncode, "choose a new folder" in again.stderr) == (2, True)
    merged = rlkit_in_process("export", "--checkpoint", "run", "--out", "merged", "--merge-lora", cwd=run.parent)
    assert (merged.returncode, "has no adapter to merge" in merged.stderr) == (1, True)


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    """Two last ones, and the best by a metric, whichever that was."""
    done = rlkit_in_process(
        *BASE, "--out=run", "--train.steps=5", "--save.keep_last=2", "--save.keep_best=reward/mean", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    best = max(rows, key=lambda row: (row["reward/mean"], -row["step"]))
    store = Store(str(tmp_path / "run" / "checkpoints"))
    kept = [int(name[5:]) for name in store.names()]
    skipped = {row["step"] - 1 for row in rows if row.get("checkpoint/skipped")}
    last = sorted(set(range(1, 6)) - skipped)[-2:]
    assert kept == sorted({5, *last, best["step"]}, reverse=True)
    assert store.state(store.names()[0]).best == (best["reward/mean"], best["step"])


def test_a_run_folder_is_enough_to_resume(tmp_path: Path) -> None:
    assert rlkit_in_process(*BASE, "--out=run", cwd=tmp_path).returncode == 0
    done = rlkit_in_process("fit", "--resume", "run", "--train.steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed from run/checkpoints/step-000003: step 3 is done" in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4
    nothing = rlkit_in_process("fit", "--recipe=quickstart", "--resume=elsewhere", cwd=tmp_path)
    assert (nothing.returncode, "checkpoint at 'elsewhere'" in nothing.stderr) == (1, True)
    where = rlkit_in_process("fit", "--recipe=quickstart", "--resume=auto", cwd=tmp_path)
    assert (where.returncode, "--resume auto needs --out" in where.stderr) == (2, True)
    other = rlkit_in_process("fit", "--recipe=quickstart", "--out=run", cwd=tmp_path)
    assert (other.returncode, "holds another run" in other.stderr) == (2, True)


def test_a_checkpoint_of_another_model_or_damaged_is_refused(tmp_path: Path) -> None:
    from rlkit_authors.models import save_random_model

    model = save_random_model(tmp_path / "model")
    assert rlkit_in_process(*BASE, "--out=run", f"--model.path={model}", cwd=tmp_path).returncode == 0
    save_random_model(model, hidden_size=64)
    other = rlkit_in_process(
        *BASE, "--out=run", f"--model.path={model}", "--resume=auto", "--train.steps=4", cwd=tmp_path
    )
    assert other.returncode == 1
    assert "is of another model: policy.policy." in other.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-000003"
    data = next(newest.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-100])
    damaged = rlkit_in_process("export", "--checkpoint", str(newest), "--out=exported", cwd=tmp_path)
    assert damaged.returncode == 1
    assert f"{data.name} is damaged" in damaged.stderr
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unwritable_place_costs_checkpoints_then_the_run(tmp_path: Path, ranks: int) -> None:
    """The first rank alone makes the folder; the others end with the same error, and wait for nothing."""
    (tmp_path / "file").write_text("")
    start = rlkit_in_process if ranks == 1 else rlkit
    done = start(
        *BASE, "--out=run", f"--save.folder={tmp_path}/file/checkpoints", "--train.steps=5",
        f"--fabric.devices={ranks}", "--fabric.accelerator=cpu", "--train.deadline=60", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "there is none before it" in done.stderr
    assert done.stdout.count("warning: checkpoint") == 3
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["error"]["type"]) == ("failed", "CheckpointError")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_checkpoints_may_be_elsewhere(tmp_path: Path) -> None:
    """Any fsspec URL: here one in memory within a process."""
    script = (
        "from rlkit.cli.main import main; from rlkit.models.store import Store\n"
        "if __name__ == '__main__':\n"
        f"    base = {[*BASE, '--out=memory', '--save.folder=memory://kept']!r}\n"
        "    assert main(base) == 0\n"
        "    assert main([*base, '--resume=auto', '--train.steps=4']) == 0\n"
        "    print('names', Store('memory://kept').names())\n"
    )
    (tmp_path / "script.py").write_text(script)
    ran = forks.run(("script.py",), tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "names ['step-000004', 'step-000003']" in ran.stdout
    assert "resumed from memory://kept/step-000003" in ran.stdout


KILLED = """
import os, signal, sys
import rlkit.train.update
from rlkit.cli.main import main

original, calls = rlkit.train.update.update_policy, [0]

def killed(*args, **named):
    calls[0] += 1
    if calls[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **named)

if __name__ == "__main__":
    rlkit.train.update.update_policy = killed
    sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    args = (*BASE, "--save.every=100", "--train.steps=4")
    assert rlkit_in_process(*args, "--out=whole", cwd=tmp_path).returncode == 0
    again = (*args, "--out=run", "--resume=auto")
    done = forks.run(("killed.py", *again), tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert rlkit_in_process(*again, cwd=tmp_path).returncode == 0
    whole, run = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(run[name], whole[name]) for name in whole)
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert Store(str(tmp_path / "run" / "checkpoints")).names() == ["step-000004"]


def test_a_killed_sharded_run_resumes_without_optimizer_state(tmp_path: Path) -> None:
    """Both ranks are killed in step 3."""
    (tmp_path / "killed.py").write_text(KILLED)
    args = (
        *BASE, "--out=run", "--resume=auto", "--train.steps=4", "--save.optimizer=false", "--save.keep_last=1",
        "--fabric.devices=2", "--fabric.strategy=fsdp2", "--validation=null",
    )  # fmt: skip
    done = forks.run(("killed.py", *args), tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = Store(str(tmp_path / "run" / "checkpoints"))
    [newest] = store.names()
    assert {name.partition(".")[0] for name in tensor_shapes(store, newest)} == {"policy"}
    resumed = rlkit(*args, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from run/checkpoints/{newest}" in resumed.stdout
    assert resumed.stdout.count("warning: the checkpoint has no optimizer state") == 1
    assert store.names() == ["step-000004"]
