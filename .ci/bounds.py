"""Prints the packages that rlkit needs, for pip: `bounds.py lowest|newest`.

`lowest` are their lower bounds, `newest` their ranges in pyproject.toml.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(requirement: str) -> str:
    """Return a requirement of the lower bound itself; torch keeps its range, see `versions`.

    Raises:
        ValueError: It has no lower bound.
    """
    if requirement.startswith("torch>="):
        return requirement
    match = re.match(r"([\w.-]+(?:\[\w+\])?)>=([\w.]+)", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} has no lower bound, expected one such as 'rich>=13'")
    return f"{match[1]}=={match[2]}"


def main(which: str) -> None:
    requirements = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    for requirement in requirements:
        print(lowest(requirement) if which == "lowest" else requirement)


if __name__ == "__main__":
    main(sys.argv[1])
