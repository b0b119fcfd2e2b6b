"""The proof that the engine samples from the trainer's weights, before anything is trained on its tokens."""

from __future__ import annotations

import asyncio
from math import inf, isnan

import torch

from rlkit.errors import EngineError
from rlkit.interfaces import outputs
from rlkit.registry import calling, require
from rlkit.train.run import Run
from rlkit.types import Completion, Request, SampleKey, Sampling

PROMPTS = 4
"""How many prompts are continued by one token."""


def check_weights(run: Run) -> float:
    """Compare the engine's log-prob of a token after a few prompts with the trainer's; return the mean gap.

    Raises:
        EngineError: It is larger than `rollout.max_gap`.
        PartError: The engine raised, or what it returned is no completion with weights of the current version.
    """
    prompts = run.data.examples(PROMPTS)
    whole = str(run.fabric.strategy.precision.precision).startswith("32")
    whole &= all(weight.dtype is torch.float32 for weight in run.actor.parameters())
    limit = run.recipe.rollout.max_gap or (1e-3 if whole else 0.2)
    sampling = Sampling(temperature=1.0, max_tokens=1)
    asked = [tuple(run.template.start(prompt.messages)) for prompt in prompts if run.ranks.lead]
    requests = [Request(ids, sampling, SampleKey(0, 0, f"proof/{i}", 0), f"proof/{i}") for i, ids in enumerate(asked)]

    engine = run.recipe.rollout.engine

    async def ask() -> list[Completion]:
        with calling(engine, "generate"):
            return list(await asyncio.gather(*map(engine.generate, requests)))

    answers = run.ranks.broadcast_tp(run.sample(ask()))
    requests = run.ranks.broadcast_tp(requests)
    gaps = []
    for request, answer in zip(requests, answers, strict=True):
        require(engine, "generate", outputs.of_engine(answer, request, run.version, run.stop_ids))
        tokens = torch.tensor([[*request.tokens, *answer.tokens]], device=run.device)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, -1] = True
        with torch.no_grad(), run.autocast():
            gaps.append(abs(float(run.actor(tokens, mask).logps[0, -1]) - answer.logps[0]))
    mean = sum(gaps) / max(1, len(gaps))
    gap = run.ranks.all_reduce_max(inf if isnan(mean) else mean)
    if gap > limit:
        raise EngineError(
            f"the engine does not sample from the trainer's weights: log-probs of {len(gaps)} tokens are {gap:.3g} "
            f"away from the trainer's on average, expected at most {limit:g} (rollout.max_gap)"
        )
    return gap
