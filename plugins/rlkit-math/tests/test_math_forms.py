"""References and answers of every form: which are right, which are refused, and what always holds."""

from __future__ import annotations

import re
import time
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from rlkit_math.answers import UngradableError, equal, reference_of

from rlkit.rewards import MathReward
from rlkit.testing import example_trajectory
from tests.unit.answer_forms import Case, cases, references, refused

CASES = cases()
WRAPPERS = (
    "#### {}", "####{}\n", "so\n#### {}.", "#### **{}**", "#### ${}$", "#### The answer is {}.", "#### \\boxed{{{}}}",
    "\\boxed{{{}}}", "Thus $\\boxed{{{}}}$.", "It is \\boxed{{{}}}.<|im_end|>", "#### {}<|endoftext|>", "#### \\({}\\)",
    "#### \\[{}\\]", "{}", "The answer is {}.",
)  # fmt: skip


def is_right(text: str, reference: str) -> bool:
    score = MathReward().grade(example_trajectory(text, reference))
    assert score.error is None
    return score.reward == 1.0


def test_the_table_has_few_false_positives_and_negatives() -> None:
    """None of either today: a row that is read otherwise is named."""
    wrong = [case for case in CASES if is_right(case.text, case.reference) != case.right]
    false_positives = [case for case in wrong if not case.right]
    false_negatives = [case for case in wrong if case.right]
    right = sum(case.right for case in CASES)
    assert len(CASES) >= 1300
    assert 100 * len(false_positives) <= len(CASES) - right, false_positives
    assert 50 * len(false_negatives) <= right, false_negatives
    assert wrong == []


def test_a_reference_equals_itself_in_every_wrapper() -> None:
    for form, reference in references():
        plain = re.sub(r"^\$|\$$", "", reference_of(reference) or "")
        assert [w for w in WRAPPERS if not is_right(w.format(plain), reference)] == [], (form, reference)


def test_a_reference_in_no_form_is_refused() -> None:
    assert [reference for reference in refused() if reference_of(reference) is not None] == []


def written(value: int, power: int, style: int) -> str:
    """Return an integer as one of several styles writes it."""
    scaled = f"{value / 10**power:.{power}f}"
    return (
        str(value), f"{value:,}", f"{value}.0", f"${value:,}", f"{value} clips", f"\\frac{{{2 * value}}}{{2}}",
        f"{value}\\text{{ clips}}", f"x = {value}", f"{scaled} \\times 10^{{{power}}}", f"{2 * value}/2",
        f"{scaled}e{power}",
    )[style]  # fmt: skip


INTEGERS = st.integers(-(10**7), 10**7)
STYLES = st.integers(0, 10)


@given(INTEGERS, st.integers(1, 4), STYLES, STYLES)
def test_a_number_equals_itself_in_every_style(value: int, power: int, style: int, other: int) -> None:
    assert is_right(f"#### {written(value, power, style)}", written(value, power, other))


@given(INTEGERS, st.integers(-3, 3).filter(bool), st.integers(1, 4), STYLES, STYLES)
def test_another_number_is_wrong_in_every_style(value: int, gap: int, power: int, style: int, other: int) -> None:
    assert not is_right(f"#### {written(value + gap, power, style)}", written(value, power, other))
    if value:
        assert not is_right(f"#### {written(-value, power, style)}", written(value, power, other))


NUMBERS = st.sampled_from(("2", "3", "-5", "7.5", "\\frac{1}{3}", "12", "40"))
COLLECTIONS = st.builds(
    lambda shape, a, b: shape.replace("A", a).replace("B", b),
    st.sampled_from(
        (
            "(A, B)", "[A, B)", "\\{A, B\\}", "A, B", "A\\text{ or }B", "A \\text{ and } B", "x=A, y=B", "y = Ax + B",
            "\\begin{pmatrix} A \\\\ B \\end{pmatrix}", "(-\\infty, A) \\cup (B, \\infty)", "A\\sqrt{11} + B",
            "B\\pi^{A}", "A + Bi", "A < x < B", "A \\pm \\sqrt{B}", "x^2 + A x + B", "\\log_{13} B", "1:B", "4343_6",
            "0.\\overline{45}", "\\frac{270}7\\text{ degrees}", "A^2 x",
        )
    ),
    NUMBERS,
    NUMBERS,
)  # fmt: skip


@given(COLLECTIONS)
def test_no_reference_equals_its_own_last_number(reference: str) -> None:
    last = re.findall(r"[0-9]+(?:\.[0-9]+)?", reference)[-1:]
    if last and reference_of(reference):
        assert not is_right(f"#### {last[0]}", reference)
        assert not is_right(f"It is {last[0]}", reference)
        assert is_right(f"#### {reference}", reference)


BESIDE = (
    "not {}", "minus {}", "> {}", "at most {}", "\\neq {}", "half of {}", "{} squared", "{} hundred", "{} plus one",
    "{} mod 5", "{}_8", "{}!", "{}%%", "{} or 5", "{}, no wait, 5", "{} is wrong, 5", "{} and a half", "{}\\pi",
    "{} + 1",    "-{}", "{}^2", "{} {}", "{}-{}", "twice {}", "about {}",
)  # fmt: skip


@given(st.integers(3, 10**6).filter(lambda value: value != 5), st.sampled_from(BESIDE), st.sampled_from(WRAPPERS))
def test_what_stands_beside_a_number_makes_it_another_answer(value: int, beside: str, wrapper: str) -> None:
    assert not is_right(wrapper.format(beside.format(value, value)), str(value))


FRAGMENTS = r"""
    0 1 72 99999 1,000 .5 e300 10^ + - * / ^ _ ! % ( ) [ ] { } | , ; : = < > & $ #### \\\\ \le \in \cup \pm \frac \sqrt
    \binom \pi \infty \sin \log_2 ^\circ \text{cm} \overline{3} \boxed{ \begin{pmatrix} \end{pmatrix} or not x e clips
"""
PIECES = st.sampled_from([*FRAGMENTS.split(), " ", "\n", "½", "²", "\N{ZERO WIDTH SPACE}"])


@given(st.lists(PIECES, max_size=14).map("".join), st.lists(PIECES, max_size=8).map("".join))
def test_no_text_fails_or_takes_long(text: str, reference: str) -> None:
    start = time.process_time()
    for one, other in ((text, reference), (text, text), (f"#### {text}", "72")):
        MathReward().grade(example_trajectory(one, other))
        with suppress(UngradableError):
            equal(one, other)
    assert time.process_time() - start < 5


def test_no_case_is_there_twice() -> None:
    seen: set[tuple[str, str]] = set()
    twice = [case for case in CASES if (key := (case.reference, case.text)) in seen or seen.add(key)]
    assert twice == list[Case]()
