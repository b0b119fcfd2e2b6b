"""TRL's loss of generalised distillation and its gradient on fixed logits: `python -m tests.bench.gkd`.

Prints what `losses/test_distillation_loss.py` holds `Distillation` to, by TRL 1.16 (the extra `bench`): for each
beta the mean divergence of three tokens over a vocabulary of five, and its gradient by the policy's logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def logits() -> tuple[Tensor, Tensor]:
    """Return the policy's and the teacher's, each [3,5]."""
    places = torch.arange(15.0).view(3, 5)
    return 2 * torch.sin(places), 2 * torch.cos(1.7 * places)


def main() -> None:
    from trl.experimental.gkd import GKDTrainer

    for beta in BETAS:
        policy, teacher = logits()
        policy.requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(policy[None], teacher[None], beta=beta, temperature=0.8, reduction="sum")
        loss = loss / len(policy)
        loss.backward()
        assert policy.grad is not None
        print(f"{beta}: ({loss.item():.8f}, {[round(x, 8) for x in policy.grad.flatten().tolist()]}),")


if __name__ == "__main__":
    main()
