"""Completions of a real SGLang server against transformers and the trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlkit_servers.engine import ServerEngine
from rlkit_servers.http import Client
from rlkit_servers.process import free_port

from rlkit.base.errors import EngineError, RolloutError
from rlkit.engines import SGLangServer
from rlkit.interfaces.teacher import TokenSpan
from rlkit.models.actor import Actor
from rlkit.types import StopReason
from tests.served import PROMPTS, RETRY, Trainer, check_candidates, check_structures, request


def test_greedy_output_equals_generate_token_for_token(trainer: Trainer, engine: SGLangServer) -> None:
    assert trainer.is_served_by(engine)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_equal_the_trainers(trainer: Trainer, engine: SGLangServer, temperature: float) -> None:
    requests = [request(p, i, temperature=temperature, max_tokens=5 + 4 * i) for i, p in enumerate(PROMPTS)]
    actor = Actor(trainer.policy)
    for r, answer in zip(requests, trainer.ask(engine, requests), strict=True):
        tokens = torch.tensor([[*r.tokens, *answer.tokens]])
        mask = torch.arange(tokens.shape[1])[None] >= len(r.tokens)
        logps = actor(tokens, mask, temperature).logps[mask]
        assert (logps - torch.tensor(answer.logps)).abs().max() < 1e-4


def test_truncated_completions_have_candidates(trainer: Trainer, engine: ServerEngine) -> None:
    check_candidates(trainer, engine, 1e-4)


def test_structured_completions_are_valid(trainer: Trainer, engine: ServerEngine) -> None:
    check_structures(trainer, engine)


def test_a_teachers_log_probs_are_those_of_transformers(trainer: Trainer, engine: ServerEngine) -> None:
    spans = [TokenSpan(list(tokens), start) for tokens in PROMPTS for start in (1, 3) if start <= len(tokens)]
    teacher = engine.teacher([engine.fleet.owned[0].url] * 2)
    for span, logps in zip(spans, trainer.wait(teacher.logps(spans)), strict=True):
        tokens = torch.tensor([span.tokens])
        expected = Actor(trainer.policy)(tokens, torch.ones_like(tokens, dtype=torch.bool)).logps[0, span.start :]
        assert logps == pytest.approx(expected.tolist(), abs=1e-5)
    for span, positions in zip(spans, trainer.wait(teacher.top_logps(spans, 5)), strict=True):
        logits = trainer.policy(input_ids=torch.tensor([span.tokens])).logits[0, span.start - 1 : -1]
        expected = logits.log_softmax(-1).topk(5)
        assert [ids for ids, _ in positions] == expected.indices.tolist()
        actual = torch.tensor([logps for _, logps in positions]).view(-1, 5)
        torch.testing.assert_close(actual, expected.values, atol=1e-5, rtol=0.0)
    with pytest.raises(EngineError, match=r"(?s)have not scored a row: .* answered 400: .*longer than"):
        trainer.wait(teacher.logps([TokenSpan([5] * 1000, 1)]))


def test_samples_of_one_prompt_differ(trainer: Trainer, engine: SGLangServer) -> None:
    answers = trainer.ask(engine, [request(PROMPTS[0], i, session=str(i)) for i in range(8)])
    assert len({tuple(a.tokens) for a in answers}) == 8


def test_stop_ids_budgets_and_the_context_end_a_completion(trainer: Trainer, engine: SGLangServer) -> None:
    [plain] = trainer.ask(engine, [request(PROMPTS[0], temperature=0.0, max_tokens=6)])
    assert (len(plain.tokens), plain.stop, plain.versions) == (6, StopReason.LENGTH, [trainer.version] * 6)
    [stopped] = trainer.ask(engine, [request(PROMPTS[0], temperature=0.0, stop_ids=(plain.tokens[2],))])
    assert (stopped.tokens, stopped.stop) == (plain.tokens[:3], StopReason.STOP)
    assert len(stopped.logps) == len(stopped.versions) == 3
    long, over = tuple(range(3, 253)) * 2, tuple(range(3, 259)) * 2
    full, none = trainer.ask(engine, [request(long, temperature=0.0), request(over)])
    assert (len(full.tokens), full.stop) == (10, StopReason.CONTEXT)  # 500 of 512, two of which SGLang reserves
    assert (none.tokens, none.stop) == ([], StopReason.CONTEXT)


def test_truncated_sampling_reports_logps_of_the_full_softmax(trainer: Trainer, engine: SGLangServer) -> None:
    asked = [request(PROMPTS[0], **limits) for limits in ({"temperature": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0})]
    greedy, *sampled = trainer.ask(engine, asked)
    for likeliest in sampled:
        assert likeliest.tokens == greedy.tokens
        assert likeliest.logps == pytest.approx(greedy.logps, abs=1e-4)


def test_256_requests_at_once(trainer: Trainer, engine: SGLangServer) -> None:
    requests = [request((i % 256, 1, 2), i, session=str(i), max_tokens=1 + i % 16) for i in range(256)]
    retried = engine.health()["retried"]
    answers = trainer.ask(engine, requests)
    for r, answer in zip(requests, answers, strict=True):
        full = len(answer.tokens) == r.sampling.max_tokens
        assert full or answer.stop is StopReason.STOP
        assert len(answer.tokens) == len(answer.logps) == len(answer.versions)
    assert engine.health()["retried"] == retried


def test_a_deadline_ends_one_request_and_no_other(trainer: Trainer, engine: SGLangServer) -> None:
    hasty = replace(request(PROMPTS[1], max_tokens=400, stop_ids=()), deadline=0.02)

    async def run() -> list[Any]:
        fine = engine.generate(request(PROMPTS[0], temperature=0.0))
        return await asyncio.gather(engine.generate(hasty), fine, return_exceptions=True)

    late, fine = trainer.wait(run())
    assert isinstance(late, TimeoutError)
    assert fine.tokens == trainer.greedy(PROMPTS[0], 24)


def test_a_request_that_the_server_refuses_is_data(trainer: Trainer, engine: SGLangServer) -> None:
    with pytest.raises(RolloutError, match=r"token ids \(264,\), expected one or more from 0 to 263"):
        trainer.ask(engine, [request((264,))])
    odd = request(PROMPTS[0], top_p=0.5)
    object.__setattr__(odd.sampling, "top_p", 2.0)
    with pytest.raises(RolloutError, match=r"after 1 attempts: POST .*/generate answered 400: .*top_p must be in"):
        trainer.ask(engine, [odd])


def test_turns_of_a_conversation_find_their_prefix_in_the_cache(trainer: Trainer, engine: SGLangServer) -> None:
    cached: list[int] = []
    post = Client.post

    async def noted(client: Client, path: str, body: Any, deadline: float) -> Any:
        answer = await post(client, path, body, deadline)
        cached.append(answer["meta_info"]["cached_tokens"])
        return answer

    first = (260, *range(50, 90))  # no other test starts so
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "post", noted)
        [answer] = trainer.ask(engine, [request(first, session="talk")])
        second = (*first, *answer.tokens, 7, 8, 9)
        trainer.ask(engine, [request(second, session="talk")])
    assert cached[0] == 0
    assert cached[1] >= len(first) + len(answer.tokens) - 1  # the last token's own key was never computed


def test_requests_go_through_a_router_and_weights_past_it(trainer: Trainer, engine: SGLangServer) -> None:
    from aiohttp import ClientSession, web

    server, passed = engine.fleet.owned[0].url, []

    async def forward(incoming: web.Request) -> web.Response:
        passed.append(incoming.path)
        async with (
            ClientSession() as session,
            session.post(server + incoming.path, json=await incoming.json()) as response,
        ):
            return web.json_response(await response.json(), status=response.status)

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    port = free_port()
    runner = trainer.wait(start())
    routed = SGLangServer(urls=[server], router=f"http://127.0.0.1:{port}", retry=RETRY)
    routed.bind(trainer.runtime)
    try:
        trainer.publish(routed)
        assert passed == []
        assert trainer.is_served_by(routed)
        assert set(passed) == {"/generate"}
    finally:
        routed.close()
        trainer.wait(runner.cleanup())
        trainer.publish(engine)
