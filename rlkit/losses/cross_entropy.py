"""Maximum likelihood of the answers: supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.loss import PolicyLoss
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class CrossEntropy(PolicyLoss):
    """-logp of each token of the policy, whatever its reward: supervised fine-tuning on recorded answers.

    With sampled answers and a filter of their rewards it is fine-tuning by rejection sampling (RAFT, arXiv:2304.06767).
    """

    compares: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False
    formula: ClassVar[str] = "-logp"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(-out.logps, {})
