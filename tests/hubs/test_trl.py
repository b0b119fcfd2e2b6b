"""Losses of recorded conversations with tools and thoughts: those of TRL's own trainers, under vendors' templates."""

from __future__ import annotations

import json
from copy import deepcopy
from math import log
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from rlkit.cli.main import main
from rlkit.testing import save_random_model
from rlkit.types import JsonObject, Message
from tests.conftest import read_jsonl
from tests.vendors import family_of, tokenizer_of

PORT = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "High tide.", "parameters": PORT}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "tide", "arguments": {"port": "Bergen"}}}
QUESTION = {"role": "user", "content": "Tide at Bergen?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "tide", "tool_call_id": "call00001", "content": "06:10"}
ANSWER = {"role": "assistant", "content": "High at 06:10."}
THOUGHT = {"role": "assistant", "content": "<think>\nLook it up.\n</think>\n\nHigh at 06:10."}
ROWS: dict[str, list[Message]] = {
    "plain": [QUESTION, ANSWER],
    "tool": [QUESTION, CALLED, RESULT, ANSWER],
    "thought": [{"role": "system", "content": "Be brief."}, QUESTION, THOUGHT],
    "thought after a tool": [QUESTION, CALLED, RESULT, THOUGHT],
}
COMPARED = [
    ("glm4moe", "plain"), ("glm4moe", "tool"), ("glm4moe", "thought"), ("glm4moe", "thought after a tool"),
    ("gptoss", "plain"), ("gptoss", "tool"),
    ("qwen3", "thought"), ("qwen3_instruct_2507", "plain"), ("qwen3_instruct_2507", "tool"), ("qwen2_5", "tool"),
    ("llama3", "plain"),
]  # fmt: skip
"""Templates, and rows that TRL's variant of each for training renders as the template itself does."""
COMPARED_PAIRS = [
    ("gptoss", "plain"), ("qwen3", "thought"), ("qwen3", "thought after a tool"), ("qwen3_instruct_2507", "tool"),
    ("llama3_1", "tool"), ("lfm2_v2", "tool"),
]  # fmt: skip
"""The same for answers alone, which TRL renders by the template itself."""
FEW = (
    "--train.steps=3", "--train.lr=1e-3", "--train.schedule=Constant", "--train.warmup_steps=0", "--save.every=0",
    "--validation=null", "--task=Jsonl", "--task.answer_field=null", "--reward=null",
)  # fmt: skip
PLAIN = {
    "max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no",
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "max_length": None,
    "logging_steps": 1,
}  # fmt: skip


def save_base(folder: Path, name: str) -> str:
    """Write a random model with a vendor's template, and end tokens, as a folder."""
    tokenizer = tokenizer_of(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model_folder = save_random_model(folder / "base", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.save_pretrained(model_folder)
    family = family_of(name)
    ids = tokenizer.convert_tokens_to_ids([family.eos, *family.stops])
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return str(model_folder)


def only_the_policys(tokenizer: Any, ids: list[int], labels: list[int], end: int) -> list[int]:
    """Return TRL's labels without those of tokens that a policy never writes.

    Some of its templates train the newline after a turn's end, or what the generation prompt has.
    """
    asked = [tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=x) for x in (True, False)]
    opening = tokenizer.encode(asked[0].removeprefix(asked[1]), add_special_tokens=False)
    opened = {i + k for i in range(len(ids)) if ids[i : i + len(opening)] == opening for k in range(len(opening))}
    return [-100 if i in opened or (i and ids[i - 1] == end) else label for i, label in enumerate(labels)]


def rlkit_losses(folder: Path, base: str, row: JsonObject, *options: str) -> list[float]:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = (*options, *FEW, f"--model.path={base}", f"--task.path={folder}/rows.jsonl", "--train.prompts_per_step=1")
    assert main(["fit", *words, f"--out={folder}/out"]) == 0
    return [metrics["policy/loss"] for metrics in read_jsonl(folder / "out" / "metrics.jsonl")]


def trl_losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "row"), COMPARED)
def test_a_supervised_loss_is_that_of_trl(name: str, row: str, tmp_path: Path) -> None:
    base = save_base(tmp_path, name)
    columns = {"messages": ROWS[row], **({"tools": TOOLS} if "tool" in row else {})}
    own = rlkit_losses(tmp_path, base, columns, "--recipe=quick_sft")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=SFTConfig(str(tmp_path / "trl"), assistant_only_loss=True, **PLAIN),
        train_dataset=Dataset.from_list([deepcopy(columns)]),
        processing_class=tokenizer,
    )
    end = tokenizer.convert_tokens_to_ids(family_of(name).end)
    trainer.train_dataset = trainer.train_dataset.map(
        lambda x: {"labels": only_the_policys(tokenizer, x["input_ids"], x["labels"], end)}
    )
    assert own == pytest.approx(trl_losses(trainer), abs=1e-5)


@pytest.mark.parametrize(("name", "row"), COMPARED_PAIRS)
def test_a_loss_of_preferences_is_that_of_trl(name: str, row: str, tmp_path: Path) -> None:
    """The first step's is log 2 for any tokens; the others' follow from its gradient."""
    base = save_base(tmp_path, name)
    *prompt, chosen = ROWS[row]
    rejected = {**chosen, "content": chosen["content"].replace("High at 06:10.", "Ask a pilot.")}
    columns = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]} | (
        {"tools": TOOLS} if "tool" in row else {}
    )
    own = rlkit_losses(tmp_path, base, columns, "--recipe=quick_dpo", "--loss.beta=0.1")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=DPOConfig(str(tmp_path / "trl"), beta=0.1, **PLAIN),
        train_dataset=Dataset.from_list([deepcopy(columns)]),
        processing_class=tokenizer,
    )
    end = tokenizer.convert_tokens_to_ids(family_of(name).end)
    trainer.train_dataset = trainer.train_dataset.map(
        lambda x: {key: x[key][: x[key].index(end) + 1] for key in ("chosen_ids", "rejected_ids")}
    )
    assert own == pytest.approx(trl_losses(trainer), abs=1e-5)
    assert own[0] == pytest.approx(log(2), abs=1e-6)
    assert own[-1] < own[0] - 0.01
