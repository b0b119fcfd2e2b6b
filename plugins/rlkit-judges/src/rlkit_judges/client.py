"""Questions to a judge over HTTP: answers as JSON, retries, a cache, and a budget."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable
from hashlib import sha256
from math import ceil
from typing import NamedTuple, TypeVar, cast

from rlkit.base.deadlines import slot
from rlkit.base.errors import shorten
from rlkit.base.retry import HttpClient, ServiceError
from rlkit.interfaces.parser import after_thinking
from rlkit.types import JsonObject, Message, Score
from rlkit_judges.server import BudgetError, JudgeError, JudgeServer, Spending

T = TypeVar("T")

MAX_QUOTED = 500
"""Characters of a response that an error message quotes."""
MAX_CACHED = 100_000
"""Answers in the cache; beyond, the oldest are dropped."""
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)
"""Errors that reading a malformed response raises."""
_QUOTES_AND_BRACES = re.compile(r'(?<!\\)\\*"|[{}]')


class Question(NamedTuple):
    """A question to a judge.

    Args:
        prompt: The text.
        schema: JSON schema of the answer, an object.
    """

    prompt: str
    schema: JsonObject


class JudgeReply(NamedTuple):
    """The text of a response, and whether a limit of tokens cut it off."""

    text: str
    truncated: bool


class JudgeClient:
    """Asks a judge; equal questions are asked once.

    Args:
        server: Where the judge is.
    """

    def __init__(self, server: JudgeServer) -> None:
        self.server = server
        self.spending = Spending(server)
        self._cache: dict[bytes, JsonObject] = {}
        self._asking: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(server.concurrency)
        headers = {"anthropic-version": "2023-06-01", "x-api-key": server.key}
        if server.api == "openai":
            headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        self._http = HttpClient(server.url.rstrip("/"), headers)

    async def ask(self, question: Question, read: Callable[[JsonObject], T]) -> T:
        """Ask the judge and return the result of `read` on its answer.

        Args:
            question: Prompt and schema.
            read: Raises ValueError for an object that does not fit the schema; the judge is then asked again.

        Raises:
            JudgeError: There is no answer that fits, after all retries.
            BudgetError: The budget is spent.
        """
        key = sha256(json.dumps(question).encode()).digest()
        try:
            async with self._asking[key]:  # an equal question waits for the answer to the first
                if key in self._cache:
                    self.spending.count("cached")
                else:
                    self._store(key, await self._ask(question, read))
                return read(self._cache[key])
        finally:
            if not self._asking[key].locked():
                del self._asking[key]

    def score_without_answer(self, error: BudgetError | JudgeError) -> Score:
        """Return the score of a sample about which the judge was not asked, or did not answer."""
        if isinstance(error, BudgetError) and self.server.beyond_budget is not None:
            self.spending.count("beyond_budget")
            return Score(self.server.beyond_budget)
        return Score(None, error=str(error))

    def _store(self, key: bytes, answer: JsonObject) -> None:
        self._cache[key] = answer
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]

    async def _ask(self, question: Question, read: Callable[[JsonObject], object]) -> JsonObject:
        """Return an answer that `read` accepts."""
        messages: list[Message] = [{"role": "user", "content": question.prompt}]
        problem = ""
        for _ in range(1 + self.server.corrections):
            reply = await self._request(messages, question.schema)
            try:
                is_object = reply.text.lstrip().startswith(("{", "```"))  # whose texts may speak of tags
                answer = final_object(reply.text if is_object else after_thinking(reply.text))
                if reply.truncated:
                    raise ValueError("it is not complete")
                read(answer)
            except ValueError as error:
                self.spending.count("invalid")
                cut = f"; max_tokens: {self.server.max_tokens} cut it off" if reply.truncated else ""
                problem = f"{error}{cut}"
                correction = f"Your answer is not valid: {problem}. Answer with the JSON object only."
                messages = [
                    messages[0],
                    {"role": "assistant", "content": shorten(reply.text, MAX_QUOTED) or "(empty)"},
                    {"role": "user", "content": correction},
                ]
            else:
                return answer
        asked = 1 + self.server.corrections
        problem = self._without_key(problem)
        raise JudgeError(f"{self.server} gave no valid answer to a question asked {asked} times: {problem}")

    async def _request(self, messages: list[Message], schema: JsonObject) -> JudgeReply:
        """Return the reply to messages.

        Raises:
            JudgeError: There was none.
            BudgetError: The budget is spent.
        """
        body = json.dumps(self._body(messages, schema)).encode()

        async def attempt(seconds: float) -> JudgeReply:
            async with slot(self._slots):
                try:
                    self.spending.begin_call()
                    return self._read(await self._post(body, seconds), len(body))
                except ServiceError:
                    self.spending.count("failed")
                    raise

        try:
            return await self.server.retry.call(attempt)
        except (ServiceError, TimeoutError) as error:
            last = error.__cause__ if isinstance(error.__cause__, ServiceError) else None
            attempts = f" (after {error.attempts} attempts)" if isinstance(error, ServiceError) else ""
            problem = f"{error}{attempts}{f'; the last attempt: {last}' if last else ''}"
            raise JudgeError(f"{self.server}: {self._without_key(problem)}") from None

    def _without_key(self, text: str) -> str:
        """Return a text in which no server repeats the key: it would be saved with the rollout."""
        return text.replace(self.server.key, "[key]") if self.server.key else text

    def _body(self, messages: list[Message], schema: JsonObject) -> JsonObject:
        server = self.server
        body: JsonObject = {"model": server.model, "messages": messages, "max_tokens": server.max_tokens}
        body["temperature"] = server.temperature
        if server.api == "openai" and server.structured:
            named = {"name": "answer", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        body |= server.body or {}
        return {name: value for name, value in body.items() if value is not None}

    async def _post(self, body: bytes, seconds: float) -> JsonObject:
        """Return the response to one attempt."""
        path = "/chat/completions" if self.server.api == "openai" else "/messages"
        return await self._http.post_json(path, body, seconds)

    def _read(self, response: JsonObject, sent: int) -> JudgeReply:
        """Return the reply in a response, and count its tokens.

        Raises:
            ServiceError: It has no text.
        """
        openai = self.server.api == "openai"
        try:
            if openai:
                choice = response["choices"][0]
                text, reason = choice["message"]["content"], choice.get("finish_reason")
            else:
                parts = [part["text"] for part in response["content"] if part.get("type") == "text"]
                text, reason = "".join(parts), response.get("stop_reason")
            if not isinstance(text, str):
                raise TypeError("its content is no text")
        except UNREADABLE as error:
            quoted = shorten(str(response), MAX_QUOTED)
            raise ServiceError(f"answered what is no completion ({error}): {quoted}") from error
        usage = response.get("usage")
        prefix = ("prompt", "completion") if openai else ("input", "output")
        self.spending.count("prompt_tokens", _tokens(usage, f"{prefix[0]}_tokens", sent))
        self.spending.count("completion_tokens", _tokens(usage, f"{prefix[1]}_tokens", len(text)))
        return JudgeReply(text, reason in ("length", "max_tokens"))

    def close(self) -> None:
        """Drop the connections, from any thread."""
        self._http.close()


def final_object(text: str) -> JsonObject:
    """Return the JSON object with which a text ends, within a fence or not, in time linear in the text.

    It is read from its end, so that no object before it counts: that may be one that the judge quotes from a response.
    So may an object within one that cannot be read.

    Raises:
        ValueError: There is none.
    """
    unfenced = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    try:
        start = _start_of_last_object(unfenced)
        if start and unfenced.startswith("{"):
            json.JSONDecoder().raw_decode(unfenced)
        return cast("JsonObject", json.loads(unfenced[start:]))
    except (ValueError, RecursionError):
        raise ValueError(f"it is {shorten(text, MAX_QUOTED)!r}, expected a JSON object at its end") from None


def _start_of_last_object(text: str) -> int:
    """Find the start of the object whose brace ends the text.

    Raises:
        ValueError: No brace begins it.
    """
    depth, quoted = 0, False
    for mark in reversed(list(_QUOTES_AND_BRACES.finditer(text))):
        if mark[0].endswith('"'):
            quoted ^= len(mark[0]) % 2 == 1  # after an odd number of backslashes it is part of a string
        elif not quoted:
            depth += 1 if mark[0] == "}" else -1
            if depth == 0:
                return mark.start()
    raise ValueError("it has no object")


def _tokens(usage: object, name: str, characters: int) -> int:
    """Return a number of tokens that a server states, or else an estimate."""
    count = usage.get(name) if isinstance(usage, dict) else None
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**31:
        return count
    return ceil(characters / 4)
