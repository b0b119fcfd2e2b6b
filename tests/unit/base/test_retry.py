"""The policy by which requests to services are repeated."""

from __future__ import annotations

import asyncio

import pytest

from rlkit.base import retry
from rlkit.base.retry import RetryPolicy, ServiceError
from tests.unit.simulation import VirtualLoop


class Service:
    """Fails with these statuses, one after another, and then answers; None is no answer."""

    def __init__(self, *statuses: int | None, seconds: float = 0.0) -> None:
        self.statuses = list(statuses)
        self.seconds = seconds
        self.limits: list[float] = []

    async def attempt(self, limit: float) -> str:
        self.limits.append(limit)
        await asyncio.sleep(self.seconds)
        if self.statuses:
            raise ServiceError("failed", self.statuses.pop(0))
        return "answer"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)


@pytest.mark.parametrize("status", [None, 200, 408, 429, 500, 502, 503, 599])
def test_what_may_succeed_later_is_repeated(status: int | None) -> None:
    service = Service(status, status)
    assert asyncio.run(RetryPolicy(retries=2).call(service.attempt)) == "answer"
    assert len(service.limits) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 499])
def test_what_the_service_refuses_is_not(status: int) -> None:
    service = Service(500, status, 500)
    with pytest.raises(ServiceError) as raised:
        asyncio.run(RetryPolicy(retries=9).call(service.attempt))
    assert (raised.value.status, raised.value.attempts, len(service.limits)) == (status, 2, 2)


def test_the_last_attempts_error_is_raised() -> None:
    service = Service(None, 500, 503, 429)
    with pytest.raises(ServiceError) as raised:
        asyncio.run(RetryPolicy(retries=2).call(service.attempt))
    assert (raised.value.status, raised.value.attempts) == (503, 3)


def test_other_errors_are_raised_at_once() -> None:
    async def attempt(limit: float) -> None:
        raise KeyError(limit)

    with pytest.raises(KeyError):
        asyncio.run(RetryPolicy().call(attempt))


def test_all_attempts_have_one_deadline_and_each_has_its_own() -> None:
    for policy, seconds, limit in (
        (RetryPolicy(request_seconds=9.0), None, 9.0),
        (RetryPolicy(request_seconds=9.0, attempt_seconds=2.0), None, 2.0),
        (RetryPolicy(request_seconds=9.0, attempt_seconds=30.0), None, 9.0),
        (RetryPolicy(request_seconds=9.0, attempt_seconds=2.0), 1.0, 1.0),
    ):
        service = Service()
        asyncio.run(policy.call(service.attempt, seconds))
        assert service.limits == [limit]


def test_after_the_deadline_the_last_failure_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of 2 s and pauses of 1, 2 and 4 s: the third ends at 9 s, the fourth would begin at 13 s."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(retry.random, "random", lambda: 0.5)
    service, policy = Service(*[500] * 999, seconds=2.0), RetryPolicy(retries=1000, request_seconds=10.0)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        with pytest.raises(TimeoutError, match="there was no answer within 10 s") as raised:
            runner.run(policy.call(service.attempt))
        assert runner.get_loop().time() == 10.0
    assert isinstance(raised.value.__cause__, ServiceError)
    assert len(service.limits) == 3


def test_pauses_grow_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(retry.random, "random", lambda: 0.5)
    assert [retry._pause(failures) for failures in (1, 2, 3, 4)] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert retry._pause(1000) == retry.LONGEST_PAUSE
    monkeypatch.setattr(retry.random, "random", lambda: 0.0)
    assert retry._pause(2) == pytest.approx(0.2)
