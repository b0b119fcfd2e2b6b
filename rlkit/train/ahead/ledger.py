"""Which groups are sampled, wait and were trained on, where rollouts run ahead of the trainer: rules, and no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple


class Cut(NamedTuple):
    """What becomes of whole groups when a step begins: those it trains on, and those that are too old for any."""

    trained_on: list[int]
    dropped: list[int]


@dataclass
class Ledger:
    """Groups by their numbers in the order in which they are admitted, each trained on once.

    A version of the weights is the number of steps that made it since the ledger began; a group's age is the version
    that is about to be trained minus the oldest version of its tokens, time in queues included. A group is admitted
    while no more than `(1 + lead + version) * batch` are under way or were trained on, where `lead` is no more than
    `staleness`, so that none has to become older than that. A step waits for groups that would be too old for the next
    one, since to sample them again would take as long. If more of these are whole than a step trains on, the rest is
    dropped and sampled again.

    Args:
        batch: Groups of a step.
        staleness: The largest age of a group that is trained on.
        lead: How far to run ahead normally, in batches; `staleness` at most.
        total: Number of all groups.
    """

    batch: int
    staleness: int
    lead: float
    total: int

    def __post_init__(self) -> None:
        self.running: dict[int, int] = {}
        """The version of the weights at the admission of each group that is being sampled."""
        self.complete: dict[int, int] = {}
        """The version of the oldest token of each group that waits to be trained on."""
        self.trained = 0
        """How many groups were trained on."""
        self._again: set[int] = set()
        """Groups to admit again."""
        self._next = 0

    def admit(self, version: int) -> list[int]:
        """Return the numbers of the groups to begin now, those that begin again first."""
        ahead = ceil((1 + self.lead + version) * self.batch) - self.trained
        admitted: list[int] = []
        while len(self.running) + len(self.complete) < ahead:
            if self._again:
                number = min(self._again)
                self._again.remove(number)
            elif self._next < self.total:
                number = self._next
                self._next += 1
            else:
                break
            self.running[number] = version
            admitted.append(number)
        return admitted

    def renew(self, number: int, version: int) -> None:
        """Note that what was sampled of a group was left out, and others are being sampled in its position."""
        self.running[number] = version

    def end(self, number: int, oldest: int) -> None:
        """Note that a group is whole, and the version of its oldest token."""
        del self.running[number]
        self.complete[number] = oldest

    def ready(self, version: int) -> bool:
        """Whether a step can begin: a batch is whole, and no group runs that would be too old for the next step."""
        return len(self.complete) >= self.batch and all(version - v < self.staleness for v in self.running.values())

    def cut(self, version: int) -> Cut:
        """Take the batch that is trained on: the oldest groups first. Drop those that are too old for the next step."""
        order = sorted(self.complete, key=lambda number: (self.complete[number], number))
        batch = order[: self.batch]
        for number in batch:
            del self.complete[number]
        self.trained += len(batch)
        late = sorted(n for n, v in self.complete.items() if version + 1 - v > self.staleness)
        for number in late:
            del self.complete[number]
        self._again |= set(late)
        return Cut(batch, late)
