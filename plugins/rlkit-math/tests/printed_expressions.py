"""Expression trees with three printers: LaTeX, programming notation and Unicode."""

# ruff: noqa: E501, RUF001 (answers contain these characters)

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

Tree = tuple  # (operator, *operands); a number is an int, a symbol a str
Renderings = list[str]

GREEK = {"pi": "π", "theta": "θ", "alpha": "α"}
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


class Printer:
    """Prints trees in one of three notations with random but equal spellings."""

    def __init__(self, random: Random, mode: str = "") -> None:
        self.random = random
        self.mode = mode or random.choice(("latex", "latex", "plain", "unicode"))
        self.gap = random.choice(("", " "))
        self.tall = random.random() < 0.5
        self.frac = random.choice(("\\frac", "\\frac", "\\dfrac", "\\tfrac"))
        self.minus = "−" if self.mode == "unicode" and random.random() < 0.5 else "-"
        self.slash = self.mode != "latex" or random.random() < 0.15
        self.power = random.choice(("^", "^", "**")) if self.mode == "plain" else "^"
        self.star = random.choice(("*", "")) if self.mode == "plain" else ""

    def __call__(self, tree: Tree | int | str, level: int = 0) -> str:
        text, own = self.print(tree)
        return self.bracket(text) if own < level else text

    def bracket(self, text: str) -> str:
        return f"\\left({text}\\right)" if self.mode == "latex" and self.tall else f"({text})"

    def print(self, tree: Tree | int | str) -> tuple[str, int]:
        if isinstance(tree, int):
            return (str(tree), 4) if tree >= 0 else (f"{self.minus}{-tree}", 1)
        if isinstance(tree, str):
            if tree in GREEK:
                return {"latex": f"\\{tree}", "plain": tree, "unicode": GREEK[tree]}[self.mode], 4
            return tree, 4
        operator, *operands = tree
        return getattr(self, f"print_{operator}")(*operands)

    def print_sum(self, *terms: Tree | int | str) -> tuple[str, int]:
        text = self(terms[0], 1)
        for term in terms[1:]:
            sign, rest = ("+", term)
            if isinstance(term, tuple) and term[0] == "neg":
                sign, rest = self.minus, term[1]
            elif isinstance(term, int) and term < 0:
                sign, rest = self.minus, -term
            text += f"{self.gap}{sign}{self.gap}{self(rest, 2)}"
        return text, 1

    def print_neg(self, operand: Tree | int | str) -> tuple[str, int]:
        return f"{self.minus}{self(operand, 2)}", 1

    def print_mul(self, *factors: Tree | int | str) -> tuple[str, int]:
        text = self(factors[0], 2)
        for before, factor in pairwise(factors):
            piece = self(factor, 2 if self.mode == "latex" and not self.slash else 3)
            numeric = piece[0].isdigit() or piece.startswith(("-", "−"))
            if numeric or (isinstance(before, tuple) and before[0] == "fn" and not text.endswith(")")):
                times = {"latex": " \\cdot ", "plain": "*", "unicode": "·"}[self.mode]
                if piece.startswith(("-", "−")):
                    piece = self.bracket(piece)
            else:
                words = self.mode != "latex" and text[-1].isalpha() and piece[:1].isalpha() and piece[:1].isascii()
                times = self.star or ("*" if words or (text[-1].isalpha() and piece[0] == "(") else "")
                if self.mode == "latex":
                    is_command = text[-1].isalpha() and "\\" in text and piece[0].isalpha()
                    times = " " if is_command else self.random.choice(("", "", " "))
            text += times + piece
        return text, 2

    def print_div(self, above: Tree | int | str, below: Tree | int | str) -> tuple[str, int]:
        if self.slash:
            return f"{self(above, 3 if isinstance(above, tuple) and above[0] == 'sum' else 2)}/{self(below, 3)}", 2
        a, b = self(above), self(below)
        if len(a) == len(b) == 1 and a.isdigit() and self.random.random() < 0.3:
            return f"{self.frac}{a}{b}", 3
        return f"{self.frac}{{{a}}}{{{b}}}", 3

    def print_pow(self, base: Tree | int | str, exponent: Tree | int | str) -> tuple[str, int]:
        if isinstance(base, tuple) and base[0] == "fn" and isinstance(exponent, int) and self.random.random() < 0.7:
            name, argument = base[1:]
            raised = f"{exponent}".translate(RAISED) if self.mode == "unicode" else f"^{exponent}" if self.random.random() < .5 or self.mode == "plain" else f"^{{{exponent}}}"  # fmt: skip
            return self.function(f"{name}", argument, raised), 3
        text = self(base, 4)
        if self.mode == "unicode" and isinstance(exponent, int):
            return text + str(exponent).translate(RAISED), 3
        shown = self(exponent)
        if self.mode == "latex":
            single = len(shown) == 1 and self.random.random() < 0.5
            return f"{text}^{shown}" if single else f"{text}^{{{shown}}}", 3
        return f"{text}{self.power}{shown if shown.isalnum() and isinstance(exponent, (int, str)) else f'({shown})'}", 3

    def print_root(self, radicand: Tree | int | str, degree: int = 2) -> tuple[str, int]:
        shown = self(radicand)
        if self.mode == "latex":
            index = "" if degree == 2 else f"[{degree}]"
            short = len(shown) == 1 and self.random.random() < 0.3
            space = " " if short and shown.isalpha() else ""
            return f"\\sqrt{index}{space}{shown}" if short else f"\\sqrt{index}{{{shown}}}", 4
        if degree == 2:
            if self.mode == "unicode":
                return f"√{shown}" if shown.isalnum() and len(shown) < 3 and self.random.random() < .7 else f"√({shown})", 4  # fmt: skip
            return f"sqrt({shown})", 4
        if degree == 3 and self.random.random() < 0.5:
            return (f"∛{shown}" if self.mode == "unicode" and shown.isalnum() else f"cbrt({shown})"), 4
        return f"{self(radicand, 4)}^(1/{degree})", 3

    def print_fn(self, name: str, argument: Tree | int | str) -> tuple[str, int]:
        return self.function(name, argument, ""), 3

    def function(self, name: str, argument: Tree | int | str, raised: str) -> str:
        shown = self(argument)
        head = f"\\{name}" if self.mode == "latex" else name
        bare = isinstance(argument, str) or (isinstance(argument, int) and argument >= 0)
        if self.mode == "latex" and bare and self.random.random() < 0.6:
            return f"{head}{raised} {shown}" if self.random.random() < 0.7 else f"{head}{raised}{{{shown}}}"
        return f"{head}{raised}{self.bracket(shown)}"

    def print_log(self, base: int, argument: Tree | int | str) -> tuple[str, int]:
        shown = self(argument)
        if self.mode == "latex":
            sub = f"_{base}" if base < 10 and self.random.random() < 0.5 else f"_{{{base}}}"
            bare = isinstance(argument, int | str) and self.random.random() < 0.5
            return f"\\log{sub} {shown}" if bare else f"\\log{sub}{self.bracket(shown)}", 3
        return (f"log_{base}({shown})" if self.mode == "plain" else f"log{chr(0x2080 + base) if base < 10 else f'_{base}'}({shown})"), 3  # fmt: skip

    def print_abs(self, operand: Tree | int | str) -> tuple[str, int]:
        shown = self(operand)
        if self.mode == "latex":
            return self.random.choice((f"|{shown}|", f"\\left|{shown}\\right|", f"\\lvert {shown} \\rvert")), 4
        return f"|{shown}|", 4

    def print_binom(self, n: Tree | int | str, k: Tree | int | str) -> tuple[str, int]:
        if self.mode == "latex":
            return self.random.choice(("\\binom", "\\dbinom")) + f"{{{self(n)}}}{{{self(k)}}}", 4
        return f"C({self(n)},{self.gap}{self(k)})", 4

    def print_fact(self, n: Tree | int | str) -> tuple[str, int]:
        return f"{self(n, 4)}!", 4


def printed(random: Random, *trees: Tree | int | str, count: int = 4) -> Renderings:
    """Return random renderings of equal trees, the first in LaTeX."""
    return [Printer(random, "latex" if n == 0 else "")(random.choice(trees)) for n in range(count)]


def ratio(a: int, b: int) -> Tree | int:
    value = Fraction(a, b)
    if value.denominator == 1:
        return value.numerator
    shown = ("div", abs(value.numerator), value.denominator)
    return shown if value > 0 else ("neg", shown)
