"""Structures of completions on SGLang: what servers are asked for, and how an interrupted text begins again."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlkit_servers.api import ServerOutput, candidates_of
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.sglang.launch import Launch, command
from test_sglang_requests import StubServer, engine, meta, request, stubs

from rlkit.base.errors import EngineError, RecipeError
from rlkit.commands import parse
from rlkit.engines import SGLangServer
from rlkit.interfaces.launcher import ServerSite
from rlkit.types import Completion, Request, Sampling, StopReason, Structure

__all__ = ["engine"]

YES_NO = Structure(regex="yes|no")


class Server:
    """Answers "7", which a structure leaves alone, and records what it is asked."""

    url = "http://127.0.0.1:1"

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.asked: dict[str, Any] = {}

    async def get(self, path: str, deadline: float) -> Any:
        return {"version": "0.5.21", "grammar_backend": self.backend, "skip_tokenizer_init": False}

    async def post(self, path: str, body: Any, deadline: float) -> Any:
        self.asked = body["sampling_params"]
        top = [[-0.0, 7, None], [None, 3, None]]  # JSON has no infinity
        return {"output_ids": [7], "meta_info": meta("stop", 1) | {"output_top_logprobs": [top]}}


def answer(server: Server, structure: Structure) -> ServerOutput:
    async def ask() -> ServerOutput:
        api = SGLangApi(server)  # type: ignore[arg-type]
        await api.inspect(started=False)
        return await api.generate(request("a", structure=structure, top_k=2))

    return asyncio.run(ask())


def test_a_server_gets_the_schema_in_the_form_of_json_dumps() -> None:
    server = Server("llguidance")
    assert list(answer(server, Structure(json_schema={"type": "object"})).candidates[0]) == [7]
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert json.loads(server.asked["json_schema"]) == {"x-guidance": form, "type": "object"}
    answer(server, YES_NO)
    assert server.asked["regex"] == "yes|no"
    assert "json_schema" not in server.asked


def test_a_server_with_another_grammar_is_refused() -> None:
    with pytest.raises(EngineError, match="http://127.0.0.1:1 follows no sampling.structure; start it with --grammar"):
        answer(Server("xgrammar"), YES_NO)


def test_tokens_that_a_structure_excludes_are_no_candidates() -> None:
    """Of four tokens the structure leaves 5 and 8, with 3/4 and 1/4."""
    logps = [[math.log(0.75), math.log(0.25), -math.inf, -math.inf]]
    [ids], [mass] = candidates_of([8], [[5, 8, 1, 2]], logps, Sampling(top_k=4, structure=YES_NO))
    assert list(ids) == [5, 8]
    assert mass == pytest.approx(0.0)


def test_an_interrupted_text_begins_again(engine: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar of a server reads nothing before its own tokens."""

    async def aborted(self: StubServer, asked: Request) -> ServerOutput:
        return ServerOutput([7], [-0.5], ["run-0"], aborted=True)

    monkeypatch.setattr(StubServer, "ask", aborted)
    asked = replace(request("a", structure=YES_NO), resumable=True)
    assert asyncio.run(engine.generate(asked)) == Completion([], [], [], StopReason.INTERRUPTED)
    with pytest.raises(EngineError, match="has stop texts and a structure, which SGLangServer begins anew"):
        asyncio.run(engine.generate(replace(asked, resumed=1)))


def test_servers_are_asked_for_no_more_log_probs_than_tokens(engine: SGLangServer) -> None:
    asyncio.run(engine.generate(request("a", top_k=500)))
    assert [asked.sampling.top_k for server in stubs(engine) for asked in server.asked] == [100]


@pytest.mark.parametrize("gpu", [None, 0])
def test_structures_need_a_tokenizer_in_the_server(gpu: int | None) -> None:
    site = ServerSite(Path("folder"), "127.0.0.1", 20000, first_gpu=gpu)
    plain, structured = (command(site, Launch(structures=structures), "float32") for structures in (False, True))
    assert "--skip-tokenizer-init" in plain
    assert "--skip-tokenizer-init" not in structured
    assert structured[structured.index("--grammar-backend") + 1] == "llguidance"
    assert structured.count("--grammar-backend") == 1


def test_a_structure_is_checked_before_a_run() -> None:
    with pytest.raises(RecipeError, match="or set launch.structures: true"):
        SGLangServer().check_structure(YES_NO)
    server = SGLangServer(launch=Launch(structures=True))
    server.check_structure(YES_NO)
    with pytest.raises(RecipeError, match="llguidance cannot follow it"):
        server.check_structure(Structure(regex="("))


def test_stop_texts_beside_a_structure_are_refused_before_a_run() -> None:
    engine = "--rollout.engine={class_path: SGLangServer, init_args: {launch: {structures: true}}}"
    words = ["--recipe=quickstart", "--rollout.sampling.structure.regex=yes|no", "--rollout.sampling.top_k=50"]
    stop = '--rollout.sampling.stop=["no"]'
    parse("fit", [*words, stop])
    parse("fit", [*words, engine])
    with pytest.raises(RecipeError, match="stop texts and a structure, which SGLangServer begins anew in each request"):
        parse("fit", [*words, engine, stop])
