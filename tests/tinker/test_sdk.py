"""`rlkit serve tinker` with the SDK and tinker-cookbook as they are, offline, in an environment of their own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tinker
import torch
from rlkit_tinker.server.codec import config_of, data_of, encode_pass, read_pass
from rlkit_tinker.types import ForwardBackwardOutput, TensorData
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from tests.conftest import ROOT
from tests.tinker.conftest import BASE, ServedTiny, rows_of

RECIPES = "tinker_cookbook.recipes."
COMMON = (f"model_name={BASE}", "lora_rank=4")
LOOP = (*COMMON, "batch_size=2", "group_size=4", "max_tokens=16", "save_every=1")


def test_the_loop_of_the_page_learns_its_sentence(served: ServedTiny) -> None:
    page = (ROOT / "rlkit" / "docs" / "tinker.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python\n(.*?)```", page, re.S)
    (served.folder / "sky.py").write_text(script.replace("http://127.0.0.1:8765", served.url))
    printed = served.run("sky.py")
    assert " is blue" in printed
    assert re.search(r"^tinker://\w+:train:0/weights/blue$", printed, re.M)


def test_sl_loop_learns_and_resumes(served: ServedTiny) -> None:
    words = ("-m", f"{RECIPES}sl_loop", *COMMON, "batch_size=4", "save_every=1", "learning_rate=3e-3", "log_path=sl")
    served.run(*words, "max_steps=2")
    served.forget_later_checkpoints("sl")
    assert "Resuming from batch 1" in served.run(*words, "max_steps=3")
    losses = {row["step"]: row["train_mean_nll"] for row in rows_of(served.folder / "sl")}
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_rl_loop_runs_and_resumes(served: ServedTiny, loss: str) -> None:
    words = ("-m", f"{RECIPES}rl_loop", *LOOP, f"loss_fn={loss}", f"log_path=rl-{loss}")
    served.run(*words, "max_steps=2")
    served.forget_later_checkpoints(f"rl-{loss}")
    assert "Resuming from batch 1" in served.run(*words, "max_steps=3")
    folder = served.folder / f"rl-{loss}"
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 1, 2]
    assert "sampler_weights/final" in (folder / "checkpoints.jsonl").read_text()


def test_stable_reinforce_is_refused_by_name(served: ServedTiny) -> None:
    """Where it begins: samples with what it needs recorded."""
    client = tinker.ServiceClient(base_url=served.url, api_key="tml-sdk")
    sampler = client.create_sampling_client(base_model=BASE, record_stability_info=True).result()
    with pytest.raises(tinker.RequestFailedError, match="record_stability_info is True"):
        sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=1)).result()
    client.close("success").result()


def test_rl_train_runs_and_resumes(served: ServedTiny) -> None:
    """math_rl.train on additions, after a resume with ppo, which rl_loop does not take."""
    options = (*COMMON, "env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=8", "save_every=1")
    run = ("log_path=arithmetic", "behavior_if_log_dir_exists=resume", "learning_rate=1e-3")
    words = ("-m", f"{RECIPES}math_rl.train", *options, *run, f"base_url={served.url}")
    served.run(*words, "loss_fn=importance_sampling", "max_steps=2")
    served.forget_later_checkpoints("arithmetic")
    assert "weights/000001" in served.run(*words, "loss_fn=ppo", "max_steps=3")
    batches = [row.get("progress/batch") for row in rows_of(served.folder / "arithmetic")]
    assert batches == [0, 1, 2, None]  # the last row is a summary


def test_a_future_outlives_a_kill(served: ServedTiny) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key="tml-sdk")
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
    inputs = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    first = training.forward_backward([datum], "cross_entropy").result()
    passed = training.forward_backward([datum] * 3, "cross_entropy")
    served.kill()
    served.start()
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    assert len(passed.result().loss_fn_outputs) == 3
    assert step.result().metrics["grad_norm:mean"] > 0
    again = training.forward([datum], "cross_entropy").result()
    assert again.metrics["loss:sum"] < first.metrics["loss:sum"]
    client.close("success").result()


def test_messages_are_those_of_the_sdk() -> None:
    """Tokens in chunks, dense and sparse arrays, options, and outputs [N] and [N,2]."""
    sparse = torch.zeros(6, 9, dtype=torch.int64)
    sparse[2, 3] = 7
    inputs = {"target_tokens": sparse, "weights": torch.ones(6, 9), "advantages": torch.arange(6.0)}
    prompt = types.ModelInput.from_ints([1, 2]).append(types.EncodedTextChunk(tokens=[3, 4, 5, 6]))
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]
    passed = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    request = types.ForwardBackwardRequest(forward_backward_input=passed, model_id="m", seq_id=3)
    sent = forward_backward_request_to_proto(request)
    assert sent.data[0].loss_fn_inputs["target_tokens"].HasField("sparse_csr")
    message = read_pass(sent.SerializeToString())
    assert (message.model_id, message.seq_id, message.loss_fn) == ("m", 3, "ppo")
    assert config_of(message) == {"clip_low_threshold": 0.5}
    [datum] = data_of(message)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5, 6]
    assert all((datum.loss_fn_inputs[name].to_numpy() == array.numpy()).all() for name, array in inputs.items())
    arrays = [np.arange(3, dtype=np.float32), np.ones((2, 2), np.float32), np.zeros((1, 2), np.float32)]
    output = ForwardBackwardOutput([{"logprobs": TensorData(array)} for array in arrays], {"loss:sum": 1.5})
    received = deserialize_forward_backward_output(encode_pass(output))
    assert received.metrics == {"loss:sum": 1.5}
    assert all(
        (fields["logprobs"].to_numpy().reshape(array.shape) == array).all()
        for fields, array in zip(received.loss_fn_outputs, arrays, strict=True)
    )
