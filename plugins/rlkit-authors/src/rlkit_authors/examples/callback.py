"""A callback that a recipe lists: `callbacks: [{class_path: EarlyStopping, init_args: {validations: 3}}]`.

[project.entry-points.rlkit]
early-stopping = "rlkit_early_stopping"
"""

from __future__ import annotations

from rlkit.base.ranges import PositiveInt
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.callback import Callback, Json, ValidationEnd


class EarlyStopping(Callback):
    """Ends a run whose validation reward no longer improves.

    Args:
        validations: How many without progress end it.
    """

    def __init__(self, validations: PositiveInt = 3) -> None:
        self.validations = validations
        self.rewards: list[float] = []

    def on_validation(self, event: ValidationEnd) -> None:
        self.rewards.append(event.metrics["reward"])
        before, last = self.rewards[: -self.validations], self.rewards[-self.validations :]
        self.should_stop = bool(before) and max(last) <= max(before)

    def state_dict(self) -> dict[str, Json]:
        return {"rewards": [*self.rewards]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.rewards = [*state["rewards"]]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(EarlyStopping)
