"""What rows of text cost: `python -m tests.bench.rows [N]` reads N rows with a held-out split, twice.

Each start is a process of its own, with a cache in a temporary folder. Printed are the CPU seconds until both splits
can be used, the memory that they add, and the time of a random prompt.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def child(path: str) -> None:
    """Load both splits, then make prompts of random rows."""
    import torch  # noqa: F401 (part of every command, so that it is no memory of the rows)

    from rlkit.base.garbage import uncollected
    from rlkit.tasks import Jsonl

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with uncollected():
        task = Jsonl(path, validation_split=0.01)
        train, validation = task.rows("train"), task.rows("validation")
    seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    indices = random.Random(1).choices(range(len(train)), k=20_000)
    start = time.process_time()
    for index in indices:
        task.prompt(train[index], index)
    prompt = (time.process_time() - start) / len(indices)
    print(
        f"{len(train):,} and {len(validation):,} rows: {seconds:.1f} CPU s, +{(after - before) / 1024:.0f} MB,", end=" "
    )
    print(f"a random prompt {prompt * 1e6:.0f} us")


def main() -> None:
    """Write sums, and load them in two processes."""
    count, draw = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000, random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.jsonl"
        with path.open("w") as lines:
            for _ in range(count):
                a, b = draw.randrange(10**6), draw.randrange(10**6)
                lines.write(f'{{"prompt": "{a} + {b} =", "answer": "{a + b}"}}\n')
        for _ in range(2):
            words = [sys.executable, "-c", f"from tests.bench.rows import child; child({str(path)!r})"]
            subprocess.run(words, check=True, env={**os.environ, "XDG_CACHE_HOME": folder})


if __name__ == "__main__":
    main()
