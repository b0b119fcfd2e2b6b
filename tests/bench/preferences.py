"""TRL's loss of preferences and its gradient on a fixed batch: `python -m tests.bench.preferences`.

Prints what `losses/test_preference_losses.py` holds `DPO` to: for each objective of TRL 1.16 (the extra `bench`)
the loss, the gradient's norm and its products with fixed directions. The policy is the shipped tiny model with
noise in its weights, the reference that model.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from rlkit.models.load import load_policy
from rlkit.recipe import Model

FIRST, SECOND = [4, 5, 6, 7], [13, 14, 15]
ROWS = ((FIRST, [8, 9, 10, 11, 2]), (FIRST, [8, 12, 2]), (SECOND, [16, 2]), (SECOND, [17, 18, 19, 2]))
"""Prompts and answers: the better of two answers, then the worse."""
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"loss_type": "sigmoid", "beta": 0.1},
    {"loss_type": "sigmoid", "beta": 2.0},
    {"loss_type": "sigmoid_norm", "beta": 1.0},
    {"loss_type": "ipo", "beta": 0.5},
    {"loss_type": "hinge", "beta": 0.5},
)


def policies() -> tuple[Any, Any]:
    """Return the policy and the reference."""
    policy, reference = load_policy(Model("tiny")), load_policy(Model("tiny"), frozen=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(policy.named_parameters()):
            weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    return policy, reference


def summary(policy: Any) -> list[float]:
    """Return the norm of the gradient, and its products with fixed random directions."""
    gradient = torch.cat([weight.grad.flatten() for _, weight in sorted(policy.named_parameters())]).double()
    directions = torch.randn(4, len(gradient), generator=torch.Generator().manual_seed(1)).double()
    return [float(gradient.norm()), *(directions @ gradient).tolist()]


def main() -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from tests.bench.step import ROOT

    length = max(len(prompt) + len(answer) for prompt, answer in ROWS)
    order = [*ROWS[::2], *ROWS[1::2]]  # TRL has all better rows first

    def padded(of: Any) -> torch.Tensor:
        rows = [of(prompt, answer) for prompt, answer in order]
        return torch.tensor([row + [0] * (length - len(row)) for row in rows])

    batch = {
        "input_ids": padded(lambda prompt, answer: prompt + answer),
        "attention_mask": padded(lambda prompt, answer: [1] * len(prompt + answer)),
        "completion_mask": padded(lambda prompt, answer: [0] * len(prompt) + [1] * len(answer)),
    }
    rows = Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    for options in OBJECTIVES:
        policy, reference = policies()
        with tempfile.TemporaryDirectory() as folder:
            config = DPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **options
            )  # fmt: skip
            tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "rlkit" / "models" / "tiny"))
            trainer = DPOTrainer(
                model=policy, ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer
            )
            loss = trainer._compute_loss(trainer.model, batch, False)
            loss.backward()
        print(options, [loss.item(), *summary(policy)])


if __name__ == "__main__":
    main()
