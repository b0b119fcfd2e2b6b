"""Maximum likelihood of the answers: supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from rlkit.base.ranges import NUMBER, NonNegativeFloat
from rlkit.interfaces.loss import ForwardOptions, Inputs, TokenLoss
from rlkit.types import LossOutput, PolicyOutput, Reads, TrainBatch


class CrossEntropy(TokenLoss):
    """-logp of each token of the policy, whatever its reward: supervised fine-tuning on recorded answers.

    With sampled answers and a filter of their rewards it is fine-tuning by rejection sampling (RAFT, arXiv:2304.06767).

    Args:
        label_smoothing: e in (1 - e) (-logp) + e (mean of -logp over the vocabulary), as in `torch`'s `cross_entropy`.
        neftune_alpha: Scale of noise on the input embeddings in passes that are learned from (NEFTune, Jain et al.
            2023, arXiv:2310.05914): uniform within +- alpha / sqrt(tokens of the row * width). Usual: 5.
    """

    inputs: ClassVar[Inputs] = Inputs.NOTHING

    def __init__(
        self, label_smoothing: Annotated[float, Ge(0), Lt(1), NUMBER] = 0.0, neftune_alpha: NonNegativeFloat = 0.0
    ) -> None:
        self.label_smoothing = label_smoothing
        self.neftune_alpha = neftune_alpha
        self.forward = ForwardOptions(Reads(mean=label_smoothing > 0), embedding_noise=neftune_alpha)

    def explain(self) -> str:
        objective, e = "-logp", self.label_smoothing
        if e:
            objective = f"{1 - e:g} (-logp) + {e:g} (mean of -logp over the vocabulary)"
        if self.neftune_alpha:
            objective += f", with noise up to {self.neftune_alpha:g} / sqrt(tokens * width) on the embeddings"
        return objective

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        loss = -out.logps
        if out.mean_logps is not None:
            loss = (1 - self.label_smoothing) * loss - self.label_smoothing * out.mean_logps
        return LossOutput(loss, {})
