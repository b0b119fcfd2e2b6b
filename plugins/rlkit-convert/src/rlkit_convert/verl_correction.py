"""verl's options of the mismatch between engine and trainer: importance weights, rejection, and the bypass of both."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.values import boolean, choice, number, text
from rlkit_convert.verl_runtime import ACTOR

PREFIX = "algorithm.rollout_correction"
REJECTIONS = {
    "token": ("k1", "token"), "sequence": ("k1", "seq_sum"), "geometric": ("k1", "seq_mean"),
    **{f"{level}_{kind}": (kind, level) for kind in ("k1", "k2", "k3")
       for level in ("token", "seq_sum", "seq_mean", "seq_max")},
}  # fmt: skip
"""verl's names of rejections, older ones first, with rlkit's statistic and level."""
BYPASS = "nothing to do: with bypass_mode the loss's own ratio compares with the engine"


def correction(conversion: Conversion) -> None:
    """Set importance weights, which verl caps from above, or ratios to the engine's log-probs; and the rejection."""
    cap, level, threshold = f"{ACTOR}.tis_imp_ratio_cap", f"{PREFIX}.rollout_is", f"{PREFIX}.rollout_is_threshold"
    if _bypasses(conversion):
        conversion.set("train.old_logps", "rollout", f"{PREFIX}.bypass_mode")
        for key in filter(conversion.has, (level, threshold)):
            conversion.note(key, BYPASS)
    else:
        if conversion.get(cap, number, -1.0) > 0:
            conversion.carry("correction.high", cap, number, 2.0)
        if conversion.has(level):
            conversion.carry("correction.level", level, choice({"token": "token", "sequence": "sequence"}), "token")
            conversion.carry("correction.high", threshold, number, 2.0)
    if conversion.has(f"{PREFIX}.rollout_rs"):
        _rejection(conversion)


def _bypasses(conversion: Conversion) -> bool:
    """Check whether ratios are those to the engine's log-probs, in a clipped loss."""
    is_clipped = conversion.get(f"{PREFIX}.loss_type", text, "ppo_clip") == "ppo_clip"
    return is_clipped and conversion.get(f"{PREFIX}.bypass_mode", boolean, False)


def _rejection(conversion: Conversion) -> None:
    """Set the rejection and its bounds: a number, or `LOW_HIGH` of the ratio."""
    key, high_key, low_key = (f"{PREFIX}.rollout_rs{end}" for end in ("", "_threshold", "_threshold_lower"))
    kind = conversion.get(key, choice(REJECTIONS), None)
    try:
        low, high = _bounds(conversion.raw(high_key), conversion.raw(low_key))
    except ValueError:
        conversion.ask(high_key, "expected a number or LOW_HIGH; set rejection.low and rejection.high")
        return
    if kind is None or conversion.is_unknown(high_key, low_key):
        for name in filter(conversion.has, (high_key, low_key)):
            conversion.ask(name, "set rejection.low and rejection.high")
        return
    statistic, level = kind
    conversion.set("rejection.statistic", statistic, key)
    conversion.set("rejection.level", level, key)
    if statistic == "k1" and low is not None:
        conversion.set("rejection.low", low, low_key if conversion.has(low_key) else high_key)
    if high is not None:
        conversion.set("rejection.high", high, high_key)


def _bounds(upper: object, lower: object) -> tuple[float | None, float | None]:
    """Return the bounds of a ratio, each None if verl has its default.

    Raises:
        ValueError: One of them is not a number.
    """
    low, separator, high = str(upper).partition("_")
    if separator:
        return number(low), number(high)
    return None if lower is None else number(lower), None if upper is None else number(upper)
