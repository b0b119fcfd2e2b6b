"""Samples of several adapters in one batch: snapshots, seeds, stops, and the log-probs of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from rlkit_tinker import (
    AdamParams,
    Datum,
    ModelInput,
    RequestFailedError,
    SamplingClient,
    SamplingParams,
    Service,
    TrainingClient,
)
from tinker_oracle import PeftOracle, random_data, randomise

PROMPT = ModelInput.from_ints([5, 6, 7, 8])
LONG = ModelInput.from_ints(range(5, 25))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, stop=[])


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=4, max_rows=6)


@pytest.fixture
def clients(service: Service) -> Iterator[list[TrainingClient]]:
    made = [service.create_training_client(rank=2 + i, seed=i) for i in range(3)]
    for i, client in enumerate(made):
        randomise(client, i)
    yield made
    for client in made:
        client.close()


def test_a_snapshot_does_not_change_with_training(clients: list[TrainingClient]) -> None:
    snapshot = clients[0].save_weights_and_get_sampling_client()
    before = snapshot.sample(PROMPT, 1, GREEDY, include_prompt_logprobs=True).result()
    for step in range(3):
        clients[0].forward_backward(random_data(step, rows=1), "cross_entropy")
        clients[0].optim_step(AdamParams(1e-2))
    later = clients[0].save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
    assert snapshot.sample(PROMPT, 1, GREEDY, include_prompt_logprobs=True).result() == before
    assert later != before.prompt_logprobs


def test_log_probs_of_samples_are_those_of_training(clients: list[TrainingClient]) -> None:
    """To 1e-4, for samples of three adapters and the base in one batch, after one prompt of all."""
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    futures = [sampler.sample(LONG, 3, SamplingParams(max_tokens=6, seed=1)) for sampler in samplers]
    for client, future in zip(clients, futures, strict=True):
        sequences = future.result().sequences
        rows = [LONG.to_ints() + sequence.tokens for sequence in sequences]
        data = [
            Datum(ModelInput(tuple(row[:-1])), {"target_tokens": row[1:], "weights": [0.0] * (len(row) - 1)})
            for row in rows
        ]
        outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
        for sequence, output in zip(sequences, outputs, strict=True):
            assert sequence.logprobs == pytest.approx(output["logprobs"].data[LONG.length - 1 :], abs=1e-4)


def test_equal_prompts_of_tenants_share_nothing(service: Service, clients: list[TrainingClient]) -> None:
    """Greedy tokens and prompt log-probs of each adapter, and of the base, equal those of a batch of its own."""
    samplers = [service.create_sampling_client(), *(c.save_weights_and_get_sampling_client() for c in clients)]
    alone = [sampler.sample(LONG, 2, GREEDY, include_prompt_logprobs=True).result() for sampler in samplers]
    futures = [sampler.sample(LONG, 2, GREEDY, include_prompt_logprobs=True) for sampler in samplers]
    mixed = [future.result() for future in futures]
    for own, other in zip(alone, mixed, strict=True):
        assert [s.tokens for s in own.sequences] == [s.tokens for s in other.sequences]
        assert own.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-5)
    assert len({tuple(response.prompt_logprobs[1:]) for response in mixed}) == 4


def test_a_seed_repeats_whatever_else_is_sampled(clients: list[TrainingClient]) -> None:
    """Nine samples where six fit the batch, alone and among others; samples of a seed differ from one another."""
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    params = SamplingParams(max_tokens=5, seed=7, temperature=1.3)
    alone = samplers[0].sample(PROMPT, 9, params).result()
    others = [samplers[1].sample(PROMPT, 2, params), samplers[2].sample(LONG, 1, SamplingParams(max_tokens=9))]
    assert [s.tokens for s in samplers[0].sample(PROMPT, 9, params).result().sequences] == [
        s.tokens for s in alone.sequences
    ]
    assert len({tuple(s.tokens) for s in alone.sequences}) > 1
    assert all(other.done for other in others)
    unseeded = [samplers[0].sample(LONG, 1, SamplingParams(max_tokens=9)).result().sequences[0] for _ in range(3)]
    assert len({tuple(s.tokens) for s in unseeded}) > 1


def test_stops_end_a_sequence_and_stay_in_it(service: Service) -> None:
    sampler = service.create_sampling_client()
    [free] = sampler.sample(PROMPT, 1, GREEDY).result().sequences
    assert (free.stop_reason, len(free.tokens), len(free.logprobs)) == ("length", 8, 8)
    [by_id] = sampler.sample(PROMPT, 1, SamplingParams(8, temperature=0.0, stop=[free.tokens[2]])).result().sequences
    end = free.tokens.index(free.tokens[2]) + 1
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[:end], "stop")
    text = service.tokenizer.decode(free.tokens[:3])
    for stop in (text, [text, "never"]):
        [by_text] = sampler.sample(PROMPT, 1, SamplingParams(8, temperature=0.0, stop=stop)).result().sequences
        assert text in service.tokenizer.decode(by_text.tokens)
        assert text not in service.tokenizer.decode(by_text.tokens[:-1])
        assert by_text.stop_reason == "stop"


def test_log_probs_of_a_prompt_equal_peft(clients: list[TrainingClient]) -> None:
    sampler = clients[0].save_weights_and_get_sampling_client()
    response = sampler.sample(LONG, 1, SamplingParams(1), include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    logits = PeftOracle(clients[0]).model(input_ids=torch.tensor([LONG.to_ints()])).logits[0, :-1].detach()
    logps = logits.log_softmax(-1)
    expected = logps.gather(-1, torch.tensor(LONG.to_ints()[1:])[:, None])[:, 0].tolist()
    assert response.prompt_logprobs[0] is response.topk_prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    for row, likely in zip(logps, response.topk_prompt_logprobs[1:], strict=True):
        top = row.topk(3)
        assert [token for token, _ in likely] == top.indices.tolist()
        assert [logp for _, logp in likely] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert sampler.compute_logprobs(ModelInput((5,))).result() == [None]


def test_weights_that_are_not_finite_fail_alone(clients: list[TrainingClient]) -> None:
    """A short row that takes the slot of a long failed one in the cache is as it would be alone."""
    healthy = clients[1].save_weights_and_get_sampling_client()
    params = SamplingParams(6, seed=2, stop=[])
    expected = [healthy.sample(LONG, 5, params).result(), healthy.sample(PROMPT, 1, params).result()]
    with torch.no_grad():
        clients[0].adapter.parameters[0].fill_(math.nan)
    before = healthy.sample(LONG, 5, params)
    failed = clients[0].save_weights_and_get_sampling_client().sample(LONG, 1, params)
    after = healthy.sample(PROMPT, 1, params)
    for response, own in zip((before.result(), after.result()), expected, strict=True):
        assert [s.tokens for s in response.sequences] == [s.tokens for s in own.sequences]
    with pytest.raises(RequestFailedError, match="the logits after 0 tokens were not finite"):
        failed.result()


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"seed": "a"}, {"temperature": math.nan}, {"temperature": -1.0},
        {"top_p": 0.0}, {"top_k": True}, {"stop": [1, "a"]}, {"stop": ""}, {"stop": [None]},
    ],
)  # fmt: skip
def test_wrong_options_of_samples_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestFailedError, match=f"SamplingParams.{next(iter(options))} is .*, expected"):
        SamplingParams(**options)


def test_wrong_prompts_and_counts_are_refused(service: Service) -> None:
    sampler = service.create_sampling_client()
    with pytest.raises(RequestFailedError, match="the prompt has 0 tokens, expected 1 to 4095"):
        sampler.sample(ModelInput(()), 1, GREEDY)
    with pytest.raises(RequestFailedError, match="the token 264 is not in the vocabulary"):
        sampler.sample(ModelInput((264,)), 1, GREEDY)
    with pytest.raises(RequestFailedError, match="num_samples is 0, expected an integer from 1"):
        sampler.sample(PROMPT, 0, GREEDY)


def test_nobody_waits_for_long_samples_of_another(service: Service) -> None:
    """A tenant has all 6 places, and another's rows of 10 tokens join, one at a time: in 16 steps the second has."""
    flood, other = (SamplingClient(service, None, tenant) for tenant in ("flood", "other"))
    long, short = (SamplingParams(max_tokens=tokens, temperature=1.0, stop=[], seed=3) for tokens in (100, 10))
    alone = other.sample(PROMPT, 4, short).result()
    flooding = [flood.sample(PROMPT, 8, long) for _ in range(4)]
    service.samples.advance()
    small = other.sample(PROMPT, 4, short)
    active = service.samples._sampler._active
    assert [row.tenant for row in active] == ["flood"] * 6
    service.samples.advance()
    assert [row.tenant for row in active] == ["flood"] * 6 + ["other"]
    assert len(small.result().sequences) == 4
    assert not any(future.done for future in flooding)
    assert [x.tokens for x in small.result().sequences] == [x.tokens for x in alone.sequences]
    for future in flooding:
        service.samples.cancel(future)
    assert len(flooding[3].result().sequences) == 8
    assert service.samples._sampler._decoder.rows == 0
