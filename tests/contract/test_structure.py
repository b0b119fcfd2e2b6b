"""Completions with a structure: TorchEngine samples no other tokens, and the trainer knows which they were."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_engine_torch.structure import StructureMatcher

from rlkit.base.errors import EngineError, RecipeError, RolloutError
from rlkit.engines import TorchEngine
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason, Structure
from tests.candidates import logps_over_candidates
from tests.contract.test_torch_engine import PROMPTS, ask, bound, engine_of, model, request

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 9999},
        "unit": {"enum": ["m", "s", None]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "note": {"type": "string", "pattern": "^[a-c]{1,3}$"},
    },
    "required": ["answer", "unit", "steps"],
    "additionalProperties": False,
}
VOCABULARY = 263
YES_NO = Structure(regex="(yes|no)!?")

tokenizer = build_tokenizer()


def text(completion: Completion) -> str:
    return str(tokenizer.decode(completion.tokens[:-1]))


def check_logps(asked: Request, answer: Completion) -> None:
    """The trainer's log-probs over the candidates are the engine's, up to the rounding of logits."""
    gaps = (logps_over_candidates(model("qwen2"), asked, answer) - torch.tensor(answer.logps)).abs()
    assert gaps.max() < 1e-4
    assert gaps.mean() < 5e-6


@pytest.mark.slow
def test_five_hundred_answers_are_valid() -> None:
    options = {"structure": Structure(json_schema=SCHEMA), "top_k": VOCABULARY, "max_tokens": 200}
    requests = [request(PROMPTS[i % 5], i, temperature=(1.0, 0.7, 3.0)[i % 3], **options) for i in range(500)]
    texts = set()
    for asked, answer in zip(requests, ask(bound("qwen2"), requests), strict=True):
        value = json.loads(text(answer))
        jsonschema.validate(value, SCHEMA)
        assert answer.stop is StopReason.STOP
        assert text(answer) == json.dumps(value, ensure_ascii=False) or "\\" in text(answer)
        check_logps(asked, answer)
        texts.add(text(answer))
    assert len(texts) > 400


def test_candidates_are_the_tokens_that_continue_the_structure() -> None:
    requests = [request(PROMPTS[0], i, structure=YES_NO, top_k=9) for i in range(150)]
    answers, texts = ask(bound("qwen2"), requests), set()
    for answer in answers:
        texts.add(text(answer))
        expected = ["yn"]
        for character in text(answer):
            expected.append({"y": "e", "e": "s", "n": "o", "s": "!", "o": "!", "!": ""}[character])
        for ids, characters, written in zip(answer.candidates, expected, ["", *text(answer)], strict=True):
            ends = {tokenizer.eos_token_id} if written in {"s", "o", "!"} else set()
            assert set(ids) == {*tokenizer.encode(characters, add_special_tokens=False), *ends}
    for asked, answer in zip(requests[:20], answers[:20], strict=True):
        check_logps(asked, answer)
    assert texts == {"yes", "no", "yes!", "no!"}


def test_likely_tokens_are_chosen_among_those_allowed() -> None:
    """Greedy, without `top_k`: log-probs are those of the softmax over all tokens that the structure leaves."""
    [answer] = ask(bound("qwen2"), [request(PROMPTS[0], structure=YES_NO, temperature=0.0)])
    logits = model("qwen2")(torch.tensor([PROMPTS[0]])).logits[0, -1]
    first = logits[tokenizer.encode("yn", add_special_tokens=False)]
    assert text(answer)[0] == "yn"[int(first.argmax())]
    assert answer.logps[0] == pytest.approx(first.log_softmax(-1).max().item(), abs=1e-5)
    assert answer.candidates == []


@pytest.mark.parametrize("length", range(1, 6))
def test_an_interrupted_text_is_continued(length: int) -> None:
    """A digit follows each letter, wherever the request was interrupted."""
    engine = bound("qwen2")
    options: dict[str, Any] = {"structure": Structure(regex="([a-d][0-9]){3}"), "top_k": 20}
    [whole] = ask(engine, [request(PROMPTS[1], **options)])
    part = whole.tokens[:length]
    sampling = Sampling(max_tokens=24 - length, **options)
    [rest] = ask(engine, [Request((*PROMPTS[1], *part), sampling, SampleKey(0, 1, "p", 0), "s", resumed=length)])
    assert rest.tokens == whole.tokens[length:]
    assert [set(ids) for ids in rest.candidates] == [set(ids) for ids in whole.candidates[length:]]


def test_the_limit_of_tokens_cuts_a_text() -> None:
    [answer] = ask(bound("qwen2"), [request(PROMPTS[0], structure=Structure(regex="[ab]{9}"), max_tokens=4)])
    assert answer.stop is StopReason.LENGTH
    assert re.fullmatch("[ab]{4}", tokenizer.decode(answer.tokens))


@pytest.mark.parametrize("size", [224, 264, 288, 352])
def test_a_model_may_have_other_ids_than_its_tokenizer(size: int) -> None:
    """llguidance masks the tokenizer's 263 ids in 9 words of 32 bits; logits of these models fill 7, 9, 9 and 11."""
    policy = random_model("qwen2", vocab_size=size, pad_token_id=None)
    structured = [request(PROMPTS[0][:2], i, structure=Structure(regex="[ab]{9}"), max_tokens=4) for i in range(9)]
    recorded = replace(structured[0], sampling=replace(structured[0].sampling, top_k=size))
    *answers, answer = ask(engine_of(policy), [*structured, recorded])
    assert all(re.fullmatch("[ab]{4}", tokenizer.decode(answer.tokens)) for answer in answers)
    assert [set(ids) for ids in answer.candidates] == [set(tokenizer.encode("ab", add_special_tokens=False))] * 4


@pytest.mark.filterwarnings("ignore:TorchEngine")
@pytest.mark.parametrize("kind", ["qwen2", "mamba"])
def test_rows_without_a_structure_are_sampled_as_alone(kind: str) -> None:
    engine = bound(kind)
    free = [request(PROMPTS[i % 3], i) for i in range(6)]
    structured = [request(PROMPTS[i % 3], i, structure=YES_NO) for i in range(6)]
    alone = ask(engine, free)
    mixed = ask(engine, [r for pair in zip(free, structured, strict=True) for r in pair])
    assert [a.tokens for a in mixed[::2]] == [a.tokens for a in alone]
    assert all(re.fullmatch("(yes|no)!?", text(a)) for a in mixed[1::2])


@pytest.mark.parametrize("method", ["allow", "consume"])
def test_a_text_that_cannot_be_followed_fails_alone(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    plain, calls = getattr(StructureMatcher, method), []

    def fail_once(self: StructureMatcher, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 8:
            self.failure = RolloutError("out of fuel")
        plain(self, *arguments)

    monkeypatch.setattr(StructureMatcher, method, fail_once)
    engine = bound("qwen2")

    async def answers() -> list[Completion | BaseException]:
        requests = [request(PROMPTS[i], i, structure=YES_NO) for i in range(3)]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    results = asyncio.run(answers())
    assert [str(result) for result in results if isinstance(result, RolloutError)] == ["out of fuel"]
    completions = [result for result in results if isinstance(result, Completion)]
    assert sum(bool(re.fullmatch("(yes|no)!?", text(answer))) for answer in completions) == 2


def test_tokens_of_another_text_are_not_continued() -> None:
    part = tokenizer.encode("maybe", add_special_tokens=False)
    asked = Request((*PROMPTS[0], *part), Sampling(structure=YES_NO), SampleKey(0, 1, "p", 0), "s", resumed=len(part))
    with pytest.raises(RolloutError, match="rollout.sampling.structure cannot be followed: "):
        ask(bound("qwen2"), [asked])


def test_an_invalid_structure_is_blamed() -> None:
    with pytest.raises(EngineError, match=r"rollout.sampling.structure is invalid: .*unclosed group"):
        ask(bound("qwen2"), [request(PROMPTS[0], structure=Structure(regex="("))])


@pytest.mark.parametrize(
    "structure",
    [{"regex": "("}, {"json_schema": {"const": float("nan")}}, {"json_schema": {"$ref": "http://127.0.0.1/schema"}}],
)
def test_an_invalid_structure_is_refused_before_a_run(structure: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="^llguidance cannot follow it: "):
        TorchEngine().check_structure(Structure(**structure))
