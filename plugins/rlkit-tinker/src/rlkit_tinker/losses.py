"""Tinker's losses: sums over tokens of a datum, which nothing divides; log-probs are those of `target_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.base.errors import show
from rlkit_tinker.types import Datum, RequestFailedError

Inputs = Mapping[str, Tensor]
"""The arrays of a datum, each in the shape of its targets."""
Config = Mapping[str, float]
Loss = Callable[[Tensor, Inputs, Config], Tensor]
"""A function from log-probs, inputs and options to a scalar."""


def cross_entropy(logps: Tensor, inputs: Inputs, _: Config) -> Tensor:
    """Return -sum(w lp); weights may be negative, and targets [N,K] have one for each."""
    return -(inputs["weights"] * logps).sum()


def importance_sampling(logps: Tensor, inputs: Inputs, _: Config) -> Tensor:
    """Return -sum(r A) with r = exp(lp - q)."""
    return -((logps - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(logps: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -sum(min(r A, clip(r) A)) (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    return _clipped((logps - inputs["logprobs"]).exp(), inputs["advantages"], config)


def cispo(logps: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -sum(sg(clip(r)) lp A) (MiniMax 2025, arXiv:2506.13585, eq. 4)."""
    ratio = (logps - inputs["logprobs"]).exp().detach()
    return -(ratio.clamp(*_thresholds(config)) * logps * inputs["advantages"]).sum()


def dro(logps: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -sum(lp A - beta/2 (lp - q)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    penalty = config["beta"] / 2 * (logps - inputs["logprobs"]).square()
    return -(logps * inputs["advantages"] - penalty).sum()


def gspo(logps: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return PPO's sum with the ratio of the sequence, and each token's gradient (Zheng et al. 2025, arXiv:2507.18071).

    With the mean over `sequence_ratio_mask`, s = exp(mean(sg(lp) - q)) and r_t = s exp(lp - sg(lp)).
    """
    mask, fixed = inputs["sequence_ratio_mask"], logps.detach()
    mean = ((fixed - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    return _clipped(mean.exp() * (logps - fixed).exp(), inputs["advantages"], config)


def _clipped(ratio: Tensor, advantages: Tensor, config: Config) -> Tensor:
    clipped = ratio.clamp(*_thresholds(config))
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def _thresholds(config: Config) -> tuple[float, float]:
    return config["clip_low_threshold"], config["clip_high_threshold"]


@dataclass(frozen=True)
class LossFn:
    """A loss with what it reads.

    Args:
        function: The loss.
        inputs: The arrays that a datum must have besides `target_tokens`.
        defaults: Options with their defaults; None for those that must be given, since Tinker's are not published.
    """

    function: Loss
    inputs: tuple[str, ...]
    defaults: Mapping[str, float | None]


RATIO = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": LossFn(cross_entropy, ("weights",), {}),
    "importance_sampling": LossFn(importance_sampling, RATIO, {}),
    "ppo": LossFn(ppo, RATIO, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": LossFn(cispo, RATIO, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": LossFn(dro, RATIO, {"beta": None}),
    "gspo": LossFn(
        gspo, (*RATIO, "sequence_ratio_mask"), {"clip_low_threshold": None, "clip_high_threshold": None}
    ),
}  # fmt: skip


def loss_named(name: str) -> LossFn:
    """Return a loss by its name.

    Raises:
        RequestFailedError: There is no such loss.
    """
    if name == "stable_reinforce":
        raise RequestFailedError(
            "loss_fn is 'stable_reinforce', whose objective is not published; choose another, such as "
            "loss_fn=importance_sampling, cispo or gspo"
        )
    if not isinstance(name, str) or name not in LOSSES:
        raise RequestFailedError(f"loss_fn is {show(name)}, expected one of {', '.join(LOSSES)}")
    return LOSSES[name]


def complete_config(name: str, config: Mapping[str, float] | None) -> dict[str, float]:
    """Return the options of a loss, with defaults for those that are not given.

    Raises:
        RequestFailedError: An option is unknown, missing or no finite number.
    """
    defaults = loss_named(name).defaults
    for key, value in (config or {}).items():
        if key not in defaults:
            expected = ", ".join(defaults) or "none"
            raise RequestFailedError(f"loss_fn_config of {name} has {show(key)}; its options: {expected}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not torch.tensor(value).isfinite():
            raise RequestFailedError(f"loss_fn_config of {name} has {key}={show(value)}, expected a finite number")
    complete = {**defaults, **(config or {})}
    missing = [key for key, value in complete.items() if value is None]
    if missing:
        raise RequestFailedError(
            f"{name} needs {', '.join(missing)} in loss_fn_config: Tinker's default is not published; give a number"
        )
    return {key: float(value) for key, value in complete.items() if value is not None}


def read_inputs(datum: Datum, loss: LossFn) -> dict[str, Tensor]:
    """Return the arrays of a datum that a loss reads.

    Raises:
        RequestFailedError: An array is missing, has another shape than the targets, or a number that is not finite.
    """
    read = {}
    shape = datum.loss_fn_inputs["target_tokens"].shape
    for name in loss.inputs:
        if name not in datum.loss_fn_inputs:
            names = ", ".join(datum.loss_fn_inputs) or "nothing"
            raise RequestFailedError(f"a datum has {names} in loss_fn_inputs, but the loss reads {name} too; add it")
        array = datum.loss_fn_inputs[name].to_torch().float()
        if list(array.shape) != shape:
            raise RequestFailedError(f"{name} of a datum has the shape {list(array.shape)}, expected {shape}")
        if not array.isfinite().all():
            number = array[~array.isfinite()][0]
            raise RequestFailedError(f"{name} of a datum has the number {number}, expected finite ones")
        read[name] = array
    return read
