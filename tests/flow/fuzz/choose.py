"""Chooses cases: some of each kind and of each base."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from tests.flow.fuzz.arguments import argument_cases, name_cases
from tests.flow.fuzz.cases import Case
from tests.flow.fuzz.options import key_cases, value_cases
from tests.flow.fuzz.rows import row_cases
from tests.flow.fuzz.texts import noise_cases, text_cases

NOISE = 150


def every_case(seed: int) -> list[Case]:
    """Return all cases; the noise is the seed's."""
    noise = noise_cases(NOISE, random.Random(seed))
    return [*argument_cases(), *name_cases(), *text_cases(), *row_cases(), *key_cases(), *value_cases(), *noise]


def choose(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Return so many cases by the seed, all if count is 0: of each kind and base in turn, while there are any."""
    rng = random.Random(seed)
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.kind, "" if case.kind == "noise" else case.base].append(case)
    for group in groups.values():
        rng.shuffle(group)
    chosen: list[Case] = []
    while groups and (not count or len(chosen) < count):
        for key in list(groups):
            chosen.append(groups[key].pop())
            if not groups[key]:
                del groups[key]
    return chosen[: count or None]
