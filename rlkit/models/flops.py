"""The floating-point operations of training, and the peak rates of devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from rlkit.distributed.fsdp2 import blocks

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

PEAKS = {
    r"\bGB200\b": (80.0, 2500.0), r"\bB200\b": (75.0, 2250.0), r"\bGH200\b": (67.0, 989.4),
    r"\bH200 NVL\b": (60.0, 835.5), r"\bH200\b": (66.9, 989.4), r"\bH100 NVL\b": (60.0, 835.5),
    r"\bH100 PCIe\b": (51.2, 756.0), r"\bH[18]00\b": (66.9, 989.4), r"\bH20\b": (44.0, 148.0),
    r"\bA[18]00\b": (19.5, 311.9), r"\bL40S\b": (91.6, 362.1), r"\bL40\b": (90.5, 181.0), r"\bL4\b": (30.3, 121.0),
    r"\bA40\b": (37.4, 149.7), r"\bA10\b": (31.2, 125.0), r"\bRTX 6000 Ada\b": (91.1, 364.2),
    r"\bRTX A6000\b": (38.7, 154.8), r"\bRTX 3090$": (35.6, 71.0), r"\bRTX 4090$": (82.6, 165.2),
    r"\bRTX 5090$": (104.8, 209.5),
}  # fmt: skip
"""TFLOP/s of GPUs by patterns of their names; the first match counts. Each has the rate in float32, and that of dense
bfloat16 products with float32 accumulation. Source: NVIDIA's data sheets and whitepapers; Lightning's table lists the
rates of sparse products for some of them.
"""


def peak_flops(device: str, half: bool) -> float | None:
    """Return a GPU's peak operations per second, in bfloat16 or float32; None for an unknown GPU.

    Args:
        device: The name of the GPU, as `torch.cuda.get_device_name` returns it.
        half: Whether products are in bfloat16.
    """
    if "MIG" in device:
        return None
    matches = (peaks for pattern, peaks in PEAKS.items() if re.search(pattern, device))
    peaks = next(matches, None)
    return None if peaks is None else peaks[half] * 1e12


class LearningWork(NamedTuple):
    """The floating-point operations of a forward and a backward pass.

    For each weight of the blocks' matrices, a token takes 2 operations in the forward pass, 2 for the gradient of the
    input, and 2 for the gradient of the weight if it is trained. The output layer takes the same for each token that
    the policy chose. In each layer, a pair of tokens that attend takes 4 operations per channel of the heads forward
    and 8 backward (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, halved since attention is causal). Each row
    counts in full, even if a shared prompt is computed once, and recomputation does not count.

    Args:
        token: Of a token in the matrices of the blocks.
        chosen: Of a token that the policy chose, in the output layer.
        pair: Of a pair of tokens that attend.
    """

    token: int
    chosen: int
    pair: int

    @classmethod
    def of(cls, model: CausalLM) -> LearningWork | None:
        """Return those of a decoder, without the wrapper of adapters; None for a mixture of experts."""
        config = model.config.get_text_config()
        matrices = [weight for block in blocks(model) for weight in block.parameters() if weight.dim() > 1]
        if any(weight.dim() > 2 for weight in matrices):
            return None
        head = model.get_output_embeddings()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum(map(_operations_per_token, matrices)),
            0 if head is None else _operations_per_token(head.weight),
            12 * config.num_hidden_layers * config.num_attention_heads * int(size),
        )

    def flops(self, lengths: Tensor, chosen: int) -> float:
        """Return the operations for rows.

        Args:
            lengths: [B] tokens of each row.
            chosen: Number of tokens that the policy chose, in all rows.
        """
        pairs = float(lengths.double().square().sum()) / 2
        return float(lengths.sum()) * self.token + chosen * self.chosen + pairs * self.pair


def _operations_per_token(weight: Tensor) -> int:
    count = weight.numel() * (1 if weight.is_floating_point() else 2)  # a byte has two weights in 4 bits
    return count * (6 if weight.requires_grad else 4)
