"""The experts that a real SGLang selects, on the CPU, and what their replay removes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlkit.engines import SGLangServer
from rlkit.models.actor import Actor
from rlkit.testing import random_model
from rlkit.types import Completion, Request
from tests.served import PROMPTS, RETRY, Trainer, request

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True, "max_position_embeddings": 512,
}  # fmt: skip
"""Of a Qwen3-MoE whose first layer is dense."""


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
    engine.routers = actor.routers
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine)
        yield engine
    finally:
        engine.close()


def mismatch(actor: Actor, asked: Request, answer: Completion, routes: Any) -> float:
    """Return the largest difference of the trainer's log-probs from an answer's."""
    tokens = torch.tensor([[*asked.tokens, *answer.tokens]])
    mask = torch.arange(tokens.shape[1])[None] >= len(asked.tokens)
    with torch.no_grad():
        logps = actor(tokens, mask, asked.sampling.temperature, routes=routes).logps[mask]
    return float((logps - torch.tensor(answer.logps)).abs().max())


def test_routes_are_those_of_the_trainer(trainer: Trainer, actor: Actor, engine: SGLangServer) -> None:
    """Prompts come again, so that some are in the cache; a later turn asks for what is missing."""
    assert actor.routers is not None
    assert actor.routers.layers == (1, 2)
    asked = [replace(request(p, i, max_tokens=12), routes_from=0) for _ in range(2) for i, p in enumerate(PROMPTS)]
    for one, answer in zip(asked, trainer.ask(engine, asked), strict=True):
        routes: Any = answer.fields["routes"]
        assert len(routes) == len(one.tokens) + len(answer.tokens)
        assert mismatch(actor, one, answer, routes[None]) < 1e-4
        later = replace(one, tokens=(*one.tokens, *answer.tokens, 9, 31), routes_from=len(routes) - 1)
        [continued] = trainer.ask(engine, [later])
        added: Any = continued.fields["routes"]
        assert len(added) == len(later.tokens) + len(continued.tokens) - later.routes_from
        complete = torch.cat((routes[:-1], added))
        assert mismatch(actor, later, continued, complete[None]) < 1e-4
    differing, compared = actor.take_replayed()
    assert differing <= 0.01 * compared
    assert compared > 1000


def test_replay_removes_what_rounding_moves(trainer: Trainer, actor: Actor, engine: SGLangServer) -> None:
    """A trainer whose router is off by a little selects other experts than the server, which the replay removes."""
    asked = [replace(request(p, i, "drift", max_tokens=24), routes_from=0) for i, p in enumerate(PROMPTS)]
    answers = trainer.ask(engine, asked)
    gates = [p for name, p in trainer.policy.named_parameters() if name.endswith("gate.weight")]
    before = [gate.detach().clone() for gate in gates]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for gate in gates:
                gate += 1e-2 * gate.std() * torch.randn(gate.shape, generator=generator)
        routes: list[Any] = [answer.fields["routes"] for answer in answers]
        pairs = list(zip(asked, answers, strict=True))
        live = [mismatch(actor, *pair, None) for pair in pairs]
        replayed = [mismatch(actor, *pair, own[None]) for pair, own in zip(pairs, routes, strict=True)]
    finally:
        with torch.no_grad():
            for gate, weight in zip(gates, before, strict=True):
                gate.copy_(weight)
    assert actor.take_replayed()[0] > 0
    print("mismatch live", live, "replayed", replayed)
    assert max(replayed) < 0.2 * max(live)
