"""A taskset of one turn: additions, with two rewards of different weights, a metric and a row that cannot be scored."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


def final(trace: vf.Trace) -> str:
    """Return the answer in the last reply, which the shipped models write after `####`."""
    return trace.last_reply.rpartition("####")[2].strip()


class SumData(vf.TaskData):
    answer: str
    broken: str | None = None


class SumTask(vf.Task[SumData]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.data.broken == "setup":
            raise OSError("its world is gone")

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.broken == "reward":
            raise ZeroDivisionError("its reward is wrong")
        return float(final(trace) == self.data.answer)

    @vf.reward(weight=0.25)
    async def number(self, trace: vf.Trace) -> float:
        return float(final(trace).isdecimal())

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    largest: int = 9
    broken: list[int] = []  # noqa: RUF012 (a pydantic field)


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        numbers = range(self.config.largest + 1)
        pairs = sorted(((a, b) for a in numbers for b in numbers), key=lambda pair: (7 * pair[0] + 3 * pair[1]) % 11)
        for index, (a, b) in enumerate(pairs):
            broken = ("setup", "reward")[index % 2] if index in self.config.broken else None
            yield SumTask(SumData(prompt=f"{a} + {b} = ?", answer=str(a + b), broken=broken), self.config.task)
