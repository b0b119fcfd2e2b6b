"""An optimizer that a recipe names: `train: {optimizer: Sign, lr: 1.0e-6}`.

[project.entry-points.rlkit]
sign = "rlkit_sign"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.optimizer import Optimizer, WeightGroup


class Sign(Optimizer):
    """Moves each weight by the learning rate against its gradient's sign (Bernstein et al. 2018, arXiv:1802.04434)."""

    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return a torch optimizer of all groups, whose `lr` the run sets before each step."""
        return SignSGD([group.options() for group in groups], {"lr": lr})


class SignSGD(torch.optim.Optimizer):
    """State would be tensors in `self.state[weight]`, which checkpoints hold."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move the weights that have a gradient."""
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * weight.grad.sign())


@hookimpl
def rlkit_register(register: Register) -> None:
    register(Sign)
