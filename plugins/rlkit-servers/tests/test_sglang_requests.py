"""Which server a request goes to, what it contains, and how it ends with the context; SGLang is not needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from rlkit_servers.api import ServerOutput
from rlkit_servers.http import Client, Fault
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import Hung, InferenceServer
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.sglang.launch import Launch
from rlkit_servers.states import ServerState

from rlkit.base.errors import EngineError
from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.engines import SGLangServer
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.types import Completion, Prompt, Request, SampleKey, Sampling, StopReason
from tests.unit.simulation import VirtualLoop

T = TypeVar("T")


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class StubServer(InferenceServer):
    """A server that returns one token after a moment, and records its requests."""

    def __init__(self, number: int, retry: Any) -> None:
        super().__init__(SGLangApi(Client(f"http://127.0.0.1:{number}")), retry)
        self.state = ServerState.READY
        self.asked: list[Request] = []
        self.failures: list[Fault] = []
        self.revived = 0

    async def ask(self, request: Request) -> ServerOutput:
        self.asked.append(request)
        await asyncio.sleep(0.001)
        if self.failures:
            raise self.failures.pop()
        return ServerOutput([7], [-0.5], ["run-0"], stopped=True)

    async def healthy(self, deadline: float) -> bool:
        return False

    async def restart(self) -> None:
        self.revived += 1
        await asyncio.sleep(0.4)  # longer than the longest pause of the others, 0.3 s
        self.state = ServerState.COLD


class Pushed:
    """A stub of `Push` that always succeeds."""

    async def push(self, stream: Any, servers: Sequence[InferenceServer], *_: Any) -> dict[InferenceServer, Any]:
        for server in servers:
            server.state = ServerState.READY
        return {}


@pytest.fixture
def engine() -> SGLangServer:
    engine = SGLangServer(urls=["http://127.0.0.1:1"])
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100))
    policy = SimpleNamespace(config=config)
    tokenizer = SimpleNamespace(encode=lambda text, **_: [1, 2])
    runtime: Any = SimpleNamespace(context=62, stop_ids=frozenset({2}), policy=policy, tokenizer=tokenizer)
    engine.runtime = runtime
    engine.requests.bind(runtime)
    engine.weights.bind(runtime, Pushed(), "run")  # type: ignore[arg-type]
    engine.weights.version, engine.weights._stream = 0, object()  # type: ignore[assignment]
    servers: list[InferenceServer] = [StubServer(number, engine.retry) for number in range(1, 5)]
    engine.fleet.owned = servers
    engine.fleet.use(servers, engine.endpoints(servers))
    return engine


def request(session: str, tokens: tuple[int, ...] = (5, 6), **sampling: Any) -> Request:
    return Request(tokens, Sampling(**sampling), SampleKey(0, 1, session, 0), session)


def ask(engine: SGLangServer, sessions: Sequence[str]) -> list[int]:
    """Request a turn of each conversation at once; return the number of requests to each server once all are back."""
    before = [len(server.asked) for server in stubs(engine)]

    async def together() -> list[Completion]:
        answers = await asyncio.gather(*(engine.generate(request(session)) for session in sessions))
        await asyncio.gather(*engine.recovery._tasks)
        return list(answers)

    assert [answer.tokens for answer in run_virtually(together())] == [[7]] * len(sessions)
    assert [server.assigned for server in engine.fleet.servers] == [0] * len(engine.fleet.servers)
    return [len(server.asked) - count for server, count in zip(stubs(engine), before, strict=True)]


def stubs(engine: SGLangServer) -> list[StubServer]:
    return [server for server in engine.fleet.servers if isinstance(server, StubServer)]


SESSIONS = [f"conversation {i}" for i in range(64)]


def test_conversations_are_balanced_and_stay_on_their_server(engine: SGLangServer) -> None:
    assert ask(engine, SESSIONS) == [16, 16, 16, 16]
    assignments = dict(engine.fleet.balancer._assignments)
    assert ask(engine, SESSIONS) == [16, 16, 16, 16]
    assert engine.fleet.balancer._assignments == assignments
    assert ask(engine, SESSIONS[:1] * 5) == [5, 0, 0, 0]


@pytest.mark.parametrize(
    "lose",
    [
        lambda server: setattr(server, "state", ServerState.BROKEN),
        lambda server: setattr(server, "state", ServerState.COLD),
        lambda server: setattr(server, "process", SimpleNamespace(alive=False)),
    ],
)
def test_a_server_that_is_lost_gets_no_new_conversations(
    engine: SGLangServer, lose: Callable[[InferenceServer], None]
) -> None:
    lose(engine.fleet.servers[1])
    assert ask(engine, SESSIONS[:63]) == [21, 0, 21, 21]


def test_a_failed_request_brings_its_server_back(engine: SGLangServer) -> None:
    dying = stubs(engine)[0]
    dying.failures = [Fault("refused")] * 16
    asked = ask(engine, SESSIONS)
    assert sum(asked) == 64 + 16
    assert asked[0] == 16  # the others take them while it is brought back
    assert dying.revived == 1
    assert dying.state is ServerState.READY
    assert engine.fleet.restarts == 1


def test_tokens_before_a_sync_keep_their_version(engine: SGLangServer) -> None:
    async def run() -> Completion:
        asked = asyncio.create_task(engine.generate(request("a")))
        while not any(server.assigned for server in engine.fleet.servers):
            await asyncio.sleep(0)
        engine.weights.version = 1
        return await asked

    assert asyncio.run(run()) == Completion([7], [-0.5], [0], StopReason.STOP)
    assert engine.requests.health()["stale"] == 0


def test_requests_that_wait_for_a_server_are_interrupted_at_once(engine: SGLangServer) -> None:
    """The servers' restoration, which takes longer, continues."""
    for server in engine.fleet.servers:
        server.state = ServerState.BROKEN

    async def run() -> list[Completion]:
        asked = [asyncio.create_task(engine.generate(request(session))) for session in SESSIONS]
        await asyncio.sleep(0.05)
        engine.requests.interrupt()
        answers = list(await asyncio.wait_for(asyncio.gather(*asked), 0.2))
        assert {server.state for server in engine.fleet.servers} == {ServerState.BROKEN}
        await asyncio.sleep(0.6)
        return answers

    assert run_virtually(run()) == [Completion([], [], [], StopReason.INTERRUPTED)] * 64
    assert [(server.state, server.revived) for server in stubs(engine)] == [(ServerState.READY, 1)] * 4


def test_a_slow_server_is_left_alone_as_long_as_it_is_healthy() -> None:
    """A completion may take longer than `hang_seconds`, an answer to a health check may not."""
    api: Any = SimpleNamespace(client=SimpleNamespace(url="http://slow"))
    server = InferenceServer(api, ServerRetryPolicy(hang_seconds=0.5))

    async def answer(_: Request) -> ServerOutput:
        await asyncio.sleep(50.0)
        return ServerOutput([7], [-0.5], ["run-0"], stopped=True)

    async def healthy(deadline: float) -> None: ...

    async def hangs(deadline: float) -> None:
        await asyncio.sleep(deadline)
        raise Fault("no answer")

    api.generate, api.health = answer, healthy
    assert run_virtually(server.ask(request("a"))).tokens == [7]
    api.health = hangs
    with pytest.raises(Hung, match=r"http://slow did not answer a health check within 0\.5 s"):
        run_virtually(server.ask(request("a")))


def meta(reason: str, count: int, **more: Any) -> dict[str, Any]:
    """Return the `meta_info` of a response with `count` log-probs."""
    logps = {"output_token_logprobs": [[-0.5, 7]] * count} if count else {}
    return {"finish_reason": {"type": reason, **more}, "weight_version": "run-0", **logps}


@pytest.mark.parametrize(
    ("tokens", "about", "answer"),
    [
        ([7, 8], meta("abort", 2, status_code=None), ServerOutput([7, 8], [-0.5] * 2, ["run-0"] * 2, aborted=True)),
        ([7, 2], meta("abort", 2), ServerOutput([7, 2], [-0.5] * 2, ["run-0"] * 2, stopped=True)),
        ([7, 8, 9], meta("abort", 3), ServerOutput([7, 8, 9], [-0.5] * 3, ["run-0"] * 3)),
        ([], meta("abort", 0, message="Abort in waiting queue"), ServerOutput([], [], [], aborted=True)),
    ],
    ids=["cut", "stopped", "full", "waiting"],
)  # fmt: skip
def test_an_aborted_answer_has_what_there_is(tokens: list[int], about: dict[str, Any], answer: ServerOutput) -> None:
    """One whose last token ends it anyway is complete."""

    class Server:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            return {"output_ids": tokens, "meta_info": about}

    asked = request("a", max_tokens=3, stop_ids=(2,))
    assert asyncio.run(SGLangApi(Server()).generate(asked)) == answer  # type: ignore[arg-type]


def test_an_answer_that_was_aborted_for_an_error_is_a_fault() -> None:
    class Server:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            return {"output_ids": [7], "meta_info": meta("abort", 1, message="no room", status_code=503)}

    with pytest.raises(Fault, match="the request ended with .*no room"):
        asyncio.run(SGLangApi(Server()).generate(request("a")))  # type: ignore[arg-type]


def test_an_abort_names_the_requests_that_are_under_way() -> None:
    """Other ranks may have requests on the same server."""

    class Server:
        def __init__(self) -> None:
            self.aborted: dict[str, asyncio.Event] = {}

        async def post(self, path: str, body: Any, deadline: float) -> Any:
            if path == "/abort_request":
                self.aborted[body["rid"]].set()
                return ""
            await self.aborted.setdefault(body["rid"], asyncio.Event()).wait()
            return {"output_ids": [], "meta_info": meta("abort", 0)}

    async def run() -> list[ServerOutput]:
        api = SGLangApi(Server())  # type: ignore[arg-type]
        asked = [asyncio.create_task(api.generate(request(str(i)))) for i in range(3)]
        await asyncio.sleep(0)
        await api.abort(1.0)
        answers = list(await asyncio.gather(*asked))
        await api.abort(1.0)  # nothing is left
        return answers

    assert asyncio.run(run()) == [ServerOutput([], [], [], aborted=True)] * 3


@pytest.mark.parametrize("resumable", [False, True])
def test_an_aborted_request_starts_over_unless_resumed(
    engine: SGLangServer, resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang does so when it loads adapters alone."""
    answers = [ServerOutput([7], [-0.5], ["run-0"], stopped=True), ServerOutput([5], [-0.1], ["run-0"], aborted=True)]

    async def ask_node(self: StubServer, request: Request) -> ServerOutput:
        return answers.pop()

    monkeypatch.setattr(StubServer, "ask", ask_node)
    completion = asyncio.run(engine.generate(replace(request("a"), resumable=resumable)))
    complete = Completion([7], [-0.5], [0], StopReason.STOP)
    assert completion == (Completion([5], [-0.1], [0], StopReason.INTERRUPTED) if resumable else complete)


def test_the_context_that_sglang_leaves_is_the_runs(engine: SGLangServer) -> None:
    """SGLang fills 4,094 of 4,096 tokens; longer prompts are refused or skipped before a run, and do not fail in it."""
    words = ["--recipe=quickstart", "--validation.limit=2"]
    torch = load_data(parse("fit", words).recipe)
    assert (
        load_data(parse("fit", [*words, "--rollout.engine=SGLangServer"]).recipe).dialogue.context
        == torch.dialogue.context - 2
    )
    full = asyncio.run(engine.generate(request("full", tuple(range(3, 65)))))
    assert (full.tokens, full.stop) == ([], StopReason.CONTEXT)
    asyncio.run(engine.generate(request("nearly", tuple(range(3, 64)), max_tokens=9)))
    assert stubs(engine)[0].asked[-1].sampling.max_tokens == 1


def test_a_sample_brings_its_own_seed() -> None:
    """The same in every run and on every server, different for every sample, and within SGLang's signed 64 bits."""
    keys = [SampleKey(0, 1, "p", 0), SampleKey(0, 1, "p", 0), SampleKey(0, 1, "p", 1), SampleKey(0, 2, "p", 0)]
    asked: list[int] = []

    class Server:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            asked.append(body["sampling_params"]["sampling_seed"])
            meta = {
                "finish_reason": {"type": "stop"},
                "weight_version": "run-0",
                "output_token_logprobs": [[-0.5, 7, None]],
            }
            return {"output_ids": [7], "meta_info": meta}

    api = SGLangApi(Server())  # type: ignore[arg-type]
    for key in keys:
        assert asyncio.run(api.generate(Request((5,), Sampling(), key, "s"))) == ServerOutput(
            [7], [-0.5], ["run-0"], True
        )
    assert asked[0] == asked[1] == keys[0].hash()
    assert len(set(asked)) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in asked)


def test_all_options_of_sampling_are_in_the_request() -> None:
    class Server:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            self.asked = body["sampling_params"]
            meta = {"finish_reason": {"type": "stop"}, "weight_version": "run-0", "output_token_logprobs": [[-0.5, 7]]}
            top = [[-0.5, 7, None], [-1.5, 3, None], [-3.0, 9, None]]  # 0.61, 0.22 and 0.05
            return {"output_ids": [7], "meta_info": meta | {"output_top_logprobs": [top]}}

    server, key = Server(), SampleKey(0, 1, "p", 0)
    sampling = Sampling(temperature=0.7, max_tokens=9, top_p=0.9, top_k=3, min_p=0.1, stop_ids=(2, 5))
    output = asyncio.run(SGLangApi(server).generate(Request((5,), sampling, key, "s")))  # type: ignore[arg-type]
    assert list(output.candidates[0]) == [7, 3]  # the third is below 0.1 of the first
    assert output.logps == pytest.approx([-0.5 - math.log(math.exp(-0.5) + math.exp(-1.5))])
    assert server.asked == {
        "temperature": 0.7,
        "max_new_tokens": 9,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "stop_token_ids": [2, 5],
        "sampling_seed": key.hash(),
    }


def test_min_p_is_refused_where_it_would_end_the_server(engine: SGLangServer) -> None:
    engine.launch = Launch(args=["--enable-deterministic-inference"])
    assert asyncio.run(engine.generate(request("a"))).tokens == [7]
    with pytest.raises(EngineError, match="has min_p=0.1, with which SGLang's sampler fails under --enable-determ"):
        asyncio.run(engine.generate(request("a", min_p=0.1)))


@pytest.mark.parametrize("fails", [False, True])
def test_memory_that_ranks_share_is_released_before_any_goes_on(
    fails: bool, engine: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks gather after the release; if one has failed, none waits."""
    events: list[str] = []
    monkeypatch.setattr(SGLangApi, "release", lambda api, deadline: events.append("release"))
    monkeypatch.setattr(engine.runtime, "gather_world", lambda value: events.append("gather"), raising=False)
    engine.release_memory = True
    engine.fleet.owned = engine.fleet.servers[:1]
    with suppress(RuntimeError), engine.on_device():
        if fails:
            raise RuntimeError("a rollout failed")
        events.append("sampled")
    assert events == (["release"] if fails else ["sampled", "release", "gather"])


def test_a_full_engine_ends_a_conversation_by_its_context() -> None:
    conversation = Conversation(Prompt("p", []), 0, Limits(turns=8))
    conversation.begin([1, 2])
    empty = Completion([], [], [], StopReason.CONTEXT)
    conversation.sampled(Completion([3], [-0.5], [0], StopReason.STOP))
    conversation.interact()
    conversation.observed("user", [4])
    conversation.sampled(empty)
    assert (conversation.stop, conversation.error, conversation.mask) == (
        StopReason.CONTEXT,
        None,
        [False, False, True, False],
    )
    unanswered = Conversation(Prompt("p", []), 0, Limits(turns=8))
    unanswered.begin([1, 2])
    unanswered.sampled(empty)
    assert unanswered.error == "the engine returned no tokens"
