"""Runs many cases and prints a table: `python -m tests.flow.fuzz --cases 1500 --seed 0`."""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that no folder has is not looked for elsewhere

from tests.flow.fuzz.choose import choose, every_case
from tests.flow.fuzz.judge import OUTCOMES, run_cases


def main() -> int:
    """Return 1 if something was not refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1500, help="0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a text that the cases' names have")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    cases = [case for case in every_case(options.seed) if options.only in str(case)]
    outcomes, wrong = run_cases(choose(cases, options.cases, options.seed), options.verbose)
    print("\n".join(wrong))
    print(f"{outcomes.total()} cases, seed {options.seed}")
    for outcome in OUTCOMES:
        print(f"  {outcome:<10} {outcomes[outcome]:5}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
