"""Direct preference optimization's loss."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt
from torch import Tensor, nn

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER, PositiveFloat
from rlkit.interfaces.loss import Inputs, PairLoss
from rlkit.ops.masked import masked_sum
from rlkit.types import PolicyOutput, TrainBatch

Smoothing = Annotated[float, Ge(0), Lt(0.5), NUMBER]
"""The probability that a preference is the wrong way round."""


class DPO(PairLoss):
    """-log sigmoid(beta (d of the better row - d of the worse)), d = log pi - log pi_ref summed over a row's tokens.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; with `label_smoothing` e the conservative loss
    (1 - e) L(better, worse) + e L(worse, better) of Mitchell 2023. `hinge` is max(0, 1 - beta (d - d)) of SLiC (Zhao et
    al. 2023, arXiv:2305.10425) with a reference; `ipo` is (d - d - 1 / (2 beta))^2 of Azar et al. 2023
    (arXiv:2310.12036, equation 17), d divided by the row's tokens as its authors do and TRL. Log-probs are at the
    temperature of the rollout.

    Args:
        beta: How closely the policy is held to the reference.
        kind: `sigmoid`, `hinge` or `ipo`.
        label_smoothing: The probability that a preference is the wrong way round; with `sigmoid` only.
        length_normalized: Divide d by the row's tokens; with `ipo` always.
    """

    inputs: ClassVar[Inputs] = PairLoss.inputs | Inputs.REFERENCE

    def __init__(
        self,
        beta: PositiveFloat = 0.1,
        kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
        *,
        label_smoothing: Smoothing = 0.0,
        length_normalized: bool = False,
    ) -> None:
        if label_smoothing and kind != "sigmoid":
            raise RecipeError(f"DPO has label_smoothing={label_smoothing} with kind={kind!r}, expected kind='sigmoid'")
        self.beta = beta
        self.kind = kind
        self.label_smoothing = label_smoothing
        self.length_normalized = length_normalized or kind == "ipo"

    def explain(self) -> str:
        margin = "(d_better - d_worse)"
        sigmoid = f"-log sigmoid({self.beta} {margin})"
        if self.label_smoothing:
            sigmoid = f"{1 - self.label_smoothing:g} of {sigmoid} + {self.label_smoothing:g} of it for -{margin}"
        objective = {
            "sigmoid": sigmoid,
            "hinge": f"max(0, 1 - {self.beta} {margin})",
            "ipo": f"({margin} - 1 / (2 {self.beta}))^2",
        }[self.kind]
        return f"{objective}, d = {'mean' if self.length_normalized else 'sum'}_t(logp - ref_logp)"

    def scores(self, out: PolicyOutput, batch: TrainBatch) -> Tensor:
        distance = masked_sum(out.logps - batch.required("ref_logps"), batch.mask, -1)
        if self.length_normalized:
            distance = distance / batch.mask.sum(-1).clamp(min=1)
        return self.beta * distance

    def per_pair(self, better: Tensor, worse: Tensor) -> Tensor:
        margin = better - worse
        if self.kind == "hinge":
            return (1 - margin).relu()
        if self.kind == "ipo":
            return ((margin - 0.5) / self.beta) ** 2
        right, wrong = nn.functional.logsigmoid(margin), nn.functional.logsigmoid(-margin)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
