"""Answers that a sentence states in its own way: numbers in words, other languages, ranks, roundings, products."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rlkit_math.answers import canonical, equal, final_answer, form_of_reference, reference_of
from test_notations import rows

from rlkit.rewards import MathReward
from rlkit.testing import example_trajectory

WORDS = r"""
@ 125
+ So the total number of visitors was one hundred and twenty-five.
+ There were 5 groups. In the end, one hundred twenty-five people came.
+ One hundred and twenty-five visitors came.
+ We counted a hundred and twenty-five of them.
- So the total number of visitors was one hundred and fifteen.
- So the total was not one hundred and twenty-five.
- So the total was about one hundred and twenty-five.
- So the total was one hundred and twenty-five or one hundred and thirty.
- So the total was more than one hundred and twenty-five.
- There were 125 at first. In the end, only ninety came.
- It has one hundred and twenty-five thousand of them.
@ 12
+ She needs twelve more stickers.
+ Twelve students remain.
+ It rose by twelve percent.
+ There are 3 fours in 12.
- She needs twelve dozen.
- She buys two dozen eggs.
- She buys dozens of eggs.
- He drew a twelve-sided figure.
- She needs between ten and twelve.
- He ate one quarter of 12.
- He ate a quarter of twelve.
- He ate 1/4 of 12.
- He is one of twelve.
- Apollo Twelve landed.
@ 24
+ There are 24 eggs in one basket.
+ So 24 eggs fit into the two baskets.
+ She has two dozen eggs.
+ She has 2 dozen eggs.
+ There are 24 eggs. That is two dozen.
- She has 24 dozen eggs.
@ 1
- There are 1 or two solutions.
- I picked this one.
- So one can see nothing.
@ 0
+ There are zero stickers left.
- There are zero point five left.
@ 2500000
+ The town spent 2.5 million dollars on it.
+ The town spent two and a half million dollars on it.
+ The town spent two million five hundred thousand dollars on it.
- The town spent 2.5 billion dollars on it.
- The town spent two million dollars on it.
@ -5
+ By night it had fallen to minus five degrees.
+ By night it had fallen to −5 degrees.
+ By night it had fallen to negative 5.
- By night it had fallen to five degrees.
- We compute ten minus five.
@ 5
- By night it had fallen to −5 degrees.
- By night it had fallen to minus five degrees.
- By night it had fallen to negative five.
@ \frac{3}{4}
+ So the probability is three quarters.
+ So the probability was three-fourths.
+ He ate three quarters of the cake.
+ She walked ¾ of a mile.
+ He has seventy-five percent of it.
- So the probability is four thirds.
- So the probability is three fifths.
- So the probability is a quarter.
- He ate two and three quarters of the cakes.
@ 7.5
+ It takes 7½ minutes.
+ It takes 7 1/2 minutes each.
+ It takes seven and a half minutes.
+ It takes 7 and a half minutes to get there.
- It takes ½ minutes.
- It takes 7¼ minutes.
- It takes 17½ minutes each.
@ \frac{1}{2}
- It takes 7½ minutes.
- It takes seven and a half minutes.
- It takes 7 1/2 minutes each.
@ 1200
+ He earns twelve hundred dollars a month.
+ He earns a thousand two hundred dollars a month.
+ He earns one thousand two hundred dollars a month.
- He earns twelve thousand dollars a month.
@ 17
+ So it's the 17th term of the sequence.
+ It is the $17^{\text{th}}$ term.
+ It is the $\boxed{17^{\text{th}}}$ term.
+ It is \boxed{17\text{th}}.
- It is the 18th term of the sequence.
- It is the seventeenth of May.
- This happens on the seventh day.
- He has one seventeenth of it.
- It is the $\boxed{18^{\text{th}}}$ term.
- It happens in the 17th century BC or the 18th.
- It is not the 17th term.
@ 17\text{th}
+ It is the $\boxed{17^{\text{th}}}$ term.
+ It is the 17th term.
- It is the 16th term.
- \boxed{17}
@ 4
+ Tom finished in $\boxed{4^{\text{th}}}$ place.
+ Tom finished in fourth place.
- Tom finished in $\boxed{5^{\text{th}}}$ place.
- Tom finished in fifth place.
- Tom ate a fourth of it.
@ \frac{1}{4}
- Tom finished in fourth place.
"""

LANGUAGES = r"""
@ 3.5
+ Also beträgt die Strecke 3,5 km. Die Antwort lautet: 3,5
+ Die Antwort lautet: 3,5⏎⏎Probe: 2 + 1,5 = 3,5.
+ La respuesta es 3,5.
+ La réponse est 3,5.
+ La respuesta final es: **3,5**
+ Das Ergebnis ist 3,5 Liter.
+ Ответ: 3,5
+ La distance vaut 3,5 mètres.
- The answer is 3,5
- So we get 3,5
- Die Lösungen sind 3,5
- Die Antwort lautet: 3, 5
- Die Antwort lautet: 3 oder 5
- Die Antwort lautet: (3,5)
- Die Antwort lautet: 4,5
- Die Antwort lautet nicht 3,5
@ 35
- Also beträgt die Strecke 3,5 km. Die Antwort lautet: 3,5
- La respuesta es 3,5.
@ 3, 5
+ The answer is 3,5
+ Die Antwort lautet: 3; 5
@ 1234.50
+ Der Gesamtpreis beträgt 1.234,50 €.
+ El precio total es de 1.234,50 euros.
+ The total comes to 1.234,50 €.
- Der Gesamtpreis beträgt 1.234,05 €.
- Der Gesamtpreis beträgt 12.345,00 €.
@ 123450
- Der Gesamtpreis beträgt 1.234,50 €.
@ 1234
- The total comes to 1.234 m.
@ 42
+ 答えは42です。
+ 정답은 42입니다.
+ La réponse finale est 42.⏎⏎On vérifie : 6 × 7.
- 答えは42ではありません。
- 答えは42万です。
- 정답은 42가 아닙니다.
- Die Antwort ist nicht 42.
"""

VALUES = r"""
@ -\frac{\sqrt{3}}{2}
+ ∴ sin θ = −√3/2
+ Hence we obtain h = −√3/2.
+ It follows that sin θ = -√3/2.
- ∴ sin θ = √3/2
- Hence we obtain 2h = −√3/2.
- Hence we obtain h ≠ −√3/2.
- Hence we obtain h = 1 − √3/2.
- Hence we obtain h > −√3/2.
@ 1.6 \times 10^{-19}
+ q = 1.6e-19 C
+ The charge is 1.6e-19 C.
+ We measured 1.6e-19 C on it.
+ We measured 1.6×10⁻¹⁹ C.
+ We measured 1.6 × 10^-19 coulombs.
- q = 1.6e19 C
- We measured 1.6e19 C on it.
- We measured 1.6×10¹⁹ C.
@ 19
- We measured 1.6e-19 C on it.
- We measured 1.6e19 in all.
@ 20\text{ N}
+ The force is 20 N.
+ We need 20 N.
- The force is 20 J.
- The force is 20 n.
@ 20
+ The force is 20 N.
- The term is 20 x.
- The term is 20N.
@ (-\infty,-2]\cup[3,\infty)
+ The inequality holds when $x \leq -2$ or $x \geq 3$.
+ The inequality holds when x ≤ -2 or x ≥ 3.
+ So we need \(x \leq -2\) or \(x \geq 3\).
+ It holds for $x\le-2$, or $x \ge 3$.
- The inequality holds when $x \leq -2$ and $x \geq 3$.
- The inequality holds when $-2 \leq x \leq 3$.
- The inequality holds when $x < -2$ or $x > 3$.
- The inequality holds when $x \geq 3$.
@ [3,\infty)
- The inequality holds when $x \leq -2$ or $x \geq 3$.
- The inequality holds when x ≤ -2 or x ≥ 3.
@ 3
- The inequality holds when x ≤ -2 or x ≥ 3.
- The lines meet at (4, 3).
- The set contains $2$ or $3$.
@ (4,-1)
+ The lines meet at (4, −1).
+ The lines meet at the point (4, -1).
- The lines meet at (-1, 4).
@ 3:45\text{ p.m.}
+ The train arrives at 3:45 PM.
+ The train arrives at 3:45 P.M.
+ The train arrives at 3:45 in the afternoon.
+ The train arrives at 15:45.
+ The train arrives at $\boxed{3{:}45}$ PM.
- The train arrives at 3:45 AM.
- The train arrives at 3:45 A.M.
- The train arrives at 3:45 in the morning.
- The train arrives at $\boxed{3{:}45}$ AM.
- The train arrives at $\boxed{3:45}$ a.m.
- The train arrives at 3:45 AM, not at noon.
@ 3\text{ p.m.}
+ The train arrives at 3 PM.
- The train arrives at 3 AM.
- The train arrives at 3 in the morning.
@ \text{March 15}
+ The anniversary falls on March 15.
+ The anniversary falls on March 15th.
- The anniversary falls on March 14.
- The anniversary falls on May 15.
@ 2.5\text{ hours}
+ It takes 2 hours and 30 minutes.
+ They need 2 hours 30 minutes.
- It takes 2 hours and 50 minutes.
@ 30
- It takes 2 hours and 30 minutes.
@ \$5.50
+ She pays 5 dollars and 50 cents.
- She pays 5 dollars and 5 cents.
@ 50
- She pays 5 dollars and 50 cents.
@ 5
- She has 3 apples and 5 pears.
- She pays 5 dollars and 50 cents.
@ 25\pi
+ It encloses 25π cm².
+ It encloses an area of 25π.
- It encloses 25 cm².
- It encloses 5π cm².
"""

BOXES = r"""
@ 4.44
+ Rounded to the nearest hundredth, $\pi\sqrt{2}\approx \boxed{4.44}$.
+ To the nearest hundredth: $\boxed{4.44}$
+ Correct to two decimal places, this is $\boxed{4.44}$.
+ \boxed{4.44\text{ (rounded to the nearest hundredth)}}
+ \boxed{4.44} to the nearest hundredth.
+ #### 4.44 (to 2 decimal places)
+ It is 4.44 to two decimal places.
+ It is 4.44, rounded to the nearest hundredth.
+ The answer is 4.44, rounded to the nearest hundredth.
- Rounded to the nearest hundredth, $\pi\sqrt{2}\approx \boxed{4.45}$.
- It is \boxed{4.44} hundredths.
- One hundredth of \boxed{4.44}.
- It is not, to the nearest hundredth, \boxed{4.44}
@ 2
- It is 4.44 to 2 decimal places.
@ \begin{pmatrix} \frac{3}{5} & \frac{4}{5} \\ \frac{4}{5} & -\frac{3}{5} \end{pmatrix}
+ $$\boxed{\frac{1}{5}\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
+ $$\boxed{\frac15 \cdot \begin{bmatrix} 3 & 4 \\ 4 & -3 \end{bmatrix}}$$
+ $$\boxed{A = \frac{1}{5}\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
+ $$\boxed{0.2\left[\begin{array}{cc} 3 & 4 \\ 4 & -3 \end{array}\right]}$$
- $$\boxed{\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{-\frac{1}{5}\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{\frac{1}{5}\begin{pmatrix} 3 & 4 \\ -4 & 3 \end{pmatrix}}$$
- $$\boxed{5\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{\frac{1}{5}+\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{\frac{1}{0}\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{x\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
@ \begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}
- $$\boxed{\frac{1}{0}\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
- $$\boxed{2\begin{pmatrix} 3 & 4 \\ 4 & -3 \end{pmatrix}}$$
@ \begin{pmatrix} \sqrt2/2 \\ a \end{pmatrix}
+ \boxed{\frac{\sqrt{2}}{2}\begin{pmatrix} 1 \\ \sqrt{2}a \end{pmatrix}}
- \boxed{\sqrt{2}\begin{pmatrix} 1 \\ \sqrt{2}a \end{pmatrix}}
"""


FORMS = "".join(
    (Path(__file__).parent / name).read_text(encoding="utf-8").partition("\n")[2]
    for name in ("prose_forms.txt", "sentence_forms.txt")
)


@pytest.mark.parametrize(("reference", "text", "right"), rows(FORMS + WORDS + LANGUAGES + VALUES + BOXES))
def test_a_sentence_states_its_answer(reference: str, text: str, right: bool) -> None:
    score = MathReward().grade(example_trajectory(text.replace("⏎", "\n"), reference))
    assert score.error is None
    assert (score.reward == 1.0) == right


@pytest.mark.parametrize(
    "piece",
    [
        " ",
        "1",
        "(",
        ".",
        "1 ",
        "a ",
        "= ",
        "x=1\n",
        "Check: 1=1 ",
        "so ",
        "9 o ",
        "| 1 ",
        "`",
        ". Hope this helps",
        ", 2 less than 4",
    ],
)
@pytest.mark.parametrize("start", ["", "Check: ", "There are 7 dogs.\n", "9 (", "7\nWhy: "])
def test_a_long_end_is_read_in_linear_time(start: str, piece: str) -> None:
    text = start + piece * (100_000 // len(piece))
    before = time.process_time()
    for expected in ("7", "Tuesday", "x=1, y=2", "北京"):
        final_answer(text, expected)
    assert time.process_time() - before < 5  # seconds; a quadratic expression takes more than 15


def test_a_product_with_a_matrix_is_an_answer_and_no_reference() -> None:
    product, matrix = r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 4 \end{pmatrix}"
    assert equal(product, matrix)
    assert not equal(matrix, product)
    assert reference_of(product) is None


def test_two_notations_have_the_canonical_form_and_the_name_of_the_first() -> None:
    assert canonical("1/8, or 12.5%") == canonical("1/8")
    assert form_of_reference("1/8, or 12.5%") == form_of_reference("1/8")
