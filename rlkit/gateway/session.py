"""A session: one agent's requests to the policy, their limits, and the forest of turns that they grow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, Protocol

from rlkit.base.errors import EngineError, RecipeError, RolloutError, explain
from rlkit.base.tasks import cancel
from rlkit.base.text import tokens_until
from rlkit.gateway.forest import Forest, Node
from rlkit.gateway.request import Answer, Call, ChatRequest, Finish, RequestError
from rlkit.interfaces.parser import ParsedTurn
from rlkit.media import Media, Rendered
from rlkit.types import Completion, JsonObject, Message, StopReason


class PolicyBackend(Protocol):
    """What a session needs of the policy: rendering, sampling and reading."""

    context: int
    """Tokens of the longest conversation."""

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        """Return messages as the policy reads them, ready for its turn; `after` is the turn before, None at the start.

        Raises:
            RecipeError: The chat template cannot render them there, or the policy reads no pictures.
        """

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, label: str, media: Media | None = None
    ) -> Completion:
        """Continue tokens, with the pictures of their placeholders; random numbers derive from the label.

        Raises:
            RolloutError: This request failed.
            EngineError: The engine failed.
        """

    def text(self, tokens: Sequence[int]) -> str:
        """Return a turn as text, with special tokens and without the one that ended it."""

    def read(self, text: str, tools: Sequence[JsonObject], prompt: Sequence[int]) -> ParsedTurn:
        """Return the text of a turn without special tokens, and its calls of tools, if there are any.

        Args:
            text: The turn, as `text` returns it.
            tools: Those that the policy may call.
            prompt: The tokens with which its prompt ends.
        """


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use.

    Args:
        turns: Turns of the policy.
        tokens: Tokens that the policy samples in all of them; None for any number.
        tool_calls: Calls of tools that the policy makes; None for any number.
        concurrent: Requests at once.
    """

    turns: int = 64
    tokens: int | None = None
    tool_calls: int | None = None
    concurrent: int = 16


class Prepared(NamedTuple):
    """A request that has its prompt.

    Args:
        request: The request.
        parent: The turn that it continues.
        messages: Its messages after that turn.
        context: Their ids and pictures.
        budget: Most tokens to sample.
        before: Digest of its conversation.
        fingerprint: Digest of the request.
    """

    request: ChatRequest
    parent: Node | None
    messages: list[Message]
    context: Rendered
    budget: int | None
    before: str
    fingerprint: str


@dataclass
class Flight:
    """A request that is being sampled, and for how many connections."""

    answer: asyncio.Future[Answer]
    waiting: int = 0


@dataclass
class AgentSession:
    """One agent's conversation, or conversations, with the policy. It lives on one event loop.

    Args:
        id: A secret: who has it may use the session.
        backend: The policy.
        limits: What the session may use.
        counts: Events for the metrics.
        fatal: Raised by the engine, which ends the run.
    """

    id: str
    backend: PolicyBackend
    limits: SessionLimits = field(default_factory=SessionLimits)
    forest: Forest = field(default_factory=Forest)
    counts: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    fatal: EngineError | None = None

    def __post_init__(self) -> None:
        self._tag = sha256(self.id.encode()).hexdigest()[:8]  # ids of answers show nothing of the secret
        self._flights: dict[str, Flight] = {}
        self._records: dict[str, Answer] = {}
        self._conversations: dict[str, ChatRequest] = {}
        self._commits: Counter[str] = Counter()
        self._errors: dict[str, str] = {}
        self._calls = 0
        self._clock = copy_context()  # the deadline of the agent stands still while the engine samples
        self.failed = asyncio.Event()

    @property
    def error(self) -> str | None:
        """Why the policy did not answer a request, unless it did after a retry."""
        return next(iter(self._errors.values()), None)

    def conversation(self, answer: str) -> ChatRequest:
        """Return the conversation up to a turn of the policy, and its tools.

        Raises:
            RequestError: The session has no such turn.
        """
        if answer not in self._conversations:
            raise RequestError(f"this session has no response {answer!r}", status=404, kind="not_found_error")
        request = self._conversations[answer]
        return replace(request, messages=list(request.messages))

    @contextmanager
    def ask(self, request: ChatRequest, retry: bool = False) -> Iterator[asyncio.Future[Answer]]:
        """Start to sample a turn; leaving the context before it is sampled means that nobody waits for it.

        The same request in flight is joined, and a retry of an answered one gets the same answer.

        Args:
            request: What the policy reads.
            retry: Whether the agent says that it has sent the request before.

        Raises:
            RequestError: The request is refused.
        """
        self._require_open()
        fingerprint = request.fingerprint()
        flight = self._flights.get(fingerprint)
        if flight is not None:
            self.counts["requests_joined"] += 1
        elif retry and fingerprint in self._records:
            self.counts["requests_repeated"] += 1
            flight = Flight(asyncio.get_running_loop().create_future())
            flight.answer.set_result(self._records[fingerprint])
        else:
            flight = self._start(self.prepare(request, fingerprint))
        flight.waiting += 1
        try:
            yield flight.answer
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.answer.done():
                self.counts["requests_dropped"] += 1
                flight.answer.cancel()
                self._flights.pop(fingerprint, None)

    async def answer(self, request: ChatRequest, retry: bool = False) -> Answer:
        """Return the policy's turn.

        Raises:
            RequestError: The request is refused, or the session has ended.
        """
        with self.ask(request, retry) as sampling:
            return await self.wait(sampling)

    async def wait(self, sampling: asyncio.Future[Answer]) -> Answer:
        """Return the turn that `ask` has started to sample.

        Raises:
            RequestError: The session has ended, or the engine has failed.
        """
        try:
            return await asyncio.shield(sampling)
        except asyncio.CancelledError:
            if not sampling.cancelled():
                raise
            raise RequestError("the session has ended", status=410, kind="not_found_error") from None

    def prepare(self, request: ChatRequest, fingerprint: str) -> Prepared:
        """Return a request with its prompt.

        Raises:
            RequestError: It exceeds a limit, or the chat template refuses its messages.
        """
        self._require_budget()
        if request.messages[-1]["role"] == "assistant":
            raise RequestError("the last message is the assistant's, expected one that the policy answers")
        history = request.history()
        parent, length = self.forest.attach(history)
        try:
            context = render(self.backend, request, length, parent)
        except RequestError:
            if parent is None:
                raise
            parent, length = None, 0
            context = render(self.backend, request, length, parent)
            self.counts["turns_rerendered"] += 1
        used = len(self.forest.ids(parent)) + len(context.tokens)
        if used >= self.backend.context:
            raise RequestError(
                f"the conversation has {used} tokens, but the policy reads {self.backend.context - 1}",
                code="context_length_exceeded",
            )
        self.counts["tokens_retokenized"] += self.forest.rendered_again(history[length + 1 :])
        remaining = None if self.limits.tokens is None else self.limits.tokens - self._sampled
        asked = [limit for limit in (request.max_tokens, remaining) if limit is not None]
        return Prepared(
            request, parent, request.messages[length:], context, min(asked, default=None), history[-1], fingerprint
        )

    async def close(self) -> None:
        """Refuse all further requests, and end those in flight; nothing of them is committed."""
        self.closed = True
        flights, self._flights = self._flights, {}
        await cancel(*(flight.answer for flight in flights.values()))

    @property
    def _sampled(self) -> int:
        return sum(len(node.completion.tokens) for node in self.forest.nodes)

    def fail(self, error: Exception) -> RequestError:
        """Let the rollout fail because of an unexpected error; return what the agent reads."""
        problem = f"the gateway failed: {explain(error)}"
        self._errors["gateway"] = problem
        return RequestError(problem, status=500, kind="api_error")

    def _require_open(self) -> None:
        if self.closed:
            raise RequestError("the session has ended", status=410, kind="not_found_error")

    def _require_budget(self) -> None:
        limits, in_flight = self.limits, len(self._flights)
        if in_flight >= limits.concurrent:
            self.counts["requests_refused"] += 1
            problem = f"the session has {in_flight} requests in flight, expected at most {limits.concurrent}"
            raise RequestError(problem, status=429, kind="rate_limit_error")
        used = {
            "turns": (len(self.forest.nodes) + in_flight, limits.turns),
            "tokens": (self._sampled, limits.tokens),
            "tool_calls": (self._calls, limits.tool_calls),
        }
        for name, (count, limit) in used.items():
            if limit is not None and count >= limit:
                self.counts["requests_refused"] += 1
                raise RequestError(f"the session has used its {limit} {name} (conversation.{name})", code="limit")

    def _start(self, prepared: Prepared) -> Flight:
        task = asyncio.get_running_loop().create_task(self._sample(prepared), context=self._clock.copy())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to read it
        flight = self._flights[prepared.fingerprint] = Flight(task)
        self._records.pop(prepared.fingerprint, None)  # a retry of this request must not get an earlier answer
        return flight

    async def _sample(self, prepared: Prepared) -> Answer:
        before = self.forest.ids(prepared.parent)
        tokens = [*before, *prepared.context.tokens]
        segments = self.forest.media(prepared.parent)
        if prepared.context.media is not None:
            segments.append(prepared.context.media.after(len(before)))
        label = f"{prepared.fingerprint}/{self._commits[prepared.fingerprint]}"
        try:
            completion = await self.backend.sample(tokens, prepared.budget, label, Media.of(segments))
            answer = self._commit(prepared, completion, len(tokens))
        except EngineError as error:
            self.fatal = error
            self.failed.set()
            raise RequestError("the engine has failed", status=500, kind="api_error") from error
        except (RolloutError, TimeoutError) as error:
            self._errors[prepared.fingerprint] = str(error) or "the engine's deadline has passed"
            raise RequestError(f"the policy did not answer: {error}", status=503, kind="api_error") from error
        except Exception as error:  # of a parser, or a defect of rlkit: it costs the rollout, not the run
            raise self.fail(error) from error
        finally:
            flight = self._flights.get(prepared.fingerprint)
            if flight is not None and flight.answer is asyncio.current_task():  # a dropped one may end after the next
                del self._flights[prepared.fingerprint]
        self._errors.pop(prepared.fingerprint, None)
        return answer

    def _commit(self, prepared: Prepared, completion: Completion, prompt_tokens: int) -> Answer:
        """Add a sampled turn to the forest; return it as the agent reads it."""
        request = prepared.request
        completion, text, stop_text = _until_stop(self.backend, completion, request.stop)
        turn = self.backend.read(text, request.tools if request.calls else (), prepared.context.tokens)
        calls = tuple(
            Call(f"call{self._calls + i:05d}", call.name, call.arguments)
            for i, call in enumerate(call for call in turn.calls if call.error is None)
        )
        self._calls += len(calls)
        self.counts["tool_calls"] += len(calls)
        self.counts["calls_malformed"] += len(turn.calls) - len(calls)
        if turn.calls and not calls:  # the agent reads what is malformed
            turn = ParsedTurn(self.backend.read(text, (), ()).text)
        finish: Finish = "tool_calls" if calls else "stop_sequence" if stop_text else "stop"
        if completion.stop is not StopReason.STOP:
            finish = "length"
        answer = Answer(
            f"turn-{len(self.forest.nodes)}-{self._tag}",
            turn.text,
            calls,
            finish,
            stop_text,
            prompt_tokens,
            len(completion.tokens),
            int(time.time()),
        )
        messages = [*prepared.messages, answer.message()]
        self.forest.commit(
            prepared.parent, messages, prepared.context, completion, prepared.before, speaker=request.speaker
        )
        self._commits[prepared.fingerprint] += 1
        self._records[prepared.fingerprint] = answer
        self._conversations[answer.id] = replace(request, messages=[*request.messages, answer.message()])
        return answer


def render(backend: PolicyBackend, request: ChatRequest, start: int = 0, after: Node | None = None) -> Rendered:
    """Return a request's messages from `start` on as the policy reads them, which follow a turn if there is one.

    Raises:
        RequestError: The chat template refuses them there.
    """
    completion = None if after is None else after.completion
    try:
        return backend.render(request.messages[start:], request.tools, completion)
    except RecipeError as error:
        raise RequestError(str(error)) from error


def _until_stop(
    backend: PolicyBackend, completion: Completion, stops: Sequence[str]
) -> tuple[Completion, str, str | None]:
    """Return a completion up to the token that completes the first of the texts, its text before that, and it."""
    text = backend.text(completion.tokens)
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return completion, text, None
    index, stop = min(ends)
    count = tokens_until(completion.tokens, [stop], backend.text)
    return completion if count is None else completion.first(count), text[:index], stop
