"""Recipes that `rlkit convert` writes for TRL's command lines have the losses of TRL's own trainers, step by step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from rlkit_convert import convert
from rlkit_convert.write import recipe_text
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from rlkit.cli.main import main
from tests.conftest import ROOT, read_jsonl

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TINY = ROOT / "rlkit" / "models" / "tiny"
WORDS = (
    "--per_device_train_batch_size 8 --max_steps 4 --learning_rate 1e-3 --lr_scheduler_type constant --bf16 false "
    "--gradient_checkpointing false"
)
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"{n} + {3 * n} = ?"}],
        "chosen": [{"role": "assistant", "content": str(4 * n)}],
        "rejected": [{"role": "assistant", "content": str(4 * n + 1 + n % 3)}],
    }
    for n in range(7, 15)
]
"""All rows of a step, so that no order of theirs counts."""
LABELS = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
    for n, row in enumerate(PAIRS)
]
CHATS = [{"messages": row["prompt"] + row["chosen"]} for row in PAIRS]


class Compared(NamedTuple):
    """The metrics of rlkit's steps, and the log of TRL's."""

    own: list[dict[str, Any]]
    trls: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [line["policy/loss"] for line in self.own]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, a teacher beside it and a reward model, with a template that ends at the end token."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}")
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(TINY)
    scorer: Any = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1)
    scorer.config.pad_token_id = tokenizer.pad_token_id
    policy.save_pretrained(folder / "policy")
    with torch.no_grad():
        scorer.score.weight.normal_(0, 0.05)
        for weight in policy.parameters():
            weight.add_(weight.std() * torch.randn_like(weight))
    policy.save_pretrained(folder / "teacher")
    scorer.save_pretrained(folder / "scorer")
    for name in ("policy", "teacher", "scorer"):
        tokenizer.save_pretrained(folder / name)
    return folder


def compare(
    folder: Path, command: str, classes: tuple[Any, Any], model: Any, rows: list[Any], *options: str, **more: Any
) -> Compared:
    """Train by rlkit and by TRL, which both read one command line."""
    Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    name, *words = f"{command} {WORDS}".split()
    given = ["--model_name_or_path", model.config.name_or_path, "--dataset_name", str(folder / "rows.jsonl")]
    conversion = convert("trl", " ".join(["trl", name, *given, *words]), "run.sh", [])
    (folder / "mine.yaml").write_text(recipe_text(conversion))
    assert main(["fit", "--recipe", str(folder / "mine.yaml"), *options, f"--out={folder}/out"]) == 0
    config, trainer_class = classes
    plain = ["--output_dir", str(folder / "trl"), "--use_cpu", "true", "--logging_steps", "1", "--report_to", "none"]
    plain += ["--save_strategy", "no", "--disable_tqdm", "true"]
    (arguments,) = HfArgumentParser(config).parse_args_into_dataclasses([*words, *plain])
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    dataset = Dataset.from_list(rows)
    trainer = trainer_class(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer, **more)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Compared(read_jsonl(folder / "out" / "metrics.jsonl"), log)


def policy(models: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(models / "policy")


@pytest.mark.parametrize(
    ("command", "classes"),
    [
        ("dpo --beta 0.2", (DPOConfig, DPOTrainer)),
        ("cpo --loss_type simpo --cpo_alpha 0 --simpo_gamma 0.7 --beta 2.0", (CPOConfig, CPOTrainer)),
    ],
)
def test_losses_of_pairs(command: str, classes: tuple[Any, Any], models: Path, tmp_path: Path) -> None:
    compared = compare(tmp_path, command, classes, policy(models), PAIRS)
    assert compared.losses == pytest.approx([entry["loss"] for entry in compared.trls], abs=1e-4)
    assert [line["grad_norm"] for line in compared.own[:2]] == pytest.approx(
        [entry["grad_norm"] for entry in compared.trls[:2]], rel=1e-3
    )


def test_reward_models(models: Path, tmp_path: Path) -> None:
    scorer = AutoModelForSequenceClassification.from_pretrained(models / "scorer")
    command = "reward --center_rewards_coefficient 0.1"
    compared = compare(tmp_path, command, (RewardConfig, RewardTrainer), scorer, PAIRS)
    assert compared.losses == pytest.approx([entry["loss"] for entry in compared.trls], abs=1e-4)


def test_distillation_on_recorded_completions(models: Path, tmp_path: Path) -> None:
    """The loss has all of the 264 tokens."""
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher")
    command = f"gkd --lmbda 0 --beta 0.3 --teacher_model_name_or_path {models}/teacher"
    classes, options = (GKDConfig, GKDTrainer), ("--loss.top_k=264",)
    compared = compare(tmp_path, command, classes, policy(models), CHATS, *options, teacher_model=teacher)
    assert compared.losses[0] > 0.01
    assert compared.losses == pytest.approx([entry["loss"] for entry in compared.trls], abs=1e-4)


def test_kto_has_the_first_gradient_of_trls(models: Path, tmp_path: Path) -> None:
    """Later, z is measured otherwise; in the margin between both kinds of rows, as many of each, z cancels."""
    command = "kto --desirable_weight 1.2 --beta 0.3"
    compared = compare(tmp_path, command, (KTOConfig, KTOTrainer), policy(models), LABELS)
    assert compared.losses[0] == pytest.approx(compared.trls[0]["loss"], abs=1e-6)
    assert compared.own[0]["grad_norm"] == pytest.approx(compared.trls[0]["grad_norm"], rel=1e-4)
    assert 2 * compared.own[1]["policy/margin"] == pytest.approx(compared.trls[1]["rewards/margins"], abs=1e-4)


def test_the_odds_of_orpo(models: Path, tmp_path: Path) -> None:
    """The losses differ by the cross-entropy alone, which has no coefficient."""
    log_odds = []
    for coef in (0.5, 1.0):
        folder = tmp_path / str(coef)
        folder.mkdir()
        compared = compare(folder, f"orpo --beta {coef}", (ORPOConfig, ORPOTrainer), policy(models), PAIRS)
        log_odds.append((compared.losses[0], compared.trls[0]["log_odds_ratio"]))
    assert -2 * (log_odds[1][0] - log_odds[0][0]) == pytest.approx(log_odds[0][1], abs=1e-4)
