"""The experts that a real SGLang selects, on the CPU, and what their replay removes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlkit_servers.sglang.launch import Launch
from torch import Tensor

from rlkit.engines import SGLangServer
from rlkit.models.actor import Actor
from rlkit.ops.logps import DEFAULT_READS
from rlkit.ops.routes import ROUTES
from rlkit.testing import random_model
from rlkit.types import Completion, Request
from tests.served import PROMPTS, RETRY, Trainer, request

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "max_position_embeddings": 512,
}  # fmt: skip
"""Of a Qwen3-MoE; SGLang computes its layers with experts even where `mlp_only_layers` says dense."""


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer(random_model("qwen3_moe", **SIZES))
    yield trainer
    trainer.runner.close()


@pytest.fixture(scope="module")
def actor(trainer: Trainer) -> Actor:
    return Actor(trainer.policy)


@pytest.fixture(scope="module")
def engine(trainer: Trainer, actor: Actor) -> Iterator[SGLangServer]:
    engine = SGLangServer(retry=RETRY)
    assert actor.routers is not None
    engine.return_routes(actor.routers)
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine)
        yield engine
    finally:
        engine.close()


def gaps(actor: Actor, asked: Request, answer: Completion, routes: Any) -> Tensor:
    """Return how far the trainer's log-probs are from an answer's, with its routes [T,R,K] or without."""
    tokens = torch.tensor([[*asked.tokens, *answer.tokens]])
    mask = torch.arange(tokens.shape[1])[None] >= len(asked.tokens)
    reads = DEFAULT_READS._replace(expert_routes=None if routes is None else routes[None])
    with torch.no_grad():
        logps = actor(tokens, mask, asked.sampling.temperature, reads).logps[mask]
    return (logps - torch.tensor(answer.logps)).abs()


def test_routes_are_those_of_the_trainer(trainer: Trainer, actor: Actor, engine: SGLangServer) -> None:
    """Prompts come again, so that some are in the cache; a later turn asks for what is missing."""
    assert actor.routers is not None
    assert actor.routers.layers == (0, 1, 2)
    asked = [replace(request(p, i, max_tokens=12), routes_from=0) for _ in range(2) for i, p in enumerate(PROMPTS)]
    for one, answer in zip(asked, trainer.ask(engine, asked), strict=True):
        routes: Any = answer.fields[ROUTES]
        assert len(routes) == len(one.tokens) + len(answer.tokens)
        assert gaps(actor, one, answer, routes).max() < 1e-4
        later = replace(one, tokens=(*one.tokens, *answer.tokens, 9, 31), routes_from=len(routes) - 1)
        [continued] = trainer.ask(engine, [later])
        added: Any = continued.fields[ROUTES]
        assert len(added) == len(later.tokens) + len(continued.tokens) - later.routes_from
        complete = torch.cat((routes[:-1], added))
        assert gaps(actor, later, continued, complete).max() < 1e-4
    differing, compared = actor.passes.take_replayed()
    assert differing <= 0.01 * compared
    assert compared > 1000


def test_replay_removes_what_another_precision_moves() -> None:
    """A server in bfloat16 selects other experts than a trainer in float32; a control without replay has more gap."""
    sizes = {**SIZES, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "initializer_range": 0.1}
    half = Trainer(random_model("qwen3_moe", **sizes))
    actor = Actor(half.policy)
    assert actor.routers is not None
    engine = SGLangServer(retry=RETRY, launch=Launch(dtype="bfloat16"))
    engine.return_routes(actor.routers)
    try:
        engine.bind(half.runtime)
        half.publish(engine)
        asked = [replace(request(p, i, max_tokens=60), routes_from=0) for i, p in enumerate(PROMPTS * 4)]
        answers = half.ask(engine, asked)
    finally:
        engine.close()
        half.runner.close()
    pairs = list(zip(asked, answers, strict=True))
    live = torch.cat([gaps(actor, *pair, None) for pair in pairs])
    replayed = torch.cat([gaps(actor, *pair, pair[1].fields[ROUTES]) for pair in pairs])
    differing, compared = actor.passes.take_replayed()
    print(f"differs {differing / compared:.3f}, live {live.mean():.4f}, replayed {replayed.mean():.4f}")
    assert differing > 0.005 * compared
    assert replayed.mean() < 0.8 * live.mean()
