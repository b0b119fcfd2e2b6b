"""How many programs `CodeReward` grades in a second: `python -m tests.bench.programs`.

64 completions of 10 tests each, as pairs of input and output, as calls of a function, and as assertions, all passing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from dataclasses import replace

from rlkit.rewards import CodeReward
from rlkit.testing import example_trajectory

COMPLETIONS, TESTS = 64, 10
PAIRS = {"inputs": [str(n) for n in range(TESTS)], "outputs": [str(2 * n) for n in range(TESTS)]}
FORMS = {
    "input and output": ("print(2 * int(input()))", PAIRS),
    "calls": ("def double(n):\n    return 2 * n", PAIRS | {"fn_name": "double"}),
    "assertions": ("def double(n):\n    return 2 * n", [f"assert double({n}) == {2 * n}" for n in range(TESTS)]),
}


async def measure(name: str, program: str, tests: object) -> None:
    """Grade the completions at once; print the time of one."""
    reward = CodeReward(allow_code=True)
    reward.bind(None)  # type: ignore[arg-type]
    trajectories = [example_trajectory(f"```python\n{program}\n```") for _ in range(COMPLETIONS)]
    trajectories[0].prompt = replace(trajectories[0].prompt, answer=json.dumps(tests))
    start, before = time.perf_counter(), cpu()
    scores = await reward.score(trajectories)
    seconds = time.perf_counter() - start
    assert all(score.reward == 1 for score in scores), scores
    each = f"{1000 * seconds / COMPLETIONS:.0f} ms, {1000 * (cpu() - before) / COMPLETIONS:.0f} ms of CPU"
    print(f"{name}: {COMPLETIONS / seconds:.1f} completions a second on {os.cpu_count()} CPUs; {each} each")


def cpu() -> float:
    """Return the CPU seconds of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    for form, (program, tests) in FORMS.items():
        asyncio.run(measure(form, program, tests))
