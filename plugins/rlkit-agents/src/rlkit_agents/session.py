"""A session: one agent's requests to the policy, their limits, and the forest of turns that they grow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TypeVar

from rlkit.base.deadlines import in_thread
from rlkit.base.errors import EngineError, RolloutError, explain
from rlkit.base.tasks import cancel
from rlkit.base.text import tokens_until
from rlkit.interfaces.gateway import MODEL, PolicyBackend, Sample, SessionLimits
from rlkit.interfaces.parser import ParsedTurn
from rlkit.types import Completion, JsonObject, Media, Message, StopReason
from rlkit_agents.admission import Admission
from rlkit_agents.chat import ChatCompletions
from rlkit_agents.forest import Forest
from rlkit_agents.prompt import Prepared, prepare
from rlkit_agents.request import Answer, Call, ChatRequest, Finish, RequestError

T = TypeVar("T")


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
        threads: In which requests are read; all sessions of a gateway share them.
        counts: Events for the metrics.
        fatal: Raised by the engine, which ends the run.
    """

    id: str
    backend: PolicyBackend
    limits: SessionLimits = field(default_factory=SessionLimits)
    threads: Executor = field(default_factory=ThreadPoolExecutor)
    forest: Forest = field(default_factory=Forest)
    counts: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    fatal: EngineError | None = None

    def __post_init__(self) -> None:
        self._tag = sha256(self.id.encode()).hexdigest()[:8]  # ids of answers show nothing of the secret
        self.admission = Admission(self.limits.concurrent, self.counts)
        self._turn = asyncio.Lock()
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

    @property
    def forks(self) -> int:
        """Turns that continue what another turn continues already, or start another conversation of the same role."""
        return self.forest.forks

    def samples(self) -> list[Sample]:
        """Return the samples of the forest, in the order of roles."""
        return self.forest.samples()

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], max_tokens: int | None, speaker: int = 0
    ) -> Message:
        """Return the policy's next message as OpenAI's chat completions have it, in a role by its number.

        Raises:
            RequestError: The request is refused, or the session has ended.
        """
        dialect = ChatCompletions()
        body = {"model": MODEL, "messages": list(messages), "tools": list(tools), "max_tokens": max_tokens}
        request = dialect.read(body, self.conversation)
        request.speaker = speaker
        with self.admission.request():
            answer = await self.answer(request)
        message: Message = dialect.write(answer, request)["choices"][0]["message"]
        return message

    def conversation(self, answer: str) -> ChatRequest:
        """Return the conversation up to a turn of the policy, and its tools.

        Raises:
            RequestError: The session has no such turn.
        """
        if answer not in self._conversations:
            raise RequestError(f"this session has no response {answer!r}", status=404, kind="not_found_error")
        request = self._conversations[answer]
        return replace(request, messages=list(request.messages))

    async def read(self, function: Callable[[], T]) -> T:
        """Run a function that reads a request in a thread, one request of the session at a time.

        Raises:
            RequestError: The session has ended, or the function raises it.
        """
        async with self._turn:
            self._require_open()
            work, clock = in_thread(self.threads, function), self._clock.copy()
            reading = asyncio.get_running_loop().create_task(work, context=clock)
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                await asyncio.gather(
                    reading, return_exceptions=True
                )  # no thread can be stopped: until it ends, it is the session's only one
                raise

    @contextmanager
    def ask(self, prepared: Prepared, retry: bool = False) -> Iterator[asyncio.Future[Answer]]:
        """Start to sample a turn; leaving the context before it is sampled means that nobody waits for it.

        The same request in flight is joined, and a retry of an answered one gets the same answer.

        Args:
            prepared: What the policy reads.
            retry: Whether the agent says that it has sent the request before.

        Raises:
            RequestError: The request is refused.
        """
        self._require_open()
        fingerprint = prepared.fingerprint
        flight = self._flights.get(fingerprint)
        if flight is not None:
            self.counts["requests_joined"] += 1
        elif retry and fingerprint in self._records:
            self.counts["requests_repeated"] += 1
            flight = Flight(asyncio.get_running_loop().create_future())
            flight.answer.set_result(self._records[fingerprint])
        else:
            flight = self._start(prepared)
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
        prepared = await self.read(partial(prepare, request, self.forest, self.backend))
        with self.ask(prepared, retry) as sampling:
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
        limits = self.limits
        used = {
            "turns": (len(self.forest.nodes) + len(self._flights), limits.turns),
            "tokens": (self._sampled, limits.tokens),
            "tool_calls": (self._calls, limits.tool_calls),
        }
        for name, (count, limit) in used.items():
            if limit is not None and count >= limit:
                self.counts["requests_refused"] += 1
                raise RequestError(f"the session has used its {limit} {name} (conversation.{name})", code="limit")

    def _start(self, prepared: Prepared) -> Flight:
        self._require_budget()
        if prepared.rerendered:
            self.counts["turns_rerendered"] += 1
        self.counts["tokens_retokenized"] += prepared.retokenized
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
        remaining = None if self.limits.tokens is None else self.limits.tokens - self._sampled
        limits = [limit for limit in (prepared.request.max_tokens, remaining) if limit is not None]
        try:
            completion = await self.backend.sample(tokens, min(limits, default=None), label, Media.of(segments))
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
