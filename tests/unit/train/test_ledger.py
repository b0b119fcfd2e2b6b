"""Rules of rollouts that run ahead: none too old, none lost or twice, never too many, and never stuck."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.train.ahead.ledger import Cut, Ledger


def test_a_synchronous_ledger_admits_a_batch_and_takes_it() -> None:
    ledger = Ledger(batch=3, staleness=0, lead=0, total=6)
    assert ledger.admit(0) == [0, 1, 2]
    assert ledger.admit(0) == []
    for number in (2, 0):
        ledger.end(number, 0)
        assert not ledger.ready(0)
    ledger.end(1, 0)
    assert ledger.ready(0)
    assert ledger.cut(0) == Cut([0, 1, 2], [])
    assert ledger.admit(1) == [3, 4, 5]
    assert ledger.admit(2) == []  # there are no more


def test_one_batch_ahead_trains_on_the_first_that_are_whole() -> None:
    """S = 1, B = 2: four begin; 3 and 1 are whole first. Then 0 and 2 must be whole before they are too old."""
    ledger = Ledger(batch=2, staleness=1, lead=1, total=99)
    assert ledger.admit(0) == [0, 1, 2, 3]
    ledger.end(3, 0)
    ledger.end(1, 0)
    assert ledger.cut(0) == Cut([1, 3], [])
    assert ledger.admit(1) == [4, 5]
    for number, version in ((4, 1), (0, 0), (5, 1)):
        ledger.end(number, version)
        assert not ledger.ready(1)
    ledger.end(2, 0)
    assert ledger.ready(1)
    assert ledger.cut(1) == Cut([0, 2], [])  # the oldest first
    assert ledger.admit(2) == [6, 7]


def test_stale_groups_beyond_a_batch_are_dropped_and_restart() -> None:
    """S = 2, B = 1: three begin; younger ones are whole first, and the other two must be trained on by the same step.

    The one that is dropped is then waited for as any other.
    """
    ledger = Ledger(batch=1, staleness=2, lead=2, total=99)
    assert ledger.admit(0) == [0, 1, 2]
    ledger.end(2, 0)
    assert ledger.cut(0) == Cut([2], [])
    assert ledger.admit(1) == [3]
    ledger.end(3, 1)
    assert ledger.ready(1)
    assert ledger.cut(1) == Cut([3], [])
    assert ledger.admit(2) == [4]
    ledger.end(0, 0)
    assert not ledger.ready(2)
    ledger.end(1, 0)
    assert ledger.cut(2) == Cut([0], [1])
    assert ledger.admit(3) == [1, 5]
    ledger.end(5, 3)
    assert ledger.ready(3)


def test_the_lead_may_be_a_part_of_a_batch() -> None:
    ledger = Ledger(batch=4, staleness=2, lead=0.3, total=99)
    assert ledger.admit(0) == [0, 1, 2, 3, 4, 5]


@dataclass
class History:
    """A simulated engine: groups become whole in any order."""

    ledger: Ledger
    version: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)

    def admit(self) -> None:
        ledger = self.ledger
        for number in ledger.admit(self.version):
            assert number not in self.trained
            assert number not in ledger.complete
            self.begun[number] = self.version
        under_way = len(ledger.running) + len(ledger.complete)
        assert under_way + ledger.trained <= (ledger.staleness + 1 + self.version) * ledger.batch
        assert under_way <= max(ledger.batch * (1 + ledger.lead) + 1, ledger.batch)

    def step(self) -> None:
        ledger = self.ledger
        oldest = dict(ledger.complete)
        cut = ledger.cut(self.version)
        assert len(cut.trained_on) == ledger.batch
        assert all(0 <= self.version - oldest[number] <= ledger.staleness for number in cut.trained_on)
        assert not set(cut.trained_on) & set(self.trained)
        self.trained += cut.trained_on
        self.version += 1


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 4), st.floats(0, 2), st.integers(1, 12))
def test_no_history_breaks_the_rules(data: st.DataObject, batch: int, staleness: int, lead: float, steps: int) -> None:
    history = History(Ledger(batch, staleness, min(lead, staleness), batch * steps))
    while history.version < steps:
        history.admit()
        ledger = history.ledger
        assert ledger.running or ledger.ready(history.version), "stuck"
        if ledger.ready(history.version) and (not ledger.running or data.draw(st.booleans())):
            history.step()
        else:
            number = data.draw(st.sampled_from(sorted(ledger.running)))
            ledger.end(number, ledger.running[number])
    assert sorted(history.trained) == list(range(batch * steps))
    assert history.ledger.trained == batch * steps


def test_a_group_that_takes_longest_is_waited_for() -> None:
    """Group 0 becomes whole only when nothing else is left to wait for: at version 2, and nothing is dropped for it."""
    ledger, cuts = Ledger(batch=2, staleness=2, lead=1, total=40), []
    for version in range(20):
        ledger.admit(version)
        while not ledger.ready(version):
            number = max(ledger.running)
            ledger.end(number, ledger.running[number])
        cuts.append(ledger.cut(version))
    assert [0 in cut.trained_on for cut in cuts[:3]] == [False, False, True]
    assert not any(cut.dropped for cut in cuts)
    assert ledger.trained == 40
