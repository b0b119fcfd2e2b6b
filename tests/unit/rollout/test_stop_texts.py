"""Texts that end a turn, whichever tokens they are in and whatever the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.base.text import tokens_until
from rlkit.recipe.rollout import sampling_of_row
from rlkit.rollout.collect import BusyTimer, ask_engine
from rlkit.rollout.gate import Gate
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason
from tests.unit.rollout.test_gate import bound

PIECES = ["a", "b", "c", "</", "ans", "wer>", " ", "\n", "\n\n", "Q"]


def decode(tokens: Any) -> str:
    return "".join(PIECES[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "stops", "count"),
    [
        ([0, 3, 4, 5, 1], ["</answer>"], 4),  # over three tokens
        ([0, 3, 4, 5, 1], ["b", "</answer>"], 4),  # the first in the text
        ([0, 3, 4, 5, 1], ["c"], None),
        ([0, 8, 9], ["\nQ", "\n\n"], 2),
        ([0, 7, 9], ["\n"], 2),
        ([0, 8, 9], ["\n"], 2),  # within a token, which stays complete
        ([0], ["a"], 1),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_text(tokens: list[int], stops: list[str], count: Any) -> None:
    assert tokens_until(tokens, stops, decode) == count


class Scripted:
    """Samples given tokens, at most `max_tokens` of them in a request, and counts the requests."""

    def __init__(self, tokens: list[int], interrupt: int | None = None) -> None:
        self.tokens, self.requests, self.interrupt = tokens, [], interrupt  # type: ignore[var-annotated]

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        start = len(request.tokens) - 1
        assert request.resumed == start
        assert request.sampling.stop == ()
        tokens = self.tokens[start : start + request.sampling.max_tokens]
        stop = StopReason.LENGTH if len(tokens) == request.sampling.max_tokens else StopReason.STOP
        if self.interrupt is not None:
            tokens, stop, self.interrupt = tokens[: self.interrupt], StopReason.INTERRUPTED, None
        positions = list(range(start, start + len(tokens)))
        return Completion(tokens, [-float(i) for i in positions], positions, stop)


def asked(engine: Any, sampling: Sampling, gate: Gate | None = None, template: Any = None) -> Completion:
    codec = SimpleNamespace(decode=decode)
    template = template or SimpleNamespace(codec=codec, reader=None)
    limits = SimpleNamespace(context=1000)
    setup = SimpleNamespace(engine=engine, gate=gate, template=template, limits=limits, timer=BusyTimer())
    request = Request((7,), sampling, SampleKey(0, 1, "p", 0), session="s")

    async def ask() -> Completion:
        if gate is not None:
            gate.open()
            gate.count(1)
        return await ask_engine(setup, request)  # type: ignore[arg-type]

    return asyncio.run(ask())


@pytest.mark.parametrize("index", [0, 30, 31, 32, 95, 96, 150])
def test_what_is_sampled_after_the_text_is_left_out(index: int) -> None:
    """Texts that lie across the tokens at which it is searched for, 32, 96 and 224, are seen as well."""
    engine = Scripted([0] * index + [3, 4, 5] + [1] * 200)
    answer = asked(engine, Sampling(max_tokens=300, stop=("</answer>",)))
    count = index + 3
    assert answer.tokens == engine.tokens[:count]
    assert answer.logps == [-float(i) for i in range(count)]
    assert answer.versions == list(range(count))
    assert answer.stop is StopReason.STOP
    assert len(engine.requests) == (1 if count <= 32 else 2 if count <= 96 else 3)


def test_without_the_text_a_turn_ends_as_it_would() -> None:
    stop = ("</answer>",)
    ended = asked(Scripted([0] * 70), Sampling(max_tokens=300, stop=stop))
    assert (len(ended.tokens), ended.stop) == (70, StopReason.STOP)
    cut = asked(Scripted([0] * 300), Sampling(max_tokens=70, stop=stop))
    assert (len(cut.tokens), cut.stop) == (70, StopReason.LENGTH)


@pytest.mark.parametrize("stop", [(), ("</answer>",)])
def test_an_engine_that_samples_nothing_is_not_asked_for_ever(stop: tuple[str, ...]) -> None:
    engine = Scripted([])
    engine.generate = lambda request: asyncio.sleep(0, Completion([], [], [], StopReason.LENGTH))  # type: ignore[method-assign,assignment]
    assert asked(engine, Sampling(max_tokens=70, stop=stop)).tokens == []


def test_an_interruption_does_not_hide_the_text() -> None:
    engine = Scripted([0] * 40 + [3, 4, 5, 1], interrupt=10)
    answer = asked(engine, Sampling(max_tokens=300, stop=("</answer>",)), Gate())
    assert answer.tokens == engine.tokens[:43]
    assert [request.resumed for request in engine.requests] == [0, 10, 32]


def test_torch_engine_samples_the_same_tokens_with_stop_texts() -> None:
    """Those without them, up to the text; log-probs within rounding, since later requests read earlier tokens again."""
    engine = bound("qwen2")
    engine._stop_ids = frozenset()
    template = SimpleNamespace(codec=SimpleNamespace(decode=lambda ids: "".join(f"<{i}>" for i in ids)), reader=None)
    sampling = Sampling(max_tokens=200)
    everything = asked(engine, sampling, template=template)
    assert len(everything.tokens) > 40
    first = next(i for i in range(36, 200) if everything.tokens[i] not in everything.tokens[:i])
    text = f"{everything.tokens[first - 1]}><{everything.tokens[first]}"
    answer = asked(engine, replace(sampling, stop=("never", text)), template=template)
    assert answer.tokens == everything.tokens[: first + 1]
    assert answer.logps == pytest.approx(everything.logps[: first + 1], abs=1e-5)


def test_a_row_may_ask_for_fewer_tokens_and_more_texts() -> None:
    sampling = Sampling(max_tokens=64, stop=("\n\n",))
    assert sampling_of_row(sampling, None) == sampling
    assert sampling_of_row(sampling, {"max_tokens": 8}) == replace(sampling, max_tokens=8)
    assert sampling_of_row(sampling, {"max_tokens": 65}) == sampling
    assert sampling_of_row(sampling, {"stop": "Q"}).stop == ("\n\n", "Q")
    assert sampling_of_row(sampling, {"stop": ["Q", "\n\n"]}).stop == ("\n\n", "Q")


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": True}, {"temperature": 1}, {"stop": [""]}, {"stop": {"a": 1}}, "x"]
)
def test_other_options_of_a_row_are_refused(options: object) -> None:
    with pytest.raises(ValueError, match="the row's sampling"):
        sampling_of_row(Sampling(max_tokens=64), options)
