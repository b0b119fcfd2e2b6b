"""A policy learns from a teacher of another family: other tokens, other ids, another chat template."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch

from rlkit.models.load import load_policy, load_tokenizer
from rlkit.recipe import Model
from rlkit.tasks import Arithmetic
from tests.conftest import rlkit_in_process
from tests.other_tokenizer import save_other_model

SEED = 0
LOSSES = ("PolicyGradient", "Distillation")
MERGES = ("# #", "1 +")
"""Answers begin with `#### `: three tokens of the teacher, and five of the policy."""


@torch.no_grad()
def right_answers(path: str) -> int:
    """Return for how many of 200 held-out additions a model finds each token of the right answer the most likely."""
    model, tokenizer, count = load_policy(Model(path)), load_tokenizer(Model(path)), 0
    for row in islice(Arithmetic().rows("validation"), 200):
        messages = [{"role": "user", "content": row["question"]}]
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = sum(map(int, re.findall(r"\d+", row["question"])))
        ids = [*tokenizer.encode(f"#### {answer}", add_special_tokens=False), tokenizer.eos_token_id]
        tokens = torch.tensor([tokenizer.encode(start, add_special_tokens=False) + ids])
        count += model(tokens).logits[0, -len(ids) - 1 : -1].argmax(-1).tolist() == ids
    return count


@pytest.mark.slow
def test_a_policy_learns_from_a_teacher_of_other_tokens(tmp_path: Path) -> None:
    """The teacher has learned from recorded additions; policies have its log-probs or its distributions, no reward."""
    start = save_other_model(tmp_path / "other", *MERGES)
    teacher = json.dumps({"path": str(tmp_path / "teacher"), "retokenize": True})
    sft = ("--train.steps=40", "--train.prompts_per_step=64", "--train.lr=2e-3")
    distill = ("--recipe=quick_distill", f"--teacher={teacher}", "--train.steps=25", "--reward=null")
    runs = {
        "teacher": ("--recipe=quick_sft", f"--model.path={start}", *sft),
        **{loss: (*distill, f"--loss={loss}") for loss in LOSSES},
    }
    for name, words in runs.items():
        options = ("--validation=null", f"--train.seed={SEED}", f"--out={name}")
        done = rlkit_in_process("fit", *words, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    before = right_answers("tiny")
    for loss in LOSSES:
        assert right_answers(str(tmp_path / loss / "final")) > before + 20
