"""The routes over HTTP, as the SDK calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlkit_tinker import Service
from rlkit_tinker.server import routes
from rlkit_tinker.server.app import BodyBudget
from rlkit_tinker.server.coordinator import RefusedError
from rlkit_tinker.server.messages import CLASSES
from tinker_oracle import random_data
from tinker_wire import BASE, Wire, create_body, json_body, pass_body, sample_body, served

DATA = random_data(0, rows=1)


@pytest.fixture(scope="module")
def service() -> Service:
    return Service("tiny", max_adapters=3, max_rank=16)


@pytest.fixture
def serve(service: Service, tmp_path: Path) -> Callable[..., None]:
    """Run a test's coroutine with a client of a server."""

    def run(work: Callable[[Wire], Awaitable[None]], **options: Any) -> None:
        async def in_server() -> None:
            async with served(service, tmp_path, **options) as wire:
                await work(wire)

        asyncio.run(in_server())

    return run


def failure(answer: Any) -> str:
    assert answer["category"] == "user"
    return str(answer["error"])


def logprobs(content: bytes) -> np.ndarray:
    output = CLASSES["ForwardBackwardOutput"].FromString(content)
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")


def step_body(model: str, seq: int, **params: float) -> bytes:
    return json_body(model_id=model, seq_id=seq, adam_params={"learning_rate": 1e-2, **params})


def test_a_loop_trains_saves_samples_and_resumes(serve: Callable[..., None]) -> None:
    async def work(wire: Wire) -> None:
        assert await wire.json("healthz", method="GET") == {"status": "ok"}
        models = (await wire.json("get_server_capabilities", method="GET"))["supported_models"]
        assert {"model_name": BASE, "max_context_length": 4096} in models
        session = await wire.session()
        model = (await wire.call("create_model", create_body(session)))["model_id"]
        assert model == f"{session}:train:0"
        info = await wire.json("get_info", json_body(model_id=model))
        assert (info["model_data"]["tokenizer_id"], info["lora_rank"], info["model_name"]) == ("tokenizer", 4, BASE)
        losses = []
        for seq in range(1, 9, 2):  # the step is sent before the pass's result is read
            futures = [
                await wire.json("forward_backward", pass_body(model, seq, DATA)),
                await wire.json("optim_step", step_body(model, seq + 1)),
            ]
            results = [await wire.result(future["request_id"]) for future in futures]
            losses.append(CLASSES["ForwardBackwardOutput"].FromString(results[0]).metrics["loss:sum"])
            assert json.loads(results[1])["metrics"]["grad_norm:mean"] > 0
        assert losses == sorted(losses, reverse=True)
        path = (await wire.call("save_weights", json_body(model_id=model, seq_id=9, path="000004")))["path"]
        assert path == f"tinker://{model}/weights/000004"
        named = await wire.call("save_weights_for_sampler", json_body(model_id=model, seq_id=10, path="final"))
        fields = {"session_id": session, "sampling_session_seq_id": 5, "model_path": named["path"]}
        sampler = (await wire.json("create_sampling_session", json_body(**fields)))["sampling_session_id"]
        about = await wire.json(f"samplers/{sampler}", method="GET")
        assert about == {"sampler_id": sampler, "base_model": BASE, "model_path": named["path"]}
        options = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "sampling_params": {"stop": []}}
        accepted = await wire.json("asample", sample_body(sampler, 0, **options))
        assert accepted["sample_sequence_ids"] == [f"{sampler}/0/{i}" for i in range(2)]
        response = CLASSES["SampleResponse"].FromString(await wire.result(accepted["request_id"]))
        assert [len(sequence.tokens) // 4 for sequence in response.sequences] == [4, 4]
        assert np.isnan(np.frombuffer(response.prompt_logprobs, "<f4")).tolist() == [True, False, False, False]
        assert (response.topk_prompt_logprobs.k, response.topk_prompt_logprobs.length) == (2, 4)
        body = json_body(session_id=session, model_seq_id=1, path=path, optimizer=True)
        resumed = (await wire.call("load_weights", body))["model_id"]
        assert resumed == f"{session}:train:1"
        outputs = [
            logprobs(await wire.call("forward_backward", pass_body(name, seq, DATA, forward_only=True)))
            for name, seq in ((model, 11), (resumed, 1))
        ]
        assert outputs[0].tobytes() == outputs[1].tobytes()
        about = await wire.json(f"training_runs/{resumed}", method="GET")
        assert (about["training_run_id"], about["base_model"], about["lora_rank"]) == (resumed, BASE, 4)
        about = await wire.json("weights_info", json_body(tinker_path=path))
        assert about["train_mlp"] is True
        assert (await wire.send(f"sessions/{session}/finish"))[0] == 204
        assert (await wire.send("session_heartbeat", json_body(session_id=session)))[0] == 410

    serve(work)


def test_a_failed_pass_fails_the_next_step_alone(serve: Callable[..., None]) -> None:
    """Also where its message is damaged; its number is used up, and later commands run."""

    async def work(wire: Wire) -> None:
        model = await wire.model()
        for seq, broken in ((1, pass_body(model, 1, DATA, "stable_reinforce")), (3, pass_body(model, 3, []))):
            assert "error" in await wire.call("forward_backward", broken)
            assert "no step was made" in failure(await wire.call("optim_step", step_body(model, seq + 1)))
        message = CLASSES["ForwardBackwardRequest"].FromString(pass_body(model, 5, DATA))
        message.data[0].model_input[0].image = b"png"
        answer = await wire.call("forward_backward", message.SerializeToString())
        assert failure(answer).startswith(
            "datum 0: a chunk of its input holds encoded_text and image, expected encoded_text"
        )
        assert "no step was made" in failure(await wire.call("optim_step", step_body(model, 6)))
        await wire.call("forward_backward", pass_body(model, 7, DATA))
        assert "metrics" in await wire.call("optim_step", step_body(model, 8))

    serve(work)


REFUSED = [
    ("create_model", b"", 400), ("create_model", b"[]", 400), ("create_model", b"\xff\xfe", 400),
    ("create_model", b"[" * 100_000, 400), ("create_model", b'{"session_id": 1}', 400),
    ("create_model", json_body(session_id="SESSION", model_seq_id=-1), 400),
    ("create_model", json_body(session_id="SESSION", model_seq_id=1e400), 400),
    ("create_model", json_body(session_id="SESSION", model_seq_id=True), 400),
    ("create_model", b'{"session_id": "SESSION", "model_seq_id": ' + b"9" * 5000 + b"}", 400),
    ("create_model", json_body(session_id="../..", model_seq_id=0), 404),
    ("create_model", json_body(session_id="\0\n", model_seq_id=0), 400),
    ("forward_backward", b"", 400), ("forward_backward", b"\xff" * 50, 400), ("forward_backward", b"{}", 400),
    ("forward_backward", b"\x0a\x02\xff\xfe\x10\x01", 400), ("forward_backward", pass_body("MODEL", 0, DATA), 400),
    ("forward_backward", pass_body("MODEL", -1, DATA), 400), ("forward_backward", pass_body("other", 1, DATA), 404),
    ("forward_backward", pass_body("MODEL", 2**31 - 1, DATA), 400),
    ("optim_step", json_body(model_id="MODEL"), 400), ("optim_step", json_body(model_id="MODEL", seq_id="1"), 400),
    ("optim_step", json_body(model_id="MODEL", seq_id=2**70), 400), ("optim_step", json_body(seq_id=1), 400),
    ("optim_step", json_body(model_id="SESSION:train:7", seq_id=1), 404),
    ("asample", sample_body("SESSION:sample:9", 0), 404), ("asample", json_body(sampling_session_id="x"), 400),
    ("retrieve_future", b"{}", 400), ("retrieve_future", json_body(request_id="SESSION:nothing/1"), 410),
    ("retrieve_future", json_body(request_id=["x"]), 400), ("retrieve_future", json_body(request_id="x/1"), 404),
    ("get_info", json_body(model_id="SESSION:train:7/.."), 404), ("get_info", json_body(model_id=None), 400),
    ("weights_info", json_body(tinker_path="tinker://../../etc/passwd"), 400),
    ("create_sampling_session", json_body(session_id="SESSION", sampling_session_seq_id=0), 400),
    ("create_sampling_session", json_body(session_id="SESSION", sampling_session_seq_id=0, model_path="x"), 400),
    ("create_sampling_session", json_body(session_id="SESSION", sampling_session_seq_id=-1, base_model=BASE), 400),
    ("session_heartbeat", json_body(session_id="x"), 410), ("create_session", b"nothing", 400),
    ("unload_model", b"{}", 404), ("forward", b"{}", 404),
]  # fmt: skip
"""Requests that have no future, each with its status; none of those that the SDK sends again."""

FAILED = [
    ("optim_step", {}, "adam_params is"),
    ("optim_step", {"adam_params": {"learning_rate": "x"}}, "learning_rate is"),
    ("optim_step", {"adam_params": {"learning_rate": float("nan")}}, "adam_params.learning_rate is nan"),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, "AdamParams.beta1 is 1.0"),
    ("optim_step", {"adam_params": {"nesterov": True}}, "adam_params.nesterov is True"),
    ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "adam_params is"),
    ("save_weights", {"path": "../../up"}, "the path of a state is"),
    ("save_weights", {}, "path is"),
    ("save_weights", {"path": "x", "ttl_seconds": 5}, "ttl_seconds is 5"),
    ("save_weights_for_sampler", {}, "path and sampling_session_seq_id are missing"),
    ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, "no state is saved at"),
    ("load_weights", {"path": "/etc/passwd", "optimizer": True}, "the path of a state is '/etc/passwd'"),
    ("load_weights", {"path": "x"}, "optimizer is"),
]
"""Requests whose futures fail, and how."""


def test_malformed_requests_are_refused_and_nothing_is_lost(serve: Callable[..., None]) -> None:
    """Each has an error with a text; a client beside them trains as if it was alone."""

    async def work(wire: Wire) -> None:
        model = await wire.model()
        bob = wire.of("tml-bob")
        other = await bob.model()
        expected = await bob.call("forward_backward", pass_body(other, 1, DATA))
        for route, raw, status in REFUSED:
            body = raw.replace(b"SESSION", model[:32].encode()).replace(b"MODEL", model.encode())
            if route == "forward_backward" and b"MODEL" in raw:
                message = CLASSES["ForwardBackwardRequest"].FromString(raw)
                message.model_id = model
                body = message.SerializeToString()
            answer = await wire.send(route, body)
            assert answer[0] == status, (route, raw[:80], answer)
            assert json.loads(answer[1])["detail"]
        for seq, (route, fields, message) in enumerate(FAILED, 1):
            body = json_body(model_id=model, seq_id=seq, **fields)
            assert message in failure(await wire.call(route, body)), (route, fields)
        answer = await wire.call("forward_backward", pass_body(model, len(FAILED) + 1, DATA))
        assert CLASSES["ForwardBackwardOutput"].FromString(answer).loss_fn_outputs
        assert await bob.call("forward_backward", pass_body(other, 2, DATA)) == expected

    serve(work)


WRONG_SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": 0}, "num_samples is 0"),
    ({"num_samples": "2"}, "num_samples is '2'"),
    ({"sampling_params": {"temperature": -1.0}}, "SamplingParams.temperature is -1.0"),
    ({"sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop"),
    ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p is 0.1"),
    ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks.0"),
    ({"prompt": {"chunks": []}}, "the prompt has 0 tokens, expected 1 to 4095"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**40]}]}}, "is not in the vocabulary"),
    ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is 2, expected prompt_logprobs"),
    ({"record_stability_info": True}, "record_stability_info is True"),
    ({"topk_sample_logprobs": 3}, "topk_sample_logprobs is 3"),
    ({"base_model": "x"}, "base_model is 'x'"),
]
"""Options of requests for samples that fail, and how."""


def test_wrong_samples_fail_with_samples_beside_them(serve: Callable[..., None]) -> None:
    async def work(wire: Wire) -> None:
        fields = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await wire.json("create_sampling_session", json_body(**fields)))["sampling_session_id"]
        requests = [*(options for options, _ in WRONG_SAMPLES), {}]
        bodies = [sample_body(sampler, seq, **options) for seq, options in enumerate(requests)]
        accepted = [await wire.json("asample", body) for body in bodies]
        *answers, last = [await wire.result(each["request_id"]) for each in accepted]
        for answer, (options, message) in zip(answers, WRONG_SAMPLES, strict=True):
            assert message in failure(json.loads(answer)), options
        assert len(CLASSES["SampleResponse"].FromString(last).sequences) == 2

    serve(work)


def test_samples_repeat_and_leave_out_the_log_probs_of_a_prefix(serve: Callable[..., None]) -> None:
    """Without a seed of its own a request has one by its number; equal seeds are equal tokens whatever is beside."""

    async def work(wire: Wire) -> None:
        fields = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await wire.json("create_sampling_session", json_body(**fields)))["sampling_session_id"]
        hot = {"temperature": 9.0, "max_tokens": 8, "stop": []}
        seeded, free = ({"sampling_params": options} for options in ({"seed": 7, **hot}, hot))
        last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 1}
        bodies = [
            sample_body(sampler, seq, **options) for seq, options in enumerate((seeded, seeded, free, free, last))
        ]
        accepted = [await wire.json("asample", body) for body in bodies]
        responses = [CLASSES["SampleResponse"].FromString(await wire.result(x["request_id"])) for x in accepted]
        tokens = [[sequence.tokens for sequence in response.sequences] for response in responses]
        assert tokens[0] == tokens[1]
        assert len({*tokens[0], *tokens[2], *tokens[3]}) == 6
        known = np.frombuffer(responses[4].prompt_logprobs, "<f4")
        assert np.isnan(known).tolist() == [True, True, False, False]
        likely = np.frombuffer(responses[4].topk_prompt_logprobs.logprobs, "<f4")
        assert (likely[:2] == -99999).all()
        assert (likely[2:] >= known[2:]).all()

    serve(work)


def test_a_poll_is_held_and_then_repeated(serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request before which one is missing has no result yet; it arrives once that one has come."""
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.05)

    async def work(wire: Wire) -> None:
        model = await wire.model()
        later = await wire.json("optim_step", step_body(model, 2))
        status, content = await wire.send("retrieve_future", json_body(request_id=later["request_id"]))
        assert status == 408
        again = {"type": "try_again", "request_id": later["request_id"], "queue_state": "active"}
        assert json.loads(content) == again
        waiting = asyncio.create_task(wire.result(later["request_id"]))
        await wire.call("forward_backward", pass_body(model, 1, DATA))
        assert json.loads(await waiting)["metrics"]["grad_norm:mean"] > 0

    serve(work)


def test_a_tenant_sees_nothing_of_another(serve: Callable[..., None]) -> None:
    async def work(wire: Wire) -> None:
        model = await wire.model()
        session = model.partition(":")[0]
        path = (await wire.call("save_weights", json_body(model_id=model, seq_id=1, path="mine")))["path"]
        body = json_body(model_id=model, seq_id=2, sampling_session_seq_id=0)
        sampler = (await wire.call("save_weights_for_sampler", body))["sampling_session_id"]
        bob = wire.of("tml-bob")
        own = await bob.model()
        foreign = [
            ("forward_backward", pass_body(model, 3, DATA)), ("optim_step", step_body(model, 3)),
            ("asample", sample_body(sampler, 0)), ("create_model", create_body(session, 1)),
            ("retrieve_future", json_body(request_id=f"{model}/1")), ("get_info", json_body(model_id=model)),
        ]  # fmt: skip
        for route, raw in foreign:
            assert (await bob.send(route, raw))[0] == 404, route
        assert (await bob.send("session_heartbeat", json_body(session_id=session)))[0] == 410
        for route in (f"samplers/{sampler}", f"training_runs/{model}"):
            assert (await bob.send(route, method="GET"))[0] == 404
        missing = path.replace("mine", "none")
        answers = []
        for seq, name in ((1, path), (2, missing)):
            body = json_body(model_id=own, seq_id=seq, path=name, optimizer=True)
            answers.append(failure(await bob.call("load_weights", body)))
        assert answers[0].replace("mine", "none") == answers[1]
        fields = {"session_id": own.partition(":")[0], "sampling_session_seq_id": 0, "model_path": path}
        assert (await bob.send("create_sampling_session", json_body(**fields)))[0] == 400
        await bob.send(f"sessions/{session}/finish")
        assert "grad_norm:mean" not in await wire.call("optim_step", step_body(model, 3))

    serve(work)


def test_named_states_are_listed_deleted_and_bounded(serve: Callable[..., None]) -> None:
    """The sampler of a state that was overwritten or deleted fails by name, and one that is loaded goes on."""

    async def work(wire: Wire) -> None:
        model = await wire.model()
        session = model.partition(":")[0]
        for seq, name in ((1, "a"), (2, "b")):
            await wire.call("save_weights", json_body(model_id=model, seq_id=seq, path=name, ttl_seconds=3600))
        route = f"training_runs/{model}/checkpoints"
        listed = (await wire.json(route, method="GET"))["checkpoints"]
        assert [each["checkpoint_id"] for each in listed] == ["weights/a", "weights/b"]
        assert all(each["size_bytes"] > 1000 and each["time"] < each["expires_at"] for each in listed)
        fields = {"session_id": session, "sampling_session_seq_id": 0, "model_path": listed[0]["tinker_path"]}
        sampler = (await wire.json("create_sampling_session", json_body(**fields)))["sampling_session_id"]
        await wire.call("forward_backward", pass_body(model, 3, DATA))
        await wire.call("optim_step", step_body(model, 4))
        body = json_body(model_id=model, seq_id=5, path="a")
        assert "is there already; choose another name" in failure(await wire.call("save_weights", body))
        await wire.call("save_weights", json_body(model_id=model, seq_id=6, path="a", overwrite=True))
        assert isinstance(await wire.call("asample", sample_body(sampler, 0)), bytes)
        wire.routes._coordinator._executor._pairs.clear()
        message = f"tinker://{model}/weights/a was overwritten or removed"
        assert message in failure(await wire.call("asample", sample_body(sampler, 1)))
        assert (await wire.of("tml-bob").send(f"{route}/weights/b", method="DELETE"))[0] == 400
        assert (await wire.send(f"{route}/weights/b", method="DELETE"))[0] == 204
        assert (await wire.send(f"{route}/weights/b", method="DELETE"))[0] == 400
        assert len((await wire.json(route, method="GET"))["checkpoints"]) == 1
        wire.routes._folders._max_bytes = 1000.0
        body = json_body(model_id=model, seq_id=7, path="c")
        assert "delete some by RestClient.delete_checkpoint" in failure(await wire.call("save_weights", body))

    serve(work)


def test_keys_are_those_of_the_file(serve: Callable[..., None]) -> None:
    async def work(wire: Wire) -> None:
        for key, expected in (("tml-a", 200), ("tml-a ", 200), ("tml-b", 401), ("", 401), ("sk-a", 401)):
            status, content = await wire.of(key).send("client/config")
            assert status == expected, key
            assert status == 200 or b"expected one of the server's --keys" in content

    serve(work, keys=["tml-a"])


def test_slots_are_freed_by_silence_and_refused_when_full(serve: Callable[..., None]) -> None:
    async def work(wire: Wire) -> None:
        models = [await wire.model() for _ in range(3)]
        session = await wire.session()
        message = failure(await wire.call("create_model", create_body(session)))
        assert message == "all 3 adapters are in use; close a training client, or raise max_adapters"
        for model in models[1:]:
            wire.routes._seen[model.partition(":")[0]] -= 301
        await wire.routes.end_silent_sessions(asyncio.get_running_loop().time())
        heartbeats = [json_body(session_id=model.partition(":")[0]) for model in models]
        assert [(await wire.send("session_heartbeat", body))[0] for body in heartbeats] == [200, 410, 410]
        assert (await wire.send("optim_step", step_body(models[1], 1)))[0] == 404
        assert "model_id" in await wire.call("create_model", create_body(session, 1))

    serve(work)


def test_bodies_are_charged_before_they_are_read(serve: Callable[..., None]) -> None:
    """A body that is too long by its header is refused at once; one without a length when it has become too long."""

    async def work(wire: Wire) -> None:
        async def pieces() -> Any:
            for _ in range(40):
                yield bytes(2**20)

        for body in (bytes(2**25 + 1), pieces()):
            status, content = await wire.send("forward_backward", body)
            assert status == 413
            assert b"the body has more than 32 MiB" in content
        assert (await wire.send("healthz", method="GET"))[0] == 200

    serve(work)
    budget = BodyBudget()
    with budget.request("alice", 2**26), budget.request("alice", 2**26):
        with (
            pytest.raises(RefusedError, match="more than 128 MiB of bodies in flight") as refused,
            budget.request("alice", 1),
        ):
            pass
        assert refused.value.status == 429
        with budget.request("bob", 2**26):
            pass
    with budget.request("alice", 2**27):
        pass
