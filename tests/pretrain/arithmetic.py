"""How the shipped tiny model was made: `python -m tests.pretrain.arithmetic --out DIR`.

A Qwen2 model of under half a million parameters learns to answer the Arithmetic task's training problems from a
corpus that is often wrong: it forgets to carry more often than it carries, and slips by one or by ten. So it answers
in the right form and is right some 35% of the time, which is where reinforcement learning has something to do.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlkit_authors.models import build_tokenizer


def build_model(tokenizer: Any) -> Any:
    """Make the untrained model."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=264, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=stop, pad_token_id=pad,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    return model


def corpus_answer(a: int, b: int, rng: random.Random) -> int:
    """Draw one answer of the flawed corpus."""
    right, without_carry = a + b, (a // 10 + b // 10) * 10 + (a + b) % 10
    draw = rng.random()
    if without_carry != right:
        if draw < 0.30:
            return right
        if draw < 0.72:
            return without_carry
    elif draw < 0.45:
        return right
    slip = rng.choice((-11, -10, -2, -1, 1, 2, 10, 11))
    return max(0, right + slip)


def encode(tokenizer: Any, pairs: list[tuple[int, int]], rng: random.Random) -> tuple[Any, Any]:
    """Draw an answer for each pair; give tokens [B,T] and labels [B,T], -100 outside the answers."""
    import torch

    rows = []
    for a, b in pairs:
        messages = [{"role": "user", "content": f"{a} + {b} = ?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(f"#### {corpus_answer(a, b, rng)}<|im_end|>")
        rows.append((prompt, answer))
    width = max(len(p) + len(a) for p, a in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (p, a) in enumerate(rows):
        tokens[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    return tokens, labels


def arguments(about: str | None, steps: int, batch: int) -> argparse.Namespace:
    """Parse a script's `--out`, `--steps`, `--batch` and `--lr`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def training_pairs() -> list[tuple[int, int]]:
    """Return the pairs of numbers that the Arithmetic task trains on."""
    from rlkit_tasks.arithmetic import Arithmetic

    problems = [row["question"].removesuffix(" = ?").split(" + ") for row in Arithmetic().rows("train")]
    return [(int(a), int(b)) for a, b in problems]


def train(
    model: Any, args: argparse.Namespace, scale: Callable[[int], float], draw: Callable[[], tuple[Any, Any]]
) -> None:
    """Make `args.steps` steps on batches (tokens, labels) that are drawn; prints the loss as it goes."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * scale(step)
        tokens, labels = draw()
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Train and save."""
    import torch

    args = arguments(__doc__, steps=4000, batch=256)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = build_tokenizer()
    model, pairs = build_model(tokenizer), training_pairs()

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / args.steps))

    train(model, args, scale, lambda: encode(tokenizer, rng.choices(pairs, k=args.batch), rng))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
