"""TorchEngine returns the experts that it selected: those of plain passes, for prompts, tokens and later turns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.engines import TorchEngine
from rlkit.models.routes import Routing, routers_of
from rlkit.models.vision import backbone_of
from rlkit.ops.routes import ROUTES, Routers
from rlkit.testing import random_model
from rlkit.types import Completion, Request
from tests.contract.test_torch_engine import CHUNKED, PROMPTS, ask, bind, engine_of, request
from tests.flow.test_architectures import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:TorchEngine")
MIXTURES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


@cache
def policy(kind: str) -> Any:
    return random_model(kind, **KINDS[kind])


def plain_routes(model: Any, tokens: tuple[int, ...]) -> Tensor:
    """Return the routes [t,R,K] of a plain pass, ordered by expert."""
    routing, routers = Routing(), routers_of(backbone_of(model))
    assert routers is not None
    with torch.no_grad():
        backbone_of(model)(input_ids=torch.tensor([tokens]), use_cache=False, routing=routing)
    return routing.recorded(routers).sort(-1).values


def check(model: Any, asked: Request, answer: Completion) -> None:
    """Compare with a plain pass; no route of these random models is near a tie."""
    routes: Any = answer.fields[ROUTES]
    assert asked.routes_from is not None
    assert len(routes) == len(asked.tokens) + len(answer.tokens) - asked.routes_from
    assert not routes[-1].any()
    expected = plain_routes(model, (*asked.tokens, *answer.tokens))[asked.routes_from : -1]
    assert torch.equal(routes[:-1].sort(-1).values, expected)


@pytest.mark.parametrize("kind", MIXTURES)
def test_routes_are_those_of_a_plain_pass(kind: str) -> None:
    """Prompts of several lengths, two of them equal, in three places; one row asks for no routes."""
    model = policy(kind)
    engine = engine_of(model, max_rows=3)
    requests = [replace(request(p, i, max_tokens=5 + 4 * i), routes_from=0) for i, p in enumerate(PROMPTS)]
    requests[1] = replace(requests[1], routes_from=None)
    answers = ask(engine, requests)
    assert ROUTES not in answers[1].fields
    for asked, answer in zip(requests, answers, strict=True):
        if asked.routes_from is not None:
            check(model, asked, answer)


def test_a_later_turn_returns_the_routes_that_are_missing() -> None:
    """The prefix's keys and values are kept; the last token of the turn before has no route yet, a reply neither."""
    model = policy("qwen3_moe")
    engine = engine_of(model)
    first = replace(request(PROMPTS[1], max_tokens=6), continues=True, routes_from=0)
    [answer] = ask(engine, [first])
    later = (*first.tokens, *answer.tokens, 9, 200, 31)
    second = replace(first, tokens=later, routes_from=len(first.tokens) + len(answer.tokens) - 1)
    engine.health()
    [continued] = ask(engine, [second])
    assert engine.health()["prefilled_tokens"] == 4
    check(model, second, continued)
    [again] = ask(engine, [replace(second, routes_from=0)])  # whose routes are known nowhere
    assert engine.health()["prefilled_tokens"] == len(later)
    check(model, replace(second, routes_from=0), again)


def test_rows_that_are_dropped_take_their_routes_along() -> None:
    """Forty rows end after 1 to 40 tokens; those that are left move to other places of the batch."""
    model = policy("qwen3_moe")
    engine = engine_of(model)
    engine._stop_ids = frozenset()
    requests = [replace(request(PROMPTS[0], i, max_tokens=1 + i), routes_from=2) for i in range(40)]
    for asked, answer in zip(requests, ask(engine, requests), strict=True):
        check(model, asked, answer)


def test_a_dense_model_has_no_routes() -> None:
    [answer] = ask(engine_of(random_model("llama")), [replace(request(PROMPTS[0]), routes_from=0)])
    assert answer.fields == {}


def test_a_model_whose_experts_are_not_recorded_is_refused_only_if_the_recipe_asks() -> None:
    """Llama 4 is sampled through transformers' `generate`."""
    model = random_model("llama4_text", **CHUNKED)
    asking = TorchEngine()
    asking.return_routes(Routers((0, 1), 2, 2, 1), required=True)
    with pytest.raises(EngineError, match="train.router_replay is true, but TorchEngine records no experts"):
        bind(asking, model)
    engine = TorchEngine()
    engine.return_routes(Routers((0, 1), 2, 2, 1))
    with pytest.warns(UserWarning, match="experts: not replayed: TorchEngine records no experts of this model"):
        bind(engine, model)
    assert (engine.routers, engine.fills) == (None, ())
    engine.close()
