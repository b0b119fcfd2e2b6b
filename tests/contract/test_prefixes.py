"""TorchEngine between the turns of conversations: what was run once is not run again, and nothing else changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.graphs import GraphDecoder
from rlkit_engine_torch.prefixes import PrefixCache
from rlkit_engine_torch.samplers import DecoderSampler

from rlkit.base.errors import EngineError
from rlkit.engines import TorchEngine
from rlkit.models.lora import add_lora, base_model
from rlkit.recipe import Lora
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling
from tests.contract.test_torch_engine import ARCHITECTURES, engine_of, model
from tests.unit.engines.recordings import record

PROMPT, SAMPLED, REPLY = tuple(range(5, 12)), 5, 3
LATER = 1 + REPLY
"""What a later turn runs: the last sampled token, which was not read yet, and the reply."""


def turn(tokens: tuple[int, ...], name: str = "0", temperature: float = 0.0, **options: Any) -> Request:
    sampling = Sampling(max_tokens=options.pop("max_tokens", SAMPLED), temperature=temperature)
    return Request(tokens, sampling, SampleKey(0, 1, name, 0), session=name, **{"continues": True, **options})


def engine(policy: Any, keeps: bool = True, decoder: Any = None) -> TorchEngine:
    """Return an engine whose turns never end by themselves, without keys and values of earlier turns if not `keeps`."""
    bound = engine_of(policy, context=1024)
    if decoder is not None:
        bound._use(decoder)
    bound._stop_ids = frozenset()
    if not keeps:
        prefixes(bound).max_bytes = 0
    return bound


def prefixes(bound: TorchEngine) -> PrefixCache:
    assert isinstance(bound._sampler, DecoderSampler)
    return bound._sampler.prefixes


def prefilled(bound: TorchEngine) -> float:
    return bound.health()["prefilled_tokens"]


def converse(bound: TorchEngine, turns: int, count: int = 1, temperature: float = 0.0) -> list[list[Completion]]:
    """Hold conversations of one prompt; from the second turn on they differ in what they read."""

    async def one(number: int) -> list[Completion]:
        rng = random.Random(number)
        tokens, answers = PROMPT, []
        for _ in range(turns):
            answers.append(await bound.generate(turn(tokens, str(number), temperature)))
            tokens += (*answers[-1].tokens, *(rng.randrange(3, 200) for _ in range(REPLY)))
        return answers

    async def all_of_them() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(one, range(count))))

    return asyncio.run(all_of_them())


def converse_at_once(bound: TorchEngine, turns: int, lengths: Sequence[int]) -> list[Completion]:
    """Hold seven conversations at once, with turns of 1 to 6 tokens after replies of these lengths."""

    async def one(number: int) -> list[Completion]:
        rng, answers = random.Random(number), []
        tokens = tuple(rng.randrange(3, 200) for _ in range(rng.randint(1, 12)))
        for _ in range(turns):
            answers.append(await bound.generate(turn(tokens, str(number), max_tokens=rng.randint(1, 6))))
            tokens += (*answers[-1].tokens, *(rng.randrange(3, 200) for _ in range(rng.choice(lengths))))
        return answers

    async def all_of_them() -> list[Completion]:
        each = await asyncio.gather(*map(one, range(7)))
        return [answer for answers in each for answer in answers]

    return asyncio.run(all_of_them())


def ask(bound: TorchEngine, *requests: Request) -> list[Completion]:
    """Ask one after the other."""

    async def each() -> list[Completion]:
        return [await bound.generate(request) for request in requests]

    return asyncio.run(each())


def check_equal(cached: list[Completion], plain: list[Completion], atol: float = 1e-5) -> None:
    assert [a.tokens for a in cached] == [a.tokens for a in plain]
    for a, b in zip(cached, plain, strict=True):
        torch.testing.assert_close(torch.tensor(a.logps), torch.tensor(b.logps), rtol=0, atol=atol)


def check_new_weights_drop_what_is_kept(bound: TorchEngine, policy: Any, weight: torch.Tensor, how: str) -> None:
    """Change a weight of the policy, and perhaps synchronize it; a later turn is then run from its beginning."""
    [first] = ask(bound, turn(PROMPT))
    with torch.no_grad():
        weight.neg_()
    if how == "sync":
        asyncio.run(bound.sync(None, 1))  # type: ignore[arg-type]
        assert prefixes(bound).bytes == 0
    later = turn((*PROMPT, *first.tokens, 40))
    prefilled(bound)
    check_equal(ask(bound, later), ask(engine(policy, keeps=False), later))
    assert prefilled(bound) == len(later.tokens)


@pytest.mark.parametrize("turns", [1, 2, 4, 8, 16, 32])
def test_each_token_of_a_conversation_is_prefilled_once(turns: int) -> None:
    bound = engine(model("qwen2"))
    converse(bound, turns)
    assert prefilled(bound) == len(PROMPT) + (turns - 1) * LATER
    assert prefilled(bound) == 0  # since the last call


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:TorchEngine decodes through the modules")
def test_kept_keys_and_values_change_no_token(kind: str, temperature: float) -> None:
    """Sliding windows of 5 and 6 tokens among them; a group shares its prompt."""
    bound = engine(model(kind))
    cached = converse(bound, 4, 3, temperature)
    assert prefilled(bound) == len(PROMPT) + 3 * 3 * LATER
    for ours, plain in zip(cached, converse(engine(model(kind), keeps=False), 4, 3, temperature), strict=True):
        check_equal(ours, plain)


@pytest.mark.parametrize("decoder", [FusedDecoder, Decoder, GraphDecoder])
def test_rows_that_join_and_leave_keep_their_keys(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 1 to 6 tokens after replies of 1 to 9, at most 4 rows of 7 at once: rows and prompts move."""
    options = {"record": record} if decoder is GraphDecoder else {}
    bound = engine(model("qwen2"), decoder=decoder(model("qwen2"), **options))
    bound._sampler._max_rows = 4  # type: ignore[attr-defined]
    cached = converse_at_once(bound, 6, range(1, 10))
    assert prefilled(bound) < 300  # 1,110 without
    check_equal(cached, converse_at_once(engine(model("qwen2"), keeps=False), 6, range(1, 10)))


def test_adapters_are_in_the_kept_keys() -> None:
    policy = base_model(add_lora(random_model("qwen2", seed=1).eval(), Lora(rank=4, alpha=32), 0))
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, 0, 0.5)
    [cached], [plain] = (converse(engine(policy, keeps), 4) for keeps in (True, False))
    check_equal(cached, plain)


def test_forks_share_their_beginning() -> None:
    """A second answer to a history of 15 tokens runs its 3 new ones; one that rewrites its end runs what differs."""
    bound, plain = engine(model("qwen2")), engine(model("qwen2"), keeps=False)
    [first] = ask(bound, turn(PROMPT))
    history = (*PROMPT, *first.tokens, 40, 41, 42)
    forks = [turn((*history, 50, 51, 52)), turn((*history, 60)), turn((*history[:9], 99, 98)), turn(history[:4])]
    ask(bound, turn(history))
    counts = []
    for fork in forks:
        prefilled(bound)
        check_equal(ask(bound, fork), ask(plain, fork))
        counts.append(prefilled(bound))
    assert counts == [3, 1, 2, 1]


def test_a_conversation_of_one_turn_keeps_nothing() -> None:
    bound = engine(model("qwen2"))
    ask(bound, turn(PROMPT, continues=False), turn(PROMPT, continues=False))
    assert prefixes(bound).bytes == 0
    assert prefilled(bound) == 2 * len(PROMPT)


@pytest.mark.parametrize("decoder", [FusedDecoder, Decoder])
@pytest.mark.parametrize("how", ["sync", "written"])
def test_new_weights_drop_all_keys_and_values(decoder: Any, how: str) -> None:
    policy = random_model("qwen2", seed=3)
    bound = engine(policy, decoder=decoder(policy))
    check_new_weights_drop_what_is_kept(bound, policy, policy.model.layers[0].mlp.down_proj.weight, how)


def test_a_row_of_two_weights_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights change after the third of its tokens."""
    bound = engine(model("qwen2"))
    step, steps = FusedDecoder.step, list[int]()

    def change(decoder: FusedDecoder, tokens: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 3:
            bound._sampler.refresh()
        return step(decoder, tokens)

    monkeypatch.setattr(FusedDecoder, "step", change)
    ask(bound, turn(PROMPT))
    assert prefixes(bound).bytes == 0


def test_leaving_the_device_frees_keys_and_values() -> None:
    bound = engine(model("qwen2"))
    with bound.on_device():
        ask(bound, turn(PROMPT))
        assert prefixes(bound).bytes > 0
    assert prefixes(bound).bytes == 0


def test_the_least_recently_used_keys_are_dropped() -> None:
    """256 bytes a token; a turn leaves 11 tokens. 25 tokens hold two conversations: the third drops the first."""
    bound = engine(model("qwen2"))
    prefixes(bound).max_bytes = 25 * 256
    prompts = [tuple(range(start, start + 7)) for start in (5, 105, 55)]
    answers = ask(bound, *(turn(prompt, str(i)) for i, prompt in enumerate(prompts)))
    assert prefixes(bound).bytes == 22 * 256
    prefilled(bound)
    counts = []
    for prompt, answer in reversed(list(zip(prompts, answers, strict=True))):
        ask(bound, turn((*prompt, *answer.tokens, 40), max_tokens=1))
        counts.append(prefilled(bound))
    assert counts == [2, 2, 13]
    assert prefixes(bound).bytes <= 25 * 256


def test_what_overflows_is_not_kept() -> None:
    policy = random_model("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        policy.get_input_embeddings().weight[77] = torch.inf
    bound = engine(policy)
    with pytest.raises(EngineError, match="logits were not finite"):
        ask(bound, turn((5, 77, 200, 31)))
    assert prefixes(bound).bytes == 0


def test_kept_keys_take_a_share_of_the_cache() -> None:
    """A quarter of 400 tokens of 256 bytes."""
    bound = TorchEngine(max_kv_tokens=400)
    bound.bind(engine_of(model("qwen2"))._runtime)
    assert prefixes(bound).max_bytes == 100 * 256


def test_a_model_that_cannot_continue_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are wrong when they are read back: the probe finds them, and turns are run from their beginning."""
    right = Decoder.keys_values
    monkeypatch.setattr(Decoder, "keys_values", lambda *arguments: 1 + right(*arguments))
    with pytest.warns(UserWarning, match="each turn from the beginning of its conversation: a probe's logits are"):
        bound = engine(model("gpt2"))
    [cached], [plain] = converse(bound, 3), converse(engine(model("gpt2"), keeps=False), 3)
    check_equal(cached, plain)
    assert prefilled(bound) == 3 * len(PROMPT) + (1 + 2) * (SAMPLED + REPLY)
