"""Whether a loop over the service learns as rlkit's own: `python -m tests.bench.tinker_learning`, on a CPU.

Both train an adapter of rank 32 on additions that carry, which the base, the tiny model with noise added to its
weights, gets wrong: 32 prompts of 8 samples a step, GRPO's advantages, AdamW, the same learning rates. The service's
loop has four calls of the Tinker API and no more: a snapshot, `sample`, `forward_backward` with `importance_sampling`
and `optim_step`. Printed are the rewards of the first step and of the first and the last ten, by seeds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch
from rlkit_math.answers import equal, final_answer
from rlkit_tinker import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams, Service
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlkit
from rlkit.models import SHIPPED

PROMPTS, GROUP, TOKENS, RANK, RATE, WARMUP, LAST = 32, 8, 12, 32, 3e-3, 5, 10
NOISE = 0.7
"""Of the base's weights, in standard deviations of each matrix."""
EPS = 1e-6
"""Of GRPO's standard deviation."""


def carries() -> list[dict[str, str]]:
    """Return the additions of two numbers below 100 whose units carry."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]
    return [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in pairs]


def make_base(folder: Path) -> str:
    """Write the tiny model with noise in its matrices; return its path."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"], dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in (weight for weight in model.parameters() if weight.dim() == 2):
            matrix.add_(NOISE * matrix.std() * torch.randn(matrix.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED["tiny"]).save_pretrained(folder)
    return str(folder)


def text_of(service: Service, sequence: SampledSequence) -> str:
    return str(service.tokenizer.decode(sequence.tokens, skip_special_tokens=True))


def score(text: str, answer: str) -> float:
    found = final_answer(text)[0]
    return float(found is not None and equal(found, answer))


def rate_of(step: int, steps: int) -> float:
    """Return the learning rate of a step from 1, as rlkit's `Linear` with a warm-up."""
    return RATE * (step / (WARMUP + 1) if step <= WARMUP else 1 - (step - 1 - WARMUP) / max(1, steps - WARMUP))


def service_run(base: str, rows: list[dict[str, str]], steps: int, seed: int, folder: Path) -> list[float]:
    """Return the mean reward of each step of a loop over the service."""
    service = Service(base, folder=folder, seed=seed)
    client = service.create_training_client(rank=RANK, seed=seed, train_unembed=False)
    draw, curve = random.Random(seed), []
    for step in range(1, steps + 1):
        sampler = client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=TOKENS)
        batch = [(row, prompt_of(service, row["prompt"])) for row in draw.sample(rows, PROMPTS)]
        futures = [sampler.sample(prompt, GROUP, params) for _, prompt in batch]
        samples, rewards = [], []
        for (row, prompt), future in zip(batch, futures, strict=True):
            sequences = future.result().sequences
            texts = [text_of(service, x) for x in sequences]
            group = torch.tensor([score(text, row["answer"]) for text in texts])
            advantages = ((group - group.mean()) / (group.std() + EPS)).tolist()
            samples += [(prompt, x, advantage) for x, advantage in zip(sequences, advantages, strict=True)]
            rewards += group.tolist()
        count = sum(len(sequence.tokens) for _, sequence, _ in samples)
        data = [datum_of(prompt, x, advantage / count) for prompt, x, advantage in samples]
        client.forward_backward(data, "importance_sampling")
        client.optim_step(AdamParams(rate_of(step, steps), 0.9, 0.999, 1e-8, grad_clip_norm=1.0)).result()
        curve.append(statistics.mean(rewards))
    return curve


def prompt_of(service: Service, question: str) -> ModelInput:
    chat = [{"role": "user", "content": question}]
    text = service.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return ModelInput.from_ints(service.tokenizer.encode(text, add_special_tokens=False))


def datum_of(prompt: ModelInput, sequence: SampledSequence, advantage: float) -> Datum:
    tokens, masked = sequence.tokens, [0.0] * (prompt.length - 1)
    inputs = {
        "target_tokens": [*prompt.to_ints()[1:], *tokens],
        "logprobs": [*masked, *sequence.logprobs],
        "advantages": [*masked, *[advantage] * len(tokens)],
    }
    return Datum(ModelInput.from_ints([*prompt.to_ints(), *tokens[:-1]]), inputs)


def rlkit_run(base: str, rows: list[dict[str, str]], steps: int, seed: int, folder: Path) -> list[float]:
    """Return the mean reward of each step of rlkit's own loop."""
    result = rlkit.fit(
        "quick_lora",
        model={"path": base},
        task=rows,
        reward=score,
        train={"steps": steps, "seed": seed},
        validation=None,
        save={"every": 0},
        out=folder,
    )
    return list(result.columns()["reward/mean"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = carries()
    ends: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder, "base"))
        for seed in range(given.seeds):
            for name, run in (("service", service_run), ("rlkit", rlkit_run)):
                curve = run(base, rows, given.steps, seed, Path(folder) / f"{name}-{seed}")
                first, last = statistics.mean(curve[:LAST]), statistics.mean(curve[-LAST:])
                ends.setdefault(name, []).append(last)
                print(f"{name:8} seed {seed}: {curve[0]:.2f} at first, {first:.2f} -> {last:.2f}", flush=True)
    for name, last in ends.items():
        print(f"{name:8} {statistics.mean(last):.3f}, {min(last):.3f} to {max(last):.3f}")


if __name__ == "__main__":
    main()
