"""What VllmServer sends and starts, without vLLM; tests/vllm runs the real one."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_engine_http import HttpEngine
from rlkit_engine_http.engine import SharedFiles
from rlkit_engine_vllm import VllmApi, VllmEngine, VllmLaunch, VllmServer
from rlkit_engine_vllm.launch import check_release, command, environment, require_vllm
from rlkit_engine_vllm.transport import FolderTransport, VllmChanges
from rlkit_servers.changes import CheckpointReceiver, RefusedWeights
from rlkit_servers.http import Client, Fault
from safetensors import safe_open
from safetensors.torch import load

from rlkit.base.errors import EngineError, RecipeError
from rlkit.engines import SGLangEngine, SGLangServer
from rlkit.interfaces.engine import Capability
from rlkit.types import Request, SampleKey, Sampling, Structure
from tests.conftest import ROOT

TOP = [{"token_id": t, "logprob": math.log(p)} for t, p in ((4, 0.2), (6, 0.5), (5, 0.1))]
"""The sampled token first, as vLLM returns them."""
ANSWER: dict[str, Any] = {
    "token_ids": [4, 5, 6],
    "logprobs": {"content": [{**entry, "top_logprobs": TOP} for entry in (TOP[0], TOP[2], TOP[1])]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "run-1", "start": 0, "end": 2}, {"version": "run-2", "start": 2, "end": 3}],
}


def answer(monkeypatch: pytest.MonkeyPatch, body: Any) -> list[Any]:
    """Have every POST answer this; return what is posted."""
    posted: list[Any] = []

    async def post(client: Client, path: str, sent: Any, deadline: float) -> Any:
        posted.append((path, sent))
        if isinstance(body, Exception):
            raise body
        return body

    monkeypatch.setattr(Client, "post", post)
    return posted


def generate(
    monkeypatch: pytest.MonkeyPatch, structure: Structure | None = None, top_p: float = 1.0, **choice: Any
) -> Any:
    posted = answer(monkeypatch, {"choices": [ANSWER | choice]})
    sampling = Sampling(
        max_tokens=5, temperature=0.7, top_p=top_p, top_k=3, min_p=0.1, stop_ids=(6,), structure=structure
    )
    output = asyncio.run(VllmApi(Client("http://x")).generate(Request((1, 2), sampling, SampleKey(3, 1, "p", 0), "s")))
    return posted, output


def test_tokens_carry_log_probs_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    [(path, body)], output = generate(monkeypatch)
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [1, 2]
    params = body["sampling_params"]
    assert (params["temperature"], params["top_k"], params["min_p"]) == (0.7, 3, 0.1)
    assert params["stop_token_ids"] == [6]
    assert 0 <= params["seed"] < 1 << 63
    assert params["logprobs"] == 3
    assert output.tokens == [4, 5, 6]
    assert output.logps == pytest.approx([math.log(p / 8) for p in (2, 1, 5)])
    assert list(map(list, output.candidates)) == [[6, 4, 5]] * 3
    assert output.labels == ["run-1", "run-1", "run-2"]
    assert (output.stopped, output.aborted) == (True, False)


def test_each_position_of_a_sample_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts a generator from the seed of a request: turns with one seed would begin with the same noise."""
    posted = answer(monkeypatch, {"choices": [ANSWER]})
    api = VllmApi(Client("http://x"))

    def seed(tokens: int, sample: int = 0, resumed: int = 0) -> int:
        key = SampleKey(3, 1, "p", sample)
        request = Request((1,) * tokens, Sampling(max_tokens=5), key, "s", resumed=resumed)
        asyncio.run(api.generate(request))
        return int(posted[-1][1]["sampling_params"]["seed"])

    turns = [seed(2), seed(7), seed(9, resumed=2)]
    assert len({*turns, seed(2, sample=1)}) == 4
    assert seed(2) == turns[0]  # a request that is sent again


@pytest.mark.parametrize(("count", "aborted"), [(2, True), (3, False)])
def test_an_abort_after_the_last_token_is_none(monkeypatch: pytest.MonkeyPatch, count: int, aborted: bool) -> None:
    content = {"content": ANSWER["logprobs"]["content"][:count]}
    _, output = generate(monkeypatch, token_ids=[4, 5, 6][:count], logprobs=content, finish_reason="abort")
    assert output.aborted is aborted


def test_a_token_beyond_the_limits_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mass of 0.8, top-p leaves 0.5 and 0.2."""
    with pytest.raises(Fault, match=r"vLLM sampled otherwise .* a token is not among those that top_p=0.6, top_k=3"):
        generate(monkeypatch, top_p=0.6)


def test_structures_are_asked_for_in_the_form_of_json_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    [(_, body)], _ = generate(monkeypatch, Structure(json_schema={"type": "object"}))
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    sent = body["sampling_params"]["structured_outputs"]
    assert {name: json.loads(text) for name, text in sent.items()} == {"json": {"x-guidance": form, "type": "object"}}
    [(_, body)], _ = generate(monkeypatch, Structure(regex="a+"))
    assert body["sampling_params"]["structured_outputs"] == {"regex": "a+"}


def test_structures_need_a_server_that_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = Structure(regex="a+")
    with pytest.raises(RecipeError, match="VllmServer samples any text; .* or set launch.structures: true"):
        VllmServer().check_structure(structure)
    VllmServer(launch=VllmLaunch(structures=True)).check_structure(structure)
    plain, follows = (
        command(Path("m"), 9, VllmLaunch(structures=structures), "float32", 512, on_gpu=True)
        for structures in (False, True)
    )
    assert ("--tokens-only" in plain, "--tokens-only" in follows) == (True, False)
    assert follows[follows.index("--structured-outputs-config") + 1] == '{"backend": "guidance"}'


@pytest.mark.parametrize(("backend", "skips"), [("auto", False), ("guidance", True)])
def test_a_running_server_that_follows_no_structure_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str, skips: bool
) -> None:
    config = {"structured_outputs_config": {"backend": backend}, "model_config": {"skip_tokenizer_init": skips}}

    async def get(client: Client, path: str, deadline: float) -> Any:
        return {"version": "0.32.0", "vllm_config": config}

    monkeypatch.setattr(Client, "get", get)
    with pytest.raises(EngineError, match="does not follow structures .* start it with --enable-scale-out --struct"):
        asyncio.run(VllmApi(Client("http://x"), structures=True).inspect(False))


def test_a_server_that_returns_too_few_log_probs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("answered 400: Requested sample logprobs of 3, which is greater than max allowed: 2", 400)
    answer(monkeypatch, fault)
    request = Request((1, 2), Sampling(top_k=3), SampleKey(3, 1, "p", 0), "s")
    with pytest.raises(EngineError, match="max allowed: 2; start vLLM server http://x with --max-logprobs -1"):
        asyncio.run(VllmApi(Client("http://x")).generate(request))


def test_other_ends_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Fault, match="the request ended with error"):
        generate(monkeypatch, finish_reason="error")


def test_other_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_release("0.32.0")
    check_release("0.32.4.dev3+cpu")
    for version in ("0.31.2", "0.33.0", "1.32.0"):
        with pytest.raises(EngineError, match=rf"vLLM is {re.escape(version)}, but .* works with 0\.32 up to, but"):
            check_release(version)
    monkeypatch.setattr("rlkit_engine_vllm.launch.DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(EngineError, match="vllm is not installed in this environment"):
        require_vllm()


def test_a_server_without_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(client: Client, path: str, deadline: float) -> Any:
        return {"version": "0.32.0"}

    monkeypatch.setattr(Client, "get", get)
    answer(monkeypatch, Fault("answered 404: Not Found", 404))
    with pytest.raises(EngineError, match="takes no weights from rlkit .*404"):
        asyncio.run(VllmApi(Client("http://x")).inspect(False))


def test_urls_of_other_machines_need_a_folder() -> None:
    with pytest.raises(RecipeError, match="has the url 'x:1'"):
        VllmServer(["x:1"])
    for options in ({}, {"transport": "tensor", "folder": "/f"}, {"transport": "disk"}):
        with pytest.raises(RecipeError, match="set transport: disk and a folder .* or transport: changes"):
            VllmServer(["http://10.0.0.7:9"], **options)
    VllmServer(["http://10.0.0.7:9"], transport="disk", folder="/f")
    VllmServer(["http://10.0.0.7:9"], transport="changes")


def test_adapters_alone_are_no_changes() -> None:
    with pytest.raises(RecipeError, match="adapters cannot be sent as changes"):
        VllmServer(transport="changes", launch=VllmLaunch(adapter_only=True))


def test_changes_travel_as_safetensors_and_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is posted is read as the worker reads it: bit for bit what was sent, or refused."""
    posted = answer(monkeypatch, {})
    transport, receiver, api = VllmChanges(), CheckpointReceiver(), VllmApi(Client("http://x"))
    weights = {"q": torch.randn(40, 30).bfloat16(), "k": torch.randn(30, 40).bfloat16().T, "scale": torch.tensor(1.5)}

    def update(version: str) -> None:
        transport.sent.begin(version, transport.sent.label == receiver.version != "")
        receiver.begin()
        for bucket in (["q"], ["k", "scale"]):
            asyncio.run(transport.load(api, transport.prepare([(name, weights[name]) for name in bucket])))
        transport.sent.end()
        asyncio.run(transport.finish(api))
        for path, body in posted:
            assert path == "/update_weights"
            receiver.receive(load(base64.b64decode(body["update_info"]["bucket"])))

    update("run-1")
    full_bytes = transport.sent.bytes
    posted.clear()
    weights["q"][3, 7:9] = torch.tensor([-0.0, 0.5], dtype=torch.bfloat16)
    update("run-2")
    assert (full_bytes, transport.sent.bytes) == (2 * 1200 * 2 + 4, 2 * (4 + 2))
    assert receiver.version == "run-2"
    assert all(torch.equal(receiver.copies[name], tensor) for name, tensor in weights.items())
    assert torch.signbit(receiver.copies["q"][3, 7])
    with pytest.raises(RefusedWeights, match="these are changes of run-1, but the weights are run-2"):
        update("run-3")  # the last update is posted again, before this one
    assert receiver.version == "run-2"
    posted.clear()
    update("run-4")
    assert (transport.sent.full_updates, receiver.version) == (2, "run-4")


def test_a_server_gets_the_gpus_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment([2, 3])["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment([2, 3])["CUDA_VISIBLE_DEVICES"] == "2,3"
    launch = VllmLaunch(tensor_parallel=2, memory_fraction=0.5, release_memory=True)
    words = command(Path("m"), 9, launch, "bfloat16", 512, on_gpu=True)
    assert "--enable-sleep-mode" in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.5"
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "--enforce-eager" not in words
    words = command(Path("m"), 9, VllmLaunch(), "float32", 8192, on_gpu=False)
    assert "--no-enable-chunked-prefill" in words
    assert words[words.index("--max-num-batched-tokens") + 1] == "8192"


def test_a_folder_keeps_what_no_later_file_replaces() -> None:
    transport = FolderTransport(SimpleNamespace())  # type: ignore[arg-type]
    try:
        transport.prepare([("a", torch.ones(2)), ("b", torch.ones(2))])
        transport.prepare([("a", torch.full((2,), 3.0))])
        index = json.loads((transport.folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert index == {"a": "000002.safetensors", "b": "000001.safetensors"}
        with safe_open(transport.folder / index["a"], "pt") as tensors:
            assert tensors.get_tensor("a").tolist() == [3.0, 3.0]
        transport.prepare([("b", torch.zeros(2))])
        assert sorted(path.name for path in transport.folder.glob("*.safetensors")) == [
            "000002.safetensors",
            "000003.safetensors",
        ]
    finally:
        transport.close()


def test_the_table_of_engines_states_what_the_classes_have() -> None:
    engines: list[Any] = [SGLangServer, SGLangEngine, VllmServer, VllmEngine, HttpEngine]
    made = [engine() for engine in engines]
    options = [engine.__init__.__code__.co_varnames for engine in engines]
    changes = ["changes" in str(engine.__init__.__annotations__.get("transport")) for engine in engines]
    rows = {
        "samples while the trainer learns": [Capability.BESIDE in engine.capabilities for engine in made],
        "requests are interrupted": [Capability.INTERRUPT in engine.capabilities for engine in made],
        "servers that already run (`urls`)": ["urls" in names for names in options],
        "transport of weights is an option": ["transport" in names for names in options],
        "changes of weights alone": [*changes[:-1], SharedFiles().sent is not None],
        "adapters alone, memory released (`launch`)": ["launch" in names for names in options],
        "reads pictures": [bool(engine.picture_models) for engine in made],
        "scores for a teacher (`teacher.engine`)": [Capability.TEACHER in engine.capabilities for engine in made],
    }
    expected = [f"| | {' | '.join(f'`{engine.__name__}`' for engine in engines)} |"]
    expected += [
        f"| {row} | {' | '.join('yes' if value else 'no' for value in values)} |" for row, values in rows.items()
    ]
    expected.append(f"| reserved tokens of the context | {' | '.join(str(engine.reserved) for engine in made)} |")
    assert all(Capability.CANDIDATES in engine.capabilities for engine in made)
    lines = (ROOT / "rlkit" / "docs" / "servers.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in expected if line not in lines] == []
