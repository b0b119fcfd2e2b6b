"""TRL's loss of reward models on the pairs of `losses/test_bradley_terry.py`: `python -m tests.bench.reward_loss`.

It needs the extra `bench`.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import RewardTrainer

from tests.unit.losses.test_bradley_terry import CHOSEN, MARGINS, REJECTED


def losses() -> None:
    """Print a row of the test's table for each combination of options."""
    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    for margins in (False, True):
        for centre in (None, 0.01):
            scores = torch.tensor([*CHOSEN, *REJECTED], requires_grad=True)
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=True), args=SimpleNamespace(center_rewards_coefficient=centre),
                accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
                _tp_size=1,
            )  # fmt: skip
            inputs: dict[str, Any] = {"attention_mask": torch.ones(6, 1)}
            if margins:
                inputs["margin"] = torch.tensor(MARGINS)
            model = lambda logits=scores[:, None], **_: SimpleNamespace(logits=logits)  # noqa: E731
            loss = RewardTrainer.compute_loss(trainer, model, inputs)
            [gradient] = torch.autograd.grad(loss, scores)
            print((margins, centre or 0.0, round(loss.item(), 7), [round(x, 7) for x in gradient.tolist()]), end=",\n")


if __name__ == "__main__":
    losses()
