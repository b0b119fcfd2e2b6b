"""TorchEngine against transformers' own `generate`, on several architectures, and against the trainer."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_engine_torch import blocks, decoder, engine, samplers
from rlkit_engine_torch.blocks import FusedModel, why_not_fused
from rlkit_engine_torch.cache import CacheLayer
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.graphs import GraphDecoder
from rlkit_engine_torch.probe import why_not
from rlkit_engine_torch.samplers import DecoderSampler
from transformers import GenerationConfig

from rlkit.base.errors import EngineError
from rlkit.engines import TorchEngine
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora, base_model
from rlkit.recipe import Lora
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason
from tests.events import Gate, until
from tests.unit.engines.recordings import record

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
CHUNKED = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8}
"""Of `llama4_text`, whose tokens attend within chunks: no decoder of ours has that."""
PROMPTS = [(5, 9, 200, 31), (7, 7, 7, 12, 99, 104, 32, 8, 45, 61, 3), (5, 9, 200, 31), (40,), tuple(range(3, 23))]


@cache
def model(kind: str) -> Any:
    return random_model(kind, **ARCHITECTURES.get(kind, {}))


def bound(kind: str, context: int = 512, **options: int) -> TorchEngine:
    return engine_of(model(kind), context, **options)


def engine_of(policy: Any, context: int = 512, **options: int) -> TorchEngine:
    return bind(TorchEngine(**options), policy, context)


def bind(engine: TorchEngine, policy: Any, context: int = 512) -> TorchEngine:
    runtime = SimpleNamespace(
        policy=policy,
        tokenizer=build_tokenizer(),
        device=torch.device("cpu"),
        context=context,
        stop_ids=frozenset({build_tokenizer().eos_token_id}),
        autocast=nullcontext,
        unsharded=nullcontext,
        tensor_parallel=1,
    )
    engine.bind(runtime)  # type: ignore[arg-type]
    return engine


def request(tokens: tuple[int, ...], sample: int = 0, prompt: str = "p", **sampling: Any) -> Request:
    return Request(tokens, Sampling(**{"max_tokens": 24, **sampling}), SampleKey(0, 1, prompt, sample), session="s")


def ask(engine: TorchEngine, requests: list[Request]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_output_equals_generate_token_for_token(kind: str) -> None:
    assert why_not(model(kind)) is None
    answers = ask(bound(kind), [request(p, temperature=0.0) for p in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt])
        plain = model(kind).generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False)
        assert answer.tokens == plain[0, len(prompt) :].tolist()


def test_recordings_of_sampling_last_as_long_as_the_requests() -> None:
    """A recording holds memory of a GPU, which learning needs."""
    engine = bound("qwen2")
    engine._use(GraphDecoder(model("qwen2"), record=record))
    ask(engine, [request(PROMPTS[0])])
    replayed = engine._loop.batch._replayed
    assert replayed is not None
    assert replayed._replay is replayed._stale is None


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_equal_the_trainers(kind: str, temperature: float) -> None:
    engine = bound(kind, max_rows=3)
    requests = [request(p, i, temperature=temperature, max_tokens=5 + 4 * i) for i, p in enumerate(PROMPTS)]
    actor = Actor(model(kind))
    for r, answer in zip(requests, ask(engine, requests), strict=True):
        tokens = torch.tensor([[*r.tokens, *answer.tokens]])
        mask = torch.arange(tokens.shape[1])[None] >= len(r.tokens)
        logps = actor(tokens, mask, temperature).logps[mask]
        assert (logps - torch.tensor(answer.logps)).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:TorchEngine decodes")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ],
)
def test_finished_rows_stay_in_the_context(kind: str, options: dict[str, Any]) -> None:
    """One of 41 rows ends at 160 tokens, and stays in the batch until the others, of 3 to 29 tokens, end too."""
    engine = engine_of(random_model(kind, max_position_embeddings=160, **options), context=160)
    engine._stop_ids = frozenset()
    assert isinstance(engine._sampler, DecoderSampler)
    long, *short = [request(tuple(range(3, 161)))] + [request((5, 9, i), i, max_tokens=26) for i in range(40)]
    assert [answer.stop for answer in ask(engine, [long])] == [StopReason.CONTEXT]
    answers, actor = ask(engine, [long, *short]), Actor(engine._runtime.policy)
    assert [len(answer.tokens) for answer in answers] == [2] + [26] * 40
    tokens = torch.tensor([[*r.tokens, *answer.tokens] for r, answer in zip(short, answers[1:], strict=True)])
    mask = (torch.arange(29) >= 3).expand(40, -1)
    logps = torch.tensor([answer.logps for answer in answers[1:]])
    torch.testing.assert_close(actor(tokens, mask, 1.0).logps[mask].view(40, 26), logps, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "mamba"])
def test_a_sample_does_not_depend_on_the_batch(kind: str) -> None:
    requests = [request(p, s, prompt=str(i)) for i, p in enumerate(PROMPTS[:3]) for s in range(3)]
    together = ask(bound(kind), requests)
    alone = [ask(bound(kind), [r])[0] for r in requests]
    crowded = ask(bound(kind, max_rows=4, max_kv_tokens=100), list(reversed(requests)))[::-1]
    assert [a.tokens for a in together] == [a.tokens for a in alone] == [a.tokens for a in crowded]
    assert len({tuple(a.tokens) for a in together[:3]}) == 3  # samples of one prompt differ


def test_models_of_unknown_layers_go_through_generate() -> None:
    prompts, policy = PROMPTS[:3], random_model("llama4_text", **CHUNKED)
    with pytest.warns(
        UserWarning, match=r"slow: .* support Llama4ForCausalLM: it has layers of type chunked_attention"
    ):
        engine = engine_of(policy)
    assert engine.health() == {"rows_peak": 0.0, "slow_path": 1.0, "fused": 0.0, "prefilled_tokens": 0.0}
    answers = ask(engine, [request(p, temperature=0.0) for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt])
        plain = policy.generate(  # type: ignore[attr-defined]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False
        )
        assert answer.tokens == plain[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["qwen2", "mamba"])
@pytest.mark.filterwarnings("ignore:TorchEngine")
def test_a_generation_config_does_not_change_sampling(kind: str) -> None:
    """It truncates, penalises, suppresses and forces tokens, asks for beams, and ends texts."""
    policy = random_model(kind)
    requests = [request(p, s, temperature=t) for p in PROMPTS[:2] for s, t in ((0, 1.0), (1, 0.7), (2, 0.0))]
    expected = ask(engine_of(policy), requests)
    policy.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.01, repetition_penalty=1.3, no_repeat_ngram_size=1,
        forced_bos_token_id=7, forced_eos_token_id=7, suppress_tokens=list(range(50, 150)), begin_suppress_tokens=[8],
        bad_words_ids=[[9]], sequence_bias=[[[10], -9.0]], min_new_tokens=20, max_new_tokens=2, max_time=0.0,
        use_cache=False, eos_token_id=expected[0].tokens[0], stop_strings=["a"], return_dict_in_generate=True,
    )  # fmt: skip
    before = policy.generation_config.to_dict()
    answers = ask(engine_of(policy), requests)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [a.logps for a in answers] == [a.logps for a in expected]
    assert policy.generation_config.to_dict() == before
    for asked, answer in zip(requests[:2], answers, strict=False):
        logits = policy(torch.tensor([[*asked.tokens, *answer.tokens]])).logits[0, len(asked.tokens) - 1 : -1]
        logps = (logits.float() / asked.sampling.temperature).log_softmax(-1)
        chosen = logps.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert answer.logps == pytest.approx(chosen.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "Gemma2ForCausalLM, which is slower .*: its class is none of LlamaForCausalLM, Mistral"),
        ("mistral", "MistralForCausalLM, which is slower .*: it attends in a sliding window"),
    ],
)
def test_a_model_that_is_not_fused_is_warned_of(kind: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"decodes through the modules of {reason}"):
        engine = bound(kind)
    assert (engine.health()["slow_path"], engine.health()["fused"]) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["qwen2", "mamba"])
@pytest.mark.filterwarnings("ignore:TorchEngine")
def test_logits_that_are_not_finite_fail_their_request(kind: str) -> None:
    """Of a prompt with a token whose embedding overflows; a request beside it is answered as ever."""
    policy = random_model(kind, tie_word_embeddings=False)
    with torch.no_grad():
        policy.get_input_embeddings().weight[77] = torch.inf
    engine = engine_of(policy)
    [fine] = ask(engine, [request(PROMPTS[0])])
    with pytest.raises(EngineError, match="logits were not finite after 0 tokens .* lower train.lr"):
        ask(engine, [request((5, 77, 200, 31))])

    async def beside() -> list[Completion | BaseException]:
        requests = [request((5, 77, 200, 31)), request(PROMPTS[0])]
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    failed, answered = asyncio.run(beside())
    assert isinstance(failed, EngineError)
    assert isinstance(answered, Completion)
    assert answered.tokens == fine.tokens


def test_a_token_that_makes_logits_not_finite_ends_its_row() -> None:
    policy = random_model("qwen2", tie_word_embeddings=False)
    [before] = ask(engine_of(policy), [request(PROMPTS[0])])
    count = 1 + next(i for i, token in enumerate(before.tokens) if token not in (*PROMPTS[0], 3, 4, 5, 6, 7))
    with torch.no_grad():
        policy.get_input_embeddings().weight[before.tokens[count - 1]] = torch.nan
    with pytest.raises(EngineError, match=f"not finite after {count} tokens"):
        ask(engine_of(policy), [request(PROMPTS[0])])


def test_a_model_whose_copies_differ_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = FusedModel.logits
    monkeypatch.setattr(FusedModel, "logits", lambda fused, hidden: logits(fused, hidden) * 2)
    with pytest.warns(UserWarning, match="fused copies of its weights: a probe's logits are .* away, expected at most"):
        assert bound("qwen2").health()["fused"] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_half_precision_weights_are_decoded_with_the_cache(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernels for one query round otherwise than those for many: here by up to 1% of each logit."""
    policy = random_model(kind, **ARCHITECTURES[kind]).to(dtype)
    step = Decoder.step

    def rounded(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(decoder, tokens)
        return logits * (1 + 0.01 * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype))

    monkeypatch.setattr(Decoder, "step", rounded)
    assert why_not(policy) is None
    assert "logits are" in str(why_not(policy.float()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_a_decoder_that_sees_the_padding_is_found_out(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = decoder.attention_masks
    monkeypatch.setattr(decoder, "attention_masks", lambda config, visible: masks(config, torch.ones_like(visible)))
    assert "a probe's logits are" in str(why_not(random_model(kind, **ARCHITECTURES[kind]).to(dtype)))


def test_a_model_whose_logits_are_all_alike_is_decoded() -> None:
    policy = random_model("llama")
    torch.nn.init.zeros_(policy.lm_head.weight)
    assert why_not(policy) is None


def test_unknown_layers_of_a_decoder_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_model("qwen2")
    monkeypatch.setattr(policy.config, "layer_types", ["full_attention", "chunked_attention"])
    assert why_not(policy) == "it has layers of type chunked_attention"
    monkeypatch.undo()
    monkeypatch.setattr(Decoder, "admit", lambda *_: int("x"))
    assert "a probe failed with ValueError: invalid literal" in str(why_not(policy))


def test_the_cache_has_what_each_transformers_release_asks() -> None:
    """Up to 5.12 a layer's bound is called `get_max_cache_shape`, later `get_max_length`; both are abstract there."""

    class Older(ABC):
        @abstractmethod
        def get_max_cache_shape(self) -> int: ...

    class Newer(ABC):
        @abstractmethod
        def get_max_length(self) -> int: ...

    class Both(CacheLayer, Older, Newer): ...

    assert Both(None).get_max_cache_shape() == Both(None).get_max_length() == -1


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_decoder_and_generate_sample_the_same_tokens(kind: str) -> None:
    """A token's random number belongs to its position, however it is sampled."""
    requests = [request(p, s, prompt=str(i), max_tokens=9 + s) for i, p in enumerate(PROMPTS) for s in range(2)]
    slow = bound(kind)
    slow._use(None)
    fast = ask(bound(kind), requests)
    assert [a.tokens for a in ask(slow, requests)] == [a.tokens for a in fast]
    assert [len(a.tokens) for a in fast] == [9, 10] * len(PROMPTS)
    assert len({tuple(a.tokens) for a in fast}) == len(fast)


def test_waiting_rows_replace_finished_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 requests of 4 to 25 tokens, 4 rows: each is replaced as it ends, or two at once."""
    admitted: list[int] = []
    admit = DecoderSampler._admit

    def noted(self: DecoderSampler, batch: Any, joined: Any) -> Any:
        admitted.extend([len(joined)] if joined else [])
        return admit(self, batch, joined)

    monkeypatch.setattr(DecoderSampler, "_admit", noted)
    requests = [request(PROMPTS[0], s, temperature=0.0, max_tokens=4 + 3 * s) for s in range(8)]
    for refill, expected in ((0.0, [4, 1, 1, 1, 1]), (0.5, [4, 2, 2])):
        monkeypatch.setattr(FusedDecoder, "refill", refill)
        admitted.clear()
        ask(bound("qwen2", max_rows=4), requests)
        assert admitted == expected


def test_a_full_batch_decodes_until_a_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 requests of 5 tokens, 2 rows: three times one call that admits and four steps, while others wait."""
    calls: list[int] = []
    run = DecoderSampler.run
    monkeypatch.setattr(DecoderSampler, "run", lambda *args: (calls.append(len(args[2])), run(*args))[1])
    ask(bound("qwen2", max_rows=2), [request(PROMPTS[0], s, temperature=0.0, max_tokens=5) for s in range(6)])
    assert calls == [2, 2, 2]


def test_a_late_row_replaces_a_finished_one_of_a_full_batch() -> None:
    """18 rows, of which the first ends after 2 tokens and is still computed, since 17 are none of the few sizes."""
    engine = bound("qwen2", max_rows=18)

    async def staggered() -> list[bool]:
        tasks = [
            asyncio.create_task(engine.generate(request(PROMPTS[0], s, temperature=0.0, max_tokens=200 if s else 2)))
            for s in range(18)
        ]
        await tasks[0]
        await engine.generate(request(PROMPTS[1], temperature=0.0, max_tokens=2))
        done = [task.done() for task in tasks]
        await asyncio.gather(*tasks)
        return done

    assert asyncio.run(staggered()) == [True] + [False] * 17


def test_steps_are_of_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows of 2 to 41 tokens: 8 sizes in each doubling, since oneDNN compiles kernels for each."""
    sizes: set[int] = set()
    step = FusedDecoder.step
    monkeypatch.setattr(FusedDecoder, "step", lambda self, tokens: (sizes.add(self.rows), step(self, tokens))[1])
    requests = [request(PROMPTS[0], s, max_tokens=2 + s) for s in range(40)]
    assert [len(a.tokens) for a in ask(bound("qwen2"), requests)] == list(range(2, 42))
    assert sorted(sizes) == [*range(1, 16), *range(16, 32, 2), 32, 36, 40]


def test_requests_join_between_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests come during the fourth step of the first one."""
    alone = [ask(bound("qwen2"), [request(p, i)])[0] for i, p in enumerate((*PROMPTS, PROMPTS[1]))]
    engine = bound("qwen2")
    gate = Gate(monkeypatch, step=4)

    async def staggered() -> list[Completion]:
        first = asyncio.create_task(engine.generate(request(PROMPTS[1], len(PROMPTS))))
        await until(gate.entered.is_set)
        late = [asyncio.create_task(engine.generate(request(p, i))) for i, p in enumerate(PROMPTS)]
        await asyncio.sleep(0)
        gate.opened.set()
        return list(await asyncio.gather(*late, first))

    assert [a.tokens for a in asyncio.run(staggered())] == [a.tokens for a in alone]
    assert gate.rows[:5] == [1, 1, 1, 1, 6]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_fused_decoder_computes_what_the_modules_do(kind: str) -> None:
    """While rows of three prompts come and go; the last newcomers have a longer prompt than all before."""
    policy = random_model(kind, seed=3, sliding_window=None, rms_norm_eps=1e-3)
    assert why_not_fused(policy) is None
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2.0)
            if "bias" in name:
                weight.normal_()
    rows = [list(PROMPTS[1]), list(PROMPTS[1]), list(PROMPTS[0]), list(PROMPTS[1])]
    decoder = FusedDecoder(policy)
    logits = decoder.admit([PROMPTS[1], PROMPTS[0]], [2, 1])
    logits = torch.cat((logits, decoder.admit([PROMPTS[1]], [1])[-1:]))
    for step in range(12):
        expected = [policy(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]
        torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-3, atol=1e-3)
        assert decoder.positions().tolist() == [len(row) for row in rows]
        if step == 4:
            decoder.keep([0, 3])
            rows = [rows[0], rows[3]]
        if step == 8:
            decoder.admit([PROMPTS[4]], [2])
            rows += [list(PROMPTS[4]), list(PROMPTS[4])]
        if step == 10:
            decoder.keep([1, 3])
            rows = [rows[1], rows[3]]
        tokens = [(7 * step + 3 * i) % 200 for i in range(len(rows))]
        logits = decoder.step(torch.tensor(tokens))
        rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
    decoder.keep([])
    assert decoder.rows == decoder.end == 0


def test_a_sync_refreshes_the_copies_of_the_weights() -> None:
    engine = bound("qwen2")
    before = ask(engine, [request(PROMPTS[0], temperature=0.0)])[0].tokens
    head = model("qwen2").model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        head.neg_()
    try:
        asyncio.run(engine.sync(None, 1))  # type: ignore[arg-type]
        after = ask(engine, [request(PROMPTS[0], temperature=0.0)])[0].tokens
        tokens = torch.tensor([PROMPTS[0]])
        plain = model("qwen2").generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False
        )
        assert after == plain[0, len(PROMPTS[0]) :].tolist() != before
    finally:
        with torch.no_grad():
            head.neg_()


def test_a_pass_computes_the_logits_of_one_token_a_row() -> None:
    """Those of all tokens of all prompts could be gigabytes."""
    widths: set[int] = set()
    hook = model("qwen2").lm_head.register_forward_hook(lambda head, inputs, output: widths.add(inputs[0].shape[1]))
    decoder = Decoder(model("qwen2"))
    decoder.admit([PROMPTS[1]], [2])
    decoder.step(torch.tensor([5, 6]))
    hook.remove()
    assert widths == {1}


def test_the_cache_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 4 tokens and answers of 10, 40 and 40: a bound of 60 leaves no room beside the 44."""
    sizes: list[int] = []
    step = FusedDecoder.step

    def measured(decoder: FusedDecoder, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(decoder.rows * (len(PROMPTS[0]) + decoder.end + 1))
        return step(decoder, tokens)

    monkeypatch.setattr(FusedDecoder, "step", measured)
    requests = [request(PROMPTS[0], i, max_tokens=budget) for i, budget in enumerate((10, 40, 40))]
    assert [len(answer.tokens) for answer in ask(bound("qwen2", max_kv_tokens=60), requests)] == [10, 40, 40]
    assert max(sizes) <= 60


def test_a_gpu_has_more_rows_and_a_cache_by_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers x 2 x 2 heads x 8 numbers of 4 bytes are 256 bytes a token: a fifth of 512 MB holds 400,000."""
    assert bound("qwen2").capacity == 256
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine, "_gpu_bytes", lambda _: 512_000_000)
    on_gpu = bound("qwen2")
    assert on_gpu.capacity == 512
    assert isinstance(on_gpu._sampler, DecoderSampler)
    assert on_gpu._sampler._max_kv_tokens == 400_000
    limited = bound("qwen2", max_rows=3, max_kv_tokens=60)
    assert isinstance(limited._sampler, DecoderSampler)
    assert (limited.capacity, limited._sampler._max_kv_tokens) == (3, 60)


def test_equal_prompts_are_run_once() -> None:
    admitted: list[int] = []
    admit = FusedDecoder.admit

    def counted(decoder: FusedDecoder, prompts: Any, *rows: Any) -> torch.Tensor:
        admitted.append(len(prompts))
        return admit(decoder, prompts, *rows)

    engine = bound("qwen2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDecoder, "admit", counted)
        ask(engine, [request(PROMPTS[1], s) for s in range(8)])
    assert admitted == [1]


def test_stop_ids_budgets_and_the_context_end_a_completion() -> None:
    engine = bound("qwen2", context=16)
    [plain] = ask(engine, [request(PROMPTS[0], max_tokens=6)])
    assert (len(plain.tokens), plain.stop, plain.versions) == (6, StopReason.LENGTH, [0] * 6)
    stopping = request(PROMPTS[0], max_tokens=6, stop_ids=(plain.tokens[2],))
    [stopped] = ask(engine, [stopping])
    assert (stopped.tokens, stopped.stop) == (plain.tokens[:3], StopReason.STOP)
    requests = [request(PROMPTS[1], 1, max_tokens=100), request(tuple(range(3, 19)), 2), request(PROMPTS[4], 3)]
    most, *none = ask(engine, requests)  # prompts of 11, 16 and 20 tokens
    assert (len(most.tokens), most.stop) == (5, StopReason.CONTEXT)
    assert [(answer.tokens, answer.stop) for answer in none] == [([], StopReason.CONTEXT)] * 2


@pytest.mark.parametrize(
    "technique",
    [
        "modules",
        "alone",
        "refilled",
        "refilled in pairs",
        "recorded",
        "never dropped",
        "prompts apart",
        "packed layers",
    ],
)
def test_each_technique_has_equal_greedy_tokens(technique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fused steps of all rows at once, that share prompts and drop rows: 15 of 3 to 24 tokens."""
    requests = [
        request(p, s, temperature=0.0, max_tokens=3 + 7 * s + i) for i, p in enumerate(PROMPTS) for s in range(3)
    ]
    expected = [a.tokens for a in ask(bound("qwen2"), requests)]
    assert len({len(tokens) for tokens in expected}) > 10  # rows end at different steps
    engine = bound("qwen2", max_rows=4 if technique.startswith("refilled") or technique == "recorded" else 256)
    if technique == "modules":
        engine._use(Decoder(model("qwen2")))
    elif technique == "refilled in pairs":
        monkeypatch.setattr(FusedDecoder, "refill", 0.5)
    elif technique == "recorded":
        monkeypatch.setattr(GraphDecoder, "refill", 0.5)
        engine._use(GraphDecoder(model("qwen2"), record=record))
    elif technique == "never dropped":
        monkeypatch.setattr(FusedDecoder, "spare", 2.0)
    elif technique == "packed layers":  # which this model's are too small for
        monkeypatch.setattr(blocks, "PACKED_SIZE", 1)
    elif technique == "prompts apart":  # a pass for each
        monkeypatch.setattr(samplers, "PREFILL_TOKENS", 1)
    rounds = [[r] for r in requests] if technique == "alone" else [requests]
    assert [a.tokens for some in rounds for a in ask(engine, some)] == expected


@pytest.mark.parametrize(("packed", "use_dora"), [(False, False), (True, False), (False, True)])
def test_merged_adapters_have_equal_greedy_tokens(
    packed: bool, use_dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the layers with adapters as they are; without the adapters the tokens differ."""
    monkeypatch.setattr(blocks, "PACKED_SIZE", 1 if packed else 1 << 40)
    requests = [request(p, s, temperature=0.0, max_tokens=20) for s, p in enumerate(PROMPTS)]
    plain = random_model("qwen2", seed=1).eval()
    without = [answer.tokens for answer in ask(engine_of(plain), requests)]
    policy = base_model(add_lora(plain, Lora(rank=4, alpha=32, use_dora=use_dora), 0))
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, 0, 0.5)
    engine = engine_of(policy)
    assert engine.health()["fused"] == 1.0
    merged = [answer.tokens for answer in ask(engine, requests)]
    engine._use(Decoder(policy))
    assert [answer.tokens for answer in ask(engine, requests)] == merged != without


def test_truncated_sampling_reports_logps_of_the_full_softmax() -> None:
    answers = ask(bound("qwen2"), [request(PROMPTS[0], s, top_p=1e-6) for s in range(3)])
    [greedy] = ask(bound("qwen2"), [request(PROMPTS[0], temperature=0.0)])
    for answer in answers:
        assert answer.tokens == greedy.tokens
        assert answer.logps == pytest.approx(greedy.logps, abs=1e-5)


def test_each_row_of_a_batch_is_truncated_by_its_own_limits() -> None:
    """A `min_p` of 1 leaves the most likely token alone, whatever its neighbours in the batch sample."""
    asked = [request(PROMPTS[0], s, temperature=5.0, min_p=float(s % 2)) for s in range(6)]
    answers = ask(bound("qwen2"), asked)
    [greedy] = ask(bound("qwen2"), [request(PROMPTS[0], temperature=0.0)])
    assert [answer.tokens == greedy.tokens for answer in answers] == [False, True] * 3


def test_a_deadline_ends_one_request_and_no_other() -> None:
    engine = bound("qwen2")
    hasty = Request(PROMPTS[1], Sampling(max_tokens=400), SampleKey(0, 1, "p", 0), session="s", deadline=0.02)

    async def both() -> list[Any]:
        return await asyncio.gather(
            engine.generate(hasty), engine.generate(request(PROMPTS[0])), return_exceptions=True
        )

    late, fine = asyncio.run(both())
    assert isinstance(late, TimeoutError)
    assert fine.tokens == ask(bound("qwen2"), [request(PROMPTS[0])])[0].tokens


def test_a_failure_reaches_everyone_who_waits() -> None:
    engine = bound("qwen2")

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDecoder, "step", fail)
        with pytest.raises(EngineError, match="RuntimeError: out of memory") as raised:
            ask(engine, [request(PROMPTS[0]), request(PROMPTS[1])])
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert ask(engine, [request(PROMPTS[0])])[0].tokens  # and the engine works again


def test_a_failing_prompt_pass_reaches_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bound("qwen2")
    monkeypatch.setattr(FusedDecoder, "admit", lambda *_: int("x"))
    with pytest.raises(EngineError, match="TorchEngine failed with ValueError: invalid literal"):
        ask(engine, [request(PROMPTS[0])])


def test_an_iterator_that_ends_in_the_models_code_reaches_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A StopIteration in a future would wait forever."""
    engine = bound("qwen2")
    monkeypatch.setattr(FusedDecoder, "admit", lambda *_: next(iter(())))
    with pytest.raises(EngineError, match="RuntimeError: StopIteration: the model's code"):
        ask(engine, [request(PROMPTS[0])])


def test_the_event_loop_runs_while_a_step_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step is held meanwhile: its token is of the old version, the next one of the new."""
    [expected] = ask(bound("qwen2"), [request(PROMPTS[0])])
    engine = bound("qwen2")
    gate = Gate(monkeypatch, step=3)

    async def rollout() -> Completion:
        answer = asyncio.create_task(engine.generate(request(PROMPTS[0])))
        await until(gate.entered.is_set)
        synced = asyncio.create_task(engine.sync(None, 7))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)  # the loop is not blocked
        assert not synced.done()
        assert engine.version == 0
        gate.opened.set()
        await synced
        return await answer

    found = asyncio.run(rollout())
    assert (found.tokens, found.logps) == (expected.tokens, expected.logps)
    assert found.versions == [0] * 4 + [7] * 20  # of the prompt's pass and of three steps
    assert {name.rpartition("_")[0] for name in gate.threads} == {"rlkit-decode"}


def test_cancelled_requests_end_decoding_after_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = bound("qwen2")
    gate = Gate(monkeypatch, step=2)

    async def rollout() -> None:
        answer = asyncio.create_task(engine.generate(request(PROMPTS[0])))
        await until(gate.entered.is_set)
        answer.cancel()
        await asyncio.wait((answer,))
        threading.Timer(0.1, gate.opened.set).start()

    with engine.on_device():
        asyncio.run(rollout())
    assert gate.opened.is_set()
    assert len(gate.threads) == 2
    assert len(ask(engine, [request(PROMPTS[0])])[0].tokens) == 24
    engine.close()


def test_a_row_cancelled_before_its_prompt_is_run_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt a pass: the second request is cancelled during the first one's, which takes one step after that."""
    monkeypatch.setattr(samplers, "PREFILL_TOKENS", 4)
    entered, opened, steps = threading.Event(), threading.Event(), []
    admit, step = FusedDecoder.admit, FusedDecoder.step

    def held(decoder: FusedDecoder, *args: Any) -> torch.Tensor:
        entered.set()
        assert opened.wait(30)
        return admit(decoder, *args)

    engine = bound("qwen2")
    monkeypatch.setattr(FusedDecoder, "admit", held)
    monkeypatch.setattr(FusedDecoder, "step", lambda *args: (steps.append(args), step(*args))[1])

    async def rollout() -> None:
        first = asyncio.create_task(engine.generate(request(PROMPTS[0], max_tokens=2)))
        second = asyncio.create_task(engine.generate(request(PROMPTS[3], max_tokens=50)))
        await until(entered.is_set)
        second.cancel()
        await asyncio.wait((second,))
        opened.set()
        assert len((await first).tokens) == 2
        await until(lambda: not engine._loop.running)

    asyncio.run(rollout())
    assert len(steps) == 1


def test_the_cache_reclaims_columns_of_rows_that_are_gone() -> None:
    decoder = Decoder(model("qwen2"))
    decoder.admit([PROMPTS[4]], [1])
    for step in range(200):
        if step % 10 == 9:  # a newcomer takes over from the row before it
            decoder.admit([PROMPTS[0]], [1])
            decoder.keep([1])
        logits = decoder.step(torch.tensor([5]))
    assert decoder.layers[0].keys.shape[2] <= 192
    row = torch.tensor([[*PROMPTS[0], *[5] * 1]])  # the last newcomer came at step 199
    torch.testing.assert_close(logits[0], model("qwen2")(input_ids=row).logits[0, -1], rtol=1e-3, atol=1e-3)
