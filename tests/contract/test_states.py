"""TorchEngine between the turns of conversations of models with recurrent layers, whose states are kept."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.prefixes import PrefixCache
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rlkit.base.errors import EngineError
from rlkit.models.recurrent import StateLayer
from rlkit.testing import random_model
from tests.contract.test_prefixes import (
    LATER,
    PROMPT,
    REPLY,
    SAMPLED,
    ask,
    check_equal,
    check_new_weights_drop_what_is_kept,
    converse,
    converse_at_once,
    engine,
    prefilled,
    prefixes,
    turn,
)
from tests.flow.test_architectures import KINDS

FAST = {"qwen3_next", "falcon_h1", "lfm2", "mamba2"}
"""Linear attention beside attention, both in one layer, short convolutions, and states alone."""
RECURRENT = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
    for kind in (*sorted(FAST), "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid")
]
FROM_THE_BEGINNING = {
    "mamba": "a probe's logits are",  # its passes begin with empty states
    "nemotron_h": "its decode steps do not clamp time steps",
}

pytestmark = pytest.mark.filterwarnings("ignore:TorchEngine decodes through the modules")


@cache
def model(kind: str) -> Any:
    return random_model(kind, **KINDS[kind])


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kept_states_change_no_token(kind: str, temperature: float) -> None:
    """Three conversations of one prompt: what they share is run once, and then each token of each once."""
    bound = engine(model(kind))
    kept = converse(bound, 4, 3, temperature)
    assert prefilled(bound) == len(PROMPT) + 3 * 3 * LATER
    for ours, plain in zip(kept, converse(engine(model(kind), keeps=False), 4, 3, temperature), strict=True):
        check_equal(ours, plain)


@pytest.mark.parametrize("turns", [1, 2, 4, 8, 16, 32])
def test_each_token_is_prefilled_once(turns: int) -> None:
    bound = engine(model("qwen3_next"))
    converse(bound, turns)
    assert prefilled(bound) == len(PROMPT) + (turns - 1) * LATER


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_replies_of_any_length_go_on_from_states(kind: str) -> None:
    """Turns of 1 to 6 tokens after replies of 0 to 40, at most 4 rows of 7 at once.

    In rows of 200 tokens, linear attention in float32 is 3.2e-5 from the trainer's without states, 3.6e-5 with them.
    """
    bound = engine(model(kind))
    bound._sampler._max_rows = 4  # type: ignore[attr-defined]
    lengths = [0, 1, 3, 40]
    kept, fewer = converse_at_once(bound, 5, lengths), prefilled(bound)
    plain = engine(model(kind), keeps=False)
    check_equal(kept, converse_at_once(plain, 5, lengths), atol=1e-4)
    assert fewer < prefilled(plain) / 2


def test_only_the_end_of_a_conversation_is_continued() -> None:
    """What goes on from the last turn runs what is new; a fork, an edit and an earlier turn run everything."""
    bound, plain = engine(model("qwen3_next")), engine(model("qwen3_next"), keeps=False)
    [first] = ask(bound, turn(PROMPT))
    history = (*PROMPT, *first.tokens, 40, 41, 42)
    [second] = ask(bound, turn(history))
    end = (*history, *second.tokens)
    asked = [
        turn((*history, 50, 51, 52)),  # another answer to the second turn
        turn((*history[:9], 99, 98)),
        turn(history),
        turn((*end, 60)),
        turn((*end, 61, 62)),  # goes on from the same end: its branch is another
    ]
    counts = []
    for request in asked:
        prefilled(bound)
        check_equal(ask(bound, request), ask(plain, request))
        counts.append(prefilled(bound))
    assert counts == [len(history) + 3, 11, len(history), 2, len(end) + 2]


def test_a_conversation_keeps_one_state() -> None:
    """Two convolutions of 80 channels and 4 columns, and two states of 8 heads of 8 by 8: 6,656 bytes."""
    bound = engine(model("mamba2"))
    sizes = []
    for turns in (1, 2, 8):
        converse(bound, turns)
        sizes.append(prefixes(bound).bytes)
        prefixes(bound).clear()
    assert sizes == [2 * (80 * 4 + 8 * 8 * 8) * 4] * 3


def test_states_of_the_least_recently_used_conversations_are_dropped() -> None:
    bound = engine(model("mamba2"))
    prefixes(bound).max_bytes = 2 * 6656 + 100
    prompts = [tuple(range(start, start + 7)) for start in (5, 105, 55)]
    answers = ask(bound, *(turn(prompt, str(i)) for i, prompt in enumerate(prompts)))
    assert prefixes(bound).bytes == 2 * 6656
    counts = []
    prefilled(bound)
    for prompt, answer in reversed(list(zip(prompts, answers, strict=True))):
        ask(bound, turn((*prompt, *answer.tokens, 40), max_tokens=1))
        counts.append(prefilled(bound))
    assert counts == [2, 2, 13]


@pytest.mark.parametrize("how", ["sync", "written"])
def test_new_weights_drop_states(how: str) -> None:
    policy: Any = random_model("qwen3_next", seed=3, **KINDS["qwen3_next"])
    check_new_weights_drop_what_is_kept(engine(policy), policy, policy.model.layers[0].linear_attn.out_proj.weight, how)


def test_states_that_cannot_be_kept_are_not_those_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out when a second turn is kept: the third one runs what comes after the first."""
    bound = engine(model("qwen3_next"))
    [first] = ask(bound, turn(PROMPT))
    history = (*PROMPT, *first.tokens, 40)

    def fail(*arguments: object) -> list[StateLayer]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "states", fail)
        with pytest.raises(EngineError, match="out of memory"):
            ask(bound, turn(history))
    later = turn((*history, 41, 42, 43))
    prefilled(bound)
    check_equal(ask(bound, later), ask(engine(model("qwen3_next"), keeps=False), later))
    assert prefilled(bound) == 1 + 4


@pytest.mark.parametrize("kind", FROM_THE_BEGINNING)
def test_kinds_whose_states_do_not_serve_say_so(kind: str) -> None:
    with pytest.warns(UserWarning, match=f"from the beginning of its conversation: {FROM_THE_BEGINNING[kind]}"):
        bound = engine(model(kind))
    converse(bound, 3)
    assert prefilled(bound) == 3 * len(PROMPT) + (1 + 2) * (SAMPLED + REPLY)


def test_a_layer_of_states_is_made_with_any_release_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until 5.12, its own constructor takes no number of states."""
    monkeypatch.setattr(LinearAttentionCacheLayerMixin, "__init__", lambda self: None)
    layer = StateLayer(2)
    layer.update_recurrent_state(torch.ones(1, 2), 1)
    assert layer.has_previous_state == {0: False, 1: True}
    assert layer.conv_states == {0: None, 1: None}


def test_prefixes_come_with_the_states_after_them() -> None:
    """Random turns, forks and edits over three tokens: states are as many bytes as 10 tokens, and 60 tokens fit."""
    rng, kept = random.Random(0), PrefixCache(60 * 8, recurrent=True)

    def summary(tokens: tuple[int, ...]) -> Tensor:
        return torch.tensor([[len(tokens), sum(x * 3**i for i, x in enumerate(tokens[:20]))] + [0] * 8])

    def states(tokens: tuple[int, ...]) -> list[StateLayer]:
        layer = StateLayer(1)
        layer.update_recurrent_state(summary(tokens))
        return [layer]

    ends, hits = [()], 0
    for _ in range(2000):
        begin = rng.choice(ends[-6:])
        prompt = (*begin[: rng.choice([len(begin), rng.randint(0, len(begin))])], *rng.choices(range(3), k=3))
        prefix = kept.find(prompt)
        if prefix is not None:
            hits += 1
            [layer] = prefix.states
            assert torch.cat(prefix.chunks, 3)[0, 0, 0, : prefix.length, 0].tolist() == list(prompt[: prefix.length])
            assert torch.equal(layer.recurrent_states[0], summary(prompt[: prefix.length]))
        tokens = (*prompt, *rng.choices(range(3), k=2))[:18]
        each = torch.tensor(tokens).view(1, 1, 1, -1, 1)
        kept.store(tokens, None, lambda start, end, x=each: x[:, :, :, start:end], lambda x=tokens: states(x))
        ends.append(tokens if len(tokens) < 18 else ())
        assert kept.bytes == sum(node.nbytes for node in kept._nodes) <= kept.max_bytes
    assert hits > 200
