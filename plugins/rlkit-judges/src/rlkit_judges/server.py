"""A server with a model that judges: its options, and what is spent on it."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Count, FiniteFloat, PositiveInt, Repeats, Temperature
from rlkit.base.retry import RetryPolicy, require_http
from rlkit.types import JsonObject

RETRY = RetryPolicy(retries=4, request_seconds=300.0, attempt_seconds=90.0)

VARIABLE = re.compile(r"RLKIT_[A-Z0-9_]+")
"""A recipe of unknown origin must not send other secrets anywhere."""


@dataclass(frozen=True)
class JudgeServer:
    """A model behind an OpenAI- or Anthropic-compatible address.

    Each attempt counts as a call. Budgets hold for each process of a run, from its start or its resumption. They are
    checked before a call, so calls in flight may exceed `max_total_tokens` by up to `concurrency` answers. Without
    numbers from the server, four characters count as a token.

    Args:
        url: The address up to `/v1`, such as `http://127.0.0.1:30000/v1`.
        model: The model's name.
        api: `openai` posts to `/chat/completions`, `anthropic` to `/messages`.
        key_variable: Name of the environment variable with the API key, which begins with `RLKIT_`; the key is written
            nowhere. Null for a server without a key.
        temperature: Of the judge's answers; null leaves it to the server.
        max_tokens: Most tokens of an answer.
        structured: Whether to send the JSON schema of the answer to an OpenAI-compatible server as `response_format`.
        body: Further fields of the request, such as `{reasoning_effort: low}`; a null removes a field.
        concurrency: Requests in flight at once; the wait for a slot counts towards no timeout.
        retry: How often, and for how long, a request is attempted.
        corrections: How often the judge is asked again after an answer that does not fit the schema.
        max_calls: Most calls; null for no limit.
        max_total_tokens: Most tokens, prompts and answers together; null for no limit.
        beyond_budget: The reward of samples that the budget does not cover; null fails them, as `on_error` says.
    """

    url: str
    model: str
    api: Literal["openai", "anthropic"] = "openai"
    key_variable: str | None = None
    temperature: Temperature | None = 0.0
    max_tokens: PositiveInt = 1024
    structured: bool = True
    body: JsonObject | None = None
    concurrency: Count = 32
    retry: RetryPolicy = RETRY
    corrections: Repeats = 2
    max_calls: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    beyond_budget: FiniteFloat | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RecipeError(f"a judge's server has url={self.url!r}, expected http://… or https://…")
        if self.key_variable is not None and not VARIABLE.fullmatch(self.key_variable):
            raise RecipeError(
                f"a judge's server has key_variable={self.key_variable!r}, expected the name of an environment "
                "variable that begins with RLKIT_"
            )

    def __str__(self) -> str:
        return f"the judge {self.model} at {self.url}"

    def require_usable(self) -> None:
        """Check what only a run needs.

        Raises:
            RecipeError: aiohttp is not installed, or the variable with the key is not set.
        """
        require_http("a judge")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise RecipeError(f"{self} has key_variable={self.key_variable!r}, which is not set; export it")

    @property
    def key(self) -> str:
        """The API key; empty for none."""
        return os.environ.get(self.key_variable or "", "")


class BudgetError(Exception):
    """The budget of a judge is spent."""


class JudgeError(Exception):
    """A judge did not answer a question, or not in the form that was asked for."""


class Spending:
    """Counts calls and tokens, and refuses calls beyond the budget.

    Args:
        server: With the budget.
    """

    def __init__(self, server: JudgeServer) -> None:
        self._server = server
        self.counts: Counter[str] = Counter()
        """Totals by the names of metrics, without `reward/`."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a total."""
        self.counts[f"judge_{name}"] += amount

    def begin_call(self) -> None:
        """Count a call.

        Raises:
            BudgetError: The budget does not cover it.
        """
        server = self._server
        tokens = self.counts["judge_prompt_tokens"] + self.counts["judge_completion_tokens"]
        if server.max_calls is not None and self.counts["judge_calls"] >= server.max_calls:
            raise BudgetError(f"the budget of {server} is spent: {server.max_calls:,} calls")
        if server.max_total_tokens is not None and tokens >= server.max_total_tokens:
            raise BudgetError(f"the budget of {server} is spent: {server.max_total_tokens:,} tokens")
        self.count("calls")
