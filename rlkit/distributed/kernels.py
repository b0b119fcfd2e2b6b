"""The kernels of torch that a training or sampling process uses."""

from __future__ import annotations

import torch


def choose_kernels() -> None:
    """Disable cuDNN attention, and compute float32 products in float32 instead of TF32.

    cuDNN plans a kernel for each new number of keys, which costs each decode step and each micro-batch 20 to 40 ms.
    TF32 rounds factors to 10 bits, which makes rotary angles of late positions and log-probs wrong in the third digit;
    under `bf16-mixed` the large products are in bfloat16 anyway. TF32 is disabled here because some containers enable
    it by an environment variable.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
