"""Every kind of model: packed passes equal padded ones, batched decoding equals `generate`, and the docs say which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.model_table import COMPUTED, OTHERS, USED, actor, adapters, computed, decoding, rows, served
from tests.contract.test_torch_engine import PROMPTS, ask, engine_of, request
from tests.flow.test_architectures import KINDS, MISMATCH
from tests.unit.models.test_packing import rows_of

FAST = {"llama", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "mamba", "gemma2", "granite"}
"""Sinks and windows, heads of two sizes, linear attention, layers with attention and a state, soft caps and scales."""
EACH = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in (*KINDS, *OTHERS)]

pytestmark = pytest.mark.filterwarnings("ignore:TorchEngine")


@pytest.mark.parametrize("kind", EACH)
def test_the_docs_say_how_a_kind_is_computed(kind: str) -> None:
    """`python -m tests.contract.model_table` writes what they say."""
    own = computed(kind)
    if kind in KINDS:
        assert rows(COMPUTED)[kind][1:] == own
        assert rows(USED)[kind][1:] == [*decoding(kind)[1:], served(kind, "SGLang"), served(kind, "vLLM")]
    assert own[0].startswith("padded") == (kind == "mamba")


@pytest.mark.parametrize(
    "kind", [kind if kind == "mamba" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_docs_say_what_adapters_reach(kind: str) -> None:
    assert rows(USED)[kind][0] == adapters(kind)


@pytest.mark.parametrize("kind", EACH)
def test_packed_passes_equal_padded_ones(kind: str) -> None:
    """Rows of up to 70 tokens, longer than all windows, some of which share a prompt."""
    module = actor(kind)
    tokens, mask = rows_of([20, 9, 30], [[3, 25, 1], [2, 12], [40]], 0)
    weights = torch.linspace(-1, 1, tokens.numel()).view_as(tokens)
    results, packed = [], module.passes.packed
    for module.passes.packed in (packed, False):
        module.zero_grad()
        out = module(tokens, mask)
        ((out.logps + 0.1 * out.entropy) * weights).sum().backward()
        results.append((out.logps.detach(), {name: p.grad for name, p in module.named_parameters()}))
    module.passes.packed = packed
    (logps, gradients), (plain_logps, plain_gradients) = results
    torch.testing.assert_close(logps, plain_logps, atol=5e-5, rtol=0)
    for name, gradient in plain_gradients.items():
        if gradient is not None:
            assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("kind", EACH)
def test_batched_decoding_equals_generate(kind: str) -> None:
    """Prompts of 4, 11 and 1 tokens in two places: the last one joins when the first has ended."""
    policy: Any = actor(kind).policy
    budgets = zip((PROMPTS[0], PROMPTS[1], PROMPTS[3]), (4, 11, 9), strict=True)
    requests = [request(prompt, temperature=0.0, max_tokens=budget) for prompt, budget in budgets]
    engine = engine_of(policy, max_rows=2)
    engine._stop_ids = frozenset()
    for asked, answer in zip(requests, ask(engine, requests), strict=True):
        prompt, budget = torch.tensor([asked.tokens]), asked.sampling.max_tokens
        mask = torch.ones_like(prompt)
        plain = policy.generate(prompt, attention_mask=mask, max_new_tokens=budget, do_sample=False, eos_token_id=None)
        assert answer.tokens == plain[0, len(asked.tokens) :].tolist()
        sampled = torch.arange(plain.shape[1]) >= len(asked.tokens)
        with torch.no_grad():
            logps = actor(kind)(plain, sampled[None]).logps[0, sampled]
        torch.testing.assert_close(logps, torch.tensor(answer.logps), atol=MISMATCH.get(kind, 1e-4), rtol=0)
