"""Contracts of the parts of conversations: tools, interactions, environments and engines.

A check takes the class, or a function that returns an unbound part: `check_tool(lambda: MyTool(limit=3))`.
It runs one conversation alone and two concurrently, and compares the replies: no state may leak between them.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlkit.base.errors import EngineError, RecipeError, explain
from rlkit.interfaces import outputs
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.runtime import BoundPart, RunPart, Runtime
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.models.weights import PolicyWeights
from rlkit.types import Completion, JsonObject, Message, Prompt, Request, SampleKey, Sampling
from rlkit_authors.fields import check_filled
from rlkit_authors.runtime import ExampleRuntime

PROMPT = Prompt("example", [{"role": "user", "content": "2 + 2 = ?"}], "4")
ACTIONS = ("1", "yes", "", "\x00{[(<", "four", "4")
"""The policy's turns in a conversation; an environment must accept any text."""

P = TypeVar("P", bound=BoundPart)
Replies = list[Any]
PlayTurn = Callable[[P, State, Replies, int], Awaitable[None]]
"""Runs a turn of the conversation with this number, and appends the part's reply."""
Free = Callable[[P, State], Awaitable[None]]


def check_tool(make: Callable[[], Tool], arguments: Mapping[str, object] | None = None) -> Replies:
    """Check a tool's description and replies, the isolation of conversations, and the release of state.

    Args:
        make: The class, or a function that makes a tool.
        arguments: The arguments of each call; examples from the schema by default.
    """

    async def play_turn(tool: Tool, state: State, replies: Replies, _number: int) -> None:
        call_arguments = dict(example_arguments(tool.parameters) if arguments is None else arguments)
        if not replies:
            await tool.create(state)
        answer = await tool.call(call_arguments, state)
        reply = ToolReply(answer) if isinstance(answer, str) else answer
        if not isinstance(reply, ToolReply) or not isinstance(reply.text, str) or not _finite(reply.reward):
            raise AssertionError(
                f"{_name(tool)}.call returned {answer!r}, expected a text or a ToolReply of finite reward"
            )
        check_filled(tool, "call", reply.fields, metrics=reply.metrics)
        reward = await tool.reward(state)
        if not _finite(reward):
            raise AssertionError(f"{_name(tool)}.reward returned {reward!r}, expected a finite number")
        replies.append(answer)

    def start() -> Tool:
        tool = _bound(make)
        for field in ("name", "description"):
            value = getattr(tool, field, None)
            if not isinstance(value, str) or not value:
                raise AssertionError(f"{_name(tool)}.{field} is {value!r}, expected a text for the policy")
        check_schema(getattr(tool, "parameters", None), f"{_name(tool)}.parameters")
        return tool

    async def release(tool: Tool, state: State) -> None:
        await tool.release(state)

    check_close(make())  # as after a failure elsewhere, before `bind`
    return asyncio.run(_compare(start, play_turn, release))


def check_interaction(make: Callable[[], Interaction], prompt: Prompt = PROMPT) -> Replies:
    """Check a user's replies, the isolation of conversations, and the release of state; return the replies."""

    async def play_turn(user: Interaction, state: State, replies: Replies, _number: int) -> None:
        if replies and replies[-1].done:
            return
        if not replies:
            await user.start(prompt, state)
        messages: list[Message] = [*prompt.messages, {"role": "assistant", "content": "4"}]
        for reply in replies:
            messages += [*reply.messages, {"role": "assistant", "content": ""}]
        before = copy.deepcopy(messages)
        reply = await user.reply(messages, state)
        if messages != before:
            raise AssertionError(f"{_name(user)}.reply modified the messages of its argument; return new ones")
        if not isinstance(reply, Reply) or not isinstance(reply.done, bool) or not _finite(reply.reward):
            raise AssertionError(f"{_name(user)}.reply returned {reply!r}, expected a Reply with a finite reward")
        if any("role" not in m or "content" not in m for m in reply.messages) or not (reply.messages or reply.done):
            raise AssertionError(
                f"{_name(user)}.reply returned {reply!r}, expected messages with role and content, or done"
            )
        check_filled(user, "reply", reply.fields, metrics=reply.metrics)
        replies.append(reply)

    async def finish(user: Interaction, state: State) -> None:
        await user.finish(state)

    return asyncio.run(_compare(lambda: _bound(make), play_turn, finish))


def check_environment(make: Callable[[], Environment], prompt: Prompt = PROMPT) -> Replies:
    """Check that an episode accepts any action, that equal seeds reproduce it in isolation, and the release of state.

    Args:
        make: The class, or a function that makes an environment.
        prompt: The prompt of the episodes.
    """

    async def play_turn(game: Environment, state: State, replies: Replies, number: int) -> None:
        if not replies:
            text = await game.reset(prompt, number, state)
            replies.append(text)
            if not isinstance(text, str):
                raise AssertionError(f"{_name(game)}.reset returned {text!r}, expected the first observation's text")
        elif replies[-1].done:
            return
        action = ACTIONS[len(replies) - 1]
        try:
            observation = await game.step(action, state)
        except Exception as error:  # the policy may write anything
            raise AssertionError(f"{_name(game)}.step raised {explain(error)} on the action {action!r}") from error
        typed = isinstance(observation, Observation) and isinstance(observation.text, str)
        if not typed or not isinstance(observation.done, bool) or not _finite(observation.reward):
            raise AssertionError(
                f"{_name(game)}.step returned {observation!r}, expected an Observation with a finite reward"
            )
        check_filled(game, "step", observation.fields, metrics=observation.metrics)
        replies.append(observation)

    async def finish(game: Environment, state: State) -> None:
        await game.finish(state)

    return asyncio.run(_compare(lambda: _bound(make), play_turn, finish, repeats=True))


def check_engine(make: Callable[[], RolloutEngine], runtime: Runtime | None = None) -> list[Completion]:
    """Check an engine's completions, their versions after a sync, and that closing never fails.

    Args:
        make: The class, or a function that makes an engine.
        runtime: The runtime to bind it to; rlkit's tiny model on the CPU by default.
    """
    runtime = ExampleRuntime() if runtime is None else runtime
    check_close(make())  # as after a failure elsewhere, before `bind`
    engine = make()
    try:
        engine.bind(runtime)
    except EngineError as error:
        raise RecipeError(f"{_name(engine)} cannot serve here: {error}") from error
    tokens = tuple(runtime.tokenizer.encode("2 + 2 = ?", add_special_tokens=False))
    keys = [SampleKey(0, 1, "example", sample) for sample in range(3)]
    requests = [Request(tokens, Sampling(max_tokens=4 if k.sample else 1), k, f"s{k.sample}") for k in keys]

    async def generate_all() -> list[Completion]:
        await engine.sync(PolicyWeights(runtime.policy), 3)
        with engine.on_device():
            return list(await asyncio.gather(*map(engine.generate, requests)))

    completions = asyncio.run(generate_all())
    for request, completion in zip(requests, completions, strict=True):
        problem = outputs.of_engine(completion, request, 3, runtime.stop_ids)
        if problem:
            raise AssertionError(f"{_name(engine)}.generate {problem}")
        count = len(completion.tokens)
        check_filled(engine, "generate", completion.fields, tokens=range(count, len(request.tokens) + count + 1))
    if not all(_finite(gauge) for gauge in engine.health().values()):
        raise AssertionError(f"{_name(engine)}.health returned {engine.health()!r}, expected finite numbers by name")
    check_close(engine)
    return completions


def check_schema(schema: object, where: str) -> None:
    """Check that a value is a JSON schema of an object."""
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{where} is not JSON: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise AssertionError(f"{where} is {schema!r}, expected a JSON schema of type object")
    _check_schema(schema, where)


KINDS: dict[str, object] = {
    "object": {}, "array": [], "string": "1", "integer": 1, "number": 1.0, "boolean": True, "null": None,
}  # fmt: skip
"""The types of a JSON schema, each with an example value."""


def _check_schema(schema: object, where: str) -> None:
    if not isinstance(schema, dict):
        raise AssertionError(f"{where} is {schema!r}, expected a schema")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in KINDS:
            raise AssertionError(f"{where} has the type {kind!r}, expected one of {', '.join(KINDS)}")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise AssertionError(f"{where}.properties is {properties!r}, expected schemas by name")
    for name, property_schema in properties.items():
        _check_schema(property_schema, f"{where}.{name}")
    required = schema.get("required", [])
    unknown = [name for name in required if name not in properties] if isinstance(required, list) else required
    if unknown != []:
        raise AssertionError(f"{where}.required has {unknown!r}, expected names of its properties")
    if "items" in schema:
        _check_schema(schema["items"], f"{where}.items")


def example_arguments(schema: JsonObject) -> dict[str, object]:
    """Return arguments that satisfy an object's schema, as far as types, enums and examples determine them."""
    return {name: _example(property_schema) for name, property_schema in schema.get("properties", {}).items()}


def _example(schema: JsonObject) -> object:
    fixed = [schema[key] for key in ("const", "default") if key in schema]
    choices = fixed or schema.get("examples") or schema.get("enum")
    if choices:
        return choices[0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    return example_arguments(schema) if kind == "object" else KINDS[kind]


async def _compare(make: Callable[[], P], play_turn: PlayTurn[P], free: Free[P], repeats: bool = False) -> Replies:
    """Run two conversations, each alone and then both with one new part; the replies must be equal.

    If the first differs between two runs, the part is random and nothing is compared, unless `repeats` requires
    reproducible replies.
    """
    first, repeated, second = [(await _play(make(), play_turn, free, [number]))[0] for number in (0, 0, 1)]
    part = make()
    together = await _play(part, play_turn, free, [0, 1])
    if repeats and repeated != first:
        raise AssertionError(
            f"{_name(part)} returned {repeated!r} after {first!r}, expected the same for the same seed"
        )
    for replies, alone in zip(together, (first, second), strict=True):
        if repeated == first and replies != alone:
            raise AssertionError(
                f"{_name(part)} returned {replies!r} beside another conversation and {alone!r} alone; "
                "store what belongs to a conversation in its state"
            )
    return first


async def _play(part: P, play_turn: PlayTurn[P], free: Free[P], numbers: Sequence[int]) -> list[Replies]:
    """Run conversations interleaved, free each twice, and one that never started; return the replies of each."""
    states: list[State] = [{} for _ in numbers]
    replies: list[Replies] = [[] for _ in numbers]
    for _ in ACTIONS:
        for state, conversation_replies, number in zip(states, replies, numbers, strict=True):
            await play_turn(part, state, conversation_replies, number)
    for state, when in (*((s, w) for s in states for w in ("", " a second time")), ({}, " on an empty state")):
        try:
            await free(part, state)
        except Exception as error:  # freeing must not fail, whatever the state holds
            raise AssertionError(
                f"{_name(part)}.{free.__name__}(state){when} raised {explain(error)}; "
                "it is called however a conversation ended"
            ) from error
    check_close(part)
    return replies


def _bound(make: Callable[[], P]) -> P:
    part = make()
    part.bind(ExampleRuntime())
    return part


def check_close(part: RunPart) -> None:
    """Check that a part can be closed, even if nothing is open any more."""
    for when in ("", " a second time"):
        try:
            part.close()
        except Exception as error:  # closing must not fail, whatever is open
            raise AssertionError(
                f"{_name(part)}.close(){when} raised {explain(error)}; it is also called after a failure"
            ) from error


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _name(part: object) -> str:
    return type(part).__name__
