"""Routes as vLLM and SGLang write them into responses, and as a broken or hostile server might."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from rlkit_engine_http import HttpEngine
from rlkit_engine_vllm import VllmApi, VllmServer
from rlkit_servers.http import Fault
from rlkit_servers.routes import routes_of_bytes, routes_of_npy
from rlkit_servers.sglang.api import SGLangApi
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.engines import SGLangServer
from rlkit.ops.routes import Routers
from rlkit.rollout.gate import remainder
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason

ROUTERS = Routers((1, 2), 3, 8, 2)
"""Layer 0 of three is dense."""
REQUEST = Request((5, 9, 200), Sampling(max_tokens=9), SampleKey(0, 1, "p", 0), "s", routes_from=0)
SELECTED = numpy.array([[[0, 0], [6, 1], [4, 7]], [[0, 0], [2, 6], [0, 0]], [[0, 0], [3, 1], [0, 7]]])
"""Of three of four tokens; the second one's in layer 2 is missing."""
ROUTES = [[[7, 2], [5, 8]], [[3, 7], [0, 0]], [[4, 2], [1, 8]], [[0, 0], [0, 0]]]
FROM_SGLANG = "AAAAAAAAAAAGAAAAAQAAAAQAAAAHAAAAAAAAAAAAAAACAAAABgAAAAAAAAAAAAAAAAAAAAAAAAADAAAAAQAAAAAAAAAHAAAA"
"""The same as little-endian numbers of 4 bytes."""

Decode = Callable[..., Tensor]


def npy(numbers: Any, dtype: Any = numpy.uint8) -> str:
    """Return numbers as vLLM 0.32 does."""
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(numbers, dtype), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def raw(numbers: Any) -> str:
    """Return numbers as SGLang 0.5.21 does."""
    return base64.b64encode(numpy.asarray(numbers, numpy.int32).tobytes()).decode()


ENCODINGS = [
    pytest.param(routes_of_npy, npy, id="vLLM"),
    pytest.param(routes_of_npy, lambda x: npy(x, numpy.uint16), id="vLLM-shorts"),
    pytest.param(routes_of_bytes, raw, id="SGLang"),
]


@pytest.mark.parametrize(("decode", "encode"), ENCODINGS)
def test_routes_are_decoded(decode: Decode, encode: Callable[[Any], str]) -> None:
    """The last token has none; a request from its third token on gets those of the third and of what was sampled."""
    routes = decode(encode(SELECTED), ROUTERS, REQUEST, 1)
    assert routes.dtype == torch.uint8
    assert routes.tolist() == ROUTES
    assert routes_of_bytes(FROM_SGLANG, ROUTERS, REQUEST, 1).tolist() == ROUTES
    later = replace(REQUEST, routes_from=2)
    assert decode(encode(SELECTED[2:]), ROUTERS, later, 1).tolist() == ROUTES[2:]


@pytest.mark.parametrize(("decode", "encode"), ENCODINGS)
def test_only_an_aborted_request_may_have_other_rows(decode: Decode, encode: Callable[[Any], str]) -> None:
    for sampled, expected in ((3, [*ROUTES[:3], *ROUTES[3:] * 3]), (0, [*ROUTES[:2], *ROUTES[3:]])):
        with pytest.raises(Fault, match=f"they are of 3 tokens, expected {2 + sampled}"):
            decode(encode(SELECTED), ROUTERS, REQUEST, sampled)
        assert decode(encode(SELECTED), ROUTERS, REQUEST, sampled, aborted=True).tolist() == expected


@pytest.mark.parametrize(("decode", "encode"), ENCODINGS)
def test_hostile_routes_are_refused(decode: Decode, encode: Callable[[Any], str]) -> None:
    beyond = SELECTED.copy()
    beyond[1, 2] = (3, 8)
    content = base64.b64decode(encode(SELECTED))
    for encoded, problem in (
        (encode(beyond), "name an expert that is not from 0 to 7"),
        (encode(SELECTED[:, :2]), "cannot be read"),
        ("not base64!", "base64|character"),
        (base64.b64encode(content[:-1]).decode(), "cannot be read"),
        ("", "cannot be read"),
    ):
        with pytest.raises(Fault, match=problem):
            decode(encoded, ROUTERS, REQUEST, 1)


def test_many_experts_need_shorts_and_a_single_one_is_no_repetition() -> None:
    """Of one layer with 300 experts, and of one with 8 of which each token takes one."""
    later = replace(REQUEST, tokens=(5,))
    many = routes_of_npy(npy([[[299, 3]]], numpy.uint16), Routers((0,), 1, 300, 2), later, 1)
    assert (many.dtype, many.tolist()) == (torch.int16, [[[300, 4]], [[0, 0]]])
    assert routes_of_bytes(raw([[[7]]]), Routers((0,), 1, 8, 1), later, 1).tolist() == [[[8]], [[0]]]


def test_a_single_expert_0_is_left_to_the_router() -> None:
    """A token that was not recorded has zeros, too."""
    later = replace(REQUEST, tokens=(5, 6))
    assert routes_of_bytes(raw([[[0]], [[7]]]), Routers((0,), 1, 8, 1), later, 1).tolist() == [[[0]], [[8]], [[0]]]


def test_negative_experts_are_refused() -> None:
    with pytest.raises(Fault, match="name an expert that is not from 0 to 7"):
        routes_of_bytes(raw(-SELECTED), ROUTERS, REQUEST, 1)


def test_a_file_of_objects_is_not_unpickled() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("was unpickled",)

    file = io.BytesIO()
    numpy.save(file, numpy.array([Bomb()], dtype=object), allow_pickle=True)
    for content in (file.getvalue(), pickle.dumps(Bomb())):
        with pytest.raises(Fault, match="cannot be read"):
            routes_of_npy(base64.b64encode(content).decode(), ROUTERS, REQUEST, 1)
    huge = base64.b64decode(npy(SELECTED)).replace(b"2), }" + b" " * 12, b"2" + b"0" * 12 + b"), }")
    with pytest.raises(Fault, match="cannot be read"):
        routes_of_npy(base64.b64encode(huge).decode(), ROUTERS, REQUEST, 1)
    with pytest.raises(Fault, match="of type float64, expected uint8 or uint16"):
        routes_of_npy(npy(SELECTED, numpy.float64), ROUTERS, REQUEST, 1)


HEADERS = (
    "{'descr': [1], 'fortran_order': False, 'shape': (3, 3, 2), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 3, 2), ",
    "(" * 5000,
    "-" * 9000 + "1",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 3, 2), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (9, 2), }",
    "{[]: 1}",
)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.filterwarnings("ignore:Reading")
def test_a_hostile_header_is_refused(header: str) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(range(18))
    for body in (content, content[: len(header) + 11]):  # of one byte alone
        with pytest.raises(Fault, match="cannot be read"):
            routes_of_npy(base64.b64encode(body).decode(), ROUTERS, REQUEST, 1)


def test_the_rest_of_an_interrupted_answer_begins_with_its_last_token() -> None:
    """It was sampled, but not run; before a token was sampled, all routes are missing."""
    answer = Completion([7, 8], [-1.0, -1.0], [0, 0], StopReason.INTERRUPTED)
    assert remainder(REQUEST, answer, 9).routes_from == 4
    assert remainder(REQUEST, Completion([], [], [], StopReason.INTERRUPTED), 9).routes_from == 0
    assert remainder(replace(REQUEST, routes_from=None), answer, 9).routes_from is None


class Answering:
    """A client whose server answers each call with a response, and remembers the body."""

    url = "http://127.0.0.1:1"

    def __init__(self, response: Any) -> None:
        self.response = response
        self.body: dict[str, Any] = {}

    async def get(self, path: str, deadline: float) -> Any:
        return self.response

    async def post(self, path: str, body: Any, deadline: float) -> Any:
        self.body = body
        return self.response


def sglang(**meta: object) -> Any:
    own = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None]], "weight_version": "v"}
    return {"output_ids": [7], "meta_info": {**own, **meta}}


def vllm(**choice: object) -> Any:
    logprobs = {"content": [{"logprob": -0.5}]}
    own = {"token_ids": [7], "finish_reason": "length", "logprobs": logprobs, "weight_versions": None}
    return {"choices": [{**own, **choice}]}


def ask(api: Any, request: Request = REQUEST) -> Any:
    return asyncio.run(api.generate(request))


@pytest.mark.parametrize(
    ("make", "respond", "encode"), [(SGLangApi, sglang, raw), (VllmApi, vllm, npy)], ids=["SGLang", "vLLM"]
)
def test_a_request_asks_for_routes_and_reads_them(make: Any, respond: Any, encode: Any) -> None:
    client = Answering(respond(routed_experts=encode(SELECTED[1:])))
    api = make(client)
    assert ask(api).expert_routes is None  # of a server that was not started for that
    assert "routed_experts" not in str(client.body)
    api.routers = ROUTERS
    assert ask(api, replace(REQUEST, routes_from=1)).expert_routes.tolist() == ROUTES[1:]
    assert ("routed_experts_start_len': 1" in str(client.body)) != (
        "routed_experts_prompt_start': 1" in str(client.body)
    )
    assert ask(api, replace(REQUEST, routes_from=None)).expert_routes is None
    client.response = respond()
    with pytest.raises(
        EngineError, match="return(s|ed) no experts of its tokens: start it with --enable-return-routed"
    ):
        ask(api)


def test_vllm_returns_no_routes_with_truncation_or_on_a_cpu() -> None:
    """It answers "AuxOutput Connector requires Model Runner V2", and then "Model Runner V2 requires Triton"."""
    api = VllmApi(Answering(vllm()))  # type: ignore[arg-type]
    api.routers = ROUTERS
    with pytest.raises(EngineError, match="not those of the full softmax where sampling truncates"):
        ask(api, replace(REQUEST, sampling=Sampling(top_k=4)))
    plain, truncated = Sampling(), Sampling(top_k=4)
    assert "needs a GPU" in str(VllmServer().routes_problem(plain, on_gpu=False, asked=True))
    assert "where rollout.sampling truncates" in str(VllmServer().routes_problem(truncated, on_gpu=True, asked=True))
    assert "was not run on a GPU" in str(VllmServer().routes_problem(plain, on_gpu=True, asked=False))
    assert VllmServer().routes_problem(plain, on_gpu=True, asked=True) is None


@pytest.mark.parametrize("kind", [VllmServer, SGLangServer])
def test_running_servers_return_routes_only_if_the_recipe_asks(kind: Any) -> None:
    running = kind(["http://127.0.0.1:1"])
    assert "servers at urls may not return them" in running.routes_problem(Sampling(), on_gpu=False, asked=False)
    assert running.routes_problem(Sampling(), on_gpu=False, asked=True) is None


def test_a_running_server_without_the_switch_is_refused() -> None:
    api = SGLangApi(Answering({"version": "0.5.21", "enable_return_routed_experts": False}))  # type: ignore[arg-type]
    asyncio.run(api.inspect(started=False))
    api.routers = ROUTERS
    with pytest.raises(EngineError, match="does not return the experts of its tokens: start it with --enable-return"):
        asyncio.run(api.inspect(started=False))


@pytest.mark.parametrize(
    ("returns", "runner", "problem"),
    [(False, True, True), (True, False, True), (True, "0", True), (True, True, False), (True, None, False)],
)
def test_a_running_vllm_without_its_switches_is_refused(returns: bool, runner: object, problem: bool) -> None:
    variables = {} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": runner}
    config = {"aux_output_config": {"enable_return_routed_experts": returns}}
    api = VllmApi(Answering({"version": "0.32.0", "vllm_config": config, "vllm_env": variables}))  # type: ignore[arg-type]
    api.routers = ROUTERS
    asyncio.run(api.inspect(started=True))
    if not problem:
        asyncio.run(api.inspect(started=False))
        return
    with pytest.raises(EngineError, match="--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, or set"):
        asyncio.run(api.inspect(started=False))


def test_a_vllm_that_cannot_be_asked_names_both_switches_in_its_first_response() -> None:
    class Closed(Answering):
        async def get(self, path: str, deadline: float) -> Any:
            if "server_info" in path:
                raise Fault("Not Found", 404)
            return {"version": "0.32.0"}

    api = VllmApi(Closed(vllm()))  # type: ignore[arg-type]
    api.routers = ROUTERS
    asyncio.run(api.inspect(started=False))
    with pytest.raises(EngineError, match="--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, or set"):
        ask(api)


def test_engines_of_other_products_return_no_routes() -> None:
    assert HttpEngine().routes_problem(Sampling(), on_gpu=True, asked=True) == "HttpEngine does not return them"
