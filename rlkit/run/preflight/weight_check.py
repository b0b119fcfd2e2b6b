"""The check that the engine samples from the trainer's weights, before anything is trained on its tokens."""

from __future__ import annotations

import asyncio
from math import inf, isnan

import torch

from rlkit.base.errors import EngineError
from rlkit.data.data import Data
from rlkit.interfaces import outputs
from rlkit.registry import calling, require
from rlkit.rollout.service import RolloutService
from rlkit.types import Completion, Media, Request, SampleKey, Sampling

PROMPTS = 4
"""Prompts that are continued by one token."""


def check_weights(data: Data, service: RolloutService) -> float:
    """Compare the engine's log-prob of a token after a few prompts with the trainer's; return the mean gap.

    Raises:
        EngineError: The gap is larger than `rollout.max_gap`.
        PartError: The engine raised, or did not return a completion of the current weights.
    """
    prompts = data.examples(PROMPTS)
    recipe, actor, ranks = service.recipe, service.actor, service.ranks
    full_precision = str(ranks.fabric.strategy.precision.precision).startswith("32")
    full_precision &= all(x.dtype is torch.float32 for x in actor.parameters() if x.is_floating_point())
    limit = recipe.rollout.max_gap or (1e-3 if full_precision else 0.2)
    sampling = Sampling(temperature=1.0, max_tokens=1)
    template = data.dialogue.template
    starts = [template.render_start(prompt.messages, prompt.tools) for prompt in prompts if ranks.lead]
    requests = [
        Request(
            tuple(tokens),
            sampling,
            SampleKey(0, 0, f"weight-check/{i}", 0),
            f"weight-check/{i}",
            media=None if segment is None else Media([segment]),
        )
        for i, (tokens, segment) in enumerate(starts)
    ]

    engine = service.engine

    async def generate() -> list[Completion]:
        with calling(engine, "generate"):
            return list(await asyncio.gather(*map(engine.generate, requests)))

    completions = ranks.broadcast_tp(service.sample(generate()))
    requests = ranks.broadcast_tp(requests)
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        require(
            engine, "generate", outputs.of_engine(completion, request, service.version, data.dialogue.template.stop_ids)
        )
        is_picture = template.reader is not None and completion.tokens[0] in template.reader.placeholders
        sampled = [0] if is_picture else completion.tokens  # a picture's token stands for nothing here
        tokens = torch.tensor([[*request.tokens, *sampled]], device=ranks.fabric.device)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, -1] = True
        with torch.no_grad(), ranks.fabric.autocast():
            logps = actor(tokens, mask, media=[request.media]).logps
        if not is_picture:
            gaps.append(abs(float(logps[0, -1]) - completion.logps[0]))
    mean = sum(gaps) / max(1, len(gaps))
    gap = ranks.all_reduce_max(inf if isnan(mean) else mean)
    if gap > limit:
        raise EngineError(
            f"the engine does not sample from the trainer's weights: log-probs of {len(gaps)} tokens are {gap:.3g} "
            f"away from the trainer's on average, expected at most {limit:g} (rollout.max_gap)"
        )
    return gap
