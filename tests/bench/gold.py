"""TRL's loss of distributions over two vocabularies, on fixed logits: `python -m tests.bench.gold`.

Prints what `losses/test_distillation_loss.py` holds `Distillation` to, by TRL 1.16 (the extra `bench`): for each beta
the divergence over shared tokens, the ULD loss of the others, and the gradients of both by the policy's logits, of
three tokens. Vocabularies have five and six tokens, of which three are shared.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

BETAS = (0.0, 0.5, 1.0)
SHARED, TEACHER_SHARED = [0, 2, 3], [5, 1, 2]
"""The policy's ids of shared tokens, and the teacher's."""


def logits() -> tuple[Tensor, Tensor]:
    """Return the policy's [3,5] and the teacher's [3,6]."""
    return 2 * torch.sin(torch.arange(15.0)).view(3, 5), 2 * torch.cos(1.7 * torch.arange(18.0)).view(3, 6)


def main() -> None:
    from trl.experimental.gold import GOLDConfig
    from trl.experimental.gold.gold_trainer import ULDLoss

    names = (["a", "mine", "b", "c", "mine too"], ["theirs", "b", "c", "theirs too", "theirs as well", "a"])
    vocabularies = [{name: i for i, name in enumerate(own)} for own in names]
    tokenizers = [SimpleNamespace(get_vocab=vocabulary.copy) for vocabulary in vocabularies]
    for beta in BETAS:
        config = GOLDConfig(output_dir="unused", uld_use_hybrid_loss=True, beta=beta, bf16=False, use_cpu=True)
        loss = ULDLoss(config, *tokenizers)
        policy, teacher = logits()
        policy.requires_grad_()
        loss._compute_hybrid_uld_loss(policy.softmax(-1), teacher.softmax(-1))
        values = []
        for part in (loss.last_matched_loss, loss.last_unmatched_loss):
            [gradient] = torch.autograd.grad(part, policy, retain_graph=True)
            values.append((round(part.item(), 8), [round(x, 8) for x in gradient.flatten().tolist()]))
        print(f"{beta}: {values},")


if __name__ == "__main__":
    main()
