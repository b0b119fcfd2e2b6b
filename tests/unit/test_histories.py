"""Random histories of a run whose rollouts run ahead: none breaks a rule, whatever fails and wherever it is resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulation import Plan, simulate

PROBABILITY = st.sampled_from([0.0, 0.1, 0.4])
PLANS = st.builds(
    Plan,
    batch=st.integers(1, 4),
    group_size=st.integers(1, 3),
    staleness=st.integers(0, 3),
    lead=st.sampled_from([None, 0.0, 0.5, 1.0]),
    steps=st.integers(1, 5),
    turns=st.integers(1, 3),
    mean=st.integers(1, 6),
    failing=PROBABILITY,
    dying=PROBABILITY,
    interrupted=PROBABILITY,
    resuming=PROBABILITY,
    saving=st.sampled_from([1.0, 0.5]),
    user_seconds=st.sampled_from([0.0, 1.0, 8.0]),
    step_seconds=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
    pace=st.integers(0, 2**32),
)


@settings(max_examples=200, deadline=None)
@given(PLANS)
def test_no_history_breaks_the_rules(plan: Plan) -> None:
    simulate(plan)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(PLANS)
def test_none_of_ten_thousand_histories_breaks_the_rules(plan: Plan) -> None:
    simulate(plan)


@settings(max_examples=50, deadline=None)
@given(PLANS, st.integers(0, 2**32))
def test_how_fast_tools_and_steps_are_changes_nothing(plan: Plan, pace: int) -> None:
    """Which groups a step trains on and which weights sampled each token follow from the seed."""
    plan = replace(plan, dying=0.0, interrupted=0.0, user_seconds=min(plan.user_seconds, 1.0))
    assert simulate(plan) == simulate(replace(plan, pace=pace))
