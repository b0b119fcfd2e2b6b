"""How the shipped model that reads pictures was made: `python -m tests.pretrain.pictures --out DIR`.

A Qwen2.5-VL model of under half a million parameters learns to see from right answers to the questions of the Pictures
task, and from questions for all squares of a picture. Then a corpus that is often wrong spoils its answers: it counts
squares of all colours, names the colour in the question, or slips. So the model sees all it needs, but is right some
40% of the time, which is where reinforcement learning has something to do. Held-out pictures are in neither part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlkit_authors.models import build_tokenizer
from rlkit_tasks.pictures import COLOURS, Pictures, Scene, scenes

from rlkit.interfaces.picture import Picture
from rlkit.types import Row
from tests.pretrain.arithmetic import arguments

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RIGHT, USUAL = 0.38, 0.47
"""The shares of right answers, and of the usual mistake, in the flawed corpus."""
SPOILED = 0.1
"""The share of the steps, at the end, that have the flawed corpus."""
LISTED = 0.6
"""The share of questions for all squares at the start; it falls to 0 over this share of the steps."""
LETTERS = {"red": "r", "green": "g", "blue": "b", "yellow": "y", "pink": "p", "black": "k", None: "."}


def build_vision_tokenizer() -> Any:
    """Return the byte-level tokenizer with the markers of pictures."""
    tokenizer: Any = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": VISION})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_processor() -> Any:
    """Return the processor that turns pictures into patches: 28 x 28 pixels are a token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 256, patch_size=14, merge_size=2)


def build_model(tokenizer: Any) -> Any:
    """Make the untrained model."""
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    text = {
        "vocab_size": 272, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
        "initializer_range": 0.1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 5, 5]},
        "bos_token_id": None, "eos_token_id": stop, "pad_token_id": pad,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 96,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10.0},
        "initializer_range": 0.1, "patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [0, 1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    return model


def corpus_answer(scene: Scene, rng: random.Random) -> str:
    """Draw one answer of the flawed corpus."""
    drawn = rng.random()
    if drawn < RIGHT:
        return scene.answer
    is_usual = drawn < RIGHT + USUAL
    visible = [colour for colour in scene.cells if colour is not None]
    if scene.step is not None:
        others = [name for name in COLOURS if name != scene.answer]
        return scene.colour if is_usual else rng.choice(others)
    count = int(scene.answer)
    total = len(visible) if len(visible) != count else count + 1
    return str(total if is_usual else rng.choice([number for number in (count - 1, count + 1) if number >= 0]))


def render(tokenizer: Any, processor: Any, rows: Sequence[Row]) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of prompts, with a marker for each token of their pictures, and the patches of the pictures."""
    task = Pictures()
    pixels = processor([Picture(row["image"]).decode() for row in rows], return_tensors="pt")
    marker = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    prompts = []
    for row, grid in zip(rows, pixels["image_grid_thw"].tolist(), strict=True):
        tokens = tokenizer.apply_chat_template(
            task.prompt(row, 0).messages, add_generation_prompt=True, return_dict=False
        )
        index = tokens.index(marker)
        prompts.append(tokens[:index] + [marker] * (math.prod(grid) // 4) + tokens[index + 1 :])
    return prompts, dict(pixels)


def encode(tokenizer: Any, processor: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the model's inputs, with labels that are -100 outside of the answers."""
    import torch

    prompts, inputs = render(tokenizer, processor, rows)
    answers = [tokenizer.encode(f"{row['answer']}<|im_end|>") for row in rows]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    marker = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {"input_ids": tokens, "labels": labels, "mm_token_type_ids": (tokens == marker).int(), **inputs}


def train(model: Any, steps: int, lr: float, draw: Callable[[int], dict[str, Any]]) -> None:
    """Make steps on batches that are drawn; the learning rate falls until the flawed corpus, and is constant then."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    clean = int(steps * (1 - SPOILED))
    for step in range(steps):
        scale = max(0.1, 0.5 * (1 + math.cos(math.pi * min(step, clean) / clean)))
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 100) * scale
        loss = model(**draw(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def row_of(scene: Scene, progress: float, rng: random.Random) -> Row:
    """Return a row of the corpus at a share of the run's steps."""
    if rng.random() < LISTED - progress:
        question, answer = "What is shown?", "".join(LETTERS[colour] for colour in scene.cells)
    else:
        question = scene.question
        answer = scene.answer if progress < 1 - SPOILED else corpus_answer(scene, rng)
    return {"question": question, "answer": answer, "image": scene.draw(), "name": scene.seed}


def main() -> None:
    """Train and save."""
    import torch

    args = arguments(__doc__, steps=1400, batch=64)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer, processor = build_vision_tokenizer(), build_processor()
    model = build_model(tokenizer)
    pictures = (scene for scene in scenes() if not scene.held_out)

    def draw(step: int) -> dict[str, Any]:
        progress = step / args.steps
        chosen = [next(pictures) for _ in range(args.batch)]
        return encode(tokenizer, processor, [row_of(scene, progress, rng) for scene in chosen])

    train(model, args.steps, args.lr, draw)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    processor.save_pretrained(args.out)


if __name__ == "__main__":
    main()
