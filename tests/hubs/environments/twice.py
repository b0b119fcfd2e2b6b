"""An environment of two turns: the second question depends on the first answer."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["TwiceEnv", "TwiceTaskset"]


class TwiceData(vf.TaskData):
    first: int
    second: int


class TwiceTask(vf.Task[TwiceData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        sums = [str(self.data.first + self.data.second), str(self.data.first + self.data.second + 1)]
        replies = [reply.content for reply in trace.assistant_messages]
        return sum(reply == f"#### {total}" for reply, total in zip(replies, sums, strict=False)) / 2


class TwiceTaskset(vf.Taskset[TwiceTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TwiceTask]:
        for a in range(8):
            for b in range(8):
                yield TwiceTask(TwiceData(prompt=f"{a} + {b} = ?", first=a, second=b), self.config.task)


class TwiceConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TwiceEnv(vf.Env[TwiceConfig]):
    async def run(self, task: TwiceTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            reply = await player.turn()
            if not reply.terminated:
                await player.turn(f"{task.data.first + task.data.second} + 1 = ?")
