"""Which of torch's kernels a process that trains or samples may use."""

from __future__ import annotations

import torch


def choose_kernels() -> None:
    """Leave cuDNN out of attention, and compute float32 products in float32.

    cuDNN plans a kernel for each new length of the keys and keeps the plan, so that each decode step and each
    micro-batch waits 20 to 40 ms for one. TF32 rounds factors to 10 bits, in which rotary angles of late positions and
    log-probs are wrong in the third digit; under `bf16-mixed` the large products are in bfloat16 anyway. It is set
    here because some containers switch it on by an environment variable.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
