"""Completions of a real SGLang server against transformers and the trainer."""

from __future__ import annotations

import pytest
import torch

from rlkit.engines import SGLangServer
from rlkit.models.actor import Actor
from tests.sglang.conftest import PROMPTS, Trainer, request


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
