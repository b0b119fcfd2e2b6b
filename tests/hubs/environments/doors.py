"""An OpenEnv server: behind one of four doors is a prize, and every observation says which."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

ROUNDS = 2


class OpenDoor(Action):
    door: int = Field(ge=1, le=4)


class Corridor(Observation):
    text: str


class Doors(Environment[OpenDoor, Corridor, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.trouble: str | None = None
        self.round = 0

    def reset(self, seed: int | None = None, trouble: str | None = None, **options: Any) -> Corridor:
        self.random = random.Random(seed)
        self.trouble = trouble
        self.round = 0
        if trouble == "reset":
            raise ValueError("no corridor")
        return self._observe(None)

    def _observe(self, reward: float | None) -> Corridor:
        self.prize = self.random.randint(1, 2)
        return Corridor(text=f"The prize is behind {self.prize}", reward=reward, done=self.round == ROUNDS)

    def step(self, action: OpenDoor, timeout_s: float | None = None, **options: Any) -> Corridor:
        self.round += 1
        if self.trouble == "step":
            raise OSError("the door is stuck")
        if self.trouble == "hang":
            time.sleep(3)
        if self.trouble == "die":
            os._exit(1)
        return self._observe(float(action.door == self.prize))

    @property
    def state(self) -> State:
        return State(step_count=self.round)


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_app(Doors, OpenDoor, Corridor, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
