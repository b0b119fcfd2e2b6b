"""States are saved and loaded bit for bit, and exported for peft and transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rlkit_tinker import AdamParams, ModelInput, RequestFailedError, SamplingParams, Service, TrainingClient
from safetensors.torch import load_file, save_file
from tinker_oracle import gradients, random_data, randomise
from transformers import AutoModelForCausalLM

from rlkit.models.load import load_policy
from rlkit.models.lora import load_by_peft
from rlkit.recipe import Model

PROMPT = ModelInput.from_ints(range(5, 15))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service("tiny", max_adapters=4, folder=tmp_path_factory.mktemp("states"))


@pytest.fixture
def client(service: Service) -> Iterator[TrainingClient]:
    """A client after two steps, with gradients for a third."""
    with service.create_training_client(rank=4, seed=1) as client:
        randomise(client, 2)
        for step in range(2):
            client.forward_backward(random_data(step, rows=1), "cross_entropy")
            client.optim_step(AdamParams(1e-2))
        client.forward_backward(random_data(2, rows=1), "cross_entropy").result()
        yield client


def bits(client: TrainingClient) -> list[torch.Tensor]:
    adapter = client.adapter
    moments = [x for weight in adapter.parameters for _, x in sorted(adapter.optimizer.state.get(weight, {}).items())]
    return [*adapter.parameters, *moments, *(g for g in gradients(client) if g is not None)]


def check_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_loaded_state_goes_on_bit_for_bit(service: Service, client: TrainingClient) -> None:
    """With moments and retained gradients; the saved state does not change with the client's next step."""
    path = client.save_state("middle").result()
    with service.create_training_client(rank=4, seed=9) as other:
        other.load_state(path, optimizer=True).result()
        check_equal(bits(other), bits(client))
        for each in (client, other):
            each.optim_step(AdamParams(1e-2)).result()
            each.forward_backward(random_data(3, rows=1), "cross_entropy").result()
        check_equal(bits(other), bits(client))
        weights_before = [weight.detach().clone() for weight in other.adapter.parameters]
        other.load_state(path).result()
        assert not torch.equal(other.adapter.parameters[1], weights_before[1])
        assert other.optim_step(AdamParams()).result().metrics == {"skipped:max": 1.0}
        assert len(bits(other)) == len(other.adapter.parameters)


def test_a_failure_is_saved_with_its_state(service: Service, client: TrainingClient) -> None:
    with pytest.raises(RequestFailedError):
        client.forward_backward([], "ppo").result()
    path = client.save_state("failed").result()
    with service.create_training_client(rank=4) as other:
        other.load_state(path, optimizer=True)
        with pytest.raises(RequestFailedError, match="no step was made.*data are empty"):
            other.optim_step(AdamParams()).result()


def test_a_name_is_written_once_unless_overwritten(service: Service, client: TrainingClient) -> None:
    client.save_state("once").result()
    with pytest.raises(RequestFailedError, match="is there already; choose another name, or set overwrite=True"):
        client.save_state("once").result()
    client.save_state("once", overwrite=True).result()
    assert not list(service.folder.rglob("*.partial"))


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "..", "a.partial", "x" * 300, "a\nb", "\0"])
def test_a_name_leads_nowhere_else(client: TrainingClient, name: str) -> None:
    with pytest.raises(RequestFailedError, match="the path of a state is .*, expected tinker://MODEL/weights/NAME"):
        client.save_state(name)
    with pytest.raises(RequestFailedError, match="the path of a state is .*, expected tinker://MODEL/weights/NAME"):
        client.load_state(f"tinker://{client.model_id}/weights/{name}")


def test_what_does_not_fit_changes_nothing(service: Service, client: TrainingClient) -> None:
    """Another rank, missing matrices, numbers that are not finite, damaged files, no state."""
    path = client.save_state("fits").result()
    folder = service.folder / path.removeprefix("tinker://")
    with service.create_training_client(rank=2) as other:
        before = [weight.detach().clone() for weight in other.adapter.parameters]
        with pytest.raises(RequestFailedError, match=r"does not fit .* is \[4, 128\] there, expected \[2, 128\]"):
            other.load_state(path).result()
        check_equal(before, bits(other))
    before = [x.detach().clone() for x in bits(client)]
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(iter(weights))
    for broken, message in (
        ({k: x for k, x in weights.items() if k != name}, "is none there"),
        ({**weights, name: weights[name] / 0}, "not finite"),
    ):
        save_file(broken, folder / "adapter_model.safetensors")
        with pytest.raises(RequestFailedError, match=message):
            client.load_state(path, optimizer=True).result()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "optimizer.safetensors").write_bytes(b"{}")
    with pytest.raises(RequestFailedError, match="cannot be read"):
        client.load_state(path, optimizer=True).result()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 16}))
    with pytest.raises(RequestFailedError, match="lora_alpha 16, this service 32; set alpha to it"):
        client.load_state(path).result()
    with pytest.raises(RequestFailedError, match="no state is saved at"):
        client.load_state(path + "2").result()
    check_equal(before, bits(client))


def test_a_saved_state_is_sampled(service: Service, client: TrainingClient) -> None:
    path = client.save_state("sampled").result()
    expected = client.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
    assert service.create_sampling_client(path).compute_logprobs(PROMPT).result() == expected
    assert service.create_sampling_client().compute_logprobs(PROMPT).result() != expected


@pytest.mark.filterwarnings("ignore")  # of peft, that the head is tied
@pytest.mark.parametrize("merged", [False, True])
def test_an_exported_adapter_computes_the_same(client: TrainingClient, tmp_path: Path, merged: bool) -> None:
    """With peft, and merged with transformers alone, also where the adapted head was tied to the embeddings."""
    client.export(tmp_path / "out", merged).result()
    if merged:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    else:
        model = load_by_peft(load_policy(Model("tiny"), frozen=True), tmp_path / "out").eval()
    tokens = torch.tensor([PROMPT.to_ints()])
    with torch.no_grad():
        logps = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    sampler = client.save_weights_and_get_sampling_client()
    assert sampler.compute_logprobs(PROMPT).result()[1:] == pytest.approx(logps.tolist(), abs=1e-4)
    assert sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, temperature=0.0)).result().sequences[0].tokens
