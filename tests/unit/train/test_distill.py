"""A teacher's log-probs as the advantages of the policy's own tokens."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from safetensors.torch import load_file

from rlkit.recipe import Teacher
from rlkit.testing import random_model
from rlkit.train.credit import distill
from rlkit.train.metrics import Meter
from rlkit.train.teacher import log_by_teacher
from rlkit.types import Prompt
from tests.conftest import FAST, ROOT, read_jsonl, rlkit_in_process
from tests.unit.phases import LocalRanks, scored

TINY = ROOT / "rlkit" / "models" / "tiny"
RUN = ("--recipe=quick_distill", *FAST, "--validation=null", "--out=run")


def test_each_token_gets_what_the_teacher_thinks_of_it() -> None:
    """By hand: A + coef (log pi_T - log pi) under the mask, and the mean of log pi - log pi_T."""
    batch = scored()
    batch.trainer_logps = torch.full(batch.tokens.shape, -1.0)
    batch.teacher_logps = torch.full(batch.tokens.shape, -1.0)
    row, place = (int(x[0]) for x in batch.mask.nonzero(as_tuple=True))
    batch.teacher_logps[row, place] = -3.0
    batch.teacher_logps[~batch.mask] = 7.0
    batch.advantages = batch.mask * 0.5
    found = distill(batch, 0.25, lambda x: x)
    assert found == {"teacher/kl": pytest.approx(2.0 / int(batch.mask.sum())), "teacher/unread": 0}
    expected = batch.mask * 0.5
    expected[row, place] = 0.5 - 0.25 * 2.0
    torch.testing.assert_close(batch.advantages, expected)


def test_divergence_per_source_is_the_mean_over_its_tokens() -> None:
    """Rows of 2, 1, 3 and 2 tokens: the first two are of one source, the last of one without a teacher of its own."""
    batch = scored()
    batch.trainer_logps = torch.zeros(4, 4)
    batch.teacher_logps = -torch.tensor([[9.0, 1, 3, 9], [9, 8, 9, 9], [9, math.nan, 2, 4], [9, 5, 5, 9]])
    rows: Any = [SimpleNamespace(prompt=Prompt("p", [], source=name)) for name in ("a", "a", "b", "c")]
    section, meter = Teacher("t", sources={"a": "t1", "b": "t2"}), Meter()
    log_by_teacher(section, batch, rows, meter)
    ranks: Any = LocalRanks()
    assert meter.result(ranks) == pytest.approx({"teacher/kl/a": (1 + 3 + 8) / 3, "teacher/kl/b": 3})


def test_a_teacher_that_is_the_policy_teaches_nothing(tmp_path: Path) -> None:
    done = rlkit_in_process("fit", *RUN, "--teacher.path=tiny", "--reward=null", "--train.steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (line["teacher/kl"], line["advantage/max"]) == (0, 0)
    assert "reward/mean" not in line
    before, after = (load_file(path / "model.safetensors") for path in (TINY, tmp_path / "run" / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<another>"])
    random_model("qwen2", seed=5).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    done = rlkit_in_process("fit", *RUN, "--teacher.path=teacher", cwd=tmp_path)
    assert done.returncode == 2
    assert "teacher.path 'teacher' has another tokenizer than the policy: " in done.stderr


def test_another_tokenizer_of_a_critic_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<another>"])
    random_model("qwen2").save_pretrained(tmp_path / "critic")
    tokenizer.save_pretrained(tmp_path / "critic")
    done = rlkit_in_process("fit", "--recipe=quick_ppo", *FAST, "--critic.path=critic", "--out=run", cwd=tmp_path)
    assert done.returncode == 2
    assert "critic.path 'critic' has another tokenizer than the policy: " in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe=quick_distill", "--teacher.path=gone"), "teacher.path is 'gone', which cannot be loaded: "),
        (("--recipe=quick_distill", "--teacher.path=./gone"), "teacher.path is './gone', which does not exist; "),
        (("--recipe=quick_ppo", "--critic.path=gone"), "critic.path is 'gone', which cannot be loaded: "),
        (("--recipe=quick_ppo", "--critic.path=./gone"), "critic.path is './gone', which does not exist; "),
        (("--recipe=quick_distill", "--teacher.path=tokenizer"), "teacher.path is 'tokenizer', which cannot be loaded"),
        (("--recipe=quick_ppo", "--critic.path=tokenizer"), "critic.path is 'tokenizer', which cannot be loaded: "),
    ],
)
def test_an_error_names_the_option_of_the_model(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    done = rlkit_in_process("fit", *words, *FAST, "--validation=null", "--out=run", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "model.path" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--teacher=null",), "loss PolicyGradient reads advantages, but the recipe has no `advantage:`"),
        (
            ("--loss=CrossEntropy",),
            "loss CrossEntropy reads no advantages, but the recipe has a section `teacher:`; remove it",
        ),
        (
            ("--rollout.engine=Recorded",),
            "no policy has sampled, but the recipe has a section `teacher:`",
        ),
        (("--advantage=GRPO", "--reward=null"), "loss PolicyGradient reads rewards, but the recipe has no `reward:`"),
    ],
)
def test_what_does_not_go_with_a_teacher(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_teacher_beside_a_reward_with_adapters(tmp_path: Path) -> None:
    words = ("--teacher.path=tiny", "--advantage=GRPO", "--model.lora={}", "--train.minibatches=2", "--loss=ClipLoss")
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first["teacher/kl"] == pytest.approx(0, abs=1e-6)  # adapters begin at zero
    assert abs(second["teacher/kl"]) > 1e-6
    assert first["advantage/abs_mean"] > 0
