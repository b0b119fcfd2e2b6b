"""What each tenant has used since the server started, and what it holds now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlkit.types import JsonObject
from rlkit_tinker.server.requests import PASS, SAMPLE, WireRequest, WireResult
from rlkit_tinker.server.state import ClientSession


class Usage:
    """Counts requests by tenants."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def count(self, tenant: str, request: WireRequest, result: WireResult) -> None:
        """Count a request that has run."""
        counts = self._counts.setdefault(tenant, Counter())
        counts[f"requests.{request.route}"] += 1
        counts["requests.failed"] += result.has_failed
        if request.route == PASS:
            counts["tokens.trained"] += result.tokens
        elif request.route == SAMPLE:
            counts["tokens.sampled"] += result.tokens

    def of(self, tenant: str, sessions: Mapping[str, ClientSession]) -> JsonObject:
        """Return the counts of a tenant, and its open sessions, models and requests."""
        own = [session for session in sessions.values() if session.tenant == tenant]
        return {
            "tenant": tenant,
            "sessions": len(own),
            "models": sum(len(session.models) for session in own),
            "requests.pending": sum(len(session.pending) for session in own),
            "bytes.pending": sum(session.pending_bytes for session in own),
            "bytes.results": sum(session.result_bytes for session in own),
            **dict(sorted(self._counts.get(tenant, Counter()).items())),
        }

    def all(self, sessions: Mapping[str, ClientSession]) -> list[JsonObject]:
        """Return the usage of all tenants that have run something or have a session."""
        tenants = self._counts.keys() | {session.tenant for session in sessions.values()}
        return [self.of(tenant, sessions) for tenant in sorted(tenants)]
