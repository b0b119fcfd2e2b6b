"""Recipes of preferences and of distillation, which score, train and resume in ways of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

import pytest

from tests.tinker.conftest import BASE, ServedTiny, rows_of

RECIPES = "tinker_cookbook.recipes."
RESUME = ("behavior_if_log_dir_exists=resume",)
DPO = ("-m", f"{RECIPES}preference.dpo.train", f"model_name={BASE}", "dataset=hhh", "batch_size=2", "log_path=dpo")
POLICY = (f"model_name={BASE}", "lora_rank=4", "groups_per_batch=4", "max_tokens=16", "learning_rate=1e-3")


@pytest.fixture(scope="module")
def preferring(served: ServedTiny) -> Path:
    """The folder of a DPO run of 22 steps, with a checkpoint after 20 of them and one at its end."""
    served.run(*DPO, "learning_rate=1e-3", "max_steps=22")
    return served.folder / "dpo"


def checkpoints_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]


def test_dpo_prefers_and_resumes(served: ServedTiny, preferring: Path) -> None:
    """Its loss begins at log 2; after the last checkpoint the policy is its own reference, so it is log 2 again."""
    rows = rows_of(preferring)
    assert rows[0]["dpo_loss"] == pytest.approx(0.6931472)
    assert (rows[-1]["step"], rows[-1]["accuracy"]) == (21, 1)
    assert rows[-1]["dpo_loss"] < 0.1
    assert rows[10]["test/nll"] < rows[0]["test/nll"]
    served.forget_later_checkpoints("dpo")
    assert "weights/000020" in served.run(*DPO, *RESUME, "learning_rate=1e-3", "max_steps=22")
    resumed = rows_of(preferring)[len(rows) :]
    assert [row["step"] for row in resumed] == [20, 21]
    assert resumed[0]["dpo_loss"] == pytest.approx(0.6931472)
    assert resumed[0]["test/nll"] == pytest.approx(rows[20]["test/nll"])  # of the same weights


def test_distillation_outlives_a_server_that_is_down_and_resumes(served: ServedTiny, preferring: Path) -> None:
    """On-policy, from a checkpoint: the KL to the teacher falls; nothing shows that there was no server for 8 s."""
    teacher = (f"teacher_model={BASE}", f"teacher_checkpoint={checkpoints_of(preferring)[-1]['sampler_path']}")
    options = ("dataset=deepmath", "group_size=8", "save_every=4", "eval_every=0", "log_path=on-policy")
    words = ("-m", f"{RECIPES}distillation.on_policy_distillation", *POLICY, *teacher, *options)
    client = served.start_client(*words, "max_steps=12")
    checkpoints = served.folder / "on-policy" / "checkpoints.jsonl"
    while not checkpoints.exists() and client.poll() is None:
        time.sleep(0.02)
    served.kill()
    time.sleep(8)
    served.start()
    printed = client.communicate()[0]
    assert client.returncode == 0, printed
    kl = [row["teacher_kl"] for row in rows_of(served.folder / "on-policy")]
    assert len(kl) == 12
    assert mean(kl[6:]) < 0.5 * kl[0]
    served.forget_later_checkpoints("on-policy")
    assert "weights/000004" in served.run(*words, *RESUME, "max_steps=6")
    resumed = rows_of(served.folder / "on-policy")[12:]
    assert [row["step"] for row in resumed] == [4, 5]
    assert resumed[0]["teacher_kl"] < 0.5 * kl[0]


def test_distillation_of_likely_tokens_runs_and_resumes(served: ServedTiny) -> None:
    """SDFT: the teacher's four most likely tokens at each place, as targets [N,4] that travel sparsely."""
    options = ("group_size=2", "topk=4", "save_every=1", "eval_every=0", "log_path=sdft")
    words = ("-m", f"{RECIPES}sdft.train", *POLICY, *options)
    served.run(*words, "max_steps=2")
    served.forget_later_checkpoints("sdft")
    assert "weights/000001" in served.run(*words, *RESUME, "max_steps=3")
    rows = rows_of(served.folder / "sdft")
    assert [row["step"] for row in rows] == [0, 1, 1, 2]
    assert all(row["grad_norm:mean"] > 0 for row in rows)
