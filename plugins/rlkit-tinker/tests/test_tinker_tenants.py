"""Several tenants over one base: each is as it would be alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from rlkit_tinker import AdamParams, Datum, ModelInput, RequestFailedError, Service, TrainingClient
from tinker_oracle import PeftOracle, gradients, overall_gap, random_data, randomise
from torch import Tensor

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=9, max_rank=16)


def new_client(service: Service, tenant: int) -> TrainingClient:
    """Return one of eight clients of different ranks and layers, in some of which B is not 0."""
    options = {"train_mlp": tenant != 1, "train_attn": tenant != 2, "train_unembed": tenant != 3}
    client = service.create_training_client(rank=2 + tenant, seed=tenant % 3, **options)
    if tenant in {0, 1, 4}:
        randomise(client, tenant)
    return client


@pytest.fixture
def clients(service: Service) -> Iterator[list[TrainingClient]]:
    made = [new_client(service, tenant) for tenant in range(8)]
    yield made
    for client in made:
        client.close()


def state(client: TrainingClient) -> list[Tensor]:
    """Return the weights, moments and retained gradients of a client."""
    adapter = client.adapter
    moments = [x for weight in adapter.parameters for x in adapter.optimizer.state.get(weight, {}).values()]
    retained = [gradient for gradient in gradients(client) if gradient is not None]
    return [weight.detach().clone() for weight in adapter.parameters] + moments + retained


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def commands_of(tenant: int) -> list[tuple[str, object]]:
    """Return two steps of a tenant's own options with its own data after the prompt of all, then data of all."""
    own = random_data(tenant, rows=2, prompt=PROMPT)
    steps = [AdamParams(1e-3 * (1 + tenant), beta2=beta, grad_clip_norm=tenant % 3) for beta in (0.9, 0.95)]
    return [("pass", own), ("step", steps[0]), ("pass", random_data(99, rows=1)), ("step", steps[1]), ("pass", own[:1])]


def run(client: TrainingClient, tenant: int, command: tuple[str, object]) -> object:
    kind, argument = command
    if kind == "step":
        return client.optim_step(argument)
    return client.forward_backward(argument, LOSSES[tenant % 4])


def test_interleaved_tenants_equal_each_alone(service: Service, clients: list[TrainingClient]) -> None:
    """Bit for bit, with equal prompts and whole data in common, in a random order of their commands."""
    waiting = [list(commands_of(tenant)) for tenant in range(8)]
    order = random.Random(0)
    while any(waiting):
        tenant = order.choice([i for i in range(8) if waiting[i]])
        run(clients[tenant], tenant, waiting[tenant].pop(0)).result()
    for tenant in (0, 2, 3):
        with new_client(service, tenant) as alone:
            for command in commands_of(tenant):
                run(alone, tenant, command).result()
            assert equal(state(clients[tenant]), state(alone))


def test_a_mixed_pass_equals_passes_alone(service: Service, clients: list[TrainingClient]) -> None:
    """To 1e-5 of each gradient's norm; each tenant has the same data, and its own loss."""
    data = random_data(1, rows=2, prompt=PROMPT)
    futures = [client.forward_backward(data, LOSSES[i % 4]) for i, client in enumerate(clients)]
    outputs = [future.result() for future in futures]
    mixed = [gradients(client) for client in clients]
    for i, client in enumerate(clients):
        client.adapter.drop_gradients()
        alone = client.forward_backward(data, LOSSES[i % 4]).result()
        assert overall_gap(mixed[i], gradients(client)) < 1e-5
        assert alone.metrics["loss:sum"] == pytest.approx(outputs[i].metrics["loss:sum"], rel=1e-5)
    assert outputs[0].loss_fn_outputs[0]["logprobs"].data != outputs[4].loss_fn_outputs[0]["logprobs"].data


def test_passes_that_wait_run_together(service: Service, clients: list[TrainingClient], monkeypatch) -> None:
    counts = []
    plain = service.scheduler._trainer.run
    monkeypatch.setattr(service.scheduler._trainer, "run", lambda r: counts.append(len(r)) or plain(r))
    futures = [client.forward_backward(random_data(i, rows=1), "cross_entropy") for i, client in enumerate(clients)]
    steps = [client.optim_step(AdamParams()) for client in clients]
    assert all("grad_norm:mean" in step.result().metrics for step in reversed(steps))
    assert all(future.done for future in futures)
    assert counts == [8]


def test_a_fault_of_one_tenant_changes_no_other(service: Service, clients: list[TrainingClient]) -> None:
    """NaN weights, a refused datum and a gradient that overflows, in a mixed pass with healthy tenants."""
    data = random_data(2, rows=2, prompt=PROMPT)
    expected = []
    for client in clients[3:6]:
        client.forward_backward(data, "cross_entropy").result()
        expected.append(gradients(client))
        client.adapter.drop_gradients()
    with torch.no_grad():
        clients[0].adapter.parameters[0].fill_(torch.nan)
    overflowing = [Datum(d.model_input, {**d.loss_fn_inputs, "logprobs": [-1e30] * d.model_input.length}) for d in data]
    nan, large = (
        clients[0].forward_backward(data, "ppo"),
        clients[1].forward_backward(overflowing, "importance_sampling"),
    )
    healthy = [client.forward_backward(data, "cross_entropy") for client in clients[3:6]]
    for future in (nan, large, *healthy):
        future.result()
    for client in clients[:2]:
        with pytest.raises(RequestFailedError, match="no step was made.*its gradient is not finite"):
            client.optim_step(AdamParams()).result()
    for client, own in zip(clients[3:6], expected, strict=True):
        assert overall_gap(gradients(client), own) < 1e-5
    refused = clients[2].forward_backward([Datum(ModelInput((999,)), {})], "ppo")
    together = clients[5].forward_backward(data, "cross_entropy")
    together.result()
    with pytest.raises(RequestFailedError, match="datum 0"):
        refused.result()
    assert overall_gap(gradients(clients[5]), [2 * gradient for gradient in expected[2]]) < 1e-5


def test_ten_steps_equal_those_of_adamw(clients: list[TrainingClient]) -> None:
    """Bit for bit with torch's AdamW and clipping, where options change at each step."""
    client = clients[4]
    copies = [weight.detach().clone().requires_grad_() for weight in client.adapter.parameters]
    optimizer = torch.optim.AdamW(copies)
    options = random.Random(1)
    for step in range(10):
        client.forward_backward(random_data(step, rows=1), "cross_entropy").result()
        for copy, gradient in zip(copies, gradients(client), strict=True):
            copy.grad = gradient.clone()
        clip = step % 3 * 0.5
        params = AdamParams(
            10 ** -options.uniform(1, 4), options.uniform(0, 0.99), options.uniform(0, 0.999), 1e-8, 0.1 * step, clip
        )
        norm = torch.nn.utils.clip_grad_norm_(copies, clip or float("inf"))
        betas, decay = (params.beta1, params.beta2), params.weight_decay
        optimizer.param_groups[0].update(lr=params.learning_rate, betas=betas, eps=params.eps, weight_decay=decay)
        optimizer.step()
        metrics = client.optim_step(params).result().metrics
        assert metrics == {"grad_norm:mean": norm.item()}
        assert equal([weight.detach() for weight in client.adapter.parameters], [copy.detach() for copy in copies])


def test_a_freed_slot_starts_anew(service: Service, clients: list[TrainingClient]) -> None:
    """All slots in use are an error; a new tenant in a freed one is as in a new service."""
    message = "all 9 adapters are in use; close a training client"
    with service.create_training_client(rank=3, seed=5), pytest.raises(RequestFailedError, match=message):
        service.create_training_client(rank=3)
    first = service.create_training_client(rank=3, seed=5)
    fresh = state(first)
    first.forward_backward(random_data(0), "cross_entropy")
    first.optim_step(AdamParams(0.1))
    first.forward_backward(random_data(0), "cross_entropy").result()
    first.close()
    with pytest.raises(RequestFailedError, match="is closed; create another training client"):
        first.optim_step(AdamParams())
    with service.create_training_client(rank=3, seed=5) as second:
        assert equal(state(second), fresh)
        second.forward_backward(random_data(0), "cross_entropy").result()
        oracle = PeftOracle(second)
        loss = oracle.loss(random_data(0), lambda lp, x: -(x["weights"] * lp).sum())
        expected = torch.autograd.grad(loss, oracle.weights[1::2])  # those of B: with B = 0, A has none
        assert overall_gap(gradients(second)[1::2], expected) < 2e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0, expected an integer from 1 to 16; full fine-tuning is not served"),
        ({"rank": 17}, "rank is 17, expected an integer from 1 to 16$"),
        ({"rank": 4.0}, "rank is 4.0, expected an integer"),
        ({"rank": 4, "seed": -1}, "seed is -1, expected an integer from 0"),
        ({"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}, "the adapter has no layers"),
    ],
)
def test_a_wrong_adapter_is_refused(service: Service, options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestFailedError, match=message):
        service.create_training_client(**options)


@pytest.mark.parametrize("options", [{"learning_rate": float("nan")}, {"beta1": 1.0}, {"eps": -1.0}, {"beta2": None}])
def test_wrong_options_of_a_step_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RequestFailedError, match=f"AdamParams.{next(iter(options))} is .*, expected a number"):
        AdamParams(**options)
