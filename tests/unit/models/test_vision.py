"""Models that read pictures: passes, positions and decoding against transformers' own, on six architectures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.engines import TorchEngine
from rlkit.interfaces.picture import Picture
from rlkit.models.actor import Actor, ValueModel
from rlkit.models.config import load_config
from rlkit.models.load import load_backbone, load_policy, load_processor_of, load_tokenizer, stop_ids
from rlkit.models.processor import image_token_ids
from rlkit.models.vision import backbone_of, freeze_vision, language_model, media_inputs
from rlkit.recipe import Lora, Model, Vision
from rlkit.rollout.pictures import PictureReader
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Media, Message, Rendered, Request, SampleKey, Sampling
from tests.vision_models import VISION_KINDS, save_random_vision_model

PACKED = [kind for kind in VISION_KINDS if kind != "gemma3"]
"""Gemma 3 attends to pictures in both directions, so that rows with them are padded."""


def picture(seed: int, height: int = 56, width: int = 84) -> Picture:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture.of(Image.fromarray(pixels))


def question(text: str, *pictures: Picture) -> list[Message]:
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Case:
    """A random model with prompts of one picture, of two, and without."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.model = Model(path=str(save_random_vision_model(folder, kind)))
        self.policy = load_policy(self.model)
        processor = load_processor_of(self.model)
        assert processor is not None
        tokenizer = load_tokenizer(self.model)
        reader = PictureReader(processor, image_token_ids(load_config(self.model), processor), Vision())
        self.template = ChatTemplate(tokenizer, stop_ids(self.model, tokenizer), reader=reader)
        self.prompts = [
            self.template.render_start(question("What is it?", picture(0))),
            self.template.render_start(question("What is it?", picture(1))),
            self.template.render_start(question("Which?", picture(2, 32, 32), picture(3, 64, 32))),
            self.template.render_start([{"role": "user", "content": "No picture."}]),
        ]


@cache
def case(folder: str, kind: str) -> Case:
    return Case(Path(folder) / kind, kind)


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case(str(tmp_path_factory.getbasetemp()), request.param)


every_kind = pytest.mark.parametrize("made", VISION_KINDS, indirect=True)


def media_of(rendered: Rendered) -> Media | None:
    return None if rendered.media is None else Media([rendered.media])


def batch_of(prompts: Sequence[Rendered], lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[Media | None]]:
    """Return tokens, mask and pictures of each prompt with an answer of each length."""
    drawn = torch.Generator().manual_seed(0)
    rows = [(p, torch.randint(3, 250, (n,), generator=drawn).tolist()) for p in prompts for n in lengths]
    width = max(len(prompt.tokens) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        start, end = len(prompt.tokens), len(prompt.tokens) + len(answer)
        tokens[i, :end] = torch.tensor([*prompt.tokens, *answer])
        mask[i, start:end] = True
    return tokens, mask, [media_of(prompt) for prompt, _ in rows]


def own_logps(policy: Any, tokens: Tensor, mask: Tensor, media: Sequence[Media | None]) -> Tensor:
    """Return log-probs of one plain forward of the model for each row, which computes its own positions."""
    logps = []
    for row, row_mask, pictures in zip(tokens, mask, media, strict=True):
        length = int(row_mask.nonzero().max()) + 1
        ids = row[None, :length]
        inputs = media_inputs(backbone_of(policy), ids, [] if pictures is None else pictures.segments)
        with torch.no_grad():
            logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        each = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        logps.append(each[row_mask[1:length]])
    return torch.cat(logps)


@every_kind
def test_log_probs_equal_those_of_a_plain_forward(made: Case) -> None:
    tokens, mask, media = batch_of(made.prompts, (5, 9))
    actor = Actor(made.policy)
    assert actor.passes.packed
    expected = own_logps(made.policy, tokens, mask, media)
    for packed in (True, False):
        actor.passes.packed = packed
        with torch.no_grad():
            logps = actor(tokens, mask, media=media).logps
        torch.testing.assert_close(logps[mask], expected, atol=2e-5, rtol=0)


@every_kind
def test_another_picture_changes_the_log_probs(made: Case) -> None:
    tokens, mask, media = batch_of(made.prompts[:2], (5,))
    actor = Actor(made.policy)
    with torch.no_grad():
        seen = actor(tokens, mask, media=media).logps
        exchanged = actor(tokens, mask, media=media[::-1]).logps
    assert float((seen - exchanged).abs().max()) > 0.1


def test_only_rows_of_causal_pictures_are_packed(tmp_path_factory: pytest.TempPathFactory) -> None:
    for kind in VISION_KINDS:
        made = case(str(tmp_path_factory.getbasetemp()), kind)
        passes = Actor(made.policy).passes
        assert passes.packs([media_of(made.prompts[0])]) == (kind in PACKED)
        assert passes.packs([None])


@pytest.mark.parametrize("made", ["qwen2_5_vl", "gemma3", "smolvlm"], indirect=True)
def test_no_split_into_micro_batches_changes_gradients(made: Case) -> None:
    tokens, mask, media = batch_of(made.prompts, (3, 6))
    actor = Actor(made.policy)
    chunks = [list(range(len(tokens))), [0, 7], [1, 2, 3], [4], [5, 6]]

    def gradients(parts: Sequence[list[int]]) -> Tensor:
        actor.zero_grad()
        for rows in parts:
            actor(tokens[rows], mask[rows], media=[media[i] for i in rows]).logps.sum().backward()
        return torch.cat([w.grad.flatten() for w in actor.parameters() if w.grad is not None])

    torch.testing.assert_close(gradients(chunks[:1]), gradients(chunks[1:]), atol=1e-4, rtol=1e-4)


def engine_of(made: Case) -> TorchEngine:
    engine = TorchEngine()
    runtime: Any = SimpleNamespace(
        policy=made.policy, device=torch.device("cpu"), context=512, stop_ids=frozenset(), autocast=nullcontext,
        unsharded=nullcontext, tensor_parallel=1,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="TorchEngine"):
        engine.bind(runtime)
    return engine


def ask(
    engine: TorchEngine, prompts: Sequence[Rendered], samples: int = 1, temperature: float = 0.0
) -> list[Completion]:
    requests = [
        Request(
            tuple(prompt.tokens), Sampling(temperature=temperature, max_tokens=8), SampleKey(0, 1, str(i), sample),
            f"{i}/{sample}", media=media_of(prompt),
        )
        for i, prompt in enumerate(prompts)
        for sample in range(samples)
    ]  # fmt: skip

    async def answers() -> list[Completion]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return asyncio.run(answers())


@every_kind
def test_greedy_tokens_equal_those_of_generate(made: Case) -> None:
    engine = engine_of(made)
    completions = ask(engine, made.prompts)
    engine.close()
    for prompt, completion in zip(made.prompts, completions, strict=True):
        ids = torch.tensor([prompt.tokens])
        inputs = media_inputs(backbone_of(made.policy), ids, [prompt.media] if prompt.media else [])
        expected = made.policy.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, **inputs
        )
        assert completion.tokens == expected[0, len(prompt.tokens) :].tolist()


@every_kind
def test_the_engine_reports_the_trainers_log_probs(made: Case) -> None:
    """Prompts of equal tokens and other pictures are in the batch at once."""
    assert made.prompts[0].tokens == made.prompts[1].tokens
    engine = engine_of(made)
    completions = ask(engine, made.prompts, samples=3, temperature=1.0)
    engine.close()
    actor = Actor(made.policy)
    for i, completion in enumerate(completions):
        prompt = made.prompts[i // 3]
        if made.template.reader and not made.template.reader.placeholders.isdisjoint(completion.tokens):
            continue  # a conversation with such a token fails
        tokens = torch.tensor([[*prompt.tokens, *completion.tokens]])
        mask = torch.arange(tokens.shape[1])[None] >= len(prompt.tokens)
        with torch.no_grad():
            logps = actor(tokens, mask, media=[media_of(prompt)]).logps[mask]
        torch.testing.assert_close(logps, torch.tensor(completion.logps), atol=2e-5, rtol=0)


@every_kind
def test_a_picture_of_a_later_turn_is_read_behind_the_first(made: Case) -> None:
    """The prompt and a reply, each rendered by its own call, equal one plain forward over all tokens."""
    start, reply = made.prompts[0], made.template.render_delta(question("And this?", picture(5, 32, 64)))
    assert start.media is not None
    assert reply.media is not None
    turn = [77, 78, *sorted(made.template.stop_ids)[:1]]
    tokens = torch.tensor([[*start.tokens, *turn, *reply.tokens, 90, 91]])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, len(start.tokens) : len(start.tokens) + len(turn)] = True
    mask[0, -2:] = True
    media = Media([start.media, reply.media.after(len(start.tokens) + len(turn))])
    actor = Actor(made.policy)
    with torch.no_grad():
        two_rows = actor(tokens.repeat(2, 1), mask.repeat(2, 1), media=[media, media]).logps
    expected = own_logps(made.policy, tokens, mask, [media])
    torch.testing.assert_close(two_rows[1][mask[0]], expected, atol=2e-5, rtol=0)


@every_kind
def test_pictures_of_earlier_turns_are_not_run_again(made: Case) -> None:
    """Beside a shorter conversation; other pictures have other keys, though their tokens are the same."""
    reply = made.template.render_delta([{"role": "user", "content": "Why?"}]).tokens

    def converse(max_bytes: int | None) -> tuple[list[list[int]], list[float]]:
        engine, answers, counts = engine_of(made), list[list[int]](), list[float]()
        sampler: Any = engine._sampler
        if max_bytes is not None:
            sampler.prefixes.max_bytes = max_bytes
        rows = [tuple(prompt.tokens) for prompt in made.prompts]

        async def turn() -> list[Completion]:
            requests = (
                Request(row, Sampling(temperature=0.0, max_tokens=4), SampleKey(0, 1, str(i), 0), str(i),
                        media=media_of(prompt), continues=True)
                for i, (row, prompt) in enumerate(zip(rows, made.prompts, strict=True))
            )  # fmt: skip
            return list(await asyncio.gather(*map(engine.generate, requests)))

        for _ in range(2):
            completions = asyncio.run(turn())
            answers += [completion.tokens for completion in completions]
            counts.append(engine.health()["prefilled_tokens"])
            rows = [(*row, *c.tokens, *reply) for row, c in zip(rows, completions, strict=True)]
        engine.close()
        return answers, counts

    answers, counts = converse(None)
    assert counts[1] == 4 * (1 + len(reply))
    assert answers == converse(0)[0]


@every_kind
def test_only_the_text_model_is_trained_by_default(made: Case) -> None:
    trained = {id(weight) for weight in freeze_vision(load_policy(made.model)).parameters() if weight.requires_grad}
    policy = load_policy(made.model)
    text = {id(weight) for weight in language_model(policy).parameters()}
    named = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert trained
    assert {name for name, weight in policy.named_parameters() if id(weight) in text} <= set(named)
    assert not any("vision" in name or "visual" in name or "projector" in name for name in named)
    complete = load_policy(Model(made.model.path, vision=Vision(train=True)))
    assert all(weight.requires_grad for weight in complete.parameters())


@every_kind
def test_adapters_are_on_the_text_model_by_default(made: Case) -> None:
    lora = Lora(rank=2)
    text_only = [n for n, _ in load_policy(Model(made.model.path, lora=lora)).named_parameters() if "lora_" in n]
    assert text_only
    assert not any("vision" in name or "visual" in name or "projector" in name for name in text_only)
    both = load_policy(Model(made.model.path, lora=lora, vision=Vision(train=True)))
    assert sum("lora_" in name for name, _ in both.named_parameters()) > len(text_only)


def test_a_critic_reads_pictures(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = case(str(tmp_path_factory.getbasetemp()), "qwen2_5_vl")
    backbone, head = load_backbone(made.model)
    critic = ValueModel(backbone, head)
    torch.nn.init.normal_(critic.head.weight)
    tokens, mask, media = batch_of(made.prompts[:2], (4,))
    with torch.no_grad():
        values = critic(tokens, mask, media)
        exchanged = critic(tokens, mask, media[::-1])
    assert float((values - exchanged).abs().max()) > 0.01


@pytest.mark.parametrize("made", PACKED, indirect=True)
def test_prompts_that_end_with_a_picture_are_packed_too(made: Case) -> None:
    """The generation prompt is left out, so that the policy's first token follows the last of the picture."""
    prompts = []
    for rendered in made.prompts[:2]:
        assert rendered.media is not None
        prompts.append(Rendered(rendered.tokens[: rendered.media.end], rendered.media))
    tokens, mask, media = batch_of([*prompts, prompts[0]], (3, 4))
    actor = Actor(made.policy)
    with torch.no_grad():
        logps = actor(tokens, mask, media=media).logps
    torch.testing.assert_close(logps[mask], own_logps(made.policy, tokens, mask, media), atol=2e-5, rtol=0)
