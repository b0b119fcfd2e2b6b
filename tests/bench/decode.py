"""What a decode step takes: `python -m tests.bench.decode`, on a GPU if there is one.

256 rows of a random model of Qwen2.5-0.5B's shape (4 of a tiny one on a CPU), in bfloat16: through the model's modules,
with cuDNN's attention allowed and not, through fused weights, and on a GPU through recorded steps. The last line has
the milliseconds a step of each.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rlkit_engine_torch.decoder import AnyDecoder, Decoder
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.graphs import GraphDecoder
from rlkit_engine_torch.sampling import Truncation, choose

from rlkit.testing import random_model
from tests.gpu.trial import SHAPE

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROWS, STEPS, WARM = (256, 60, 20) if GPU else (4, 6, 2)


def half() -> Any:
    return torch.autocast(DEVICE, torch.bfloat16)


def milliseconds(decoder: AnyDecoder) -> float:
    """Return what a step takes once the first ones are made, from tokens to tokens."""
    logits = decoder.admit([list(range(3, 123))], [ROWS])
    one, zero = torch.ones(ROWS, device=DEVICE), torch.zeros(ROWS, dtype=torch.long, device=DEVICE)
    everything = Truncation(one, zero, zero.float())
    start = 0.0
    for step in range(STEPS):
        if step == WARM:
            start = time.perf_counter()  # reading the tokens has waited for the device
        tokens, _, _ = choose(logits, torch.rand(ROWS, device=DEVICE, dtype=torch.float64), one, everything)
        tokens.tolist()
        logits = decoder.step(tokens)
    logits.sum().item()
    return (time.perf_counter() - start) / (STEPS - WARM) * 1e3


def main() -> None:
    model = random_model("qwen2", **(SHAPE if GPU else {})).to(DEVICE)
    ways: list[tuple[str, Any, bool]] = [
        ("modules with cuDNN", Decoder, True), ("modules", Decoder, False), ("fused", FusedDecoder, False)
    ]  # fmt: skip
    found = []
    for name, decoder, cudnn in [*ways, ("recorded", GraphDecoder, False)] if GPU else ways:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        made = decoder(model, half)
        found.append(f"{name} {milliseconds(made):.1f}")
        print(found[-1], flush=True)
        made.release()
        made.refresh()
    print("ms a step: " + ", ".join(found))


if __name__ == "__main__":
    main()
