"""A taskset with a tool, which a server of its own serves for all rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["AdderTaskset"]


def final(trace: vf.Trace) -> str:
    """Return the answer in the last reply, which the shipped models write after `####`."""
    return trace.last_reply.rpartition("####")[2].strip()


class AdderData(vf.TaskData):
    answer: str


class AdderTask(vf.Task[AdderData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(final(trace) == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        first, _, second = expression.partition("+")
        return str(int(first) + int(second))


class AdderConfig(vf.TasksetConfig):
    calculator: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self) -> Iterator[AdderTask]:
        for index in range(80):
            a, b = 11 * index % 90, 37 * index % 97
            yield AdderTask(AdderData(prompt=f"{a} + {b} = ?", answer=str(a + b)), self.config.task)

    @classmethod
    def toolsets(cls, config: AdderConfig) -> list[vf.Toolset]:
        return [Calculator(config.calculator)]


if __name__ == "__main__":
    Calculator.run()
