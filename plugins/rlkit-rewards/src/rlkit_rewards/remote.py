"""A reward computed by a service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from rlkit.base.deadlines import slot
from rlkit.base.errors import RecipeError, shorten, show
from rlkit.base.ranges import Count, Seconds
from rlkit.base.retry import MAX_QUOTED, HttpClient, RetryPolicy, ServiceError, proxy_for, require_http
from rlkit.interfaces.content import json_messages
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.interfaces.runtime import Runtime
from rlkit.types import JsonObject, Score, Trajectory

IN_FLIGHT = 512
"""Maximum concurrent requests; waiting requests count towards no timeout."""

RETRY = RetryPolicy(retries=3, request_seconds=180.0, attempt_seconds=30.0)


class RemoteReward(RewardManager):
    """Posts batches of trajectories to an HTTP service, which returns their scores.

    It sends `{"items": [{"text", "completion", "answer", "messages", "meta"}, …]}` and expects `{"scores": [s, …]}`
    with a number, or `{"reward": number, "components": {…}, "answer": text, "feedback": text}` for each item; see
    `Score`. A reward of null is no opinion. `text` is the completion without its thinking, `answer` the reference.

    Args:
        url: URL of the service; `https://${RLKIT_LOGIN}@host` sends the user and password of that variable.
        batch_size: Items per request.
        retry: How often, and for how long, each request is attempted.
        timeout: Seconds for the samples of one prompt, retries included.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        url: str,
        batch_size: Count = 32,
        *,
        retry: RetryPolicy = RETRY,
        timeout: Seconds = 180.0,
        on_error: OnError = "drop",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise RecipeError(f"RemoteReward has url={url!r}, expected http://… or https://…")
        self.url = url
        self.batch_size = batch_size
        self.retry = retry
        self.timeout = timeout
        self.on_error = on_error
        self._http = HttpClient(url, proxy=proxy_for(url))
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    def bind(self, runtime: Runtime) -> None:
        require_http("RemoteReward")

    def close(self) -> None:
        self._http.close()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        size = self.batch_size
        chunks = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
        scores = await asyncio.gather(*(self._request(chunk) for chunk in chunks))
        return [score for chunk_scores in scores for score in chunk_scores]

    async def _request(self, chunk: Sequence[Trajectory]) -> list[Score]:
        items = [
            {
                "text": after_thinking(t.opened_thinking + t.text),
                "completion": t.opened_thinking + t.text,
                "answer": t.prompt.answer,
                "messages": json_messages(t.prompt.messages),
                "meta": dict(t.prompt.meta),
            }
            for t in chunk
        ]
        body = json.dumps({"items": items}).encode()

        async def attempt(seconds: float) -> list[Score]:
            async with slot(self._slots):
                return _parse(await self._http.post_json("", body, seconds), len(chunk))

        try:
            return await self.retry.call(attempt)
        except ServiceError as error:
            raise ConnectionError(f"{self.url}: {error} (after {error.attempts} attempts)") from error
        except TimeoutError as error:
            last = f"; the last attempt: {error.__cause__}" if isinstance(error.__cause__, ServiceError) else ""
            raise ConnectionError(f"{self.url}: {error}{last}") from error


def _parse(response: JsonObject, count: int) -> list[Score]:
    scores = response.get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise ServiceError(f"answered {shorten(str(response), MAX_QUOTED)}, expected an object with {count} `scores`")
    return [_score(item) for item in scores]


def _score(item: object) -> Score:
    if not isinstance(item, dict):
        return Score(item)  # type: ignore[arg-type]
    if "reward" not in item:
        return Score(None, error=f"the service answered {show(item)}, expected a number under `reward`")
    return Score(item["reward"], item.get("components", {}), answer=item.get("answer"), feedback=item.get("feedback"))
