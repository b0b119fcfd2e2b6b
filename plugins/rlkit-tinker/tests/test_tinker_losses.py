"""Losses and their gradients equal peft's adapters with torch's autograd on Tinker's formulae."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from rlkit_tinker import AdamParams, Datum, ModelInput, RequestFailedError, Service, TrainingClient
from tinker_oracle import PeftOracle, gradients, largest_gap, overall_gap, random_data, randomise
from torch import Tensor

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def clipped(r, a, low, high):
    return -torch.minimum(r * a, r.clamp(low, high) * a).sum()


def sequence_ratio(lp, x):
    mask = x["sequence_ratio_mask"]
    return (((lp - x["logprobs"]) * mask).sum() / mask.sum()).exp().detach() * (lp - lp.detach()).exp()


FORMULAE = {
    "cross_entropy": (lambda lp, x: -(x["weights"] * lp).sum(), {}),
    "importance_sampling": (lambda lp, x: -((lp - x["logprobs"]).exp() * x["advantages"]).sum(), {}),
    "ppo": (lambda lp, x: clipped((lp - x["logprobs"]).exp(), x["advantages"], 0.8, 1.2), {}),
    "cispo": (
        lambda lp, x: -((lp - x["logprobs"]).exp().clamp(0.5, 1.5).detach() * lp * x["advantages"]).sum(),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    ),
    "dro": (lambda lp, x: -(lp * x["advantages"] - 0.025 * (lp - x["logprobs"]) ** 2).sum(), {"beta": 0.05}),
    "gspo": (lambda lp, x: clipped(sequence_ratio(lp, x), x["advantages"], 0.8, 1.2), CLIP),
}


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=4)


@pytest.fixture
def client(service: Service) -> Iterator[TrainingClient]:
    with service.create_training_client(rank=4, seed=1) as client:
        randomise(client, 2)
        yield client


def check_gradients(client: TrainingClient, expected: Sequence[Tensor]) -> None:
    """Each matrix's gradient is within 1e-4 of its norm, all together within 2e-5: float32's rounding."""
    assert largest_gap(gradients(client), expected) < 1e-4
    assert overall_gap(gradients(client), expected) < 2e-5


@pytest.mark.parametrize("name", FORMULAE)
def test_gradients_equal_those_of_peft(client: TrainingClient, name: str) -> None:
    """With the loss of one datum negated they do not."""
    formula, config = FORMULAE[name]
    data = random_data(3)
    output = client.forward_backward(data, name, config).result()
    oracle = PeftOracle(client)
    loss = oracle.loss(data, formula)
    expected = torch.autograd.grad(loss, oracle.weights)
    check_gradients(client, expected)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    for datum, outputs in zip(data, output.loss_fn_outputs, strict=True):
        assert largest_gap([outputs["logprobs"].to_torch()], [oracle.logps(datum).detach()]) < 1e-5
    negated = torch.autograd.grad(-oracle.loss(data[:1], formula) + oracle.loss(data[1:], formula), oracle.weights)
    assert overall_gap(gradients(client), negated) > 1e-2


def test_targets_of_two_dimensions_have_a_weight_each(client: TrainingClient) -> None:
    """Targets [N,3], of which some are equal, as a teacher's likely tokens padded with token 0."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(0, 250, (7, 3), generator=generator)
    targets[2:, 2] = 0
    inputs = {"target_tokens": targets, "weights": torch.randn(7, 3, generator=generator)}
    data = [Datum(ModelInput.from_ints(range(3, 10)), inputs)]
    output = client.forward_backward(data, "cross_entropy").result()
    oracle = PeftOracle(client)
    expected = torch.autograd.grad(oracle.loss(data, FORMULAE["cross_entropy"][0]), oracle.weights)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [7, 3]
    check_gradients(client, expected)


def test_gradients_of_calls_add_up_until_a_step(client: TrainingClient) -> None:
    data = random_data(3)
    for datum in data:
        client.forward_backward([datum], "cross_entropy").result()
    oracle = PeftOracle(client)
    expected = torch.autograd.grad(oracle.loss(data, FORMULAE["cross_entropy"][0]), oracle.weights)
    check_gradients(client, expected)


def test_a_custom_loss_equals_direct_autograd(client: TrainingClient) -> None:
    """DPO's loss of two answers, with reference log-probs of 0."""

    def dpo(data, logps):
        margin = logps[0].sum() - logps[1].sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin:mean": margin.item()}

    data = [Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in random_data(4, rows=2)]
    output = client.forward_backward_custom(data, dpo).result()
    oracle = PeftOracle(client)
    loss, metrics = dpo(data, [oracle.logps(datum) for datum in data])
    check_gradients(client, torch.autograd.grad(loss, oracle.weights))
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert output.metrics["margin:mean"] == pytest.approx(metrics["margin:mean"], rel=1e-4)


def test_a_forward_pass_has_no_gradient(client: TrainingClient) -> None:
    data = random_data(3)
    forward = client.forward(data, "ppo").result()
    assert gradients(client) == [None] * len(gradients(client))
    assert client.optim_step(AdamParams()).result().metrics == {"skipped:max": 1.0}
    trained = client.forward_backward(data, "ppo").result()
    for before, after in zip(forward.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
        assert before["logprobs"].data == after["logprobs"].data


def changed(**inputs: object) -> Datum:
    datum = random_data(3)[0]
    return Datum(datum.model_input, {k: x for k, x in {**datum.loss_fn_inputs, **inputs}.items() if x is not None})


@pytest.mark.parametrize(
    ("loss", "config", "datum", "message"),
    [
        ("stable_reinforce", {}, changed(), "objective is not published.*loss_fn=importance_sampling"),
        ("grpo", {}, changed(), "loss_fn is 'grpo', expected one of cross_entropy, "),
        ("ppo", {"clip": 0.2}, changed(), "loss_fn_config of ppo has 'clip'; its options: clip_low_threshold, "),
        ("ppo", {"clip_low_threshold": math.nan}, changed(), "clip_low_threshold=nan, expected a finite number"),
        ("dro", {}, changed(), "dro needs beta in loss_fn_config"),
        ("gspo", {}, changed(), "gspo needs clip_low_threshold, clip_high_threshold in loss_fn_config"),
        ("ppo", {}, changed(advantages=None), "datum 0: .*but the loss reads advantages too"),
        ("ppo", {}, changed(advantages=[1.0]), r"advantages of a datum has the shape \[1\], expected \[9\]"),
        (
            "ppo",
            {},
            changed(advantages=[math.inf] * 9),
            "advantages of a datum has the number inf, expected",
        ),
        ("ppo", {}, changed(target_tokens=[264] * 9), "the token 264 is not in the vocabulary, expected 0 to 263"),
        ("ppo", {}, changed(target_tokens=[1.0] * 9), "target_tokens is .*float32.*expected int64"),
        ("ppo", {}, changed(target_tokens=None), "loss_fn_inputs has no target_tokens"),
        ("ppo", {}, Datum(ModelInput(())), "its input has 0 tokens, expected 1 to 4096"),
    ],
)
def test_a_wrong_request_is_refused(client: TrainingClient, loss, config, datum, message) -> None:
    with pytest.raises(RequestFailedError, match=message):
        client.forward_backward([datum], loss, config).result()
    with pytest.raises(RequestFailedError, match="no step was made, and the gradient was dropped"):
        client.optim_step(AdamParams()).result()
    assert client.optim_step(AdamParams()).result().metrics == {"skipped:max": 1.0}


def test_bfloat16_is_close_to_float32(client: TrainingClient) -> None:
    """Log-probs and gradients of the same adapter; weights and gradients stay float32."""
    data = random_data(3)
    expected = client.forward_backward(data, "cross_entropy").result()
    half = Service("tiny", precision="bf16-mixed").create_training_client(rank=4, seed=1)
    randomise(half, 2)
    actual = half.forward_backward(data, "cross_entropy").result()
    assert actual.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=0.02)
    assert 1e-4 < overall_gap(gradients(half), gradients(client)) < 0.1
    assert {gradient.dtype for gradient in gradients(half)} == {torch.float32}
    assert half.optim_step(AdamParams()).result().metrics["grad_norm:mean"] > 0
