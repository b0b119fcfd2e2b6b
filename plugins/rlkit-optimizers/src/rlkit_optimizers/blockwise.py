"""AdamW over blocks of 256 numbers, whose moments have 8 bits and one scale for each block."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlkit_optimizers.rounding import stochastically_rounded

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that is not used here

from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise  # noqa: E402

BLOCK = 256
"""Numbers of a block; bitsandbytes' kernels know no other size."""

SMALLEST = 4096
"""Numbers of the smallest tensor whose moments have 8 bits, as in bitsandbytes' own optimizers."""

CHUNK = 2**24
"""Numbers that are updated at once: in float32 they take 64 MiB."""


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW with moments in 8 bits; weights in bfloat16 are rounded stochastically.

    The random bits are a function of the weight's index and its number of steps, so a resumed run has the same.

    Args:
        groups: Parameter groups with `params` and `weight_decay`.
        lr: Learning rate.
        betas: Decays of the first and the second moment.
        eps: Number added to the root of the second moment.

    Raises:
        ValueError: A weight is neither float32 nor bfloat16.
    """

    def __init__(self, groups: Sequence[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        dtypes = {weight.dtype for weight in weights} - {torch.float32, torch.bfloat16}
        if dtypes:
            raise ValueError(f"weights are {dtypes.pop()}, expected float32 or bfloat16")
        self._indices = {weight: index for index, weight in enumerate(weights)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch itself would cast codes and scales to the dtype of their weight."""
        super().load_state_dict(state_dict)
        for weight, index in self._indices.items():
            state = self.state[weight]  # where torch has moved it
            saved = state_dict["state"].get(index, {})
            state.update({key: value.to(state[key].device, copy=True) for key, value in saved.items()})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient.

        Raises:
            ValueError: A closure is given.
        """
        if closure is not None:
            raise ValueError("BlockwiseAdamW.step takes no closure")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(_zeros(weight))
        key = f"{self._indices[weight]}/{int(state['step'])}".encode()  # hashed: a CPU reads 32 bits of a seed
        generator = torch.Generator(weight.device)
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))
        if "blocks_avg" not in state:
            _update_exactly(weight, state, group, generator)
            return
        state["step"] += 1
        numbers, gradient = weight.view(-1), weight.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, weight.numel(), CHUNK):
            chunk, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
            wide = numbers[chunk].float()  # the weights themselves if they are float32
            optimizer_update_8bit_blockwise(
                "adam",
                gradient[chunk].float(),
                wide,
                state["exp_avg"].view(-1)[chunk],
                state["exp_avg_sq"].view(-1)[chunk],
                *group["betas"],
                0.0,  # beta3 and alpha are AdEMAMix's
                0.0,
                group["eps"],
                int(state["step"]),
                group["lr"],
                code_table(True, weight.device),
                code_table(False, weight.device),
                state["blocks_avg"][blocks],
                state["blocks_avg_sq"][blocks],
                group["weight_decay"],
            )
            _write(wide, numbers[chunk], generator)


def _zeros(weight: Tensor) -> dict[str, Tensor]:
    """Return the state before the first step."""
    step = torch.zeros((), dtype=torch.float32)
    if weight.numel() < SMALLEST or not weight.is_contiguous():
        moments = torch.zeros_like(weight, dtype=torch.float32)
        return {"step": step, "exp_avg": moments, "exp_avg_sq": moments.clone()}
    codes = torch.zeros_like(weight, dtype=torch.uint8)
    scales = torch.zeros(-(-weight.numel() // BLOCK), device=weight.device)
    return {
        "step": step,
        "exp_avg": codes,
        "exp_avg_sq": codes.clone(),
        "blocks_avg": scales,
        "blocks_avg_sq": scales.clone(),
    }


@cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values, from -1 or 0 to 1, that codes stand for."""
    codes: Tensor = create_dynamic_map(signed=signed)
    return codes.to(device)


def _update_exactly(
    weight: Tensor, state: dict[str, Tensor], group: dict[str, Any], generator: torch.Generator
) -> None:
    """Update a small tensor, whose moments are float32."""
    assert weight.grad is not None
    wide = weight.detach().float()
    adamw(
        [wide],
        [weight.grad.float()],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    _write(wide, weight, generator)


def _write(wide: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Write updated numbers to their weight, unless they are its own."""
    if weight.dtype != wide.dtype:
        weight.copy_(stochastically_rounded(wide, generator))
