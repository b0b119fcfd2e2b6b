"""GPUs that an estimate can be made for, wherever it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlkit.base.errors import RecipeError, show

GIB = 2**30
SIZE = re.compile(r"([0-9]{1,8})(?: ?(?:MiB|MB)| ?(GB|GiB|G))?", re.IGNORECASE)
"""The memory of a GPU: in MiB without a unit."""


@dataclass(frozen=True)
class Gpu:
    """The memory and the peak speeds of a GPU, as its data sheet gives them.

    Args:
        name: Shown name.
        memory: Bytes that a process can allocate.
        half: Operations per second on dense 16-bit products; 0 if unknown.
        single: Operations per second in float32.
        bandwidth: Bytes per second read from memory.
    """

    name: str
    memory: int
    half: float = 0.0
    single: float = 0.0
    bandwidth: float = 0.0


H100 = Gpu("H100", 79 * GIB, 989e12, 67e12, 3.35e12)
GPUS = {
    "h100": H100,
    "h200": Gpu("H200", 139 * GIB, 989e12, 67e12, 4.8e12),
    "a100": Gpu("A100 80GB", 79 * GIB, 312e12, 19.5e12, 2.04e12),
    "l40s": Gpu("L40S", 44 * GIB, 362e12, 91.6e12, 0.864e12),
    "4090": Gpu("RTX 4090", 23 * GIB, 165e12, 82.6e12, 1.008e12),
}


def gpu_named(text: str) -> Gpu:
    """Return the GPU of a name in `GPUS`, or one of a size such as `24GB` or a number of MiB, whose speed is unknown.

    Of a size in GB, a process can allocate 1 GiB less.

    Raises:
        RecipeError: It is neither.
    """
    gpu = GPUS.get(text.lower())
    if gpu is not None:
        return gpu
    size = SIZE.fullmatch(text)
    if size is not None and 0 < int(size[1]) < 2**24:
        number = int(size[1])
        if not size[2] and number >= 1024:
            return Gpu(f"a GPU of {number:,} MiB", number * 2**20)
        if size[2] and number > 1:
            return Gpu(f"a GPU of {number} GB", (number - 1) * GIB)
    raise RecipeError(f"--gpu is {show(text)}, expected {', '.join(GPUS)} or its memory, such as 24GB or 24000 MiB")
