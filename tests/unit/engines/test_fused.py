"""The parts of decoding through fused weights."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
import torch
from rlkit_engine_torch import batch as batch_module
from rlkit_engine_torch import blocks, row_attention
from rlkit_engine_torch.batch import AHEAD, DecodeBatch, Row, group_by_prompt
from rlkit_engine_torch.blocks import PACKED_SIZE, FusedLinear, PackedLinear
from rlkit_engine_torch.compiled import rotated_heads
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.fused import GROWTH, FusedDecoder, row_copies
from rlkit_engine_torch.graphs import GraphDecoder
from rlkit_engine_torch.layers import swiglu
from rlkit_engine_torch.prefixes import Prefix
from rlkit_engine_torch.row_attention import RowAttention
from rlkit_engine_torch.sampling import SampledTokens, choose
from torch import Tensor

from rlkit.ops.attention import packed_attention
from rlkit.ops.ragged import by_sdpa
from rlkit.ops.random import uniform
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling


@pytest.mark.parametrize("rows", [1, 7, 128])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_layers_compute_what_plain_ones_do(
    rows: int, with_bias: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_pack = dtype == torch.float32 or blocks.uses_onednn(dtype)
    monkeypatch.setattr(blocks, "uses_onednn", lambda dtype: can_pack)
    torch.manual_seed(rows)
    weight, bias = torch.randn(500, 300) / 17, torch.randn(500) if with_bias else None
    plain = FusedLinear(weight.to(dtype).float(), None if bias is None else bias.to(dtype).float())
    packed = FusedLinear(weight, bias).to(dtype)
    assert isinstance(packed, PackedLinear) == can_pack
    x, other = torch.randn(rows, 300).to(dtype), torch.randn(rows, 500).to(dtype)
    expected = plain(x.float())
    for actual, exact in (
        (packed(x), expected),
        (packed.plus(x, other.clone()), expected + other),
        (packed.times(x, other), expected * other),
        (packed.silu(x), torch.nn.functional.silu(expected)),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("has_avx512", "has_mkl", "expected"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_float32_products_are_those_of_the_faster_library(
    has_avx512: bool, has_mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs with AVX512, with AVX2 alone, and of other makers."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": has_avx512})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    assert blocks.uses_onednn.__wrapped__(torch.float32) == expected
    assert not blocks.uses_onednn.__wrapped__(torch.float16)


def test_small_layers_and_those_in_float16_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not blocks.uses_onednn(torch.float16)
    monkeypatch.setattr(blocks, "uses_onednn", lambda dtype: dtype == torch.float32)
    assert not isinstance(FusedLinear(torch.zeros(PACKED_SIZE // 8 - 1, 8), None).to(torch.float32), PackedLinear)
    assert not isinstance(FusedLinear(torch.zeros(500, 300), None).to(torch.float16), PackedLinear)


@pytest.mark.parametrize(("kind", "half"), [("llama", False), ("qwen2", False), ("qwen3", False), ("qwen2", True)])
@pytest.mark.filterwarnings("error:.*operator by operator")
def test_steps_that_are_compiled_yield_the_same(kind: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without its kernels: prompts and rows of several lengths, and rows that are left out."""
    model, found = random_model(kind, num_attention_heads=4, num_key_value_heads=2).eval(), []
    for function in (rotated_heads, swiglu, row_attention.softmax_weights, row_attention.join):
        monkeypatch.setattr(function, "_compiled", None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for compiled in (False, True):
        for module in (blocks, row_attention):
            monkeypatch.setattr(module, "compiles", lambda *_, wanted=compiled: wanted)
        monkeypatch.setattr(blocks, "joins_gates", lambda _, wanted=compiled: wanted)
        decoder = FusedDecoder(model, partial(torch.autocast, "cpu", torch.bfloat16, enabled=half))
        logits = [decoder.admit([[5, 3, 4], [9, 8]], [5, 4], [[7] * (i % 3) for i in range(9)])]
        for step in range(3):
            logits.append(decoder.step(torch.arange(9) + 5 * step))
        decoder.keep([1, 2, 5, 8])
        logits.append(decoder.step(torch.arange(4)))
        found.append(torch.cat(logits).float())
    assert rotated_heads._compiled not in {None, rotated_heads.function}
    assert (found[0] - found[1]).norm() <= (0.02 if half else 1e-5) * found[0].norm()


def test_random_numbers_are_those_of_each_rows_key_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rows join, are left out, or sample alone."""
    drawn: list[Tensor] = []

    def draw(logits: Tensor, u: Tensor, *args: Any, **options: Any) -> SampledTokens:
        drawn.append(u)
        return choose(logits, u, *args, **options)

    monkeypatch.setattr(batch_module, "choose", draw)
    batch, positions = DecodeBatch(torch.device("cpu")), dict.fromkeys((11, 12, 13, 14), 2)

    def add(*keys: int) -> None:
        request = Request((3, 4), Sampling(max_tokens=90), SampleKey(0, 0, "", 0), session="")
        batch.add([Row(request, 90, frozenset(), None, key) for key in keys])  # type: ignore[arg-type]

    def check(steps: int, first: int = 0) -> None:
        for _ in range(steps):
            keys = [row.key for row in batch.rows[first:]]
            batch.sample(torch.zeros(len(keys), 7), 0, first)
            expected = uniform(torch.tensor(keys), torch.tensor([positions[key] for key in keys]))
            assert torch.equal(drawn[-1], expected)
            positions.update({key: positions[key] + 1 for key in keys})

    add(11, 12, 13)
    check(AHEAD + 2)
    add(14)
    check(1, first=3)
    check(2)
    batch.keep([0, 3])
    check(2)


def test_a_cpu_caches_keys_and_values_of_16_bits_in_float32() -> None:
    """Logits are those of a plain pass in bfloat16, but for its rounding."""
    model = random_model("qwen2").eval()
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    decoder = FusedDecoder(model, autocast)
    decoder.admit([[5, 3, 4]], [2], [[6], [8, 9]])
    logits = decoder.step(torch.tensor([7, 5]))
    for layer in decoder.layers:
        assert layer.prompts is not None
        assert layer.rows is not None
        assert (layer.prompts.dtype, layer.rows.dtype) == (torch.float32, torch.float32)
    with torch.no_grad(), autocast():
        rows = [model(input_ids=torch.tensor([row])).logits[0, -1] for row in ([5, 3, 4, 6, 7], [5, 3, 4, 8, 9, 5])]
    assert (logits - torch.stack(rows)).float().norm() < 0.02 * logits.float().norm()


def test_rows_that_join_a_smaller_cache_may_move() -> None:
    """Row 0 is alone while the cache widens; of three that join, the first two end at once."""
    model = random_model("qwen2").eval()
    decoder = FusedDecoder(model)
    decoder.admit([[5, 3, 4]], [4])
    decoder.step(torch.tensor([6, 7, 8, 9]))
    decoder.keep([0])
    for _ in range(GROWTH + 1):
        decoder.step(torch.tensor([6]))
    decoder.admit([[4, 8]], [3])
    decoder.keep([3, 0])
    found = decoder.step(torch.tensor([9, 7]))
    rows = [[4, 8, 9], [5, 3, 4, *[6] * (GROWTH + 2), 7]]
    with torch.no_grad():
        expected = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("moved", [[(0, 3), (1, 2)], [(0, 1), (1, 0), (2, 0)]])
def test_rows_are_copied_as_they_were_before(moved: list[tuple[int, int]]) -> None:
    """In the second case rows change places, so that none may be overwritten before it is copied."""
    columns = torch.arange(40.0).view(2, 4, 1, 5, 1)
    expected = columns.clone()
    for new, old in moved:
        expected[:, new] = columns[:, old]
    row_copies(moved, columns.device)(columns)
    assert torch.equal(columns, expected)


def test_a_prompt_after_a_prefix_leaves_nothing_of_an_earlier_one() -> None:
    """The slot of a prompt with keys that are no numbers is taken by a shorter one, beside a longer one."""
    model = random_model("qwen2").eval()
    decoder = FusedDecoder(model)
    decoder.admit([[5, 3, 4], [6] * 9], [1, 1])
    prefix = Prefix(2, [decoder.keys_values(0, 0, 2)])
    for layer in decoder.layers:
        assert layer.prompts is not None
        with torch.inference_mode():
            layer.prompts[:, 1] = torch.nan
    decoder.keep([0])
    decoder.admit([[5, 3, 9]], [1], (), (), [prefix])
    decoder.admit([[7] * 8], [1])
    logits = decoder.step(torch.tensor([8, 8, 8]))
    with torch.no_grad():
        prompts = ([5, 3, 4, 8], [5, 3, 9, 8], [7] * 8 + [8])
        expected = torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", [FusedDecoder, Decoder, partial(GraphDecoder, record=lambda run, _: run)])
@pytest.mark.parametrize("seed", [2, 5, 14])
@pytest.mark.filterwarnings("error:decode steps are not recorded")
def test_rows_that_overflow_change_no_others(decoder: Any, seed: int) -> None:
    """Token 77 yields keys and values that are no numbers: neither beside such rows nor in their slots do others."""
    model: Any = random_model("qwen2", tie_word_embeddings=False)
    rng = random.Random(seed)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    decoding, rows = decoder(model), list[list[int]]()

    def check(logits_RV: Tensor, new: list[list[int]]) -> None:
        for logits, tokens in zip(logits_RV, new, strict=True):
            if 77 not in tokens:
                with torch.no_grad():
                    expected = model(input_ids=torch.tensor([tokens])).logits[0, -1]
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)

    for _ in range(30):
        prompts = [
            [rng.choice((5, 6, 7, 8, 9, 10, 11, 77)) for _ in range(rng.randint(1, 5))]
            for _ in range(rng.randint(1, 2))
        ]
        copies = [rng.randint(1, 2) for _ in prompts]
        longest = rng.choice((0, 3)) if decoding.resumes else 0
        own = [[rng.choice((8, 9, 77)) for _ in range(rng.randint(0, longest))] for _ in range(sum(copies))]
        shared = [prompt for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        new = [prompt + tokens for prompt, tokens in zip(shared, own, strict=True)]
        check(decoding.admit(prompts, copies, own), new)
        rows += new
        for _ in range(rng.randint(0, 4)):
            tokens = [rng.choice((8, 9, 10, 11, 12, 13, 14, 77)) for _ in rows]
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            check(decoding.step(torch.tensor(tokens)), rows)
        kept = rng.sample(range(len(rows)), rng.randint(0, min(5, len(rows))))
        decoding.keep(kept)
        rows = [rows[i] for i in kept]


def attended(queries: Tensor, prompts: Tensor, own: Tensor, mask: Tensor | None, row_prompts: list[int]) -> Tensor:
    """Return what queries [R,heads,D] attend to in float64, from keys and values of prompts and rows [2,R,H,C,D]."""
    groups = queries.shape[1] // own.shape[2]
    keys, values = torch.cat([prompts[:, row_prompts], own], 3).double().repeat_interleave(groups, 2)
    scores = torch.einsum("rhd,rhcd->rhc", queries.double(), keys)
    if mask is not None:
        scores[..., prompts.shape[3] :] += mask
    return torch.einsum("rhc,rhcd->rhd", scores.softmax(-1), values)


def measured(patch: pytest.MonkeyPatch) -> list[float]:
    """Return how far what decoding attends to is from float64, an entry for each layer of each step to come."""
    gaps = list[float]()

    class Compared(RowAttention):
        def __init__(self, row_prompts: list[int], *arguments: Any) -> None:
            super().__init__(row_prompts, *arguments)
            self.row_prompts = row_prompts

        def __call__(self, queries: Tensor, prompts: Tensor, own: Tensor, mask: Tensor | None) -> Tensor:
            output = super().__call__(queries, prompts, own, mask)
            expected = attended(queries, prompts, own, mask, self.row_prompts)
            gaps.append(float((output - expected).norm() / expected.norm()))
            return output

    patch.setattr("rlkit_engine_torch.fused.RowAttention", Compared)
    return gaps


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_large_key_biases_survive_half_precision(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores reach thousands, which bfloat16 rounds by 4 or more: errors of 3% and more, against 0.4% of values."""
    model, gaps = random_model("qwen2", key_bias=100.0, head_dim=64, initializer_range=0.1), measured(monkeypatch)
    decoder = FusedDecoder(model, lambda: torch.autocast("cpu", kind))
    decoder.admit([list(range(3, 203)), list(range(203, 3, -1))], [3, 2])
    for step in range(20):
        decoder.step(torch.arange(5) + 7 * step)
    assert len(gaps) == 20 * 2
    assert max(gaps) < 0.01


def test_biases_of_keys_need_a_model_that_has_them() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no key biases"):
        random_model("llama", key_bias=100.0)


@pytest.mark.parametrize("attention", [packed_attention, by_sdpa])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_rows_that_join_later_equal_complete_ones(kind: str, attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a row that is there; more of their own than its columns, and one has none."""
    monkeypatch.setattr("rlkit_engine_torch.fused.packed_attention", attention)
    model = random_model(kind, initializer_range=0.3).eval()
    decoder = FusedDecoder(model)
    decoder.admit([[5, 3, 4]], [1])
    decoder.step(torch.tensor([6]))
    own = [list(range(20, 24 + GROWTH)), [], [7, 8], [9], []]
    found = decoder.admit([[4, 8], [3, 5, 4, 6]], [3, 2], own)
    prompts = [[4, 8]] * 3 + [[3, 5, 4, 6]] * 2
    rows = [[5, 3, 4, 6], *([*prompt, *tokens] for prompt, tokens in zip(prompts, own, strict=True))]

    def check(found: torch.Tensor, some: list[list[int]]) -> None:
        with torch.no_grad():
            expected = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in some])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)

    check(found, rows[1:])
    for step in range(GROWTH + 4):
        if step == 3:
            decoder.keep([0, 5, 3, 2])
            rows = [rows[0], rows[5], rows[3], rows[2]]
        assert decoder.positions().tolist() == [len(row) for row in rows]
        tokens = [(7 * step + 3 * i) % 200 for i in range(len(rows))]
        found = decoder.step(torch.tensor(tokens))
        rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        check(found, rows)


def test_rows_share_their_prompts_pass_within_a_budget() -> None:
    rows = [row((1, 2, 3, 4), resumed) for resumed in (0, 2, 1, 2)] + [row((1, 2, 7, 7, 7), 3), row((1, 2, 3, 4), 0)]
    whole = group_by_prompt(rows, False, 4)
    assert [(g.prompt, len(g.rows), g.tokens) for g in whole] == [((1, 2, 3, 4), 5, 4), ((1, 2, 7, 7, 7), 1, 5)]
    apart = group_by_prompt(rows, True, 99)
    assert [(g.prompt, g.rows, g.tokens) for g in apart] == [
        ((1, 2, 3, 4), [rows[0], rows[5]], 4),
        ((1, 2), [rows[1], rows[3], rows[4]], 9),
        ((1, 2, 3), [rows[2]], 4),
    ]
    assert [(g.prompt, g.tokens) for g in group_by_prompt(rows, True, 6)] == [
        ((1, 2, 3, 4), 4), ((1, 2), 6), ((1, 2, 3), 4), ((1, 2), 5),
    ]  # fmt: skip


def row(tokens: tuple[int, ...], resumed: int) -> Row:
    request = Request(tokens, Sampling(max_tokens=9), SampleKey(0, 1, "p", 0), "s", resumable=True, resumed=resumed)
    future: asyncio.Future[Completion] = asyncio.Future(loop=asyncio.new_event_loop())
    return Row(request, 9, frozenset(), future, 0)
