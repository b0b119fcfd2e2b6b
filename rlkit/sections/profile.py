"""Which steps of a run are profiled."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.base.ranges import PositiveInt


@dataclass
class Profile:
    """Traces of single steps, in `profile/` of the run folder; null for none.

    Each rank writes `step-00003.trace.json.gz` (open it at ui.perfetto.dev), `step-00003.txt` (operators by time)
    and, on a GPU, `step-00003.memory.pickle` (open it at pytorch.org/memory_viz). Profiled steps are slower; their
    results are the same.

    Args:
        steps: The steps to profile, from 1.
    """

    steps: list[PositiveInt]
