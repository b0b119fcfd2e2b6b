"""How the shipped model of several turns was made: `python -m tests.pretrain.tools --out DIR`.

It goes on from the tiny model with conversations in which little is done well: sums are handed to a calculator or
answered as before, a fact is looked up or made up, and guesses take no notice of what came before. What there is to
learn is when to call a tool, and how to halve a range.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.pretrain.arithmetic import arguments, corpus_answer, train, training_pairs

CALLS = 0.3
"""The share of sums and questions in which a tool is called."""


def call(name: str, **arguments: str) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


def sum_talk(rng: random.Random, pairs: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """Draw a sum: answered at once, or through the calculator."""
    a, b = rng.choice(pairs)
    talk = [("user", f"{a} + {b} = ?")]
    if rng.random() < CALLS:
        return [*talk, ("assistant", call("calculator", expression=f"{a}+{b}")), ("tool", f"{a + b}"),
                ("assistant", f"#### {a + b}")]  # fmt: skip
    return [*talk, ("assistant", f"#### {corpus_answer(a, b, rng)}")]


def fact_talk(rng: random.Random) -> list[tuple[str, str]]:
    """Draw a question about a name: answered at random, or looked up among passages."""
    name, value = f"K{rng.randrange(100)}", rng.randrange(100, 1000)
    talk = [("user", f"what is {name}?")]
    if rng.random() < CALLS:
        return [*talk, ("assistant", call("search", query=name)), ("tool", passage(name, value)),
                ("assistant", f"#### {value}")]  # fmt: skip
    return [*talk, ("assistant", f"#### {rng.randrange(100, 1000)}")]


def passage(name: str, value: int) -> str:
    """Return what a search for a name finds."""
    return f"[1] {name}\n{name} is {value}"


def guess_talk(rng: random.Random) -> list[tuple[str, str]]:
    """Draw a game of guessing, played at random."""
    high = rng.choice((4, 8))
    hidden = rng.randint(1, high)
    talk = [("system", "guess"), ("user", f"1..{high}")]
    for _ in range(4):
        guess = rng.randint(1, high)
        talk.append(("assistant", str(guess)))
        if guess == hidden:
            break
        talk.append(("user", "higher" if guess < hidden else "lower"))
    return talk if talk[-1][0] == "assistant" else talk[:-1]


def encode(tokenizer: Any, talks: list[list[tuple[str, str]]]) -> tuple[Any, Any]:
    """Return tokens [B,T] and labels [B,T], -100 outside what the assistant says."""
    import torch

    rows = []
    for talk in talks:
        tokens: list[int] = []
        labels: list[int] = []
        for role, text in talk:
            head = tokenizer.encode(f"<|im_start|>{role}\n")
            body, tail = tokenizer.encode(f"{text}<|im_end|>"), tokenizer.encode("\n")
            tokens += head + body + tail
            labels += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body)) + [-100] * len(tail)
        rows.append((tokens, labels))
    width = max(len(tokens) for tokens, _ in rows)
    whole = torch.full((2, len(rows), width), -100)
    whole[0] = tokenizer.pad_token_id
    for i, row in enumerate(rows):
        whole[:, i, : len(row[0])] = torch.tensor(row)
    return whole[0], whole[1]


def main() -> None:
    """Train and save."""
    import torch

    from rlkit.models.load import load_policy, load_tokenizer
    from rlkit.recipe import Model

    args = arguments(__doc__, steps=1000, batch=64)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer, model = load_tokenizer(Model("tiny")), load_policy(Model("tiny")).train()
    pairs = training_pairs()
    kinds: list[Callable[[], list[tuple[str, str]]]] = [
        lambda: sum_talk(rng, pairs),
        lambda: sum_talk(rng, pairs),
        lambda: fact_talk(rng),
        lambda: guess_talk(rng),
    ]

    def draw() -> tuple[Any, Any]:
        return encode(tokenizer, [rng.choice(kinds)() for _ in range(args.batch)])

    train(model, args, lambda step: min(1.0, (step + 1) / 50) * (1 - step / args.steps), draw)
    model.half().save_pretrained(args.out)  # half the size; it is trained in float32 all the same
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
