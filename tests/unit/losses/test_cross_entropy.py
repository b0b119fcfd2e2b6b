"""Supervised fine-tuning's options: label smoothing, and NEFTune's noise on the embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from rlkit.interfaces.loss import AdvantageLoss
from rlkit.losses import CrossEntropy
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.ops.logps import LOGPS, OutputLayer, logits_logps, token_logps
from rlkit.ops.random import RowNoise
from rlkit.recipe import Lora, Model
from rlkit.testing import random_model
from rlkit.train.metrics import Meter
from rlkit.train.update import MiniBatch, embedding_noise
from rlkit.types import PolicyOutput, Reads
from tests.conftest import read_jsonl, rlkit_in_process
from tests.unit.phases import context, ready, recipe, update_policy

ROWS = torch.tensor([[5, 3, 4, 6, 9, 2, 0], [5, 3, 4, 8, 2, 0, 0], [5, 3, 4, 8, 2, 0, 0], [7, 6, 5, 4, 7, 3, 2]])
CHOSEN = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 1]]) > 0


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
@pytest.mark.parametrize("memory", [200, 1 << 20])
@pytest.mark.parametrize("frozen", [False, True])
def test_label_smoothing_is_that_of_torch(smoothing: float, memory: int, frozen: bool) -> None:
    """In chunks of 2 tokens and in one, with an output layer that learns and a frozen one; and from whole logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 6, generator=generator).requires_grad_()
    weight = torch.randn(25, 6, generator=generator).requires_grad_(not frozen)
    targets, batch = torch.randint(25, (7,), generator=generator), ready()
    loss = CrossEntropy(smoothing)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    expected = cross_entropy(hidden @ weight.T / 0.7, targets, label_smoothing=smoothing, reduction="none")
    pull = torch.linspace(-1, 1, 7)
    wanted = torch.autograd.grad((expected * pull).sum(), leaves)
    for found in (
        token_logps(hidden, OutputLayer(weight, None, 0.7), targets, reads=loss.forward.statistics, memory=memory),
        logits_logps(hidden @ weight.T, targets, 0.7, reads=loss.forward.statistics),
    ):
        per_token = loss(PolicyOutput(found.logps, found.entropy, mean_logps=found.mean), batch).per_token
        torch.testing.assert_close(per_token, expected, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad((per_token * pull).sum(), leaves)
        torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-6)


def test_the_actor_computes_what_the_loss_reads_and_no_more() -> None:
    actor = Actor(load_policy(Model("tiny")))
    for actor.chunked in (True, False):
        out = actor(ROWS, CHOSEN, 1.0, CrossEntropy(0.1).forward.statistics)
        logits = actor.logits(ROWS)[:, :-1][CHOSEN[:, 1:]]
        expected = cross_entropy(logits, ROWS[CHOSEN], label_smoothing=0.1, reduction="none")
        torch.testing.assert_close(CrossEntropy(0.1)(out, ready()).per_token[CHOSEN], expected, rtol=1e-5, atol=1e-5)
        assert out.sum_pi_squared is None
        bare = actor(ROWS, CHOSEN, 1.0, LOGPS)
        assert [x is None for x in bare] == [False, *[True] * 7]
    assert CrossEntropy().forward.statistics == Reads(entropy=True, squares=False, mean=False)


def noise_of(alpha: float) -> RowNoise:
    lengths = (ROWS > 0).sum(-1)
    return RowNoise.of_rows("key", ROWS, lengths, torch.tensor([0, 1, 1, 2]), alpha / lengths.sqrt())


def test_noise_is_uniform_within_its_bound() -> None:
    """Of 40 tokens and width 4096: within 5 / sqrt(40 * 4096), of variance bound^2 / 3."""
    noise = RowNoise(torch.tensor([3]), torch.tensor([5 / math.sqrt(40)]))
    found = noise.draw(torch.zeros(40, dtype=torch.long), torch.arange(40), 4096)
    bound = 5 / math.sqrt(40 * 4096)
    assert found.abs().max() <= bound
    assert found.abs().max() > 0.999 * bound
    assert found.mean().abs() < 0.01 * bound
    assert found.square().mean() == pytest.approx(bound**2 / 3, rel=0.01)
    assert torch.corrcoef(found).triu(1).abs().max() < 0.1


def test_noise_depends_on_seed_step_and_row_alone() -> None:
    batch, made = ready(), recipe(loss=CrossEntropy(neftune_alpha=5.0))
    one = embedding_noise(batch, made, "1/0")
    assert one is not None
    assert len(set(one.keys.tolist())) == 4
    assert one.bounds.tolist() == pytest.approx([5 / math.sqrt(n) for n in (3, 2, 4, 3)])
    half = embedding_noise(batch.rows(torch.tensor([1, 0])), made, "1/0")  # another rank, in another order
    assert half is not None
    assert half.keys.tolist() == one.keys[[1, 0]].tolist()
    seeded = replace(made, train=replace(made.train, seed=1))
    for other in (embedding_noise(batch, made, "2/0"), embedding_noise(batch, seeded, "1/0")):
        assert other is not None
        assert not set(other.keys.tolist()) & set(one.keys.tolist())
    assert embedding_noise(batch, recipe(loss=CrossEntropy()), "1/0") is None


@pytest.mark.parametrize("lora", [False, True])
def test_noise_on_embeddings_is_per_row_however_packed(lora: bool) -> None:
    """Rows 0, 1 and 2 share a prompt, whose noise is another in each; 1 and 2 are equal but for that."""
    policy = random_model("llama")
    actor = Actor(load_policy(Model("tiny", lora=Lora(rank=4))) if lora else policy)
    noise, found = noise_of(100.0), []
    for packed, chunked in ((True, True), (False, True), (False, False)):
        actor.passes.packed, actor.chunked = packed, chunked
        actor.zero_grad()
        out = actor(ROWS, CHOSEN, noise=noise)
        out.logps.sum().backward()
        found.append([out.logps.detach(), *(p.grad for p in actor.parameters() if p.grad is not None)])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-3, atol=1e-5)
    logps = found[0][0]
    assert (logps[1] - logps[2]).abs().max() > 1e-4
    if not lora:
        embedded = policy.get_input_embeddings()(ROWS)
        rows, places = torch.arange(4).repeat_interleave(7), torch.arange(7).repeat(4)
        embedded = embedded + noise.draw(rows, places, embedded.shape[-1]).view_as(embedded)
        plain = torch.log_softmax(policy(inputs_embeds=embedded).logits[:, :-1], -1)
        expected = plain.gather(-1, ROWS[:, 1:, None]).squeeze(-1)
        torch.testing.assert_close(logps[:, 1:][CHOSEN[:, 1:]], expected[CHOSEN[:, 1:]], rtol=1e-4, atol=1e-5)


class Skipping(CrossEntropy, AdvantageLoss):
    """Needs no backward pass of rows without an advantage."""


def test_noise_is_in_passes_with_a_gradient_alone() -> None:
    made = context(recipe(loss=CrossEntropy(neftune_alpha=5.0)))
    seen: list[Any] = []
    forward = made.models.policy.module.forward

    def noted(*args: Any, noise: RowNoise | None, media: None) -> PolicyOutput:
        seen.append((torch.is_grad_enabled(), noise))
        return forward(*args)

    made.models.policy.module.forward = noted
    batch = ready()
    batch.accepted = batch.accepted.clone()
    noise = embedding_noise(batch, made.recipe, "1/0")
    made.data.token_limit = 6
    update_policy(made, MiniBatch(batch, [0, 1, 2, 3], noise=noise), Meter())
    assert len(seen) == 3
    for (grad, added), rows in zip(seen, ([2], [0, 3], [1]), strict=True):
        assert grad
        assert noise is not None
        assert torch.equal(added.keys, noise.keys[rows])
    made.recipe.loss = Skipping(neftune_alpha=5.0)  # rows without an advantage are computed for metrics alone
    batch.advantages = torch.zeros_like(batch.advantages)
    batch.advantages[2] = 1.0
    seen.clear()
    update_policy(made, MiniBatch(batch, [0, 1, 2, 3], noise=noise), Meter())
    assert [(grad, added is not None) for grad, added in seen] == [(False, False), (False, False), (True, True)]


def test_log_probs_before_the_update_are_without_noise() -> None:
    assert recipe(loss=CrossEntropy(neftune_alpha=5.0)).needs_old_logps  # or the first noisy pass would be taken for it
    assert not recipe(loss=CrossEntropy()).needs_old_logps


RUN = ("--recipe=quick_sft", "--train.prompts_per_step=8", "--train.steps=4", "--validation=null", "--reward=null")


@pytest.mark.slow
def test_a_run_with_noise_resumes_bit_for_bit(tmp_path: Path) -> None:
    noisy = ("--loss.neftune_alpha=10", "--loss.label_smoothing=0.1", "--save.every=2", "--save.keep_last=2")
    weights, losses = {}, {}
    for out, *words in (
        ("one", *RUN, *noisy),
        ("resumed", *RUN, *noisy, "--resume=one/checkpoints/step-000002"),
        ("split", *RUN, *noisy, "--train.max_tokens_per_micro_batch=30"),
    ):
        done = rlkit_in_process("fit", *words, f"--out={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        weights[out] = load_file(tmp_path / out / "final" / "model.safetensors")
        losses[out] = [line["policy/loss"] for line in read_jsonl(tmp_path / out / "metrics.jsonl")]
    assert all(torch.equal(x, weights["resumed"][name]) for name, x in weights["one"].items())
    assert losses["split"] == pytest.approx(losses["one"], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.label_smoothing=1", "a number of 0 or more and below 1"),
        ("--loss.label_smoothing=-0.1", "a number of 0 or more and below 1"),
        ("--loss.label_smoothing=.nan", "a number of 0 or more and below 1"),
        ("--loss.neftune_alpha=-1", "a number of 0 or more"),
        ("--loss.neftune_alpha=.inf", "a number from 0 to 1e+30"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, words: str, message: str) -> None:
    done = rlkit_in_process("fit", *RUN, words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_noise_beyond_reason_breaks_no_weights(tmp_path: Path) -> None:
    done = rlkit_in_process("fit", *RUN, "--loss.neftune_alpha=1e30", "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(x.isfinite().all() for x in load_file(tmp_path / "run" / "final" / "model.safetensors").values())


def test_explain_shows_the_options() -> None:
    assert CrossEntropy().explain() == "-logp"
    shown = CrossEntropy(0.1, 5.0).explain()
    assert shown == (
        "0.9 (-logp) + 0.1 (mean of -logp over the vocabulary), with noise up to 5 / sqrt(tokens * width) on the "
        "embeddings"
    )
