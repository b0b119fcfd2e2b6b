"""Programs run by a stand-in for Sandbox Fusion, which is right, slow, wrong, rude or dead."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from test_code import DOUBLE, PAIRS, scores

from rlkit.base.errors import RecipeError
from rlkit.rewards import CodeReward
from rlkit.types import Score
from tests.judge_stand_in import Body, StandIn, serving
from tests.unit.clock import SkippingLoop

SLOW = "print(2 * int(input()))  # the first test takes too long"
Respond = Callable[[Body], "web.StreamResponse | Awaitable[web.StreamResponse] | None"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts, and their number."""
    monkeypatch.setattr("rlkit.base.retry.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("rlkit_code.runners.RETRIES", 1)


def result(stdout: str = "", code: int | None = 0, status: str = "Finished", seconds: float = 0.1) -> dict[str, Any]:
    """Return the result of a command, as Sandbox Fusion has it."""
    return {"status": status, "execution_time": seconds, "return_code": code, "stdout": stdout, "stderr": ""}


def answer(run: object, compiled: object = None, status: str = "Success") -> web.Response:
    return web.json_response({"status": status, "message": "", "compile_result": compiled, "run_result": run})


async def really_run(body: Body) -> web.Response:
    """Run a program in Python, as the service does."""
    if body["code"].strip() == SLOW and body["stdin"] == "1\n":
        return answer(result("", None, "TimeLimitExceeded"), status="Failed")
    command, pipe = (sys.executable, "-I", "-S", "-c", body["code"]), subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    output, _ = await process.communicate(body["stdin"].encode())
    return answer(result(output.decode(), process.returncode), status="Failed" if process.returncode else "Success")


def graded(
    respond: Respond, programs: list[str], tests: object = PAIRS, loop: SkippingLoop | None = None, **options: Any
) -> tuple[list[Score], StandIn]:
    """Return the scores of programs, and what the service received; its time for None as an answer is soon over."""
    loop = loop or SkippingLoop()

    async def silence() -> web.StreamResponse:
        loop.skip_from_thread(75.0)
        await asyncio.sleep(600)
        return answer(result("2"))

    def handle(body: Body) -> web.StreamResponse | Awaitable[web.StreamResponse]:
        response = respond(body)
        return silence() if response is None else response

    with serving(handle) as stand_in:  # type: ignore[arg-type]
        options = {"url": f"{stand_in.url}/run_code", "compile_seconds": 0.3, "partial": True, **options}
        return scores(programs, tests, loop=loop, **options), stand_in


def test_real_programs_by_the_service() -> None:
    programs = [DOUBLE, "print(2)", "print(", SLOW, "print(2 * int(input())); raise SystemExit(3)"]
    found, stand_in = graded(really_run, programs)
    assert [score.reward for score in found] == [1, 0.5, 0, 0.5, 0]
    assert found[1].components == {"accuracy": 0.0, "compile_error": 0.0, "tests_passed": 0.5}
    assert found[1].feedback == "The program fails test 2 of 2."
    assert len(stand_in.bodies) == 10
    [body] = [body for body in stand_in.bodies if (body["code"], body["stdin"]) == (f"{DOUBLE}\n", "21\n")]
    assert body == {"code": f"{DOUBLE}\n", "language": "python", "stdin": "21\n", "compile_timeout": 0.3,
                    "run_timeout": 60.0, "memory_limit_MB": 1024}  # fmt: skip


@pytest.mark.parametrize("compiled", [result(code=1), result(code=None, status="TimeLimitExceeded")])
def test_a_compile_error_ends_the_tests_at_once(compiled: object) -> None:
    [score], stand_in = graded(lambda _: answer(None, compiled, "Failed"), ["x"], language="c++")
    assert score.components == {"accuracy": 0.0, "compile_error": 1.0, "tests_passed": 0.0}
    assert score.feedback == "The program does not compile."
    assert [body["language"] for body in stand_in.bodies] == ["cpp"]


def test_the_first_failure_or_the_end_of_the_time_ends_the_tests() -> None:
    tests = {"inputs": ["1"] * 9, "outputs": ["2"] * 9}
    [score], stand_in = graded(lambda _: answer(result("3")), ["x"], tests, partial=False)
    assert (score.reward, len(stand_in.bodies)) == (0.0, 1)
    [score], stand_in = graded(lambda _: answer(result("2", seconds=0.4)), ["x"], tests, total_seconds=1.0)
    assert (score.reward, len(stand_in.bodies)) == (3 / 9, 3)  # 0.4 and 0.8 are within a second, 1.2 is not


def test_javascript_is_nodejs_there_and_others_are_as_they_are() -> None:
    for language, theirs, memory in (("js", "nodejs", -1), ("rust", "rust", 256), ("R", "R", 256)):
        [score], stand_in = graded(lambda _: answer(result("2\n")), ["x"], language=language, memory_mb=256)
        body = stand_in.bodies[0]
        assert (score.reward, body["language"], body["memory_limit_MB"]) == (0.5, theirs, memory)


def never(body: Body) -> None:
    """Do not answer."""


@pytest.mark.parametrize(
    ("respond", "message", "attempts"),
    [
        (never, "did not answer within 70.3 s (after 2 attempts)", 2),
        (lambda _: web.Response(status=503, text="full"), "answered 503: full (after 2 attempts)", 2),
        (lambda _: web.Response(status=422, text="no such language"), "answered 422: no such language", 1),
        (lambda _: web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}), "answered 302", 2),
        (lambda _: web.Response(text="<html>"), "JSONDecodeError", 2),
        (lambda _: web.json_response([1]), "answered [1], expected an object", 2),
        (lambda _: answer(result(status="Error"), status="SandboxError"), "'SandboxError'", 2),
        (lambda _: answer(None), "expected a status and results of a run", 2),
        (lambda _: answer(result() | {"stdout": 2}), "expected a status and results of a run", 2),
    ],
    ids=["slow", "full", "refuses", "elsewhere", "text", "list", "broken", "no run", "no output"],
)
def test_what_the_service_does_wrong_is_no_reward(respond: Respond, message: str, attempts: int) -> None:
    [score], stand_in = graded(respond, ["x"])
    assert score.reward is None
    assert message in str(score.error)
    assert str(score.error).startswith("CodeReward: Sandbox Fusion at 127.0.0.1:")
    assert [body["code"] for body in stand_in.bodies].count("x\n") == attempts


BREAKS: dict[str, Respond] = {
    "broken": lambda _: answer(result(status="Error"), status="SandboxError"),
    "crash": lambda _: web.Response(status=500),
    "silent": never,
    "cut": lambda _: web.Response(text='{"status": "Succ'),
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_a_program_that_breaks_its_sandbox_fails(breaks: Respond) -> None:
    """An error would leave its group out, which the policy would learn to prefer to a wrong answer."""

    def respond(body: Body) -> web.StreamResponse | Awaitable[web.StreamResponse] | None:
        return breaks(body) if body["code"] == "break\n" else answer(result("2"))

    scored, stand_in = graded(respond, ["break", "x"], language="rust", concurrency=1)
    assert [(score.reward, score.error) for score in scored] == [(0.0, None), (0.5, None)]
    assert scored[0].components == {"accuracy": 0.0, "compile_error": 0.0, "tests_passed": 0.0}
    bodies = [(body["code"], body["language"]) for body in stand_in.bodies if body["code"] != "x\n"]
    assert bodies == [("break\n", "rust")] * 2 + [("", "rust")]  # two attempts of the first test, no second test


def test_a_failure_in_passing_is_repeated() -> None:
    replies = iter([web.Response(status=500), answer(result("2")), answer(result("42"))])
    [score], _ = graded(lambda _: next(replies), ["x"])
    assert score.reward == 1


def test_a_program_that_floods_the_service_fails_its_test() -> None:
    [score], stand_in = graded(lambda _: answer(result("2" * 2**23)), ["x"])
    assert (score.reward, score.error, len(stand_in.bodies)) == (0.0, None, 2)  # one attempt of either test


def test_a_dead_service_is_an_error_without_the_login() -> None:
    [score] = scores(["x"], PAIRS, url="http://user:secret@127.0.0.1:9/run_code")
    assert "CodeReward: Sandbox Fusion at 127.0.0.1:9: failed with ClientConnectorError" in str(score.error)
    assert "secret" not in str(score.error)


def test_requests_are_bounded_and_their_wait_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an attempt, which has 30 s, and of a request, which has 60; 12 pairs of requests take 25 s each."""
    monkeypatch.setattr("rlkit_code.runners.LONGEST_PAUSE", 0.0)
    loop, pair = SkippingLoop(), asyncio.Barrier(2)

    async def late(_: Body) -> web.StreamResponse:
        if await pair.wait() == 0:
            loop.skip_from_thread(25.0)
        await asyncio.sleep(0.01)
        return answer(result("2"))

    found, stand_in = graded(late, ["x"] * 12, loop=loop, concurrency=2, seconds=20.0)
    assert [score.reward for score in found] == [0.5] * 12
    assert stand_in.most_in_flight == 2


def test_what_a_service_cannot_test_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected http://"):
        CodeReward(allow_code=True, url="localhost:8080")
    with pytest.raises(RecipeError, match="language 'cobol', expected R?"):
        CodeReward(allow_code=True, url="http://h/run_code", language="cobol")
    for tests in (PAIRS | {"fn_name": "f"}, ["assert f(1) == 2"]):
        [score] = scores(["x"], tests, url="http://127.0.0.1:9/run_code")
        assert "calls and assertions need the sandbox of this machine, without `url`" in str(score.error)
