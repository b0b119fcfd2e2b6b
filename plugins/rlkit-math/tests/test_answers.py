"""Final answers as models write them: which are right, which must stay wrong, and which earn the format's credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlkit_math.answers import canonical

from rlkit.rewards import MathReward
from rlkit.testing import example_trajectory
from rlkit.types import StopReason
from tests.conftest import ROOT, read_jsonl

RIGHT = r"""
#### 72
####72
####   72
#### 72.
#### 72.0
#### 72.00
#### +72
#### 72 clips
#### 72 dollars per day
#### 72kg
#### 72 km/h
#### 72/day
#### 72-page book
#### 72 m^2
#### 72°
#### 72^\circ
#### 72%
#### 72 %
#### 72\%
#### 72 percent
#### $72
#### \$72
#### $72.00
#### $72 per week
#### 72$
#### €72
#### 72 €
#### 72 USD
#### USD 72
#### $72$
#### \(72\)
#### \[72\]
#### **72**
#### **72 clips**
#### *72*
#### __72__
#### `72`
#### "72"
#### **Answer: 72**
#### Answer: 72
#### The answer is 72
#### The answer is **72** clips.
#### x = 72
#### = 72
#### 48 + 24 = 72
#### 48 + 24 = $72
#### 144/2
#### 72/1
#### (72)
#### [72]
#### \boxed{72}
#### $\boxed{72}$
#### \boxed{72\text{ clips}}
#### 72 \text{ clips}
#### \text{72}
#### <<48+24=72>>72
#### 7.2e1
#### 71⏎#### 72
#### Final answer⏎72
#### Final answer⏎⏎**72** clips
####⏎72
\boxed{72}
so it is \boxed{72 \text{ clips}}.
She sold 48 + 24 = 72 clips.
"""

WRONG = r"""
#### 73
#### -72
#### - 72
#### ⊖72
#### -$72
#### $-72
#### 72.5
#### 7.2
#### 7,2
#### 7,20
#### 72,5
#### 720
#### 72,000
#### 72 000
#### 72k
#### 72 thousand
#### 1/72
#### 72/2
#### 72 or 73
#### 73 or 72
#### 72 clips or 73 clips
#### 72 and 73
#### 72 to 73
#### 72-73
#### 72, 73
#### 72; 73
#### 72 73
#### 72:30
#### 72x
#### 72y + 1
#### 2 x 72
#### 72^2
#### 72\pi
#### 72 + 1
#### 72 = 73
#### x >= 72
#### x != 72
#### 1.72
#### 72.1.1
#### clips
####
#### 72⏎#### 71
#### \boxed{71}
#### \text{I do not know}
#### (72, 73)
#### {72, 73}
#### nan
#### inf
I sold 72, no, 73.
#### 72 clips in 2 months
#### 48 + 24
#### 72 (24 in May)
#### 72 (48 + 24)
#### 72 clips, of which 24 in May
#### 72 - that is all
#### 72: done
#### ~72
#### ≈ 72
#### 72!
"""


def forms(table: str) -> list[str]:
    """Return the forms of a table, one a line, in which ⏎ stands for a new line and ⊖ for a typographic minus."""
    return [line.replace("⏎", "\n").replace("⊖", "\N{MINUS SIGN}") for line in table.strip("\n").splitlines()]


def grade(text: str, answer: str = "#### 72", stop: StopReason = StopReason.STOP) -> tuple[float, float]:
    """Return accuracy and the credit for the format."""
    trajectory = example_trajectory(text, answer)
    trajectory.stop = stop
    components = MathReward(format_weight=0.1).grade(trajectory).components
    return components["accuracy"], components["format"]


@pytest.mark.parametrize(
    ("text", "accuracy", "strict", "final"),
    [
        ("#### 72", 1, 1, "72"), ("so \\boxed{72.0}", 1, 1, "72"), ("It is 72", 1, 0, "72"),
        ("#### seventy-two", 1, 1, "72"), ("#### 71", 0, 0, "71"), ("", 0, 0, ""),
    ],
)  # fmt: skip
def test_strict_is_marked_and_right(text: str, accuracy: float, strict: float, final: str) -> None:
    """A cut-off answer may be strict, but not of the format; the reward has neither in it by default."""
    score = MathReward().grade(replace(example_trajectory(text, "#### 72"), stop=StopReason.LENGTH))
    assert (score.reward, score.answer) == (accuracy, final)
    assert score.components == {"accuracy": accuracy, "strict": strict, "format": 0}


@pytest.mark.parametrize(
    ("answers", "form"),
    [
        (["12", "12.0", "$12", " 12 apples.", "**12**", "\\boxed{12}", "1.2e1", "x = 12", "24/2"], "12"),
        (["0.5", "1/2", "0.50", "$0.50"], "0.5"), (["1/3", "2/6"], "1/3"), (["50%", "50 percent"], "50%"),
        (["1,234,567", "1234567.0"], "1234567"), (["-3", "\N{MINUS SIGN}3"], "-3"), (["", "  "], ""),
        (["2x + 1", "$2x+1$", "2x +1"], "2x+1"), (["3 or 4", "3  or 4"], "3or4"),
        (["9" * 400, "9" * 400 + ".0"], "9" * 400),
        (["1" + "0" * 350 + ".5"], "2" + "0" * 349 + "1/2"),
    ],
)  # fmt: skip
def test_equal_answers_have_one_form(answers: list[str], form: str) -> None:
    assert {canonical(answer) for answer in answers} == {form}


@given(st.text(max_size=600))
def test_any_answer_has_a_form(text: str) -> None:
    assert len(canonical(text)) <= max(600, len(text))


@pytest.mark.parametrize("text", forms(RIGHT))
def test_a_right_answer_is_right_in_every_form(text: str) -> None:
    assert grade(text)[0] == 1.0


@pytest.mark.parametrize("text", forms(WRONG))
def test_a_wrong_answer_stays_wrong(text: str) -> None:
    assert grade(text)[0] == 0.0


def test_the_tables_are_long_enough() -> None:
    assert len(forms(RIGHT)) >= 60
    assert len(forms(WRONG)) >= 40


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("#### 50%", "50", True),
        ("#### 50%", "0.5", True),
        ("#### 50", "50%", True),
        ("#### 0.5", "50%", True),
        ("#### 0.5", "50", False),
        ("#### 5%", "0.5", False),
        ("#### 1,080 dollars", "#### 1,080", True),
        ("#### 1 080", "1080", True),
        ("#### 1080", "#### 1,080", True),
        ("#### 1,08", "1.08", False),
        ("#### -3 degrees", "-3", True),
        ("#### 3", "-3", False),
        ("#### 3 1/2 hours", "3.5", True),
        ("#### 3 1/2", "2", False),
        ("#### 0.333333", "1/3", True),
        ("#### 0.33", "1/3", False),
        ("#### 5 million", "5000000", True),
        ("#### 5k", "5000", True),
        ("#### 2 thousand", "2000", True),
        ("#### 1.5 billion", "1500000000", True),
        ("#### 3 trillion", "3000000000000", True),
        ("#### 1000.500001", "1000.5", True),  # up to 1e-6, and of numbers below 1 up to a millionth of them
        ("#### 1000.500002", "1000.5", False),
        ("#### 0.0000002", "0.0000001", False),
        ("#### 1000001", "1000000", False),
        ("#### 12345678901234567", "12345678901234568", False),
        ("#### \\frac{3}{4}", "0.75", True),
        ("#### \\frac{1}{2}", "\\frac{1}{2}", True),  # the reference is the formula, not the last number in it
        ("#### 2", "\\frac{1}{2}", False),
        ("#### 2\\pi", "2 \\pi", True),
        ("#### 2", "2\\pi", False),
        ("#### 2^{10}", "1024", True),
        ("#### x^2 + 2x + 1", "\\boxed{(x+1)^2}", True),
        ("#### even", "#### Even", True),
        ("#### odd", "#### even", False),
        ("#### (1, 2)", "(1,2)", True),
        ("#### (2, 1)", "(1,2)", False),
        ("#### B", "#### B", True),
        ("#### A", "#### B", False),
        ("#### 11:30", "#### 11:30", True),
        ("#### 0", "#### 0", True),
        ("#### 1/0", "#### 0", False),
        ("#### 7 / 8", "0.875", True),
        ("#### 1 3 / 4", "1.75", True),
        ("#### .50", "0.5", True),  # a point before a digit is no full stop
        ("#### $.50", "1/2", True),
        ("#### .50", "50", False),
        ("#### ... 5", "5", False),
        ("#### x + 1", "1", False),  # a sum, of which the last term is not the value
        ("#### 1", "x + 1", False),
        ("#### x+1", "x + 1", True),
        ("#### \\pi - 2", "-2", False),
        ("#### pi + 1", "1", False),
        ("#### the answer is - 5", "-5", True),
    ],
)
def test_numbers_percentages_and_formulae(given: str, expected: str, same: bool) -> None:
    assert grade(given, expected)[0] == float(same)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### Step 1: Compute\n3 * 24 = 72.\n\nThe answer is \\boxed{72}.", True),
        ("#### Final answer\n\\boxed{72}", True),
        ("#### Step 2\nSo \\boxed{71}\n#### Step 3\nSo \\boxed{72}", True),
        ("#### Step 1\n\\boxed{72}\n#### Step 2\nSo \\boxed{71}", False),
        ("#### Step 1\n\\boxed{72}\n#### Step 2\nHm.", False),  # no answer after the last heading
        ("#### 71\n\\boxed{72}", False),  # an answer, and no heading
        ("#### not \\boxed{72}", False),
        ("#### 71 or \\boxed{72}", False),
    ],
)
def test_a_box_after_words_at_the_mark_is_the_answer(text: str, right: bool) -> None:
    """Four hash signs begin a heading in Markdown too."""
    assert grade(text)[0] == float(right)


@pytest.mark.parametrize(
    ("text", "credit"),
    [
        ("#### 73", 1), ("#### 73 clips", 1), ("#### \\frac{1}{2}", 1), ("#### x + 1", 1), ("\\boxed{7}", 1),
        ("####", 0), ("#### ", 0), ("#### clips", 0), ("#### I do not know", 0), ("#### \n72", 0), ("72", 0),
        ("\\boxed{}", 0), ("\\boxed{no idea}", 0), ("#### #### ####", 0), ("#### ?", 0), ("#### 72 or 73", 1),
        ("#### 72 is wrong, 71", 0),
    ],
)  # fmt: skip
def test_the_format_counts_where_a_number_or_a_formula_follows(text: str, credit: int) -> None:
    assert grade(text)[1] == credit


@pytest.mark.parametrize(
    ("stop", "credit"),
    [(StopReason.STOP, 1), (StopReason.TURNS, 1), (StopReason.LENGTH, 0), (StopReason.CONTEXT, 0)],
)
def test_an_answer_that_was_cut_off_earns_nothing_for_its_format(stop: StopReason, credit: int) -> None:
    assert grade("#### 72", stop=stop) == (1.0, credit)


def test_gold_answers_of_gsm8k_are_right_by_themselves() -> None:
    """A sample of openai/gsm8k's answers (MIT): the number after the mark is right, the one next to it is wrong."""
    rows = read_jsonl(ROOT / "tests" / "unit" / "data" / "gsm8k.jsonl")
    for row in rows:
        assert grade(row["answer"], row["answer"]) == (1.0, 1.0), row
        number = row["answer"].rpartition("#### ")[2]
        assert grade(f"It is {number} dollars.", row["answer"])[0] == 1.0
        assert grade(f"#### {int(number.replace(',', '')) + 1}", row["answer"])[0] == 0.0
    assert len(rows) == 40


@pytest.mark.parametrize(
    "text",
    [
        "#### 1\N{REPLACEMENT CHARACTER}4",
        "#### 1\x075",
        "#### 12## 1",
        "#### 15}",
        "#### 1[4",
        "#### 1?4",
        "#### 1\\4",
        "#### 14 or so",
    ],
)
def test_what_is_in_no_form_is_wrong_and_earns_nothing(text: str) -> None:
    """An untrained policy writes it all the time."""
    assert grade(text, "14") == (0.0, 0.0)


HOSTILE = (
    r"\boxed{10^{10^{10}}}",
    r"#### 9^{9^9}",
    r"#### 2^99999999999",
    r"#### 99999999!",
    r"#### ((7!)!)!",
    "#### " + "9" * 100_000,
    "#### 1e999999999",
    "#### " + "(" * 5000 + "1" + ")" * 5000,
    r"#### " + r"\sqrt{" * 400 + "2" + "}" * 400,
    r"#### " + r"\frac{1}{" * 400 + "2" + "}" * 400,
    "#### " + "x+" * 50_000 + "1",
    "#### " + "1 " * 50_000,
    "#### " + "a" * 100_000 + "1",
    "#### " + "(" * 100_000,
    "#### " + " (" * 50_000,
    "#" * 100_000,
    r"\boxed{" * 20_000,
    "1," * 50_000,
    "1/" * 50_000,
    r"\boxed{5}" + " the answer is 7" * 10_000,
    r"\boxed{5}" + " wait," * 50_000,
    "** " * 50_000 + "a",
    "a" + "9" * 100_000,
    "twenty and " * 50_000,
    "It is $x$ or " * 50_000 + "5",
    "option " * 50_000 + "A is right or wrong",
    r"\boxed{\begin{cases}" + "&" * 400 + r"\end{cases}}",
    r"\boxed{5 " + "kg*" * 150 + "m}",
    r"\boxed{" + "x=y=" * 120 + "1}",
    r"\boxed{" + "2500!*" * 80 + "1}",
    r"\boxed{\binom{2500}{1250}^{2500}}",
    r"\boxed{" + "1 red, " * 60 + "2 blue}",
    r"\boxed{" + "_{1}C_{1}" * 50 + "}",
    r"\boxed{" + "C(1," * 35 + "1" + ")" * 35 + "}",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.timeout(20)
def test_no_text_keeps_the_grader_busy(text: str) -> None:
    for expected in ("#### 72", r"\boxed{\frac{1}{2}}"):
        assert MathReward().grade(example_trajectory(text, expected)).reward == 0.0
