"""Steps of supervised fine-tuning and of DPO with rlkit and with TRL: `python -m tests.bench.recorded [ROW ...]`.

Both train the same model on the same rows in the same order, a batch an optimizer step, in float32 on one thread. Each
side is a process of its own that makes one step when asked (see `step.py`); they alternate, and what is measured is CPU
seconds. rlkit runs with its defaults; TRL (the extra `bench`) with its defaults but for gradient checkpointing, which
computes each forward pass twice to save memory: `--checkpointing` leaves it on. Losses of all steps are compared.

The rows of the tiny model are those of `Arithmetic`; those of other models have 50 to 400 tokens, as in GSM8K. Rows of
`-system` begin with a system prompt; with the template's tokens these are 25, as by Qwen2.5's template.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.step import ROOT, Gate, Side, gated_steps, product_rate, reset_peak

RATE, BETA = 1e-4, 0.1


class Row(NamedTuple):
    """One line of the table: rows or pairs of a step and of TRL's micro-batch, and tokens of a system message."""

    size: str
    pairs: bool
    batch: int
    micro_batch: int
    system: int = 0


ROWS = {
    "sft-tiny": Row("tiny", False, 128, 128),
    "sft-10m": Row("10m", False, 32, 8),
    "sft-10m-system": Row("10m", False, 32, 8, system=13),
    "dpo-tiny": Row("tiny", True, 64, 64),
    "dpo-10m": Row("10m", True, 16, 8),
}


def rlkit_side(row: Row, model: Path, rows: list[dict[str, Any]], steps: int) -> None:
    """Train with rlkit's defaults."""
    from rlkit import Recipe, fit
    from rlkit.engines import Recorded
    from rlkit.losses.cross_entropy import CrossEntropy
    from rlkit.losses.dpo import DPO
    from rlkit.recipe import Fabric, Model, Rollout, Save, Train
    from rlkit.schedules import Constant
    from rlkit.types import Sampling

    turns = gated_steps(lambda metrics: {"loss": metrics["policy/loss"], "tokens": metrics["update/tokens"]})
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Recipe(
                model=Model(str(model)),
                task=rows,
                rollout=Rollout(engine=Recorded(), sampling=Sampling(max_tokens=512)),
                reward=None,
                advantage=None,
                loss=DPO(BETA) if row.pairs else CrossEntropy(),
                train=Train(
                    steps=steps, prompts_per_step=row.batch, lr=RATE, schedule=Constant(), warmup_steps=0, seed=0
                ),
                fabric=Fabric(accelerator="cpu"),
                validation=None,
                save=Save(every=0),
                callbacks=[turns],
            ),
            out=Path(folder) / "run",
            quiet=True,
        )


def trl_side(row: Row, model: Path, rows: list[dict[str, Any]], steps: int, checkpointing: bool) -> None:
    """Train with TRL on the tokens that rlkit trains on, in its order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from rlkit.data.order import permutation_of

    gate, losses = Gate(), []
    trainer_class: Any = DPOTrainer if row.pairs else SFTTrainer

    class InOrder(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            losses.append(float(loss))
            return loss

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.report(loss=sum(losses))
            losses.clear()

    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": row.micro_batch, "learning_rate": RATE,
            "gradient_accumulation_steps": row.batch // row.micro_batch, "max_steps": steps, "logging_steps": 1,
            "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
            "disable_tqdm": True, "gradient_checkpointing": checkpointing, "max_length": None,
        }  # fmt: skip
        config = DPOConfig(beta=BETA, **options) if row.pairs else SFTConfig(**options)
        order = permutation_of(0, 0, len(rows)).tolist()
        trainer = InOrder(
            model=AutoModelForCausalLM.from_pretrained(model), args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_list([encoded(rows[i], tokenizer) for i in order]), callbacks=[Turns()],
        )  # fmt: skip
        gate.report(rss=reset_peak())
        trainer.train()


def encoded(row: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """Return a row's tokens as TRL's collators expect them."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    answers = {name: tokenizer.encode(row[name], add_special_tokens=False) for name in row if name != "prompt"}
    answers = {name: [*ids, tokenizer.eos_token_id] for name, ids in answers.items()}
    if "completion" in answers:
        return {"input_ids": prompt + answers["completion"], "labels": [-100] * len(prompt) + answers["completion"]}
    return {"prompt_ids": prompt, "chosen_ids": answers["chosen"], "rejected_ids": answers["rejected"]}


def tiny_rows(count: int, pairs: bool) -> list[dict[str, Any]]:
    """Return rows of `Arithmetic`."""
    from rlkit_tasks.arithmetic import Arithmetic

    task = Arithmetic(mistakes=1 if pairs else 0)
    prompts = [task.prompt(row, i) for i, row in enumerate(task.rows("train"))][:count]
    names = ["chosen", "rejected"] if pairs else ["completion"]
    texts = [[answer.messages[0]["content"] for answer in prompt.recorded] for prompt in prompts]
    return [
        {"prompt": prompt.messages, **dict(zip(names, answers, strict=True))}
        for prompt, answers in zip(prompts, texts, strict=True)
    ]


def long_rows(count: int, row: Row, tokenizer: Any) -> list[dict[str, Any]]:
    """Return rows of 50 to 400 tokens: one or two questions, and answers of 10 to 250 tokens."""
    from tests.bench.work import TASK, questions

    rng = random.Random(5)
    texts = [question.removesuffix(f" {TASK}") for question, _ in questions(count * 2 + 500, 3)]

    def answer() -> str:
        ids = tokenizer.encode(" ".join(rng.choices(texts, k=6)))
        return str(tokenizer.decode(ids[: int(10 * 25 ** rng.random())]))

    rows = []
    instruction = tokenizer.decode(tokenizer.encode(TASK)[: row.system])
    system = [{"role": "system", "content": instruction}] if row.system else []
    for i in range(count):
        prompt = [*system, {"role": "user", "content": " ".join(texts[2 * i : 2 * i + rng.randint(1, 2)])}]
        answers = {"chosen": answer(), "rejected": answer()} if row.pairs else {"completion": answer()}
        rows.append({"prompt": prompt, **answers})
    return rows


def compare(name: str, steps: int, sides: list[str], options: list[str]) -> None:
    """Print a line of the table: medians of CPU seconds a step, the first step left out."""
    module = "tests.bench.recorded"
    running = [Side(side, [name, f"--steps={steps}", *options], module) for side in sides]
    rates = []
    try:
        rounds = []
        for _ in range(steps):
            rounds.append([side.step() for side in running])
            rates.append(product_rate(0.1))
    finally:
        for side in running:
            side.close()
    seconds = [statistics.median(side["cpu"] for side in column[1:]) for column in zip(*rounds, strict=True)]
    cells = [f"{side.name} {cpu:.3f} s" for side, cpu in zip(running, seconds, strict=True)]
    if len(running) == 2:
        ratio = statistics.median(trl["cpu"] / rlkit["cpu"] for trl, rlkit in rounds[1:])
        gap = max(abs(trl["loss"] - rlkit["loss"]) for trl, rlkit in rounds)
        first, last = rounds[0][1]["loss"], rounds[-1][1]["loss"]
        cells.append(f"ratio {ratio:.2f}, losses {first:.4f} to {last:.4f}, at most {gap:.1e} apart")
    cells.append(f"products {statistics.median(rates) / 1e9:.0f} GFLOP/s")
    print(f"{name:14}", " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--only", action="append", choices=["trl", "rlkit"])
    parser.add_argument("--checkpointing", action="store_true", help="TRL's default")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tiny = ROOT / "rlkit" / "models" / "tiny"
    if arguments.side is not None:
        name, folder = arguments.rows[0], arguments.folder
        row, rows = ROWS[name], json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        model = tiny if row.size == "tiny" else folder / row.size
        if arguments.side == "trl":
            return trl_side(row, model, rows, arguments.steps, arguments.checkpointing)
        return rlkit_side(row, model, rows, arguments.steps)
    from transformers import AutoTokenizer

    from tests.bench.work import save_model

    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        options = [f"--folder={folder}", *(["--checkpointing"] if arguments.checkpointing else [])]
        for name in arguments.rows:
            row, count = ROWS[name], ROWS[name].batch * arguments.steps
            if row.size == "tiny":
                rows = tiny_rows(count, row.pairs)
            else:
                model = save_model(folder / row.size, row.size)
                rows = long_rows(count, row, AutoTokenizer.from_pretrained(model))
            (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
            compare(name, arguments.steps, arguments.only or ["trl", "rlkit"], options)
    return None


if __name__ == "__main__":
    main()
