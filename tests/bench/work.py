"""What the benches train: Qwen2 models with random weights, short sums in words, and a tokenizer learned from them."""

from __future__ import annotations

import random
from pathlib import Path

import torch

SIZES = {"1m": (128, 4, 384, 4, 2), "10m": (384, 6, 1024, 6, 2), "50m": (640, 12, 1600, 10, 2)}
"""Hidden size, layers, size between, heads, and heads of keys and values, by a model's name."""

ENDS = 1 / 80
"""The probability that an answer ends with the next token, so that lengths are ragged."""

TASK = "Work out the problem in short steps, then write the final number after four hash marks."
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ["Ava", "Ben", "Cara", "Dan", "Eli", "Fay", "Gus", "Hal", "Ivy", "Jon", "Kim", "Leo", "Mia", "Ned", "Oli"]
ITEMS = ["apples", "books", "coins", "dolls", "eggs", "flags", "grapes", "hats", "jars", "kites", "lamps", "mugs"]


def questions(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions of about 100 tokens, with their answers."""
    rng = random.Random(seed)
    return [_question(rng) for _ in range(count)]


def _question(rng: random.Random) -> tuple[str, str]:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    text, result = rng.choice((
        (f"{name} has {a} {item}. A friend brings {b} more {item} and then {name} loses {c} of them. "
         f"How many {item} does {name} have now?", a + b - c),
        (f"{name} buys {c} boxes with {a} {item} each. {name} already had {b} {item} at home. "
         f"How many {item} are there in total?", a * c + b),
        (f"A shop sells {item} for {c} dollars each. {name} buys {a} {item} on Monday and {b} {item} on Friday. "
         f"How many dollars does {name} spend?", (a + b) * c),
    ))  # fmt: skip
    return f"{text} {TASK}", str(result)


def tokenizer(vocabulary: int = 512):  # type: ignore[no-untyped-def]
    """Return a byte-level tokenizer of `vocabulary` tokens, learned from the questions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, 512),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([f"{q}\n#### {a}\nuser\nassistant\n" for q, a in questions(4000, 1)], trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    found.chat_template = TEMPLATE
    return found


def save_model(folder: Path, size: str, vocabulary: int = 512, ends: float = ENDS) -> Path:
    """Write a model whose answers end with a probability of `ends` at each token, and its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = tokenizer(vocabulary)
    hidden, layers, between, heads, kv_heads = SIZES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048, initializer_range=0.05,
        tie_word_embeddings=True, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    _set_end(model, words.eos_token_id, ends)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@torch.no_grad()
def _set_end(model, end: int, probability: float) -> None:  # type: ignore[no-untyped-def]
    """Let channel 0, which no layer writes to, carry the logit of the end token; find its weight by bisection."""
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, 0.05)
    embedding[:, 0] = 0.2
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0].zero_()
        layer.mlp.down_proj.weight[0].zero_()
    embedding[end] = 0
    hidden = model.model(torch.randint(5, len(embedding), (16, 96))).last_hidden_state[:, 16:]
    others = (hidden @ embedding.T).logsumexp(-1)
    low, high = -3.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        logit = hidden[..., 0] * middle
        rises = (logit - torch.logaddexp(others, logit)).exp().mean() < probability
        low, high = (middle, high) if rises else (low, middle)
    embedding[end, 0] = low
