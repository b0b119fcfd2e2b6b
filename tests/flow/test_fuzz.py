"""Malformed recipes, overrides and data files: none may end in a traceback, hang or be accepted."""

from __future__ import annotations

import fnmatch
from collections import Counter
from itertools import islice

import pytest

from tests.flow.fuzz.arguments import argument_cases
from tests.flow.fuzz.bases import bases
from tests.flow.fuzz.cases import Case
from tests.flow.fuzz.choose import choose, every_case
from tests.flow.fuzz.judge import run_cases
from tests.flow.fuzz.values import statements

CASES = 300


def test_a_few_command_lines_are_refused() -> None:
    cases = [*islice(argument_cases(), 0, 60, 12)]
    assert run_cases(cases) == (Counter(clear=5), [])


def test_what_is_stated_as_legal_is_about_options_and_columns() -> None:
    every = bases().values()
    options = {option for base in every for option, _, _ in base.options()}
    rows = {f"{file} {column}" for base in every for file, columns in base.columns().items() for column in columns}
    for kind, patterns in statements().items():
        for pattern in patterns:
            assert fnmatch.filter(rows if kind == "columns" else options, pattern), f"{kind}: {pattern}"


@pytest.mark.slow
def test_what_every_case_begins_with_is_accepted() -> None:
    cases = [Case("base", name, "", base.write, "it is what the others spoil") for name, base in bases().items()]
    assert run_cases(cases) == (Counter(accepted=len(cases)), [])


@pytest.mark.slow
def test_what_is_malformed_is_refused_clearly_and_in_time() -> None:
    every = every_case(0)
    cases = choose(every, CASES, 0)
    assert {case.kind for case in cases} == {case.kind for case in every}
    assert {case.base for case in cases} >= {case.base for case in every if case.kind != "noise"}
    outcomes, wrong = run_cases(cases)
    assert not wrong
    assert outcomes["clear"] > CASES * 2 / 3
