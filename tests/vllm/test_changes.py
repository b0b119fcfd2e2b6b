"""Weights sent to a real vLLM server as changes of those that were sent before."""

from __future__ import annotations

from typing import Any

from rlkit_engine_vllm.transport import VllmChanges

from tests.served import Trainer, changes_arrive_or_are_healed


def test_changes_are_applied_and_refused_ones_are_healed(trainer: Trainer, second: Any) -> None:
    """A refused change leaves the server as it is, and full weights follow without a restart."""
    changes_arrive_or_are_healed(trainer, second(transport="changes"), VllmChanges(), 1e-5)
