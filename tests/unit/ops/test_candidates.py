"""Truncated sampling: the tokens that could be sampled, and statistics of the distributions over them."""

from __future__ import annotations

import math

import pytest
import torch
from rlkit_engine_torch.sampling import Truncation, choose
from rlkit_servers.api import candidates_of

from rlkit.ops.candidates import over_candidates
from rlkit.ops.logps import ALL, LOGPS, logits_logps
from rlkit.rollout.collate import collate
from rlkit.testing import example_trajectory
from rlkit.types import Sampling

PROBS = torch.tensor([0.15, 0.5, 0.1, 0.25])


def limits(top_p: float = 1.0, top_k: int = 0) -> Truncation:
    return Truncation(torch.tensor([top_p]), torch.tensor([top_k]), torch.zeros(1))


def test_log_probs_are_renormalised_over_the_candidates() -> None:
    """Of 1/2, 1/4, 0.15 and 0.1, two reach 0.7: the first has 2/3 of their mass, the second 1/3."""
    u = torch.tensor([0.1, 0.9])
    tokens, logps, candidates = choose(PROBS.log().expand(2, -1), u, truncation=limits(0.7, 3), largest_k=3)
    assert tokens.tolist() == [1, 3]
    assert logps.tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 3)])
    assert candidates is not None
    assert candidates.tolist() == [[1, 3, -1]] * 2


def test_rows_without_top_k_have_no_candidates() -> None:
    truncation = Truncation(torch.tensor([0.7, 0.7]), torch.tensor([0, 2]), torch.zeros(2))
    _, logps, candidates = choose(PROBS.log().expand(2, -1), torch.full((2,), 0.1), truncation=truncation, largest_k=2)
    assert logps.tolist() == pytest.approx([math.log(1 / 2), math.log(2 / 3)])
    assert candidates is not None
    assert candidates.tolist() == [[-1, -1], [1, 3]]


def test_statistics_are_those_of_the_restricted_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 9, generator=generator, requires_grad=True)
    candidates = torch.tensor([[4, 2, 7], [0, -1, -1], [-1, -1, -1]])
    targets, weights = torch.tensor([2, 0, 5]), torch.randn(2, 3, generator=generator)
    full = logits_logps(logits, targets, 0.7, reads=LOGPS, ids=candidates.clamp(min=0))
    actual = over_candidates(full, candidates, ALL)
    assert actual.entropy is not None
    (actual.logps @ weights[0] + actual.entropy @ weights[1]).backward()
    gradient, logits.grad = logits.grad, None

    excluded = torch.ones(3, 9, dtype=torch.bool)
    excluded[0, [4, 2, 7]] = excluded[1, 0] = excluded[2] = False  # a token without candidates is not restricted
    logps = (logits / 0.7).masked_fill(excluded, -1e9).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1) * torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(actual.logps, logps[torch.arange(3), targets])
    torch.testing.assert_close(actual.entropy, entropy, atol=1e-6, rtol=0)
    assert actual.squares is not None
    torch.testing.assert_close(actual.squares[:2], logps.exp().square().sum(-1)[:2])
    (logps[torch.arange(3), targets] @ weights[0] + entropy @ weights[1]).backward()
    torch.testing.assert_close(gradient, logits.grad, atol=1e-6, rtol=1e-5)


def test_a_servers_candidates_are_its_most_likely_tokens() -> None:
    logps = [[math.log(p) for p in (0.5, 0.25, 0.15)]] * 2
    ids, masses = candidates_of([1, 3], [[1, 3, 0]] * 2, logps, Sampling(top_p=0.7, top_k=3))
    assert [list(row) for row in ids] == [[1, 3]] * 2
    assert masses == pytest.approx([math.log(0.75)] * 2)
    ids, _ = candidates_of([0], [[1, 3, 0]], logps[:1], Sampling(top_p=0.75 - 1e-9, top_k=3, max_tokens=1))
    assert list(ids[0]) == [1, 3, 0]  # the server has rounded the sum of the others to less than top_p
    with pytest.raises(ValueError, match=r"top_p=0.7, top_k=3 and min_p=0.0"):
        candidates_of([0], [[1, 3, 0]], logps[:1], Sampling(top_p=0.7, top_k=3))


def test_candidates_of_unlike_numbers_are_padded() -> None:
    truncated, plain = example_trajectory("ab"), example_trajectory("c")
    truncated.candidates = [(), (), [3], [5, 4]]
    batch = collate([truncated, plain])
    assert batch.candidates is not None
    assert batch.candidates.tolist() == [[[-1, -1], [-1, -1], [3, -1], [5, 4]], [[-1, -1]] * 4]
    assert collate([plain]).candidates is None
