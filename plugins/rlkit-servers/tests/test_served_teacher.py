"""A teacher on servers: its log-probs equal those of a loaded teacher, and failures of a server are handled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_servers import teacher as server_teacher

from rlkit.base.errors import EngineError
from rlkit.base.retry import RetryPolicy
from rlkit.engines import SGLangServer
from rlkit.interfaces.teacher import TokenSpan
from rlkit.testing import random_model
from rlkit.train import teacher
from rlkit.train.teacher import check_servers, logps_on_servers, top_on_servers
from rlkit.types import RolloutBatch
from tests.conftest import rlkit_in_process
from tests.served import DISTILL, save_teacher, served_as_loaded
from tests.stubs import Stub, serving
from tests.unit.phases import LocalRanks, scored

Answer = Callable[..., Any]
"""From tokens, the index before the first scored token, and the number of most likely tokens if these are requested,
to a response or an HTTP status."""


class Server:
    """Serves `/generate` as SGLang does, and counts requests."""

    def __init__(self, answer: Answer, stack: ExitStack) -> None:
        counter = self
        self.asked = 0

        class Handler(Stub):
            def do_POST(self) -> None:
                counter.asked += 1
                body = self.read()
                assert body["sampling_params"] == {"max_new_tokens": 0}
                top = (body["top_logprobs_num"],) if "top_logprobs_num" in body else ()
                response = answer(body["input_ids"], body["logprob_start_len"], *top)
                self.answer(response, response if isinstance(response, int) else 200)

        self.url = stack.enter_context(serving(Handler))


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    with ExitStack() as stack:
        yield lambda answer: Server(answer, stack)


def token_response(
    tokens: list[int], start: int, logp: Callable[[int], float | None] = lambda position: -float(position)
) -> Any:
    """Return SGLang's response: an entry for each token from `start` on, the first without a log-prob."""
    entries = [
        [logp(position) if position > start else None, tokens[position], None] for position in range(start, len(tokens))
    ]
    return {"output_ids": [], "meta_info": {"input_token_logprobs": entries}}


def top_response(positions: list[Any]) -> Any:
    """Return SGLang's response with the most likely tokens at each position."""
    entries = [top and [[logp, token, None] for logp, token in top] for top in positions]
    return {"output_ids": [], "meta_info": {"input_top_logprobs": [None, *entries]}}


def ask(*servers: Server, spans: list[TokenSpan] | None = None) -> list[list[float]]:
    teacher = SGLangServer().teacher([server.url for server in servers])
    return asyncio.run(teacher.logps(spans or [TokenSpan([5, 6, 7, 8], 2)]))


def test_rows_are_scored_from_their_starts_in_their_order(serve: Callable[[Answer], Server]) -> None:
    first, second = serve(token_response), serve(token_response)
    spans = [TokenSpan(list(range(length)), 1 + length % 3) for length in range(4, 104)]
    assert ask(first, second, spans=spans) == [[-float(i) for i in range(s.start, len(s.tokens))] for s in spans]
    assert first.asked + second.asked == 100
    assert min(first.asked, second.asked) > 0
    assert ask(first, spans=[TokenSpan([3], 1)]) == [[]]


def test_each_server_scores_a_prompt_before_anything_is_spent(serve: Callable[[Answer], Server]) -> None:
    first, second = serve(token_response), serve(token_response)
    data: Any = SimpleNamespace(
        teacher_prompts=SimpleNamespace(prompt=lambda prompt: prompt, template=None),
        prompt=lambda row: SimpleNamespace(messages=[row], tools=None),
        order=SimpleNamespace(rows=["the first row", "the second"]),
        dialogue=SimpleNamespace(
            reader=None,
            template=SimpleNamespace(start=lambda messages, tools: [5, 6, 7] if messages == ["the first row"] else []),
        ),
    )
    service: Any = SimpleNamespace(
        recipe=SimpleNamespace(teacher=SimpleNamespace(urls=[first.url, second.url], engine=None)),
        ranks=SimpleNamespace(lead=True),
        wait=asyncio.run,
    )
    check_servers(data, service)
    assert (first.asked, second.asked) == (1, 1)
    service.ranks.lead = False  # the first rank's answer is enough
    check_servers(data, service)
    assert (first.asked, second.asked) == (1, 1)


def test_a_request_that_fails_goes_to_the_next_server(serve: Callable[[Answer], Server]) -> None:
    broken, healthy = serve(lambda *_: 503), serve(token_response)
    assert ask(broken, healthy) == [[-2.0, -3.0]]
    assert (broken.asked, healthy.asked) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda tokens, start: token_response([9, *tokens[1:3], 9], start), "has scored other tokens than it was sent"),
        (lambda tokens, start: token_response(tokens[:-1], start), "has scored other tokens than it was sent"),
        (lambda tokens, start: token_response(tokens, start, lambda position: float("nan")), "has scored other tokens"),
        (lambda tokens, start: token_response(tokens, start, lambda position: None), "expected log-probs of the input"),
        (lambda *_: {"meta_info": {"input_token_logprobs": [None, 3]}}, "expected log-probs of the input"),
        (lambda *_: ["\u001b[31m"], "expected log-probs of the input"),
        (lambda *_: 400, "answered 400: 400"),
    ],
)
def test_what_is_no_answer_ends_with_its_cause(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str
) -> None:
    monkeypatch.setattr(server_teacher, "RETRY", RetryPolicy(retries=1, request_seconds=60.0))
    server = serve(answer)
    with pytest.raises(EngineError) as error:
        ask(server)
    assert f"the teacher's servers ({server.url}) have not scored a row: " in str(error.value)
    assert message in str(error.value)


def test_a_server_that_does_not_answer_is_named(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_teacher, "RETRY", RetryPolicy(retries=1, request_seconds=0.2))
    ended = Event()
    with pytest.raises(EngineError, match=r"have not scored a row: .* answer within 0\.2 s"):
        ask(serve(lambda *_: ended.wait(60)))
    ended.set()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[(-0.1, 3), (-3.0, 4)]], "not returned the 2 most likely tokens at each position"),
        ([[(-0.1, 3), (-3.0, 3)]] * 2, "not returned the 2 most likely tokens"),
        ([[(-0.1, 3)]] * 2, "not returned the 2 most likely tokens"),
        ([[(-0.1, 3), (float("nan"), 4)]] * 2, "not returned the 2 most likely tokens"),
        ([None] * 2, "expected the most likely tokens"),
        ([[("x", 3), (-3.0, 4)]] * 2, "expected the most likely tokens"),
    ],
)
def test_most_likely_tokens_are_as_many_as_were_asked_for(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, positions: Any, message: str
) -> None:
    monkeypatch.setattr(server_teacher, "RETRY", RetryPolicy(retries=0, request_seconds=60.0))
    fine = serve(lambda *_: top_response([[(-0.1, 3), (-3.0, 4)]] * 2))
    spans = [TokenSpan([5, 6, 7, 8], 2)]
    assert asyncio.run(SGLangServer().teacher([fine.url]).top_logps(spans, 2)) == [[([3, 4], [-0.1, -3.0])] * 2]
    broken = serve(lambda *_: top_response(positions))
    with pytest.raises(EngineError, match=message):
        asyncio.run(SGLangServer().teacher([broken.url]).top_logps(spans, 2))


def on_servers(monkeypatch: pytest.MonkeyPatch, answer: Any, columns: int) -> tuple[Any, list[TokenSpan]]:
    """Return a context whose teacher always returns `answer`, with a policy of `columns` tokens, and what it scores."""
    asked: list[TokenSpan] = []

    async def score(spans: list[TokenSpan], *count: int) -> Any:
        asked.extend(spans)
        return [answer] * len(spans)

    def connect(urls: list[str], engine: Any) -> Any:
        assert (urls, engine) == (["http://teacher"], None)
        return SimpleNamespace(logps=score, top_logps=score)

    monkeypatch.setattr(teacher, "connect_teacher", connect)
    monkeypatch.setattr(teacher, "columns_of", lambda actor: columns)
    section = SimpleNamespace(urls=["http://teacher"], engine=None)
    recipe = SimpleNamespace(teacher=section)
    return SimpleNamespace(recipe=recipe, ranks=LocalRanks(), actor=None, wait=asyncio.run), asked


def two_rows() -> RolloutBatch:
    """Return a row without a token of the policy, and one with a tool's token 7 between two of the policy's."""
    batch = scored().rows(torch.tensor([0, 1]))
    batch.tokens = torch.tensor([[1, 2, 0, 0, 0], [4, 5, 6, 7, 8]])
    batch.attention = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    batch.mask = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    return batch


def test_a_row_is_scored_from_its_first_sampled_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, asked = on_servers(monkeypatch, [-1.0, -2.0, -3.0], columns=9)
    logps = logps_on_servers(service, two_rows())
    assert asked == [TokenSpan([4, 5, 6, 7, 8], 2)]
    assert logps.tolist() == [[0, 0, 0, 0, 0], [0, 0, -1, 0, -3]]


def test_positions_of_tokens_that_the_policy_lacks_are_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy has the tokens 0 to 8; all but the two most likely ones have 1/4 of the mass."""
    half, quarter = math.log(0.5), math.log(0.25)
    positions = [([8, 3], [half, quarter]), ([1, 2], [half, quarter]), ([3, 9], [half, quarter])]
    service, asked = on_servers(monkeypatch, positions, columns=9)
    ids, logps = top_on_servers(service, two_rows(), 2)
    assert asked == [TokenSpan([4, 5, 6, 7, 8], 2)]
    assert ids[1].tolist() == [[0, 0], [0, 0], [8, 3], [0, 0], [0, 0]]
    assert logps[1, 2].tolist() == pytest.approx([half, quarter, quarter])
    assert logps[1, 4].isnan().all()
    assert not logps[0].any()
    assert not logps[1, [0, 1, 3]].any()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["PolicyGradient", "Distillation"])
def test_a_teacher_behind_servers_teaches_as_one_that_is_loaded(
    serve: Callable[[Answer], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    model = random_model("qwen2", seed=5)
    save_teacher(model, tmp_path)

    @torch.no_grad()
    def answer(tokens: list[int], start: int, count: int = 0) -> Any:
        logps = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        if count:
            top = logps[start:-1].topk(count)
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            return top_response([list(zip(*pair, strict=True)) for pair in pairs])
        return token_response(tokens, start, lambda position: logps[position - 1, tokens[position]].item())

    server = serve(answer)
    served = served_as_loaded(tmp_path, server.url, loss)
    assert server.asked == 1 + sum(line["rollout/samples"] for line in served)  # one before the first step
    monkeypatch.setattr(server_teacher, "RETRY", RetryPolicy(retries=0, request_seconds=5.0))
    gone = rlkit_in_process("fit", *DISTILL, '--teacher.urls=["http://127.0.0.1:9"]', "--out=gone", cwd=tmp_path)
    assert gone.returncode != 0
    assert "the teacher's servers (http://127.0.0.1:9) have not scored a row: " in gone.stderr
    assert not list((tmp_path / "gone").glob("rollouts/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--teacher.urls=[]",), "teacher.urls names no server"),
        (('--teacher.urls=["127.0.0.1:3"]',), "teacher.urls has '127.0.0.1:3', expected http://"),
        (("--teacher.path=null",), "teacher.path does not name their model"),
        (("--teacher.engine=TorchEngine",), "teacher.engine is TorchEngine, whose servers do not score tokens"),
        (("--teacher.urls=null", "--teacher.engine=SGLangServer"), "teacher.urls, but there are none; add them"),
        (("--rollout.sampling.temperature=0.7",), "return log-probs of temperature 1; set it to 1"),
    ],
)
def test_what_does_not_go_with_servers(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    urls = '--teacher.urls=["http://127.0.0.1:9"]'
    process = rlkit_in_process("recipe", "check", "quick_distill", "--teacher.path=tiny", urls, *words, cwd=tmp_path)
    assert process.returncode == 2
    assert message in process.stderr
