"""How the cost of rlkit's step grows: `python -m tests.bench.scale [group] [length] [size] [vocabulary]`.

One of the samples of a prompt, the bound of the length, the parameters and the vocabulary grows, and the others stay at
8 samples, 64 tokens, 1M parameters and 512 tokens; 16 prompts, and once more for lengths with 64, so that twice as many
samples are wanted as TorchEngine holds rows. Each point is a process of its own; its first step is left out. The
exponent is the slope of the logarithm of a sampled token's CPU seconds (for groups and lengths: 0 is linear growth of
the step) from each point to the next.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.step import PROMPTS, SAMPLES, Side, summarize
from tests.bench.work import SIZES, save_model

STEPS = 4
VOCABULARY = 512
AXES: dict[str, list[Any]] = {
    "group": [2, 4, 8, 16, 32],
    "length": [64, 256, 1024],
    "refilled": [64, 256, 1024],
    "size": list(SIZES),
    "vocabulary": [512, 8192, 32_768, 151_936],
}


def point(axis: str, value: Any) -> tuple[dict[str, Any], str, int]:
    """Return the row of `step.py`, the model's size and its vocabulary."""
    size, vocabulary = (value if axis == "size" else "1m"), (value if axis == "vocabulary" else VOCABULARY)
    row = {
        "size": size,
        "length": value if axis in {"length", "refilled"} else 64,
        "samples": value if axis == "group" else SAMPLES,
        "prompts": 4 * PROMPTS if axis == "refilled" else PROMPTS,
    }
    return row, size, vocabulary


def measure(axis: str, folder: Path) -> None:
    """Print a line for each point of an axis."""
    last: tuple[float, float] | None = None
    for value in AXES[axis]:
        row, size, vocabulary = point(axis, value)
        model = folder / f"{size}-{vocabulary}"
        if not model.exists():
            save_model(model, size, vocabulary)
        side = Side("rlkit", [f"--steps={STEPS}", f"--point={json.dumps(row)}", f"--model={model}"])
        try:
            steps = [side.step() for _ in range(STEPS)]
        finally:
            side.close()
        found = summarize(steps[1:])
        cost = 1e3 * found["cpu"] / (found["length"] * row["prompts"] * row["samples"])
        place = _parameters(model) if axis == "size" else float(value)
        slope = "" if last is None else f", exponent {math.log(cost / last[1]) / math.log(place / last[0]):.2f}"
        last = (place, cost)
        print(
            f"{axis} {value}: {found['cpu']:.2f} s a step, +{found['peak']:.0f} MB, length {found['length']:.0f}, "
            f"{cost:.3f} ms a token{slope} (sampling {found['sample']:.2f}, update {found['update']:.2f})",
            flush=True,
        )


def _parameters(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", default=list(AXES), metavar="AXIS", help=", ".join(AXES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for axis in given.axes:
            measure(axis, Path(folder))


if __name__ == "__main__":
    main()
