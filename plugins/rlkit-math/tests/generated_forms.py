"""A seeded generator of answers: equal ones in several notations, and wrong ones that are written the same ways.

A kind draws a value, its near misses, and several renderings of each. Expressions are trees with three printers: LaTeX,
programming notation and Unicode.
"""

# ruff: noqa: E501, RUF001, RUF005 (renderings are long and contain these characters)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random
from typing import NamedTuple

from printed_expressions import RAISED, Printer, Renderings, Tree, printed, ratio


class Pair(NamedTuple):
    """A reference, an answer to it, and whether it is right."""

    kind: str
    reference: str
    answer: str
    equal: bool


def number(random: Random) -> Tree | int:
    """Draw an integer, a fraction or a radical: an item of collections."""
    kind = random.randrange(6)
    if kind < 3:
        return random.choice([n for n in range(-12, 30) if n])
    if kind == 3:
        return ratio(random.randint(-12, 12) or 5, random.randint(2, 9))
    if kind == 4:
        return ("mul", random.randint(2, 7), ("root", random.choice((2, 3, 5, 7, 11))))
    return ("sum", random.randint(1, 9), ("root", random.choice((2, 3, 5, 7, 11))))


def value_of(tree: Tree | int) -> float:
    if isinstance(tree, int):
        return tree
    operator, *rest = tree
    values = [value_of(item) for item in rest]
    match operator:
        case "sum":
            return sum(values)
        case "mul":
            return math.prod(values)
        case "div":
            return values[0] / values[1]
        case "neg":
            return -values[0]
    return values[0] ** 0.5


def numbers(random: Random, count: int) -> list[Tree | int]:
    """Draw different numbers in ascending order."""
    drawn = {value_of(tree): tree for tree in (number(random) for _ in range(5 * count))}
    chosen = random.sample(sorted(drawn), count)
    return [drawn[value] for value in sorted(chosen)]


Kind = Callable[[Random], tuple[Renderings, Renderings]]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def grouped(value: int, separator: str) -> str:
    return f"{value:,}".replace(",", separator)


@kind
def integer(random: Random) -> tuple[Renderings, Renderings]:
    n = random.choice((random.randint(2, 99), random.randint(-99, -2), random.randint(100, 999)))

    def write(n: int) -> Renderings:
        return [
            f"{n}", f"{n}", f"{n}.0", f"{n}.", f"\\text{{{n}}}", f"\\mathbf{{{n}}}", f"x = {n}", f"x={n}", f"n = {n}",
            f"{n}".replace("-", "−"), f"{{{n}}}", f"\\textbf{{{n}}}", f"({n})", f"\\left({n}\\right)",
            f"{n}\\,", f"\\ {n}", f"**{n}**", f"\\frac{{{2 * n}}}{{2}}", f"\\mathrm{{{n}}}",
            f"{n} \\text{{ ways}}", f"{n}\\text{{ people}}", f"{n}\\ \\text{{integers}}", f"N = {n}", f"f(2) = {n}",
            f"\\text{{The answer is }} {n}", f"{n} \\quad", f"a_{{10}} = {n}", f"S_5 = {n}", f"P(3) = {n}",
            f"m+n = {n}", f"|S| = {n}", f"\\displaystyle {n}", f"\\angle ABC = {n}", f"AB = {n}", f"x + y = {n}",
            f"\\max = {n}", f"\\text{{Area}} = {n}", f"k={n}", f"\\lambda = {n}", f"x_1 = {n}",
           
            f"\\det(A) = {n}", f"\\gcd(a,b) = {n}", f"abc = {n}", f"a+b+c={n}", f"\\tan A = {n}", f"{n}:",
            f"\\sqrt{{{n * n}}}" if n > 0 else f"{n}",
            f"ab + c = {n}", f"\\text{{Perimeter}}={n}", f"f'(1) = {n}", f"|z|={n}", f"\\theta = {n}",
            f"\\lim_{{x\\to 0}} f(x) = {n}",
        ]  # fmt: skip

    misses = [n + 1, n - 1, -n, 10 * n, n + 10, int(str(abs(n))[::-1]) if str(abs(n))[::-1] != str(abs(n)) else n + 2]
    wrong = [text for miss in misses if miss != n for text in random.sample(write(miss), 2)]
    return write(n), [*wrong, f"{n}x", f"{n}i", f"\\frac{{1}}{{{n}}}", f"{n}^2", f"{n}\\pi", f"{n}, {n + 1}",
        f"x \\ne {n}", f"x \\ge {n}", f"{n}.5"]  # fmt: skip


@kind
def thousands(random: Random) -> tuple[Renderings, Renderings]:
    n = random.choice((random.randint(1000, 99_999), random.randint(100_000, 99_999_999)))

    def write(n: int) -> Renderings:
        styles = (",", "{,}", "\\,", "\\ ", " ", ",\\!", "\u202f", "\u2009", "\u00a0", "~", "\\;", "{,}\\!", "'",
            "\\thinspace ")  # fmt: skip
        return [f"{n}", f"{n}", *(grouped(n, style) for style in styles), f"\\$ {n:,}", f"{n:,}.00",
            f"{n:,} \\text{{ ways}}", f"{n}_{{}}"[:-3]]  # fmt: skip

    digits = str(n)
    swapped = int(digits[:-2] + digits[-1] + digits[-2])
    misses = [n + 1, n * 10, n // 10, n + 1000, *([swapped] if swapped != n else [])]
    return write(n), [text for miss in misses for text in random.sample(write(miss),
        2)] + [f"{digits[:-3]}.{digits[-3:]}" if int(digits[-3:]) else f"{n}1"]  # fmt: skip


@kind
def decimal(random: Random) -> tuple[Renderings, Renderings]:
    places = random.randint(1, 3)
    n = random.choice([k for k in range(1, 10 ** (places + 1)) if k % 10])
    value = Fraction(n, 10**places)

    def write(value: Fraction) -> Renderings:
        shown = f"{float(value):.{places}f}"
        texts = [shown, f"{shown}0", f"x = {shown}", f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
            f"\\text{{{shown}}}", f"{value.numerator}/{value.denominator}", f"\\approx {shown}"]  # fmt: skip
        return [*texts, shown[1:]] if shown.startswith("0.") else texts

    return write(value), [text for miss in (value + Fraction(1, 10**places), value * 10, value / 10,
        value + 1) for text in write(miss)[:2]]  # fmt: skip


@kind
def fraction(random: Random) -> tuple[Renderings, Renderings]:
    while True:
        a, b = random.randint(1, 40), random.randint(2, 40)
        if math.gcd(a, b) == 1 and a != b:
            break
    sign = random.choice(("", "-"))

    def write(a: int, b: int, sign: str) -> Renderings:
        texts = [
            f"{sign}\\frac{{{a}}}{{{b}}}", f"{sign}\\dfrac{{{a}}}{{{b}}}", f"{sign}\\tfrac{{{a}}}{{{b}}}",
            f"{sign}{a}/{b}",
            f"{sign} \\frac {{{a}}} {{{b}}}", f"{sign}\\cfrac{{{a}}}{{{b}}}", f"\\frac{{{sign}{a}}}{{{b}}}",
            f"{sign}\\frac{{{2 * a}}}{{{2 * b}}}",
            f"{sign}{{{a} \\over {b}}}", f"{sign}\\left(\\frac{{{a}}}{{{b}}}\\right)", f"{sign}({a}/{b})",
            f"{sign}{a} / {b}",
            f"x = {sign}\\frac{{{a}}}{{{b}}}", f"P(A) = {sign}\\frac{{{a}}}{{{b}}}", f"{sign}{a}⁄{b}",
            f"{sign}{a}∕{b}", f"{sign}{a} ÷ {b}",
            f"{sign}\\frac{{\\text{{{a}}}}}{{\\text{{{b}}}}}", f"{sign}\\displaystyle\\frac{{{a}}}{{{b}}}",
            f"{sign}\\frac{{{a}}}{{{b}}}\\text{{.}}",
            f"{sign}{a} \\div {b}", f"\\frac{{m}}{{n}} = {sign}\\frac{{{a}}}{{{b}}}",
            f"{sign}\\frac{{{a}}}{{{b}}} \\approx {a / b:.4f}" if not sign else f"{sign}\\frac{{{a}}}{{{b}}}",
            f"{sign}\\frac{{{a}}}{{{b}}} = {sign}{a / b:.6g}" if Fraction(f"{a / b:.6g}") == Fraction(a,
            b) else f"{sign}\\frac{{{a}}}{{{b}}}",
        ]  # fmt: skip
        if a < 10 and b < 10:
            texts += [f"{sign}\\frac{a}{b}", f"{sign}\\frac{{{a}}}{b}", f"{sign}\\frac{a}{{{b}}}",
                f"{sign}\\dfrac{a}{b}"]  # fmt: skip
        return texts

    other = "-" if not sign else ""
    wrong = write(a + 1, b, sign) * (math.gcd(a + 1, b) != b or True) + write(a, b + 1, sign) + write(a, b,
        other) + (write(b, a, sign))  # fmt: skip
    return write(a, b, sign), [*random.sample(wrong, 10), f"{sign}{a}.{b}", f"{a}, {b}", f"{sign}\\frac{{{a}}}{{{b}}}x"]


@kind
def mixed(random: Random) -> tuple[Renderings, Renderings]:
    b = random.randint(2, 12)
    a = random.choice([k for k in range(1, b) if math.gcd(k, b) == 1])
    whole = random.randint(1, 20)

    def write(w: int, a: int, b: int) -> Renderings:
        return [
            f"{w}\\frac{{{a}}}{{{b}}}", f"{w} \\frac{{{a}}}{{{b}}}", f"{w}\\dfrac{{{a}}}{{{b}}}", f"{w} {a}/{b}",
            f"\\frac{{{w * b + a}}}{{{b}}}", f"{w * b + a}/{b}", f"{w}\\,\\frac{{{a}}}{{{b}}}",
            f"{w}\\ \\frac{{{a}}}{{{b}}}",
            f"{w}\\tfrac{{{a}}}{{{b}}}", f"{w} \\text{{ and }} \\frac{{{a}}}{{{b}}}", f"x={w}\\frac{{{a}}}{{{b}}}",
        ]  # fmt: skip

    return write(whole, a, b), write(whole + 1, a, b)[:4] + [f"{whole} \\cdot \\frac{{{a}}}{{{b}}}", f"\\frac{{{whole * a}}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}",
        f"{whole}", f"-{whole}\\frac{{{a}}}{{{b}}}"]  # fmt: skip


@kind
def percent(random: Random) -> tuple[Renderings, Renderings]:
    n = random.choice([Fraction(k) for k in range(2, 98)] + [Fraction(k, 2) for k in range(3, 99, 2)])

    def write(n: Fraction) -> Renderings:
        shown = f"{float(n):g}"
        return [f"{shown}\\%", f"{shown}%", f"{shown} %", f"{shown}\\text{{ percent}}", f"{shown} percent",
            f"{shown}\\,\\%", f"{shown}\\text{{\\%}}", f"{shown} per cent",
            f"{shown}0\\%" if "." in shown else f"{shown}.0\\%", f"{shown} \\text{{ per cent}}",
            f"\\text{{{shown}\\%}}", f"{shown}\\ \\%", f"p = {shown}\\%"]  # fmt: skip

    decimal = f"{float(n / 100):g}"
    return [*write(n), decimal], [text for m in (n + 1, n * 10, n / 10,
        100 - n if n != 50 else n + 3) for text in random.sample(write(m), 2)] + [f"-{float(n):g}\\%"]  # fmt: skip


@kind
def money(random: Random) -> tuple[Renderings, Renderings]:
    cents = random.choice((random.randint(1, 200) * 100, random.randint(101, 99_999), random.randint(100_000, 999_999)))

    def write(cents: int) -> Renderings:
        shown = f"{cents / 100:.2f}" if cents % 100 else str(cents // 100)
        long = f"{cents / 100:,.2f}"
        return [f"\\${shown}", f"${shown}", f"\\${long}", f"${long}", f"{shown} dollars",
            f"{shown}\\text{{ dollars}}", f"\\text{{\\${shown}}}", f"\\$ {shown}", f"{shown} USD", f"US\\${long}",
            f"{shown}", f"\\$\\,{shown}", f"\\mathdollar {shown}", f"\\text{{USD }}{long}", f"\\${{{shown}}}",
            f"\\${shown}\\text{{ per month}}", f"{long}\\text{{ dollars}}"]  # fmt: skip

    return write(cents), [text for miss in (cents + 1, cents + 100, cents * 10,
        cents * 100) for text in random.sample(write(miss), 2)] + [f"{cents // 100} cents"]  # fmt: skip


UNITS = {
    "cm": (("cm", "centimeters", "centimetres"), "m"), "m": (("m", "meters", "metres"), "cm"), "km": (("km",
    "kilometers"), "m"),
    "in": (("in", "inches", "in."), "feet"), "ft": (("ft", "feet"), "inches"), "kg": (("kg", "kilograms"), "g"),
    "g": (("g", "grams"), "kg"),
    "mph": (("mph", "miles per hour", "mi/h"), "km/h"), "km/h": (("km/h", "kilometers per hour", "kph"), "m/s"),
    "m/s": (("m/s", "meters per second"), "km/h"),
    "hours": (("hours", "h", "hr", "hrs"), "minutes"), "minutes": (("minutes", "min", "mins"), "hours"),
    "seconds": (("seconds", "s", "sec"), "minutes"),
    "mL": (("mL", "ml", "milliliters"), "L"), "L": (("L", "liters", "litres"), "mL"), "days": (("days",), "weeks"),
    "J": (("J", "joules"), "kJ"),
    "N": (("N", "newtons"), "J"), "W": (("W", "watts"), "kW"), "miles": (("miles", "mi"), "feet"), "lb": (("lb",
    "lbs", "pounds"), "ounces"),
}  # fmt: skip


@kind
def unit(random: Random) -> tuple[Renderings, Renderings]:
    (names, other) = random.choice(list(UNITS.values()))
    n = random.randint(2, 500)
    shown = random.choice((str(n), f"{n / 10:g}", f"\\frac{{{n}}}{{7}}" if n % 7 else str(n), f"{n}\\sqrt{{3}}",
        f"{n}\\pi"))  # fmt: skip

    def write(shown: str, names: tuple[str, ...]) -> Renderings:
        texts = [shown]
        for name in names:
            texts += [f"{shown}\\text{{ {name}}}", f"{shown} \\text{{ {name}}}", f"{shown}\\ \\text{{{name}}}",
                f"{shown}\\,\\mathrm{{{name}}}", f"{shown}~\\mathrm{{{name}}}", f"{shown} \\, \\text{{{name}}}",
                f"{shown} \\mathrm{{~{name}}}", f"{shown}\\;\\text{{{name}}}", f"{shown}\\mbox{{ {name}}}",
                f"{shown} \\textrm{{ {name}}}", f"x = {shown}\\text{{ {name}}}", f"{shown}\\operatorname{{{name}}}",
                f"{shown}\\quad\\text{{{name}}}", f"{shown}\\ \\textit{{{name}}}"]  # fmt: skip
            if "\\" not in shown:
                texts += [f"{shown} {name}"]
        return texts

    wrong = str(n + 1) if "\\" not in shown and "." not in shown else shown.replace(str(n),
        str(n + 2)) if "\\" in shown else f"{n / 10 + 0.1:g}"  # fmt: skip
    right = write(shown, names)
    with_unit = [text for text in write(shown, (other,)) if text != shown]
    bad = random.sample(write(wrong, names), 4)
    marked = [text for text in right if text != shown]
    return marked, bad + random.sample(with_unit, 4)


@kind
def area(random: Random) -> tuple[Renderings, Renderings]:
    name, long = random.choice((("cm", "centimeters"), ("m", "meters"), ("in", "inches"), ("ft", "feet"), ("km",
        "kilometers")))  # fmt: skip
    power, word, other = random.choice(((2, "square", 3), (3, "cubic", 2)))
    n = random.randint(2, 300)
    shown = random.choice((str(n), f"{n}\\pi", f"{n}\\sqrt{{3}}"))

    def write(shown: str, power: int, word: str) -> Renderings:
        return [f"{shown}\\text{{ {name}}}^{power}", f"{shown}\\text{{ {name}}}^{{{power}}}",
            f"{shown}\\,\\mathrm{{{name}}}^{power}", f"{shown} \\mathrm{{~{name}}}^{{{power}}}",
            f"{shown}\\text{{ {word} {long}}}", f"{shown}\\ \\text{{{name}}}^{power}",
            f"{shown}\\text{{ {name}$^{power}$}}", f"{shown}\\text{{ {name}}}{'²³'[power - 2]}",
            f"{shown}\\ \\mathrm{{{name}^{power}}}", f"{shown}\\, \\text{{{word} {long}}}",
            f"{shown}\\text{{ {name}^{power}}}", f"{shown}\\text{{ {word} units}}",
            f"{shown}\\text{{ {'sq' if power == 2 else 'cu'} {name}}}"]  # fmt: skip

    return write(shown, power, word), random.sample(write(shown.replace(str(n), str(n + 1)), power, word),
        3) + [f"{shown}\\text{{ {name}}}^{other}", f"{shown}\\text{{ {name}}}",
        f"{shown}\\,\\mathrm{{{name}}}^{{{other}}}"]  # fmt: skip


@kind
def clock(random: Random) -> tuple[Renderings, Renderings]:
    hour, minute, half = random.randint(1, 11), random.randint(1, 59), random.choice("ap")

    def write(hour: int, minute: int, half: str) -> Renderings:
        base = f"{hour}:{minute:02}"
        return [f"{base}\\text{{ {half}.m.}}", f"{base} {half.upper()}M", f"{base}{half}m",
            f"{base}\\,\\text{{{half.upper()}M}}", f"{base} {half}.m.", f"\\text{{{base} {half.upper()}M}}",
            f"{base} \\text{{ {half.upper()}.M.}}", f"{hour + 12 * (half == 'p')}:{minute:02}",
            f"{base}~\\mathrm{{{half}.m.}}", f"{base} \\mathrm{{{half.upper()}M}}",
            f"0{base} {half.upper()}M" if hour < 10 else f"{base} {half.upper()}M"]  # fmt: skip

    right = write(hour, minute, half)
    return right, random.sample(write(hour, minute % 59 + 1, half), 2) + random.sample(write(hour % 11 + 1, minute,
        half), 2) + list(write(hour, minute, "pa"["ap".index(half)])[:7])  # fmt: skip


@kind
def date(random: Random) -> tuple[Renderings, Renderings]:
    months = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
        "November", "December")  # fmt: skip
    month, day = random.randrange(12), random.randint(1, 28)

    def write(month: int, day: int) -> Renderings:
        name = months[month]
        suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return [f"\\text{{{name} {day}}}", f"{name} {day}", f"{day} {name}", f"{name} {day}{suffix}",
            f"{name[:3]} {day}", f"the {day}{suffix} of {name}", f"\\text{{{name}}}\\ {day}",
            f"\\text{{{name} }}{day}", f"{day}{suffix} {name}", f"\\text{{{name} }} {day}^{{\\text{{{suffix}}}}}",
            f"{name[:3]}. {day}"]  # fmt: skip

    return write(month, day), write(month, day % 28 + 1)[:3] + write((month + 1) % 12, day)[:3] + [f"{day}",
        months[month]]  # fmt: skip


@kind
def ratio_of(random: Random) -> tuple[Renderings, Renderings]:
    while True:
        a, b = random.randint(1, 30), random.randint(1, 30)
        if math.gcd(a, b) == 1 and a != b and not (b >= 10):
            break

    def write(a: int, b: int) -> Renderings:
        return [f"{a}:{b}", f"{a} : {b}", f"{a}\\colon {b}", f"{a} to {b}", f"{a}\\text{{ to }}{b}", f"{a}{{:}}{b}",
            f"{a}\\,:\\,{b}", f"\\text{{{a}:{b}}}", f"{a} \\text{{:}} {b}", f"a:b = {a}:{b}", f"{a}∶{b}"]  # fmt: skip

    return write(a, b) + write(2 * a, 2 * b)[:1] * (2 * b < 10), write(b, a)[:4] + write(a + 1,
        b)[:3] + [f"{a}:{b}:{a}", f"{a}, {b}"]  # fmt: skip


def span(random: Random, low: str, high: str, closed: tuple[bool, bool]) -> Renderings:
    """Return renderings of an interval; an infinite end is `inf`."""
    left, right = "[" if closed[0] else "(", "]" if closed[1] else ")"
    infinity = random.choice(("\\infty", "\\infty", "∞", "+\\infty"))
    negative = infinity.replace("+", "")
    lo = f"-{negative}" if low == "-inf" else low
    hi = infinity if high == "inf" else high
    texts = [f"{left}{lo}, {hi}{right}", f"{left}{lo},{hi}{right}", f"\\left{left}{lo}, {hi}\\right{right}",
        f"x \\in {left}{lo}, {hi}{right}", f"x\\in\\left{left}{lo},{hi}\\right{right}",
        f"\\bigl{left}{lo},\\,{hi}\\bigr{right}", f"\\left{left} {lo} , {hi} \\right{right}"]  # fmt: skip
    le = [("\\le", "\\leq", "≤", "\\leqslant", "<=") if c else ("<", "\\lt", "<", "<", "<") for c in closed]
    ge = [("\\ge", "\\geq", "≥", "\\geqslant", ">=") if c else (">", "\\gt", ">", ">", ">") for c in closed]
    n = random.randrange(5)
    if low == "-inf":
        texts += [f"x {le[1][n]} {high}", f"{high} {ge[1][n]} x", f"\\{{x \\mid x {le[1][n]} {high}\\}}"]
    elif high == "inf":
        texts += [f"x {ge[0][n]} {low}", f"{low} {le[0][n]} x", f"\\{{x : x {ge[0][n]} {low}\\}}",
            f"\\{{ x \\in \\mathbb{{R}} \\mid x {ge[0][n]} {low} \\}}"]  # fmt: skip
    else:
        texts += [f"{low} {le[0][n]} x {le[1][n]} {high}", f"{high} {ge[1][n]} x {ge[0][n]} {low}",
            f"\\{{x \\mid {low} {le[0][n]} x {le[1][n]} {high}\\}}",
            f"x {ge[0][n]} {low} \\text{{ and }} x {le[1][n]} {high}",
            f"x \\in \\mathbb{{R}}, {low} {le[0][n]} x {le[1][n]} {high}",
            f"\\left\\{{ x : {low} {le[0][n]} x {le[1][n]} {high} \\right\\}}"]  # fmt: skip
    return texts


@kind
def interval(random: Random) -> tuple[Renderings, Renderings]:
    low, high, third = (Printer(random, "latex")(tree) for tree in numbers(random, 3))
    shape = random.randrange(3)
    closed = (random.random() < 0.5, random.random() < 0.5)
    if shape == 0:
        closed, low = (False, closed[1]), "-inf"
    elif shape == 1:
        closed, high = (closed[0], False), "inf"

    def write(low: str, high: str, closed: tuple[bool, bool]) -> Renderings:
        return span(random, low, high, closed)

    flipped = (not closed[0], closed[1]) if low != "-inf" else (closed[0], not closed[1])
    wrong = write(low, high, flipped) + (write(low, third, closed) if high not in ("inf",) else write(third, high,
        closed))  # fmt: skip
    if low == "-inf":
        wrong += write(high, "inf", (closed[1], False))
    elif high == "inf":
        wrong += write("-inf", low, (False, closed[0]))
    else:
        wrong += [f"{low}, {high}", f"\\{{{low}, {high}\\}}", low, *write(low, "inf", (closed[0], False))]
    return write(low, high, closed), random.sample(wrong, min(len(wrong), 10))


@kind
def union(random: Random) -> tuple[Renderings, Renderings]:
    a, b, c = (Printer(random, "latex")(tree) for tree in numbers(random, 3))
    closed = (random.random() < 0.5, random.random() < 0.5)

    def write(a: str, b: str, closed: tuple[bool, bool]) -> Renderings:
        first, second = span(random, "-inf", a, (False, closed[0])), span(random, b, "inf", (closed[1], False))
        n = random.randrange(3)
        cup = random.choice(("\\cup", " \\cup ", "∪", " ∪ "))
        cup = cup + " " * (cup[-1] == "p")
        return [f"{first[0]} \\cup {second[0]}", f"{first[n]}{cup}{second[n]}", f"{second[n]}{cup}{first[n]}",
            f"x \\in {first[n]}{cup}{second[n]}", f"{first[-3]} \\text{{ or }} {second[-4]}",
            f"{second[-4]}\\text{{ or }}{first[-3]}", f"{first[0]} U {second[0]}",
            f"\\{{x \\mid {first[-3]} \\text{{ or }} {second[-4]}\\}}", f"{first[-3]}, {second[-4]}" ,
            f"{first[0]} \\bigcup {second[0]}", f"{first[0]} \\text{{ or }} {second[0]}"]  # fmt: skip

    wrong = write(a, c, closed) + write(a, b, (not closed[0], closed[1])) + span(random, a, b,
        closed) + span(random, b, "inf", (closed[1], False))  # fmt: skip
    return write(a, b, closed), random.sample(wrong, 10)


@kind
def reals_but(random: Random) -> tuple[Renderings, Renderings]:
    a, b = (Printer(random, "latex")(tree) for tree in numbers(random, 2))

    def write(*ends: str) -> Renderings:
        items = ", ".join(ends)
        edges = ["-\\infty", *ends, "\\infty"]
        spans = " \\cup ".join(f"({low}, {high})" for low, high in itertools.pairwise(edges))
        ne = random.choice(("\\ne", "\\neq", "≠", "\\not="))
        return [spans, f"\\mathbb{{R}} \\setminus \\{{{items}\\}}", f"\\mathbb{{R}} - \\{{{items}\\}}",
            f"\\mathbb{{R}}\\backslash\\{{{items}\\}}",
            f"\\text{{all real numbers except }} {' and '.join(ends)}" if len(ends) == 1 else spans,
            f"x {ne} {', '.join(ends)}", f"\\{{x \\mid x {ne} {ends[0]}\\}}" if len(ends) == 1 else spans,
            f"\\{{x \\in \\mathbb{{R}} : x {ne} {ends[0]}\\}}" if len(ends) == 1 else spans,
            " \\text{ and } ".join(f"x {ne} {end}" for end in ends),
            f"(-\\infty, \\infty) \\setminus \\{{{items}\\}}"]  # fmt: skip

    ends = (a,) if random.random() < 0.5 else (a, b)
    return write(*ends), random.sample(write(*((a, b) if len(ends) == 1 else (a,))),
        4) + [f"\\{{{', '.join(ends)}\\}}", a, "\\mathbb{R}", f"x > {a}"]  # fmt: skip


@kind
def set_of(random: Random) -> tuple[Renderings, Renderings]:
    count = random.randint(2, 5)
    values = numbers(random, count + 1)
    items, other = values[:-1], values[-1]

    def write(items: list[Tree | int]) -> Renderings:
        show = Printer(random, "latex")
        shuffled = random.sample(items, len(items))
        comma, texts = ", ".join(map(show, items)), [show(item) for item in shuffled]
        plain = Printer(random, "plain")
        return [f"\\{{{comma}\\}}", f"\\left\\{{{comma}\\right\\}}", f"\\{{{','.join(texts)}\\}}", comma,
            ", ".join(texts), ",\\ ".join(texts), "; ".join(texts),
            f"{', '.join(texts[:-1])} \\text{{ and }} {texts[-1]}",
            f"{', '.join(texts[:-1])}, \\text{{ and }} {texts[-1]}",
            f"{', '.join(texts[:-1])} \\text{{ or }} {texts[-1]}", f"x \\in \\{{{comma}\\}}", f"x = {comma}",
            f"{{{comma}}}", ", ".join(f"x = {text}" for text in texts),
            " \\text{ or } ".join(f"x = {text}" for text in texts), ", ".join(f"x_{n} = {text}" for n,
            text in enumerate(texts, 1)), f"\\lbrace {comma} \\rbrace", ", ".join(map(plain, shuffled)),
            " and ".join(map(plain, shuffled)) if len(items) == 2 else comma, f"S = \\{{{comma}\\}}",
            ",\\quad ".join(texts), "$" + "$, $".join(texts) + "$" if len(items) > 2 else comma,
            f"x \\in \\{{ {' , '.join(texts)} \\}}", f"\\text{{{comma}}}" if "\\" not in comma else comma,
            ", \\; ".join(texts)]  # fmt: skip

    wrong = write(items[1:]) if count > 2 else []
    wrong += write([*items[1:], other]) + write([*items, other])
    return write(items), [*random.sample(wrong, 10), Printer(random, "latex")(items[-1])]


@kind
def point(random: Random) -> tuple[Renderings, Renderings]:
    values = numbers(random, random.choice((2, 2, 3)))
    random.shuffle(values)

    def write(values: list[Tree | int]) -> Renderings:
        show, plain = Printer(random, "latex"), Printer(random, "plain")
        texts = [show(value) for value in values]
        comma = ", ".join(texts)
        names = ("x", "y", "z")[: len(values)]
        return [f"({comma})", f"\\left({comma}\\right)", f"({','.join(texts)})",
            f"({', '.join(map(plain, values))})", f"({', '.join(names)}) = ({comma})", ", ".join(f"{n} = {t}" for n,
            t in zip(names, texts, strict=True)), f"\\left( {' , '.join(texts)} \\right)",
            " \\text{ and } ".join(f"{n} = {t}" for n, t in zip(names, texts,
            strict=True)) if len(values) == 2 else comma.join("()"), f"\\bigl({comma}\\bigr)", f"P = ({comma})",
            f"P({comma})", "({})".format(",\\,".join(texts)), f"\\big({comma}\\big)",
            f"\\text{{the point }}({comma})"]  # fmt: skip

    swapped = values[::-1]
    changed = [("neg", values[0]) if not isinstance(values[0], int) else values[0] + 1, *values[1:]]
    return write(values), random.sample(write(swapped), 5) + random.sample(write(changed), 5) + [Printer(random,
        "latex")(values[-1])]  # fmt: skip


@kind
def vector(random: Random) -> tuple[Renderings, Renderings]:
    values = [random.choice([n for n in range(-9, 10) if n]) for _ in range(random.choice((2, 3)))]
    if len(set(values)) == 1 or values == values[::-1]:
        values[0] += 11

    def write(values: list[int]) -> Renderings:
        comma = ", ".join(map(str, values))
        letters = ("\\mathbf{i}", "\\mathbf{j}", "\\mathbf{k}")
        hats = ("\\hat{i}", "\\hat{j}", "\\hat{k}")
        hats2 = ("\\hat{\\imath}", "\\hat{\\jmath}", "\\hat{k}")
        vecs = ("\\vec{i}", "\\vec{j}", "\\vec{k}")

        def basis(letters: tuple[str, ...]) -> str:
            text = "".join(f"{'+' if v > 0 else '-'}{'' if abs(v) == 1 else abs(v)}{x}" for v, x in zip(values,
                letters, strict=False))  # fmt: skip
            return text.removeprefix("+")

        rows, decimals = " \\\\ ".join(map(str, values)), " \\\\ ".join(f"{v}.0" for v in values)
        return [f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}", f"\\langle {comma} \\rangle",
            f"\\left\\langle {comma} \\right\\rangle", f"\\begin{{bmatrix}}{rows}\\end{{bmatrix}}", f"({comma})",
            f"\\vec{{v}} = \\langle {comma} \\rangle", f"⟨{comma}⟩", basis(letters), basis(hats), basis(vecs),
            f"<{comma}>", f"\\mathbf{{v}} = ({comma})", f"\\left[\\begin{{array}}{{c}}{rows}\\end{{array}}\\right]",
            basis(hats2), f"\\begin{{pmatrix}} {decimals} \\end{{pmatrix}}", f"[{comma}]^T", f"({comma})^T"]  # fmt: skip

    return write(values), random.sample(write(values[::-1]), 5) + random.sample(write([values[0] + 1, *values[1:]]), 5)


@kind
def matrix(random: Random) -> tuple[Renderings, Renderings]:
    rows = [[random.choice((random.randint(-9, 20), random.randint(0, 9))) for _ in range(2)] for _ in range(2)]
    rows[0][1] = rows[1][0] + 1

    def write(rows: list[list[int]]) -> Renderings:
        spaced = " \\\\ ".join(" & ".join(map(str, row)) for row in rows)
        tight = "\\\\".join("&".join(map(str, row)) for row in rows)
        return [f"\\begin{{pmatrix}} {spaced} \\end{{pmatrix}}", f"\\begin{{pmatrix}}{tight}\\end{{pmatrix}}",
            f"\\begin{{bmatrix}} {spaced} \\end{{bmatrix}}",
            f"\\left[\\begin{{array}}{{cc}} {spaced} \\end{{array}}\\right]",
            f"\\left(\\begin{{array}}{{rr}} {spaced} \\\\ \\end{{array}}\\right)",
            f"\\left[\\begin{{matrix}} {spaced} \\end{{matrix}}\\right]",
            f"A = \\begin{{bmatrix}} {spaced} \\end{{bmatrix}}", "[[" + "], [".join(", ".join(map(str,
            row)) for row in rows) + "]]",
            f"\\begin{{bmatrix}} {spaced.replace('&', ' &  ')} \\\\ \\end{{bmatrix}}",
            f"\\mathbf{{A}} = \\begin{{bmatrix}} {spaced} \\end{{bmatrix}}",
            f"\\begin{{pmatrix}}\n{spaced}\n\\end{{pmatrix}}"]  # fmt: skip

    transposed = [list(column) for column in zip(*rows, strict=True)]
    return write(rows), random.sample(write(transposed), 4) + random.sample(write([[rows[0][0] + 1, rows[0][1]],
        rows[1]]), 4)  # fmt: skip


def polynomial_of(coefficients: list[int], symbol: str = "x", shuffle: Random | None = None) -> Tree | int | str:
    """Return a polynomial with these coefficients, the highest first."""
    terms = []
    for power, coefficient in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if coefficient == 0:
            continue
        variable: Tree | str | int = symbol if power == 1 else ("pow", symbol, power)
        size = abs(coefficient)
        term: Tree | str | int = size if power == 0 else variable if size == 1 else ("mul", size, variable)
        terms.append(("neg", term) if coefficient < 0 else term)
    if shuffle is not None:
        shuffle.shuffle(terms)
    return terms[0] if len(terms) == 1 else ("sum", *terms)


@kind
def polynomial(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.sample([n for n in range(-9, 10) if n], 2)
    k = random.choice((1, 1, 2, 3))
    symbol = random.choice("xxtnak")
    coefficients = [k, -k * (a + b), k * a * b]

    def factor(a: int) -> Tree:
        return ("sum", symbol, -a)

    factored: Tree = ("mul", factor(a), factor(b)) if k == 1 else ("mul", k, factor(a), factor(b))
    equal = [polynomial_of(coefficients, symbol), polynomial_of(coefficients, symbol, random), factored]
    wrong = []
    for n in range(3):
        changed = list(coefficients)
        changed[n] += random.choice((1, 2, 5)) if changed[n] + 5 else 7
        if changed[0]:
            wrong += printed(random, polynomial_of(changed, symbol), count=2)
    wrong += printed(random, polynomial_of([-c for c in coefficients], symbol), polynomial_of([k, 0,
        *coefficients[1:]], symbol), count=2)  # fmt: skip
    if a + b:
        wrong += printed(random, polynomial_of([k, k * (a + b), k * a * b], symbol), count=2)
    return printed(random, *equal, count=8) + [f"f({symbol}) = {text}" for text in printed(random, *equal,
        count=1)], wrong  # fmt: skip


@kind
def rational_function(random: Random) -> tuple[Renderings, Renderings]:
    a, b, c = random.sample([n for n in range(-9, 10) if n], 3)
    k = random.randint(1, 5)

    def linear(n):
        return ("sum", "x", n)

    top = linear(a) if k == 1 else ("mul", k, linear(a))
    right = [("div", top, linear(b)), ("sum", k, ("div", k * (a - b), linear(b))) if a > b else ("sum", k, ("neg",
        ("div", k * (b - a), linear(b)))), ("neg", ("div", top, ("sum", -b, ("neg", "x")))), ("div", ("mul", top,
        linear(c)) if k == 1 else ("mul", *top[1:], linear(c)), ("mul", linear(b), linear(c)))]  # fmt: skip
    wrong = [("div", top, linear(c)), ("div", linear(b), top), ("div", ("sum", "x", -a), linear(b)), ("sum", "x",
        ("div", a, "x") if a > 0 else ("neg", ("div", -a, "x")), b), ("neg", ("div", top, linear(b)))]  # fmt: skip
    return printed(random, *right, count=9), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def radical(random: Random) -> tuple[Renderings, Renderings]:
    n = random.choice((2, 3, 5, 6, 7, 10, 11, 13))
    a, b = random.randint(1, 9), random.randint(2, 9)
    d = random.randint(2, 7)
    scaled = ("mul", b, ("root", n))
    shape = random.randrange(6)
    if shape == 0:
        right = [scaled, ("root", b * b * n), ("mul", ("root", n), b), ("mul", b, ("pow", n, ("div", 1, 2)))]
        wrong = [("mul", b, ("root", n + 1)), ("neg", scaled), ("root", b * n), ("mul", b, ("root", n, 3)), ("sum",
            b, ("root", n))]  # fmt: skip
    elif shape == 1:
        right = [("sum", a, scaled), ("sum", scaled, a), ("sum", a, ("root", b * b * n))]
        wrong = [("sum", a, ("neg", scaled)), ("sum", a + 1, scaled), ("mul", a + b, ("root", n)), ("root", ("sum",
            a, n)), ("neg", ("sum", a, scaled))]  # fmt: skip
    elif shape == 2:
        right = [("div", ("sum", a, ("root", n)), d), ("div", ("sum", ("root", n), a), d), ("div", ("sum", 2 * a,
            ("mul", 2, ("root", n))), 2 * d), ("sum", ratio(a, d), ("div", ("root", n), d))]  # fmt: skip
        wrong = [("sum", a, ("div", ("root", n), d)), ("div", ("sum", a, ("neg", ("root", n))), d), ("div", ("sum",
            a, ("root", n)), d + 1), ("div", ("root", a + n), d)]  # fmt: skip
    elif shape == 3:
        right = [("div", ("root", n), n), ("div", 1, ("root", n)), ("pow", n, ("neg", ("div", 1, 2)))]
        wrong = [("root", n), ("div", n, ("root", n)), ("div", 1, n), ("neg", ("div", 1, ("root", n)))]
    elif shape == 4:
        right = [("root", n, 3), ("pow", n, ("div", 1, 3))]
        wrong = [("root", n), ("root", n, 4), ("mul", 3, ("root", n)), ("root", n + 1, 3)]
    else:
        m = n + 1
        right = [("sum", ("root", n), ("root", m)), ("sum", ("root", m), ("root", n))]
        wrong = [("root", n + m), ("root", n * m), ("sum", ("root", m), ("neg", ("root", n))), ("sum", ("root", n),
            ("root", m + 1))]  # fmt: skip
    return printed(random, *right, count=9), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def nested_radical(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.randint(5, 20), random.choice((2, 3, 5, 7))
    right = [("root", ("sum", a, ("root", b))), ("pow", ("sum", ("root", b), a), ("div", 1, 2))]
    wrong = [("root", ("sum", a, ("neg", ("root", b)))), ("sum", ("root", a), ("root", b)), ("root", a + b),
        ("root", ("sum", a + 1, ("root", b)))]  # fmt: skip
    return printed(random, *right, count=6), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def power(random: Random) -> tuple[Renderings, Renderings]:
    base, exponent, k = random.choice((2, 3, 5, 7)), random.randint(3, 9), random.randint(3, 9)
    high = random.randint(50, 200)
    shape = random.randrange(4)
    if shape == 0:
        value = base**exponent
        return [*printed(random, ("pow", base, exponent), count=4), f"{value}", f"{value:,}"], [f"{value + 1}",
            *printed(random, ("pow", base, exponent + 1), ("mul", base, exponent), count=3), f"{base}{exponent}"]  # fmt: skip
    if shape == 1:
        right = [("pow", base, high), ("mul", base, ("pow", base, high - 1))]
        wrong = [("pow", base, high + 1), ("sum", ("pow", base, high), 1), ("mul", base, high), ("neg", ("pow",
            base, high))]  # fmt: skip
    elif shape == 2:
        right = [("sum", ("pow", 2, high), -1), ("sum", -1, ("pow", 2, high)), ("sum", ("mul", 2, ("pow", 2,
            high - 1)), -1)]  # fmt: skip
        wrong = [("pow", 2, high), ("sum", ("pow", 2, high), 1), ("pow", 2, high - 1), ("sum", ("pow", 3, high), -1)]
    else:
        right = [("mul", k, ("pow", "n", 2), ("pow", 2, "n")), ("mul", k, ("pow", 2, "n"), ("pow", "n", 2))]
        wrong = [("mul", k, ("pow", "n", 2), ("pow", 2, ("sum", "n", 1))), ("mul", k, "n", ("pow", 2, "n")), ("sum",
            ("mul", k, ("pow", "n", 2)), ("pow", 2, "n"))]  # fmt: skip
    return printed(random, *right, count=6), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def exponential(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.randint(2, 6), random.randint(1, 9)
    x = random.choice("xt")
    grown = ("pow", "e", ("mul", a, x))
    decay = ("pow", "e", ("neg", ("mul", a, x)))
    right, wrong = random.choice((
        ([("mul", b + 1, grown), ("mul", grown, b + 1)], [("mul", b + 2, grown), ("mul", b + 1, decay), ("pow", "e",
        ("mul", a + b, x)), ("mul", b + 1, ("pow", "e", x))]),
        ([("mul", x, decay), ("div", x, grown)], [("mul", x, grown), decay, ("neg", ("mul", x, decay))]),
        ([("sum", 1, ("neg", decay)), ("sum", ("neg", decay), 1)], [("sum", 1, decay), ("sum", decay, -1), ("sum",
        1, ("neg", grown))]),
        ([("pow", "e", ("sum", x, b)), ("mul", ("pow", "e", b), ("pow", "e", x))], [("sum", ("pow", "e", x), b),
        ("pow", "e", ("sum", x, -b)), ("mul", b, ("pow", "e", x)) if b > 1 else ("pow", "e", x)]),
    ))  # fmt: skip
    return printed(random, *right, count=7), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def logarithm(random: Random) -> tuple[Renderings, Renderings]:
    base, a, b = random.choice((2, 3, 5, 7)), random.choice((6, 10, 11, 13, 14)), random.randint(2, 9)

    def ln(value):
        return ("fn", "ln", value)

    right, wrong = random.choice((
        ([("log", base, a), ("div", ln(a), ln(base))], [("log", a, base), ("log", base, a + 1), ln(a), ("div",
        ln(base), ln(a))]),
        ([("mul", b, ln(a)), ln(a**b)], [ln(a * b), ("mul", b + 1, ln(a)), ("mul", b, ln(a + 1)), ("neg", ("mul", b,
        ln(a)))]),
        ([ln(("div", a, base)), ("sum", ln(a), ("neg", ln(base))), ("neg", ln(("div", base, a)))], [("div", ln(a),
        ln(base)), ln(("div", base, a)), ln(a - base)]),
        ([("sum", b, ("neg", ln(a))), ("sum", ("neg", ln(a)), b)], [("sum", b, ln(a)), ln(b), ("sum", b + 1, ("neg",
        ln(a)))]),
        ([("div", ln(a), b), ("mul", ("div", 1, b), ln(a))], [("div", ln(a), b + 1), ln(("div", a, b)), ("mul", b,
        ln(a))]),
        ([("sum", 1, ("log", base, a)), ("log", base, a * base)], [("log", base, a + 1), ("sum", 1, ("log", a,
        base)), ("log", base, a)]),
        ([ln(("sum", "x", b)), ln(("sum", b, "x"))], [("sum", ln("x"), b), ln(("sum", "x", -b)), ("mul", "x", ln(b))]),
    ))  # fmt: skip
    return printed(random, *right, count=8), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def trigonometric(random: Random) -> tuple[Renderings, Renderings]:
    x = random.choice(("x", "theta", "t", "alpha"))
    k, a = random.randint(2, 5), random.randint(2, 7)

    def fn(name, value):
        return ("fn", name, value)

    sin, cos, tan = fn("sin", x), fn("cos", x), fn("tan", x)
    double = ("mul", 2, x)
    right, wrong = random.choice((
        ([("pow", sin, 2), ("sum", 1, ("neg", ("pow", cos, 2)))], [fn("sin", ("pow", x, 2)), sin, ("pow", cos, 2),
        ("mul", 2, sin)]),
        ([fn("sin", double), ("mul", 2, sin, cos)], [("mul", 2, sin), fn("cos", double), ("mul", sin, cos), ("neg",
        fn("sin", double))]),
        ([fn("cos", double), ("sum", ("mul", 2, ("pow", cos, 2)), -1), ("sum", 1, ("neg", ("mul", 2, ("pow", sin,
        2))))], [("mul", 2, cos), fn("sin", double), ("sum", ("mul", 2, ("pow", cos, 2)), 1)]),
        ([("mul", a, fn("cos", ("mul", k, x))), ("mul", fn("cos", ("mul", k, x)), a)], [("mul", a, fn("sin", ("mul",
        k, x))), ("mul", a, fn("cos", ("mul", k + 1, x))), ("mul", a * k, cos), ("neg", ("mul", a, fn("cos", ("mul",
        k, x))))]),
        ([tan, ("div", sin, cos)], [("div", cos, sin), fn("cot", x), ("mul", sin, cos), ("div", 1, tan)]),
        ([fn("sec", x), ("div", 1, cos)], [cos, fn("csc", x), ("div", 1, sin)]),
        ([fn("arctan", ("div", 1, k)), ], [fn("arctan", k), fn("arcsin", ("div", 1, k)), fn("tan", ("div", 1, k)),
        ("neg", fn("arctan", ("div", 1, k)))]),
        ([("mul", "x", sin, ) if x != "x" else ("mul", a, sin)], [("mul", "y", sin), cos, ("sum", a, sin)]),
        ([("sum", sin, ("mul", a, cos)), ("sum", ("mul", a, cos), sin)], [("sum", sin, ("neg", ("mul", a, cos))),
        ("sum", ("mul", a, sin), cos), ("mul", sin, a, cos)]),
        ([fn("sin", ("sum", x, ("div", "pi", k))), fn("sin", ("sum", ("div", "pi", k), x))], [fn("sin", ("sum", x,
        ("neg", ("div", "pi", k)))), ("sum", sin, ("div", "pi", k)), fn("sin", ("div", "pi", k))]),
    ))  # fmt: skip
    return printed(random, *right, count=8), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def multiple_of_pi(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.choice(list(range(2, 20))), random.randint(2, 12)
    while math.gcd(a, b) != 1:
        b += 1
    right, wrong = random.choice((
        ([("div", ("mul", a, "pi"), b), ("mul", ("div", a, b), "pi")], [("div", ("mul", a + b + 1, "pi"), b),
        ("div", a, ("mul", b, "pi")), ("div", a, b), ("neg", ("div", ("mul", a, "pi"), b)), ("div", ("pow", "pi",
        2), b)]),
        ([("mul", a, "pi"), ("mul", "pi", a)], [("mul", a + 1, "pi"), a, ("pow", "pi", a), ("sum", a, "pi"), ("neg",
        ("mul", a, "pi"))]),
        ([("sum", a, ("neg", ("div", "pi", b))), ("sum", ("neg", ("div", "pi", b)), a), ("div", ("sum", a * b,
        ("neg", "pi")), b)], [("sum", a, ("div", "pi", b)), ("div", ("sum", a, ("neg", "pi")), b), ("sum", a + 1,
        ("neg", ("div", "pi", b)))]),
        ([("sum", ("mul", a, "pi"), ("neg", ("mul", b, ("root", 3)))), ("sum", ("neg", ("mul", b, ("root", 3))),
        ("mul", a, "pi"))], [("sum", ("mul", a, "pi"), ("mul", b, ("root", 3))), ("sum", ("mul", a, "pi"), ("neg",
        ("mul", b, ("root", 2))))]),
        ([("div", ("pow", "pi", 2), b), ("mul", ("div", 1, b), ("pow", "pi", 2))], [("div", "pi", b), ("div",
        ("mul", 2, "pi"), b), ("div", ("pow", "pi", 3), b)]),
    ))  # fmt: skip
    return printed(random, *right, count=8), [printed(random, tree, count=2)[1] for tree in wrong]


@kind
def complex_number(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.choice([n for n in range(-9, 10) if n]), random.choice([n for n in range(-9, 10) if n not in (0,
        1, -1)])  # fmt: skip
    if abs(a) == abs(b):
        a += 10

    def tree(a: int, b: int) -> list[Tree]:
        imaginary = ("mul", b, "i") if b > 0 else ("neg", ("mul", -b, "i"))
        return [("sum", a, imaginary), ("sum", imaginary, a)]

    def write(a: int, b: int) -> Renderings:
        sign = "+" if b > 0 else "-"
        return printed(random, *tree(a, b), count=5) + [f"z = {a} {sign} {abs(b)}i",
            f"{a} {sign} {abs(b)}\\mathrm{{i}}", f"{a} {sign} {abs(b)} \\cdot i", f"({a}) {sign} ({abs(b)})i",
            f"{a} {sign} {abs(b)}\\,i", f"{a} {sign} {abs(b)}\\textit{{i}}"]  # fmt: skip

    return write(a, b), random.sample(write(a, -b), 3) + random.sample(write(b, a), 3) + random.sample(write(a + 1,
        b), 3) + [f"({a}, {b})", f"{a + b}"]  # fmt: skip


@kind
def binomial(random: Random) -> tuple[Renderings, Renderings]:
    n = random.randint(5, 15)
    k = random.randint(2, n - 2)
    value = math.comb(n, k)
    wrong_k = k + 1 if k + 1 != n - k else k - 1
    right = printed(random, ("binom", n, k), ("binom", n, n - k), count=5) + [f"{{{n} \\choose {k}}}",
        f"\\frac{{{n}!}}{{{k}!{n - k}!}}", f"\\frac{{{n}!}}{{{k}!\\cdot {n - k}!}}", f"{value}", f"{value:,}",
        f"{n}C{k}", f"\\binom {{{n}}} {{{k}}}", f"{{}}_{{{n}}}C_{{{k}}}", f"C({n}, {k})", f"C_{{{n}}}^{{{k}}}",
        f"^{{{n}}}C_{{{k}}}"]  # fmt: skip
    return right, printed(random, ("binom", n + 1, k), ("binom", n, wrong_k), count=4) + [f"{value + 1}",
        f"\\frac{{{n}!}}{{{k}!}}", f"\\frac{{{n}}}{{{k}}}", f"{n}!"]  # fmt: skip


@kind
def factorial(random: Random) -> tuple[Renderings, Renderings]:
    n, k = random.randint(7, 12), random.randint(2, 6)
    value = math.factorial(n)
    right, wrong = random.choice((
        ([f"{n}!", f"{value}", f"{value:,}", f"{n} \\cdot {n - 1}!", f"{n} \\times {n - 1}!", f"({n})!",
        f"N = {n}!"], [f"{n + 1}!", f"{value + 1}", f"{n}", f"{n}!!", f"{n - 1}!"]),
        ([f"{k} \\cdot {n}!", f"{k}\\times {n}!", f"{n}! \\cdot {k}", f"{k * value}", f"{k}({n}!)", f"{k}*{n}!"],
        [f"{k}{n}!", f"{n}!", f"({k}\\cdot{n})!", f"{k + 1} \\cdot {n}!"]),
        ([f"\\frac{{{n}!}}{{{k}!}}", f"{n}!/{k}!", f"{value // math.factorial(k)}", f"\\dfrac{{{n}!}}{{{k}!}}"],
        [f"\\frac{{{k}!}}{{{n}!}}", f"\\frac{{{n}}}{{{k}}}", f"{n}!{k}!",
        f"\\frac{{{n}!}}{{{k}}}" if k > 2 else f"{n}!"]),
        (["(n+1)!", "(n+1) \\cdot n!", "(1+n)!", "(n+1)n!", "\\left(n+1\\right)!"], ["n+1!", "n!+1", "n!", "(n+2)!",
        "(n-1)!"]),
        ([f"{n}!-{k}", f"{n}! - {k}", f"-{k} + {n}!", f"{value - k}"], [f"{n}!+{k}",
        f"({n}-{k})!" if n > k else "0", f"{n}!"]),
    ))  # fmt: skip
    return right, wrong


@kind
def line(random: Random) -> tuple[Renderings, Renderings]:
    a, b, k = random.choice([n for n in range(-9, 10) if n not in (0, 1, -1)]), random.choice([n for n in range(-9,
        10) if n]), random.randint(2, 4)  # fmt: skip

    def write(a: int, b: int) -> Renderings:
        side = printed(random, polynomial_of([a, b]), polynomial_of([a, b], "x", random), count=4)
        s, t = ("-", a) if a > 0 else ("+", -a), ("-", b) if b > 0 else ("+", -b)
        return [f"y = {side[0]}", f"y={side[1]}", f"y {s[0]} {s[1]}x = {b}",
            f"{a}x - y {'+' if b > 0 else '-'} {abs(b)} = 0",
            f"{k}y = {k * a}x {'+' if b > 0 else '-'} {k * abs(b)}", f"y {s[0]} {s[1]}x {t[0]} {t[1]} = 0",
            f"{side[2]} = y", side[0], f"f(x) = {side[0]}",
            f"y - {a + b} = {a}(x - 1)" if a + b > 0 else f"y={side[0]}", f"\\text{{the line }} y = {side[0]}",
            f"y={side[0]}\\text{{.}}", f"\\ell: y = {side[0]}"][: 7 if random.random() < .5 else 13]  # fmt: skip

    return write(a, b), random.sample(write(a, -b), 3) + random.sample(write(-a, b), 3) + random.sample(write(a + 1,
        b), 2) + [f"x = {a}y {'+' if b > 0 else '-'} {abs(b)}",
        f"y > {printed(random, polynomial_of([a, b]), count=1)[0]}"]  # fmt: skip


@kind
def curve(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.sample(list(range(1, 9)), 2)
    r = random.randint(2, 9)

    def write(a: int, b: int, square: int) -> Renderings:
        d = -2 * a
        return [f"(x - {a})^2 + (y + {b})^2 = {square}", f"(x-{a})^2+(y+{b})^2={square}",
            f"(y + {b})^2 + (x - {a})^2 = {square}", f"{square} = (x-{a})^2 + (y+{b})^2",
            f"x^2 + y^2 - {-d}x + {2 * b}y + {a * a + b * b - square} = 0".replace("+ -", "- "),
            f"(x-{a})²+(y+{b})²={square}", f"({a}-x)^2 + (y+{b})^2 = {square}",
            f"\\left(x-{a}\\right)^{{2}}+\\left(y+{b}\\right)^{{2}}={square}",
            f"(x-{a})^2 + (y+{b})^2 - {square} = 0",
            f"\\frac{{(x-{a})^2}}{{{square}}} + \\frac{{(y+{b})^2}}{{{square}}} = 1"]  # fmt: skip

    return write(a, b, r * r), random.sample(write(a, b, r), 2) + random.sample(write(b, a, r * r),
        3) + [f"(x + {a})^2 + (y - {b})^2 = {r * r}", f"(x - {a})^2 - (y + {b})^2 = {r * r}", f"{r * r}"]  # fmt: skip


@kind
def function(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.randint(2, 9), random.randint(1, 9)
    body = printed(random, ("sum", ("mul", a, ("pow", "x", 2)), b), ("sum", b, ("mul", a, ("pow", "x", 2))), count=3)

    def write(name: str, bodies: Renderings) -> Renderings:
        return [f"{name}(x) = {bodies[0]}", f"{name}(x)={bodies[1]}",
            f"{name}(x) = {bodies[2]} \\text{{ for all }} x",
            f"{name}(x)={bodies[0]} \\text{{ for all }} x \\in \\mathbb{{R}}",
            f"{name}\\left(x\\right) = {bodies[0]}", f"y = {bodies[0]}", bodies[0],
            f"{name}(t) = {bodies[0].replace('x', 't')}" , f"{name}: x \\mapsto {bodies[0]}",
            f"{name}(x) \\equiv {bodies[0]}", f"{name}(x) = {bodies[0]}, \\quad x \\in \\mathbb{{R}}",
            f"\\boxed{{{name}(x)={bodies[0]}}}"]  # fmt: skip

    other = printed(random, ("sum", ("mul", a, ("pow", "x", 2)), -b), ("sum", ("mul", a + 1, ("pow", "x", 2)), b),
        ("sum", ("mul", a, "x"), b), count=3)  # fmt: skip
    return write("f", body), [*random.sample(write("f", other), 5), f"g(x) = {body[0]}"]


@kind
def piecewise(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.sample(range(1, 9), 2)

    def write(a: int, b: int) -> Renderings:
        rows = [(f"x^2 + {a}", "x < 0"), (f"{b}x", "x \\ge 0")]
        texts = []
        for word, ordered in (
            ("", rows),
            ("\\text{if } ", rows),
            ("\\text{for } ", rows[::-1]),
            ("\\text{when } ", rows),
        ):
            content = " \\\\ ".join(f"{value} & {word}{condition}" for value, condition in ordered)
            texts += [f"\\begin{{cases}} {content} \\end{{cases}}",
                f"f(x) = \\begin{{cases}} {content.replace(' &', ', &')} \\end{{cases}}",
                f"\\left\\{{\\begin{{array}}{{ll}} {content} \\end{{array}}\\right."]  # fmt: skip
        return [*texts, texts[0].replace("\\ge", "\\geq"), texts[0].replace("x \\ge 0", "0 \\le x")]

    return write(a, b), random.sample(write(b, a), 4) + [write(a, b)[0].replace("<", "\\le").replace("\\ge ", "> "),
        f"x^2 + {a}"]  # fmt: skip


@kind
def plus_minus(random: Random) -> tuple[Renderings, Renderings]:
    a, n, d = random.randint(1, 9), random.choice((2, 3, 5, 7, 11, 13)), random.randint(2, 6)

    def write(a: int, n: int) -> Renderings:
        root = f"\\sqrt{{{n}}}"
        if shape == 0:
            return [f"\\pm {root}", f"\\pm{root}", f"x = \\pm {root}", f"{root}, -{root}", f"-{root}, {root}",
                f"\\{{-{root}, {root}\\}}", f"{root} \\text{{ and }} -{root}", f"±√{n}",
                f"x={root} \\text{{ or }} x=-{root}", f"\\{{\\pm {root}\\}}", f"x = {root}, -{root}",
                f"sqrt({n}), -sqrt({n})", f"+{root}, -{root}", f"\\pm \\sqrt {{{n}}}"]  # fmt: skip
        if shape == 1:
            return [f"{a} \\pm {root}", f"{a}\\pm{root}", f"x = {a} \\pm {root}", f"{a} + {root}, {a} - {root}",
                f"{a}-{root} \\text{{ and }} {a}+{root}", f"{a} ± √{n}", f"{root}+{a}, -{root}+{a}",
                f"\\{{{a}+{root}, {a}-{root}\\}}", f"{a} \\mp {root}", f"x_{{1,2}} = {a} \\pm {root}",
                f"x = {a} + {root} \\text{{ or }} x = {a} - {root}"]  # fmt: skip
        return [f"\\frac{{{a} \\pm {root}}}{{{d}}}", f"\\frac{{{a}\\pm{root}}}{{{d}}}",
            f"x = \\frac{{{a} \\pm {root}}}{{{d}}}", f"\\frac{{{a}+{root}}}{{{d}}}, \\frac{{{a}-{root}}}{{{d}}}",
            f"({a} \\pm {root})/{d}", f"({a} ± √{n})/{d}",
            f"\\frac{{{a}-{root}}}{{{d}}} \\text{{ or }} \\frac{{{a}+{root}}}{{{d}}}",
            f"\\frac{{{a}}}{{{d}}} \\pm \\frac{{{root}}}{{{d}}}", f"\\dfrac{{{a} \\pm {root}}}{{{d}}}"]  # fmt: skip

    shape = random.randrange(3)
    right = write(a, n)
    root = f"\\sqrt{{{n}}}"
    single = [root, f"-{root}"] if shape == 0 else [f"{a} + {root}",
        f"{a} - {root}"] if shape == 1 else [f"\\frac{{{a}+{root}}}{{{d}}}"]  # fmt: skip
    return right, random.sample(write(a + 1, n + 4), 4) + single


WORDS = ("Monday", "Tuesday", "red", "blue", "even", "odd", "Alice", "Bob", "triangle", "parabola", "ellipse",
    "hyperbola", "circle", "isosceles", "increasing", "decreasing", "north", "south", "Yes", "No", "True", "False",
    "convergent", "divergent", "rhombus", "rectangle", "Mercury", "penny", "odd", "cone")  # fmt: skip


@kind
def words(random: Random) -> tuple[Renderings, Renderings]:
    word, *others = random.sample(sorted(set(WORDS)), 4)

    def write(word: str) -> Renderings:
        return [f"\\text{{{word}}}", word, word.lower(), word.capitalize(), f"\\text{{{word.lower()}}}",
            f"\\textbf{{{word}}}", f"{word}.", f"\\mathrm{{{word}}}", f"\\text{{ {word} }}", f"**{word}**",
            f"\\text{{{word}.}}", f"\\textit{{{word}}}", f"\\mbox{{{word}}}", f"\\text{{The answer is {word}}}",
            f"\\textrm{{{word}}}", f"\"{word}\"", word.upper()]  # fmt: skip

    return write(word), [text for other in others for text in random.sample(write(other), 2)] + [f"not {word}",
        f"\\text{{{word} or {others[0]}}}"]  # fmt: skip


@kind
def choice(random: Random) -> tuple[Renderings, Renderings]:
    letter, other = random.sample("ABCDE", 2)
    n = random.randint(2, 60)

    def write(letter: str) -> Renderings:
        return [f"\\text{{({letter})}}", letter, f"({letter})", f"\\text{{{letter}}}", f"\\textbf{{({letter})}}",
            f"\\mathrm{{{letter}}}", f"\\textbf{{{letter}}}", f"{letter}.", f"{letter})",
            f"\\text{{Option {letter}}}", f"Option {letter}", f"\\textbf{{({letter}) }}{n}",
            f"\\text{{({letter})}} {n}", f"\\mathbf{{({letter})}}", f"\\text{{Choice }} {letter}",
            f"\\textbf{{({letter})}}\\ {n}", f"({letter})\\; {n}", f"**{letter}**", f"\\text{{{letter}.}} {n}",
            f"\\mathbf{{{letter}}}", f"\\boxed{{{letter}}}", f"{letter.lower()}", f"\\text{{Answer: {letter}}}",
            f"\\textbf{{({letter})}} ~ {n}", f"\\text{{option ({letter})}}"]  # fmt: skip

    return write(letter), random.sample(write(other), 6) + [f"{letter}, {other}", f"\\text{{not }} {letter}",
        f"{letter} \\text{{ or }} {other}"]  # fmt: skip


@kind
def based(random: Random) -> tuple[Renderings, Renderings]:
    base = random.choice((2, 3, 5, 7, 8, 9))
    digits = str(random.randint(1, base - 1)) + "".join(str(random.randrange(base)) for _ in range(random.randint(2,
        5)))  # fmt: skip
    names = {2: "two", 3: "three", 5: "five", 7: "seven", 8: "eight", 9: "nine"}

    def write(digits: str, base: int) -> Renderings:
        return [f"{digits}_{base}", f"{digits}_{{{base}}}", f"({digits})_{base}", f"({digits})_{{{base}}}",
            f"{digits}_{{\\text{{{names.get(base, base)}}}}}", f"{digits} \\text{{ base }} {base}",
            f"{digits} base {base}", f"{digits} in base {base}", f"\\text{{{digits}}}_{{{base}}}",
            f"{digits}" + "₀₁₂₃₄₅₆₇₈₉"[base], f"{digits} \\text{{ (base {base})}}", f"N = {digits}_{{{base}}}",
            f"{{{digits}}}_{base}", f"\\overline{{{digits}}}_{base}", f"\\left({digits}\\right)_{{{base}}}",
            f"{digits}_{{(\\text{{base }}{base})}}", f"{digits}_{{\\text{{base }}{base}}}"]  # fmt: skip

    last = str((int(digits[-1]) + 1) % base)
    return write(digits, base), random.sample(write(digits[:-1] + last, base), 3) + random.sample(write(digits,
        base - 1 if base > 2 else 3), 3) + [digits]  # fmt: skip


@kind
def scientific(random: Random) -> tuple[Renderings, Renderings]:
    m, e = random.choice([n for n in range(11, 99) if n % 10]) / 10, random.choice([n for n in range(-9,
        12) if abs(n) > 2])  # fmt: skip

    def write(m: float, e: int) -> Renderings:
        return [f"{m} \\times 10^{{{e}}}", f"{m}\\times10^{{{e}}}", f"{m} \\cdot 10^{{{e}}}", f"{m}e{e}",
            f"{m}E{e}", f"{m} × 10{str(e).translate(RAISED)}", f"{m}*10^{e}", f"{m} x 10^{e}",
            f"{m * 10:g} \\times 10^{{{e - 1}}}", f"{m} \\times 10^{{{e}}}\\text{{ m}}", f"{m} · 10^{e}",
            f"{m}\\times {{10}}^{{{e}}}", f"{m}*10**{e}", f"{m}\\cdot 10^{{{e}}}",
            f"{Fraction(str(m)) * 10**e}" if e > 0 else f"{m}e{e}", f"{m} \\times 10^{{{e}}} \\mathrm{{~m}}"]  # fmt: skip

    return write(m, e), random.sample(write(m, -e), 3) + random.sample(write(m, e + 1),
        3) + random.sample(write(round(m + 0.1, 1), e), 3)  # fmt: skip


@kind
def degrees(random: Random) -> tuple[Renderings, Renderings]:
    n = random.choice((random.randint(2, 359), random.randint(20, 900) / 10))

    def write(n: float) -> Renderings:
        return [f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}°", f"{n} degrees", f"{n}\\text{{ degrees}}", f"{n} ^\\circ",
            f"{n}", f"{n}\\degree", f"\\angle A = {n}^\\circ", f"\\theta = {n}^{{\\circ}}", f"{n}\\,^\\circ",
            f"{n}\\ \\text{{degrees}}", f"{{{n}}}^\\circ", f"{n}\\text{{°}}", f"x = {n}^\\circ",
            f"m\\angle ABC = {n}^{{\\circ}}", f"{n}\\textdegree", f"{n}^{{\\text{{o}}}}", f"{n}^o"]  # fmt: skip

    m = n + 1 if isinstance(n, int) else round(n + 0.1, 1)
    return write(n), [*random.sample(write(m), 5), f"{n}\\text{{ radians}}", f"-{n}^\\circ", f"{n}\\pi", f"{n}^2"]


@kind
def repeating(random: Random) -> tuple[Renderings, Renderings]:
    head, period = random.choice(("", "", str(random.randint(1, 9)))), str(random.choice([n for n in range(1,
        99) if n % 11]))  # fmt: skip
    whole = random.choice((0, 0, random.randint(1, 9)))
    if len(period) == 1 and period in (head, "9"):
        head, period = "", "3"

    def exact(head: str, period: str) -> Fraction:
        return whole + Fraction(int(head or 0), 10 ** len(head)) + Fraction(int(period),
            (10 ** len(period) - 1) * 10 ** len(head))  # fmt: skip

    def write(head: str, period: str) -> Renderings:
        value = exact(head, period)
        return [f"{whole}.{head}\\overline{{{period}}}", f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
            f"{whole}.{head}({period})", f"{whole}.{head}{period * 4}\\ldots", f"{whole}.{head}{period * 4}...",
            f"{value.numerator}/{value.denominator}",
            f"{whole}.{head}\\bar{{{period}}}" if len(period) == 1 else f"{whole}.{head}\\overline{{{period}}}",
            f"{whole}.{head}{period}\\overline{{{period}}}", f"{whole}.{head}\\overline{{{period * 2}}}",
            f"{whole}.{head}" + "".join(f"{d}\u0305" for d in period),
            f"{whole}.{head}\\dot{{{period}}}" if len(period) == 1 else f"{whole}.{head}\\dot{{{period[0]}}}\\dot{{{period[1]}}}"]  # fmt: skip

    return write(head, period), [f"{whole}.{head}{period}",
        f"{whole}.\\overline{{{head}{period}}}" if head else f"{whole}.0\\overline{{{period}}}",
        f"{whole + 1}.{head}\\overline{{{period}}}", *write(head,
        str(int(period) + 1) if int(period) % 10 < 8 and len(str(int(period) + 1)) == len(period) else "12")[:3]]  # fmt: skip


@kind
def special(random: Random) -> tuple[Renderings, Renderings]:
    groups = [
        ["\\infty", "∞", "+\\infty", "\\text{infinity}", "Infinity", "+∞", "infinity", "\\text{Infinity}"],
        ["-\\infty", "−∞", "-∞", "\\text{negative infinity}", "-infinity", "-\\text{infinity}"],
        ["\\text{DNE}", "DNE", "does not exist", "\\text{does not exist}", "Does not exist",
        "\\text{Does Not Exist}", "\\mathrm{DNE}", "\\text{The limit does not exist}", "\\text{D.N.E.}"],
        ["\\emptyset", "\\varnothing", "∅", "\\text{no solution}", "no solutions", "\\{\\}",
        "\\text{No real solutions}", "\\text{There are no solutions}", "\\text{empty set}", "\\text{None}"][:9],
        ["\\mathbb{R}", "(-\\infty, \\infty)", "\\text{all real numbers}", "ℝ", "x \\in \\mathbb{R}", "(-∞, ∞)",
        "\\left(-\\infty, \\infty\\right)", "-\\infty < x < \\infty", "\\text{All real numbers}",
        "(-\\infty, +\\infty)", "all reals", "\\text{all real } x"],
        ["\\text{undefined}", "undefined", "Undefined", "\\textbf{undefined}"],
        ["0", "zero", "0.0", "\\text{zero}"],
        ["1", "one", "\\text{one}"],
        ["\\text{infinitely many}", "infinitely many solutions", "\\text{infinitely many solutions}",
        "infinitely many"],
    ]  # fmt: skip
    right = random.choice(groups)
    return right, [text for group in groups if group is not right for text in random.sample(group, 1)]


@kind
def congruence(random: Random) -> tuple[Renderings, Renderings]:
    m = random.randint(4, 15)
    r = random.randint(1, m - 1)

    def write(r: int, m: int) -> Renderings:
        return [f"x \\equiv {r} \\pmod{{{m}}}", f"n \\equiv {r} \\pmod {{{m}}}", f"{r} \\pmod{{{m}}}",
            f"x \\equiv {r} \\mod {m}", f"x \\equiv {r} \\ (\\text{{mod }} {m})", f"x ≡ {r} (mod {m})",
            f"{r} mod {m}", f"x \\equiv {r} \\bmod {m}", f"x \\equiv {r - m} \\pmod{{{m}}}",
            f"x\\equiv{r}\\pmod{m}" if m < 10 else f"x\\equiv{r}\\pmod{{{m}}}",
            f"x \\equiv {r} \\;(\\mathrm{{mod}}\\; {m})", f"x \\equiv {r} \\ (\\bmod\\ {m})",
            f"x = {m}k + {r}, k \\in \\mathbb{{Z}}",
            f"{r} + {m}k, k \\in \\mathbb{{Z}}"][: 12 if random.random() < 0.7 else 14]  # fmt: skip

    return write(r, m), random.sample(write(r + 1, m)[:12], 4) + random.sample(write(r, m + 1)[:12], 4)


@kind
def family(random: Random) -> tuple[Renderings, Renderings]:
    d, k = random.choice((2, 3, 4, 6)), random.choice(("k", "n"))

    def write(d: int, period: str) -> Renderings:
        domain = random.choice((f", {k} \\in \\mathbb{{Z}}", f" \\quad ({k} \\in \\mathbb{{Z}})",
            f", \\text{{ where }} {k} \\in \\mathbb{{Z}}", f" \\text{{ for any integer }} {k}",
            f", \\quad {k}\\in\\mathbb{{Z}}", f" \\text{{ for }} {k} \\in \\mathbb{{Z}}",
            f" \\text{{ where }} {k} \\text{{ is an integer}}"))  # fmt: skip
        return [f"\\frac{{\\pi}}{{{d}}} + {period}{domain}", f"x = \\frac{{\\pi}}{{{d}}} + {period}{domain}",
            f"{period} + \\frac{{\\pi}}{{{d}}}{domain}", f"\\frac{{\\pi}}{{{d}}} + {period}",
            f"x={period}+\\frac{{\\pi}}{{{d}}}{domain}",
            f"\\left\\{{\\frac{{\\pi}}{{{d}}} + {period} \\mid {k} \\in \\mathbb{{Z}}\\right\\}}",
            "π/{} + {}, {} ∈ ℤ".format(d, period.replace("\\pi", "π").replace(" ", ""), k)]  # fmt: skip

    return write(d, f"2{k}\\pi") + write(d, f"2\\pi {k}"), write(d, f"{k}\\pi")[:5] + write(d + 1,
        f"2{k}\\pi")[:3] + [f"\\frac{{\\pi}}{{{d}}}"]  # fmt: skip


@kind
def antiderivative(random: Random) -> tuple[Renderings, Renderings]:
    n, a = random.randint(2, 5), random.randint(2, 6)
    term = random.choice((("div", ("pow", "x", n + 1), n + 1), ("mul", ("div", 1, a), ("fn", "sin", ("mul", a,
        "x"))), ("mul", "x", ("pow", "e", "x")), ("fn", "ln", ("abs", ("sum", "x", a)))))  # fmt: skip
    wrong = random.choice((("div", ("pow", "x", n + 2), n + 2), ("mul", a, ("fn", "cos", "x")), ("pow", "e", "x")))
    right = printed(random, ("sum", term, "C"), ("sum", "C", term), count=5)
    return [*right, f"{right[0].replace('C', 'c')}"], printed(random, ("sum", wrong, "C"), ("sum", ("neg", term),
        "C"), count=4) + printed(random, ("mul", "C", term), count=1)  # fmt: skip


@kind
def duration(random: Random) -> tuple[Renderings, Renderings]:
    hours, minutes = random.randint(1, 9), random.choice((10, 15, 20, 30, 40, 45, 50))

    def write(h: int, m: int) -> Renderings:
        s = "s" * (h > 1)
        return [f"{h} hour{s} {m} minutes", f"{h}\\text{{ hour{s} }}{m}\\text{{ minutes}}",
            f"{h} hour{s} and {m} minutes", f"{h}\\text{{ h }}{m}\\text{{ min}}", f"{60 * h + m} minutes",
            f"{h} h {m} min", f"\\text{{{h} hour{s} and {m} minutes}}", f"{h} hr {m} min", f"{h}h {m}m",
            f"{60 * h + m}\\text{{ minutes}}", f"\\frac{{{60 * h + m}}}{{60}}\\text{{ hours}}"]  # fmt: skip

    return write(hours, minutes), write(hours + 1, minutes)[:4] + write(hours,
        minutes + 5)[:4] + [f"{hours}\\text{{ hours}}", f"{minutes}\\text{{ minutes}}"]  # fmt: skip


@kind
def points_set(random: Random) -> tuple[Renderings, Renderings]:
    values = random.sample([n for n in range(-9, 10) if n], 4)
    a, b, c, d = values

    def write(*pairs: tuple[int, int]) -> Renderings:
        texts = [f"({x}, {y})" for x, y in pairs]
        mixed = random.sample(texts, len(texts))
        return [", ".join(texts), f"\\{{{', '.join(texts)}\\}}", " \\text{ and } ".join(mixed), ",\\ ".join(mixed),
            f"\\left\\{{{','.join(mixed)}\\right\\}}", " \\text{ or } ".join(mixed), f"(x, y) = {', '.join(mixed)}",
            f"(x,y) \\in \\{{{', '.join(mixed)}\\}}", "; ".join(mixed), ",".join(t.replace(" ", "") for t in mixed),
            " and ".join(texts), ", \\quad ".join(texts)]  # fmt: skip

    return write((a, b), (c, d)), random.sample(write((b, a), (d, c)), 4) + random.sample(write((a, b), (c, -d)),
        4) + [f"({a}, {b})", f"({a}, {b}, {c}, {d})", f"({a}, {d}), ({c}, {b})"]  # fmt: skip


@kind
def system(random: Random) -> tuple[Renderings, Renderings]:
    p, q = random.sample([n for n in range(-20, 21) if n], 2)
    x, y = random.choice((("x", "y"), ("a", "b"), ("m", "n"), ("p", "q"), ("u", "v")))

    def write(p: int, q: int) -> Renderings:
        return [f"{x} = {p}, {y} = {q}", f"{x}={p},{y}={q}", f"{x} = {p} \\text{{ and }} {y} = {q}",
            f"{y} = {q}, {x} = {p}", f"({x}, {y}) = ({p}, {q})", f"({x},{y})=({p},{q})",
            f"{x} = {p}, \\; {y} = {q}", f"\\begin{{cases}} {x} = {p} \\\\ {y} = {q} \\end{{cases}}",
            f"{x} = {p}; {y} = {q}", f"{x}={p},\\quad {y}={q}",
            f"\\begin{{aligned}} {x} &= {p} \\\\ {y} &= {q} \\end{{aligned}}", f"({p}, {q})",
            f"\\left\\{{ \\begin{{array}}{{l}} {x} = {p} \\\\ {y} = {q} \\end{{array}} \\right."]  # fmt: skip

    return write(p, q), random.sample(write(q, p), 5) + random.sample(write(p, q + 1), 5) + [f"{x} = {p}", f"{p}"]


@kind
def spelled_number(random: Random) -> tuple[Renderings, Renderings]:
    n = random.randint(0, 20)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "twenty-one"]  # fmt: skip

    def write(n: int) -> Renderings:
        return [str(n), names[n], f"\\text{{{names[n]}}}", names[n].capitalize(), f"{n} ({names[n]})",
            f"\\text{{{names[n].capitalize()}}}", f"{names[n]} (${n}$)"]  # fmt: skip

    return write(n), write(n + 1)


@kind
def inequality(random: Random) -> tuple[Renderings, Renderings]:
    a, b = random.randint(2, 9), random.randint(1, 9)
    y = random.choice("yb")

    def write(sign: str, a: int, b: int) -> Renderings:
        forms = {"<": ("<", "\\lt"), "<=": ("\\le", "\\leq", "≤", "<=", "\\leqslant"), ">": (">", "\\gt"),
            ">=": ("\\ge", "\\geq", "≥", ">=")}  # fmt: skip
        other = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
        s, t = random.choice(forms[sign]), random.choice(forms[other[sign]])
        return [f"{y} {s} {a}x + {b}", f"{y} {s} {b} + {a}x", f"{a}x + {b} {t} {y}", f"{y} - {a}x {s} {b}",
            f"2{y} {s} {2 * a}x + {2 * b}", f"{a}x {'-'} {y} {t} -{b}"]  # fmt: skip

    sign = random.choice(("<", "<=", ">", ">="))
    flipped = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}[sign]
    loose = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}[sign]
    return write(sign, a, b), [random.choice(write(flipped, a, b)), random.choice(write(loose, a, b)), *write(sign,
        a + 1, b)[:3], f"{y} = {a}x + {b}"]  # fmt: skip


@kind
def chained(random: Random) -> tuple[Renderings, Renderings]:
    """Values that a chain of equations ends with."""
    a, b = random.randint(2, 30), random.randint(2, 30)
    total = a + b

    def write(total: int) -> Renderings:
        return [f"{total}", f"{total}", f"{total}.0", f"{total}", f"{total}", f"{total}",
            f"{total - b} + {b} = {total}", f"m + n = {total - b} + {b} = {total}",
            f"x = {total - b} + {b} = {total}", f"\\frac{{{2 * total}}}{{2}} = {total}", f"a+b+c = {total}",
            f"f(1) = {total - b} + {b} = {total}", f"S = {total}",
            f"{total}\\text{{ (since }} {total - b}+{b}={total}\\text{{)}}"]  # fmt: skip

    return write(total)[:13], [f"{a} + {b} = {total + 1}", f"{a} + {b}", *write(total + 1)[:4]]


WRAPPERS = (
    "So $\\boxed{{{}}}$.", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "#### {}", "The answer is \\boxed{{{}}}.",
    "\\[\\boxed{{{}}}\\]", "**Answer:** $\\boxed{{{}}}$",
    "Thus the value is\n\n$$\\boxed{{{}}}$$", "Hence, the final answer is $\\boxed{{{}}}$. I hope it is correct.",
)  # fmt: skip


def pairs(seed: int, count: int, kinds: dict[str, Kind] = KINDS) -> Iterator[Pair]:
    """Yield pairs of all kinds in turn: for each value one equal answer and one wrong one."""
    random = Random(seed)
    names = sorted(kinds)
    for index in range(count):
        name = names[index // 2 % len(names)]
        right, wrong = kinds[name](random)
        answers = right if index % 2 == 0 else wrong
        reference = right[0] if random.random() < 0.6 else random.choice(right[:6])
        yield Pair(name, reference, random.choice(answers), index % 2 == 0)


def completion(answer: str, random: Random) -> str:
    return random.choice(WRAPPERS).format(answer)
