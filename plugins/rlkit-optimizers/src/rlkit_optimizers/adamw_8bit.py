"""AdamW with moments in 8 bits, for weights in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError
from rlkit.base.installed import extra_command
from rlkit.base.ranges import Beta, PositiveFloat
from rlkit.interfaces.optimizer import Optimizer, WeightGroup

if TYPE_CHECKING:
    import torch


class AdamW8bit(Optimizer):
    """AdamW that keeps its moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), by bitsandbytes.

    The state of a weight takes 2 bytes instead of 8. With `fabric.precision: bf16-true` weights and gradients take 2
    bytes each instead of 4: weights are rounded stochastically, so that they follow small updates in the mean (Gupta et
    al. 2015, arXiv:1502.02551). Moments of tensors with fewer than 4,096 numbers stay in float32. Gradients of
    micro-batches add up in the dtype of their weight.

    Args:
        betas: Decays of the first and the second moment.
        eps: Number added to the root of the second moment.

    Raises:
        RecipeError: bitsandbytes is not installed.
    """

    formula = "betas {betas}, eps {eps:g}"
    takes_shards = False
    trains_bfloat16 = True

    def __init__(self, betas: tuple[Beta, Beta] = (0.9, 0.999), eps: PositiveFloat = 1e-8) -> None:
        if find_spec("bitsandbytes") is None:
            raise RecipeError(f"optimizer AdamW8bit needs bitsandbytes: {extra_command('4bit')}")
        self.betas = betas
        self.eps = eps

    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer."""
        from rlkit_optimizers.blockwise import BlockwiseAdamW

        return BlockwiseAdamW([group.options() for group in groups], lr, self.betas, self.eps)
