"""The check that the policy sees its pictures: log-probs must change with them, in the engine and in the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.data.data import Data
from rlkit.interfaces.content import pictures_of
from rlkit.interfaces.picture import Picture
from rlkit.registry import calling
from rlkit.rollout.service import RolloutService
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Media, Message, Prompt, Request, SampleKey, Sampling

PROMPTS = 3
"""Prompts whose pictures are replaced."""

TOKENS = 8
"""Tokens of an answer whose log-probs are compared."""

LEAST_CHANGE = 1e-4
"""The least change of a log-prob, in any answer, by which a policy sees a picture; equal passes differ by 1e-5."""

Replace = Callable[[Picture], Picture]


def check_pictures(data: Data, service: RolloutService) -> None:
    """Replace the pictures of a few prompts by noise and by each other, and compare log-probs of sampled answers.

    All ranks must call this. Nothing is checked where no example has pictures.

    Raises:
        RecipeError: Log-probs stay the same.
        EngineError: The engine failed.
    """
    prompts = [prompt for prompt in data.examples(16) if pictures_of(prompt.messages)][:PROMPTS]
    if data.dialogue.reader is None or not prompts:  # agreed: all ranks have the same model and examples
        return
    ranks, template = service.ranks, data.dialogue.template
    pictures = [picture for prompt in prompts for picture in pictures_of(prompt.messages)]
    requests = ranks.broadcast_tp([_request(template, prompt) for prompt in prompts])
    changed = {
        what: ranks.broadcast_tp([_request(template, _with_pictures(prompt, replace)) for prompt in prompts])
        for what, replace in (("noise", noise_like), ("other pictures", _next_of(pictures)))  # agreed: the same two
    }
    completions = _sample(service, requests)
    answered = zip(requests, completions, strict=True)  # agreed: as many requests as prompts on all ranks
    logps = [_logps(service, request, answer) for request, answer in answered]
    for what, replaced in changed.items():  # agreed: the same two
        compared = zip(replaced, completions, logps, strict=True)
        differences = [
            float((_logps(service, request, answer) - before).abs().max())
            for request, answer, before in compared  # agreed: as many requests as prompts on all ranks
        ]
        largest = ranks.all_reduce_max(max(differences))
        if largest < LEAST_CHANGE:
            raise RecipeError(
                f"the policy does not see its pictures: log-probs of its answers to {len(prompts)} prompts change by "
                f"at most {largest:.2g} when their pictures are replaced by {what}, expected at least "
                f"{LEAST_CHANGE:g}; choose another model, or check its chat_template.jinja and its "
                "preprocessor_config.json"
            )


def noise_like(picture: Picture) -> Picture:
    """Return a picture of random pixels, always the same, in the size of another one."""
    from PIL import Image

    width, height = picture.decode().size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return _encoded(Image.fromarray(pixels.numpy()))


def _next_of(pictures: Sequence[Picture]) -> Replace:
    """Replace each of some pictures by the next one that differs, in its size; by noise if all are equal."""
    following = dict(pairwise([*pictures, pictures[0]]))

    def replace(picture: Picture) -> Picture:
        other = following[picture]
        if other == picture:
            return noise_like(picture)
        return _encoded(other.decode().resize(picture.decode().size))

    return replace


def _encoded(image: object) -> Picture:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")  # type: ignore[attr-defined]
    return Picture(buffer.getvalue())


def _with_pictures(prompt: Prompt, replace: Replace) -> Prompt:
    """Return a prompt with each picture replaced."""
    messages: list[Message] = []
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {**part, "image": replace(part["image"])} if part["type"] == "image" else part for part in content
            ]
        messages.append({**message, "content": content})
    return dataclasses.replace(prompt, messages=messages)


def _request(template: ChatTemplate, prompt: Prompt) -> Request:
    tokens, segment = template.render_start(prompt.messages, prompt.tools)
    session = f"picture-check/{prompt.id}"
    sampling = Sampling(temperature=1.0, max_tokens=TOKENS)
    media = None if segment is None else Media([segment])
    return Request(tuple(tokens), sampling, SampleKey(0, 0, session, 0), session, media=media)


def _sample(service: RolloutService, requests: Sequence[Request]) -> list[Completion]:
    """Return the engine's answers; all ranks must call this."""
    engine = service.engine

    async def generate() -> list[Completion]:
        with calling(engine, "generate"):
            return list(await asyncio.gather(*map(engine.generate, requests if service.ranks.lead else [])))

    return service.ranks.broadcast_tp(service.sample(generate()))


def _logps(service: RolloutService, request: Request, answer: Completion) -> Tensor:
    """Return the trainer's log-probs [N] of an answer's tokens; all ranks must call this."""
    reader = service.dialogue.template.reader
    placeholders = frozenset() if reader is None else reader.placeholders
    completed = [0 if token in placeholders else token for token in answer.tokens]  # a random policy samples them
    tokens = torch.tensor([[*request.tokens, *completed]], device=service.ranks.fabric.device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, len(request.tokens) :] = True
    with torch.no_grad(), service.ranks.fabric.autocast():
        logps: Tensor = service.actor(tokens, mask, media=[request.media]).logps[mask]
    return logps
