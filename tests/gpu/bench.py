"""Whole steps and sampling on a GPU, beside others: `python -m tests.gpu.bench step|sglang MODEL`.

`step` makes GRPO steps with rlkit and with TRL and its `generate`, on the same prompts, in bf16-mixed. `sglang`
compares the tokens a second that `fit` samples through SGLangEngine with those of SGLang alone, log-probs included.
Every side is a process of its own, whose first step is left out; `step` without a GPU runs on the CPU, in float32. The
last line sums up. Exit status: 0 ok, 1 slower than it must be, 3 not run since a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.bench.work import questions
from tests.gpu.reward import even_tokens

SAMPLES = 8
SAMPLING_SHARE = 0.9
"""The smallest share of SGLang's own speed that `fit` must have."""
NOT_RUN = 3

Metrics = dict[str, float]


class Work(NamedTuple):
    """What each side does."""

    model: Path
    prompts: int
    length: int
    steps: int

    @property
    def rows(self) -> list[tuple[str, str]]:
        return questions(self.prompts * self.steps, 3)


def rlkit_recipe(work: Work, callback: Any, engine: Any = None) -> Any:
    """Return the recipe of rlkit's steps."""
    from rlkit import Recipe
    from rlkit.engines import TorchEngine
    from rlkit.recipe import Fabric, Model, Rollout, Save, Train
    from rlkit.types import Sampling

    return Recipe(
        model=Model(str(work.model)),
        task=[{"prompt": q, "answer": a} for q, a in work.rows],
        reward=even_tokens,
        rollout=Rollout(engine or TorchEngine(), SAMPLES, Sampling(max_tokens=work.length)),
        train=Train(steps=work.steps, prompts_per_step=work.prompts, lr=1e-6),
        validation=None,
        save=Save(every=0),
        callbacks=[callback],
        fabric=Fabric(devices=1, precision="bf16-mixed" if torch.cuda.is_available() else "32-true"),
    )


def rlkit_side(work: Work, engine: Any = None) -> Metrics:
    """Train with rlkit; return medians of a step."""
    from rlkit import fit
    from rlkit.interfaces.callback import Callback, StepEnd

    ends: list[float] = []

    class Clock(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        done = fit(rlkit_recipe(work, Clock(), engine), out=Path(folder) / "run", quiet=True)
    names = ("time/sample", "time/update", "time/tokens_per_second", "time/mfu", "rollout/length")
    found = {
        name: statistics.median(row[name] for row in done.metrics[1:]) for name in names if name in done.metrics[0]
    }
    return {**found, "seconds": between(ends), "peak": peak()}


def trl_side(work: Work) -> Metrics:
    """Train with TRL's GRPOTrainer; return the median of a step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def measured(completions: Any, completion_ids: Any, **more: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return even_tokens(completions, completion_ids)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=min(4, work.prompts) * SAMPLES, num_generations=SAMPLES,
            beta=0.0, gradient_accumulation_steps=max(1, work.prompts // 4), max_completion_length=work.length,
            learning_rate=1e-6, max_steps=work.steps, save_strategy="no", report_to="none", temperature=1.0, top_k=0,
            top_p=1.0, disable_tqdm=True, gradient_checkpointing=False, bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
            reward_funcs=measured,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q, _ in work.rows]),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            callbacks=[Clock()],
        )
        trainer.train()
    return {"seconds": between(ends), "rollout/length": statistics.mean(lengths), "peak": peak()}


def fit_side(work: Work) -> Metrics:
    """Train with rlkit and SGLang beside it."""
    from rlkit_servers.sglang.engine import SGLangEngine
    from rlkit_servers.sglang.launch import Launch

    return rlkit_side(work, SGLangEngine(Launch(memory_fraction=0.4)))


def sglang_side(work: Work) -> Metrics:
    """Sample the same prompts with SGLang alone; return the median of the tokens a second."""
    from rlkit_servers.sglang.launch import environment, is_packed

    os.environ.update(environment(0, 60.0))
    import sglang
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    ids = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q, _ in work.rows
    ]
    options = {"attention_backend": "triton"} if is_packed() else {}
    engine = sglang.Engine(
        model_path=str(work.model), dtype="bfloat16", mem_fraction_static=0.4, log_level="error", **options
    )
    sampling = {"temperature": 1.0, "max_new_tokens": work.length}
    speeds = []
    for start in range(0, len(ids), work.prompts):
        batch = [prompt for prompt in ids[start : start + work.prompts] for _ in range(SAMPLES)]
        began = time.perf_counter()
        found = engine.generate(input_ids=batch, sampling_params=sampling, return_logprob=True)
        speeds.append(sum(one["meta_info"]["completion_tokens"] for one in found) / (time.perf_counter() - began))
    engine.shutdown()
    return {"time/tokens_per_second": statistics.median(speeds[1:])}


def between(ends: list[float]) -> float:
    """Return the median of the seconds from one step's end to the next."""
    return statistics.median(end - start for start, end in pairwise(ends))


def peak() -> float:
    """Return the most GPU memory that this process has used, in GiB; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


SIDES: dict[str, Callable[[Work], Metrics]] = {
    "rlkit": rlkit_side, "trl": trl_side, "fit": fit_side, "sglang": sglang_side
}  # fmt: skip


def run(side: str, argv: list[str]) -> Metrics:
    """Run a side in a process of its own; end this one where it fails."""
    words = (sys.executable, "-m", "tests.gpu.bench", *argv, "--side", side)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"{side} ended with exit status {done.returncode}; its error stands above")
    found: Metrics = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_steps(argv: list[str]) -> int:
    """Compare a whole step with TRL's."""
    ours, theirs = run("rlkit", argv), run("trl", argv)
    ratio = theirs["seconds"] / ours["seconds"]
    print(
        f"a step: rlkit {ours['seconds']:.2f} s (sample {ours['time/sample']:.2f}, update {ours['time/update']:.2f}, "
        f"MFU {ours.get('time/mfu', float('nan')):.2f}, {ours['peak']:.1f} GiB), TRL {theirs['seconds']:.2f} s "
        f"({theirs['peak']:.1f} GiB): ratio {ratio:.2f}; answers of {ours['rollout/length']:.0f} and "
        f"{theirs['rollout/length']:.0f} tokens"
    )
    return int(ratio < 1)


def compare_sampling(argv: list[str]) -> int:
    """Compare the sampling of `fit` through SGLangEngine with SGLang alone."""
    ours, alone = (run(side, argv)["time/tokens_per_second"] for side in ("fit", "sglang"))
    print(f"sampling: fit {ours:,.0f}, SGLang alone {alone:,.0f} tokens a second: {ours / alone:.0%}")
    return int(ours < SAMPLING_SHARE * alone)


def main(argv: list[str]) -> int:
    """Run a bench, or one side of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=["step", "sglang"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--side", choices=SIDES)
    given = parser.parse_args(argv)
    if given.side == "trl" and find_spec("trl") is None:
        print("trl is not installed")
        return NOT_RUN
    if given.side is not None:
        metrics = SIDES[given.side](Work(given.model, given.prompts, given.length, given.steps))
        print(f"\n{json.dumps(metrics)}")
        return 0
    needed = "trl" if given.bench == "step" else "sglang"
    if find_spec(needed) is None:
        print(f"{needed} is not installed")
        return NOT_RUN
    return compare_steps(argv) if given.bench == "step" else compare_sampling(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
