"""Completions of a real server against TorchEngine's, and the exact distribution, on the same weights.

Each product's folder runs these tests with its own `trainer` and `engine`, so that products agree with each other, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from rlkit_servers.engine import ServerEngine

from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.models.weights import PolicyWeights
from rlkit.rollout.collect import BusyTimer, ask_engine
from rlkit.testing import random_model
from rlkit.types import Completion, StopReason
from tests.served import CONTEXT, PROMPTS, RETRY, Trainer, request

TEN_MILLION = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.05, "vocab_size": 2048,
}  # fmt: skip
TIE = 1e-5
"""The largest difference of the trainer's two largest logits at which engines may choose either token."""

SAMPLES = 1000
MIN_COUNT = 5
"""The smallest expected count of a token with a cell of its own; rarer ones share a cell."""

MIN_P = 1e-4


@pytest.fixture(scope="module")
def large(engine: ServerEngine) -> Iterator[tuple[Trainer, ServerEngine]]:
    """A trainer of ten million parameters, and a server with its weights."""
    trainer = Trainer(random_model("qwen2", **TEN_MILLION))
    server_engine: ServerEngine = type(engine)(retry=RETRY, transport="disk")
    try:
        server_engine.bind(trainer.runtime)
        trainer.publish(server_engine, 1 << 24)
        yield trainer, server_engine
    finally:
        server_engine.close()
        trainer.runner.close()


@contextmanager
def torch_engine(trainer: Trainer) -> Iterator[TorchEngine]:
    """Yield a TorchEngine with the trainer's weights."""
    engine = TorchEngine()
    engine.bind(trainer.runtime)
    try:
        trainer.wait(engine.sync(PolicyWeights(trainer.policy), 1))
        yield engine
    finally:
        engine.close()


def with_torch_engine(trainer: Trainer, prompts: list[tuple[int, ...]]) -> list[Completion]:
    """Return TorchEngine's greedy completions."""
    with torch_engine(trainer) as engine:
        return trainer.ask(engine, [request(prompt, temperature=0.0) for prompt in prompts])


def check_tie(trainer: Trainer, prompt: tuple[int, ...], answer: Completion, expected: Completion) -> None:
    """Check that completions first differ in the trainer's two most likely tokens, whose logits are equal to `TIE`."""
    index = next(i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b)
    logits = trainer.policy(torch.tensor([[*prompt, *expected.tokens[:index]]])).logits[0, -1]
    top = logits.topk(2)
    assert {answer.tokens[index], expected.tokens[index]} == set(top.indices.tolist())
    assert float(top.values[0] - top.values[1]) <= TIE


def check_greedy(trainer: Trainer, engine: RolloutEngine) -> None:
    """Check that 200 greedy completions of both engines have the same tokens up to a tie, and the same log-probs."""
    source = random.Random(7)
    prompts = [tuple(source.choices(range(256), k=source.randint(1, 40))) for _ in range(200)]
    answers = trainer.ask(engine, [request(prompt, temperature=0.0, session=str(prompt)) for prompt in prompts])
    ties = 0
    for prompt, answer, expected in zip(prompts, answers, with_torch_engine(trainer, prompts), strict=True):
        if answer.tokens != expected.tokens:
            check_tie(trainer, prompt, answer, expected)
            ties += 1
            continue
        assert answer.stop == expected.stop
        assert answer.logps == pytest.approx(expected.logps, abs=1e-4)
    assert ties < 5


def test_200_greedy_answers_of_a_tiny_model_agree(trainer: Trainer, engine: ServerEngine) -> None:
    trainer.publish(engine)
    check_greedy(trainer, engine)


def test_200_greedy_answers_of_ten_million_parameters_agree(large: tuple[Trainer, ServerEngine]) -> None:
    trainer, engine = large
    assert 9e6 < sum(parameter.numel() for parameter in trainer.policy.parameters()) < 11e6
    check_greedy(trainer, engine)


def test_a_stop_text_ends_a_turn_as_with_torch_engine(trainer: Trainer, engine: ServerEngine) -> None:
    """At most 96 tokens are sampled, of which 32 are asked for first; stop texts lie before, across and after these."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    template = SimpleNamespace(codec=SimpleNamespace(decode=decode), reader=None)

    def turn(engine: RolloutEngine, *stop: str) -> Completion:
        setup = SimpleNamespace(engine=engine, gate=None, template=template, timer=BusyTimer())
        setup.limits = SimpleNamespace(context=CONTEXT)
        asked = request(PROMPTS[0], temperature=0.0, max_tokens=96, stop=stop)
        return trainer.wait(ask_engine(setup, asked))  # type: ignore[arg-type]

    trainer.publish(engine)
    with torch_engine(trainer) as reference:
        everything = turn(reference).tokens
        assert len(everything) > 40
        for end in (5, 33, 40):
            texts = ("never", decode(everything[end - 3 : end]))
            answer, expected = turn(engine, *texts), turn(reference, *texts)
            assert (answer.tokens, answer.stop) == (expected.tokens, expected.stop)
            assert answer.logps == pytest.approx(expected.logps, abs=1e-4)
            assert answer.versions == [trainer.version] * len(answer.tokens)
            assert answer.stop is StopReason.STOP
            assert len(answer.tokens) <= end
            assert decode(answer.tokens).endswith(texts[1])


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.6}])
def test_sampled_frequencies_are_those_of_the_softmax(
    trainer: Trainer, engine: ServerEngine, limits: dict[str, float]
) -> None:
    """Pearson's chi-square test does not refuse them."""
    logits = trainer.policy(torch.tensor([PROMPTS[1]])).logits[0, -1].detach()
    probs = (logits / 0.7).softmax(-1)
    order = probs.argsort(descending=True)
    selected = torch.ones_like(probs, dtype=torch.bool)
    if "top_k" in limits:
        selected[order[5:]] = False
    if "min_p" in limits:
        selected = probs >= 0.2 * probs.max()
    if "top_p" in limits:
        selected[order[1:]] &= probs[order].cumsum(0)[:-1] < 0.6
    expected = SAMPLES * torch.where(selected, probs, 0) / probs[selected].sum()
    asked = [request(PROMPTS[1], i, str(i), max_tokens=1, temperature=0.7, **limits) for i in range(SAMPLES)]
    counts = Counter(answer.tokens[0] for answer in trainer.ask(engine, asked))
    assert all(selected[token] for token in counts)
    assert p_value(counts, expected.tolist()) > MIN_P


def p_value(counts: Counter[int], expected: list[float]) -> float:
    """Return the p-value of Pearson's chi-square test of counts; rare tokens share a cell, if that is large enough."""
    cells = [(float(counts[token]), count) for token, count in enumerate(expected) if count >= MIN_COUNT]
    rare = SAMPLES - sum(count for count, _ in cells), SAMPLES - sum(count for _, count in cells)
    cells += [rare] if rare[1] >= MIN_COUNT else []
    assert len(cells) > 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))
