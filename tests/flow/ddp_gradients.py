"""Run by test_gradients.py: the gradient of one mini-batch for several divisions of its rows over ranks.

usage: python ddp_gradients.py DEVICES OUT LOSSES DIVISION…   where a division such as 0,0,1 gives each row its rank
"""

from __future__ import annotations

import sys

import torch

from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.interfaces.loss import PolicyLoss
from rlkit.losses import DPO, ClipLoss, CrossEntropy, Distillation
from rlkit.train.metrics import Meter
from rlkit.train.setup import TrainContext, prepare_training
from rlkit.train.update import MiniBatch, embedding_noise
from rlkit.types import Batch, TrainBatch
from tests.unit.phases import update_policy

LENGTHS = (9, 17, 12, 30, 8, 21, 15, 11)
LOSSES: dict[str, PolicyLoss] = {
    "ClipLoss": ClipLoss(),
    "DPO": DPO(),
    "CrossEntropy": CrossEntropy(0.1, 50.0),
    "Distillation": Distillation(0.3, top_k=3),
}
REWARDS = (0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 2.0)
"""Of four groups of two, one of which has equal rewards."""


def example(rows: list[int]) -> Batch:
    """Make some of eight fixed rows, with off-policy log-probs so that clipping matters."""
    generator = torch.Generator().manual_seed(5)
    width = max(LENGTHS)
    columns = torch.arange(width)
    attention = columns < torch.tensor(LENGTHS)[:, None]
    mask = attention & (columns >= 6) & (torch.rand(len(LENGTHS), width, generator=generator) < 0.8)
    logps = (-torch.rand(len(LENGTHS), width, generator=generator) - 3) * mask
    advantages = torch.randn(len(LENGTHS), 1, generator=generator) * mask
    whole = Batch(
        tokens=torch.randint(3, 200, (len(LENGTHS), width), generator=generator),
        attention=attention,
        mask=mask,
        rollout_logps=logps,
        group=torch.arange(len(LENGTHS)) // 2,
        versions=torch.where(mask, 0, -1),
        token_rewards=torch.zeros(len(LENGTHS), width),
        rewards=torch.tensor(REWARDS),
        components=torch.zeros(len(LENGTHS), 0),
        old_logps=logps,
        ref_logps=logps - 0.1 * mask,
        advantages=advantages,
        teacher_top_ids=torch.arange(3, 6).expand(*mask.shape, 3),
        teacher_top_logps=torch.randn(*mask.shape, 4, generator=generator).log_softmax(-1),
    )
    return whole.rows(torch.tensor(rows, dtype=torch.long))


def gradient(run: TrainContext, rows: list[int], loss: str = "ClipLoss") -> torch.Tensor:
    """Return the gradient that the optimizer sees, all parameters in one vector."""
    run.recipe.loss = LOSSES[loss]
    seen: list[torch.Tensor] = []

    def look(*_: object) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for p in run.models.actor.parameters()]))

    handle = run.models.policy.optimizer.optimizer.register_step_pre_hook(look)
    batch = TrainBatch.of(example(rows))
    noise = embedding_noise(batch, run.recipe, "1/0")
    update_policy(run, MiniBatch(batch, list(range(len(batch))), noise=noise), Meter())
    handle.remove()
    return seen[0]


def make_run(devices: int, *options: str) -> TrainContext:
    """Make a run that never changes its weights: a learning rate far below what float32 shows."""
    strategy = ("--fabric.strategy=ddp",) if devices > 1 else ()
    parsed = parse(
        "fit",
        [
            "--recipe=quickstart", "--kl_loss.coef=0.1", "--train.entropy_coef=0.01", "--train.lr=1e-30",
            "--train.max_grad_norm=1e9", "--train.minibatches=2", f"--fabric.devices={devices}", *strategy, *options,
        ],
    )  # fmt: skip
    fabric = make_fabric(parsed.recipe.fabric)
    fabric.launch()
    return prepare_training(parsed.recipe, load_data(parsed.recipe), fabric)


if __name__ == "__main__":
    run = make_run(int(sys.argv[1]))
    gradients = []
    for division in sys.argv[4:]:
        mine = [row for row, rank in enumerate(division.split(",")) if int(rank) == run.ranks.fabric.global_rank]
        gradients += [gradient(run, mine, loss) for loss in sys.argv[3].split(",")]
    if run.ranks.fabric.is_global_zero:
        torch.save(gradients, sys.argv[2])
    run.service.close()
