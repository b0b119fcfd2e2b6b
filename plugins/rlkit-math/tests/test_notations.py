"""Answers in notations of LaTeX, Unicode, units and olympiads: right and wrong."""

from __future__ import annotations

import pytest

from rlkit.rewards import MathReward
from rlkit.testing import example_trajectory

ANSWERS = r"""
@ 84
+ \num{84}
+ \bm{84}
+ \mathtt{84}
+ \textsf{84}
+ \textbf{\textsf{84}}
+ 84\hspace{1em}
+ 84\enspace
+ \phantom{0}84
+ 84\tag{1}
+ 84\text{ N}
+ 84\text{ J}
+ \begin{aligned}84\end{aligned}
+ \begin{aligned} x &= 48 + 36 \\ &= 84 \end{aligned}
- \begin{aligned} x &= 84 \\ &= 85 \end{aligned}
- \begin{gathered} 84 \\ 85 \end{gathered}
- 84\text{M}
- 84\text{ M}
- \text{N}84
- 84\tag{1}5
@ 5 and 1/2
+ x = 5.5
- x = 5, y = 1/2
@ 1234
+ 1,234
+ \$1,234
- (1,234)
@ (1,234)
+ (1, 234)
- 1234
@ 2, 3
+ \text{(C) } 2, 3
- x = 2, y = 3
@ 2:30\text{ p.m.}
+ 2{:}30\text{ pm}
- 2{:}30\text{ am}
@ 60\text{ km/h}
+ 60\,\frac{\text{km}}{\text{h}}
+ 60\,\mathrm{km\,h^{-1}}
+ 60\text{ km}\cdot\text{h}^{-1}
- 60\,\frac{\text{m}}{\text{s}}
- 60\,\mathrm{m\,s^{-1}}
- 60\,\mathrm{km\,h^{-2}}
@ 9.8\text{ m/s}^2
+ 9.8\text{ meters per second squared}
+ 9.8\,\mathrm{m\,s^{-2}}
+ 9.8\,\frac{\mathrm{m}}{\mathrm{s}^2}
- 9.8\text{ meters per second}
- 9.8\text{ squared}
@ 15\text{ cm}^2
+ 15\,\mathrm{cm^{2}}
+ 15\text{ centimeters squared}
- 15\,\mathrm{cm^{3}}
- 15\text{ centimeters cubed}
@ \frac{1}{2}
+ 1 \over 2
+ \nicefrac{1}{2}
+ \sfrac12
+ \left.\frac12\right.
+ \mathbf{\frac{1}{2}}
+ \textbf{$\frac{\sqrt{1}}{2}$}
- 2 \over 1
- {1 \over 2} \over 2
@ \sqrt[3]{2}
+ ∛2
- ∛3
@ 30^\circ
+ 30{}^\circ
+ 30º
- 30{}^0
@ \lfloor n/2 \rfloor
+ ⌊n/2⌋
- ⌈n/2⌉
@ \log_2 3
+ log₂3
- log₃2
@ \binom{n}{2}
+ \frac{n(n-1)}{2}
+ n \choose 2
+ \frac{n^2-n}{2}
+ \frac{n!}{2(n-2)!}
- \frac{n(n+1)}{2}
- \frac{n}{2}
- \frac{n!}{2}
@ (n+1)!
+ (n+1)n!
- (n+1)(n-1)!
- n!+1
@ \mathbb{R}
+ \R
+ \Bbb{R}
+ \text{all real numbers}
+ \text{the set of all real numbers}
- \text{all real numbers except }0
- \text{all positive real numbers}
- \text{real}
@ (-\infty,0)\cup(0,\infty)
+ x \ne 0
+ 0 \ne x
+ \mathbb{R}\setminus\{0\}
+ \mathbb{R}-\{0\}
+ \{x\in\mathbb{R} : x\neq0\}
+ x \in \mathbb{R} \setminus \{0\}
- x \ne 1
- \mathbb{R}\setminus\{1\}
- \mathbb{R}\setminus\{0,1\}
- \mathbb{R}\setminus\emptyset
- 0
@ \mathbb{R}\setminus\{-1,\sqrt2\}
+ (-\infty,-1)\cup(-1,\sqrt2)\cup(\sqrt2,\infty)
+ \mathbb{R}\setminus\{\sqrt{2},-1\}
- \mathbb{R}\setminus\{x,-1\}
- \mathbb{R}\setminus\{-1,\frac{1}{0}\}
- (-\infty,-1)\cup(\sqrt2,\infty)
- \{-1,\sqrt2\}
@ f(x) = x
+ f(x)=x
+ f(x)=x\text{ for all }x
+ f(x)=x\text{ for all real numbers }x
+ f(x) = x \quad \forall x\in\mathbb{R}
+ x
- f(x)=-x
- f(x)=x+1
- f(x)=x\text{ or }f(x)=0
- f(x)=x\text{ for all }x > 0
- f(x)=0
@ y = x
+ x = y
+ y - x = 0
- y = -x
- y
@ x=2, y=3
+ y=3,\ x=2
+ x=2\text{ and }y=3
+ (x,y)=(2,3)
+ \begin{cases}x=2\\y=3\end{cases}
+ \left\{\begin{array}{l}x=2\\y=3\end{array}\right.
+ \begin{cases}x&=2\\y&=3\end{cases}
- x=3,\ y=2
- x=2\text{ or }y=3
- (x,y)=(3,2)
- (y,x)=(2,3)
- (2,3,4)
- \begin{cases}x=3\\y=2\end{cases}
- \begin{cases}2&3\end{cases}
- \begin{array}{l}2\\3\end{array}
@ n(n-1)2^{n-2}
+ 2^{n-2}n(n-1)
+ \frac{n(n-1)2^n}{4}
- n(n-1)2^n-2
- n(n-1)^2
@ a_n=3n-2
+ a_{n}=3n-2
- b_{n}=3n-2
@ a=b=2
- a=b=c
@ i
+ 0+i
+ \sqrt{-1}
- \sqrt{-2}
@ \left(3,\frac{\pi}{2}\right)
+ (r,\theta)=\left(3,\frac{\pi}{2}\right)
- (r,\theta)=\left(\frac{\pi}{2},3\right)
@ 48\sqrt{3}\text{ square units}
+ 48\sqrt{3}\text{ sq units}
@ n2^{n-1}
+ 2^{n-1}n
- n2^n-1
- n2
@ \text{Mr. Smith}
+ \text{Mr Smith}
- \text{Mrs. Smith}
@ (2,3)
+ \text{the point }(2,3)
- \text{the point }(3,2)
@ \frac{\pi}{4}+k\pi, k\in\mathbb{Z}
+ \frac{\pi}{4}+k\pi\ (k\in\mathbb{Z})
- \frac{\pi}{4}+k\pi\ (k\in\mathbb{N})
- \frac{\pi}{4}+2k\pi\ (k\in\mathbb{Z})
"""


TEXTS = r"""
@ 12
+ Since $x = 5$, $\boxed{12}$.
+ Step 3: $\boxed{12}$
+ 3. $\boxed{12}$
+ * \boxed{12}
+ The value is not 11 but \boxed{12}.
+ The maximum is at most 12, hence \boxed{12}.
+ \framebox{12}
- It is 11, \boxed{12}
- 3:\boxed{12}
- 11 and \boxed{12}
- Incorrect: \boxed{12}
- $\boxed{12}x$
- $\boxed{12}i$
- \boxed{12} but not \boxed{13}
- <answer>12 or 13</answer>
- The value is at most 12.
@ \frac{1}{2}
+ <answer>\frac{1}{2}</answer>
+ <think>ok</think>⏎<answer>$\frac{1}{2}$</answer>
+ Therefore, the probability is $\frac{1}{2}$.
+ so the fraction is \(\dfrac12\)
- <answer>\frac{1}{3}</answer>
- <think>the probability is $\frac{1}{2}$.
- The probability is $\frac12$ or $\frac13$.
- The probability is $\frac13$ or $\frac12$.
- The probability is at most $\frac12$.
- The probability is not $\frac12$.
- The probability is $1-\frac12$.
@ \text{Tuesday}
+ <answer>Tuesday</answer>
- <answer>Thursday</answer>
@ C
+ The correct option is (C).
- The correct option is not C.
@ 25\pi\text{ cm}^2
+ The area is $25\pi$.
+ Thus the area is $25\pi$ square centimeters.
+ The area equals 25π.
- Thus the area is $25\pi$ square meters.
- The area is 25.
- The area is less than $25\pi$.
- The area is between $\pi$ and $25\pi$.
"""


def rows(table: str) -> list[tuple[str, str, bool]]:
    rows, reference = [], ""
    for line in table.strip().splitlines():
        if line.startswith("@ "):
            reference = line[2:]
        else:
            rows.append((reference, line[2:], line.startswith("+ ")))
    return rows


@pytest.mark.parametrize(("reference", "answer", "right"), rows(ANSWERS))
def test_an_answer_in_another_notation(reference: str, answer: str, right: bool) -> None:
    score = MathReward().grade(example_trajectory(f"So $\\boxed{{{answer}}}$.", reference))
    assert score.error is None
    assert (score.reward == 1.0) == right


@pytest.mark.parametrize(("reference", "text", "right"), rows(TEXTS))
def test_an_answer_in_a_sentence(reference: str, text: str, right: bool) -> None:
    score = MathReward().grade(example_trajectory(text.replace("⏎", "\n"), reference))
    assert (score.reward == 1.0) == right
