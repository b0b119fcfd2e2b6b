"""Parsing of expressions in plain LaTeX or programming notation, of complete texts only."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rlkit_math.answers.nodes import ExpressionNode, UngradableError, is_signed
from rlkit_math.answers.units import words_of

MAX_DEPTH = 40
"""Maximum depth of nested brackets, exponents and arguments."""
GREEK = words_of("greek")
"""Commands that stand for a variable or a set."""
FUNCTIONS = words_of("function")
"""Names of functions and constants, with or without a backslash."""

_TEN = ExpressionNode("number", value=Fraction(10))
_MINUS_ONE = ExpressionNode("negative", (ExpressionNode("number", value=Fraction(1)),))
_DIGIT = re.compile("[0-9]")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_REPEATING = re.compile(
    r"(?P<start>[0-9]*)\.(?P<head>[0-9]*?)"
    r"(?P<period>(?:\\overline ?(?:\{ ?[0-9]+ ?\}|[0-9]) ?)+|\([0-9]+\)|(?:([0-9])\4{2,}|([0-9]{2,6}?)\5+) ?\.\.\.)"
)
"""A repeating decimal: `0.\\overline{45}`, `0.(45)`, `0.4545...`."""
_POWER_AFTER = re.compile(r"[A-Za-z)][0-9]+ ?\^")
_CHOOSE = re.compile(r"C ?\((?=[^()]*,)")
"""A binomial coefficient as a function: `C(n, k)`."""
_SUBSCRIPT = re.compile(r"_(?:\{ ?([A-Za-z0-9+-]{1,8}) ?\}|([A-Za-z0-9]))")
_SPELLED = {"alpha", "beta", "gamma", "theta", "lambda", "sigma", "omega", "phi"}
"""Greek letters that programming notation spells out."""
_WORD = re.compile("|".join(sorted(FUNCTIONS | _SPELLED, key=len, reverse=True)))
_NAMES = re.compile(rf"\\[A-Za-z]+|(?<![A-Za-z])(?:{_WORD.pattern})(?![A-Za-z])")
_PROSE = re.compile(r"(?<=[\w)}\]!%~] )[A-Za-z]*[a-z]{2}|[A-Za-z]{4}")
"""Words, as opposed to products of variables: four letters, or two after a blank."""
_NO_ANGLE = re.compile(rf"\\(?!(?:pi|{'|'.join(GREEK)})(?![A-Za-z]))")
"""A command that ends the argument of a function without brackets: not that of `\\sin 2\\theta`."""
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MIXED = re.compile(r" ?\\frac ?(?:\{ ?[0-9]+ ?\}|[0-9]) ?(?:\{ ?[0-9]+ ?\}|[0-9])(?![0-9])")


def parse(text: str) -> ExpressionNode | None:
    """Return the complete text as an expression; None if it is not an expression.

    Raises:
        UngradableError: The text is nested too deeply.
    """
    symbols = _NAMES.sub("~", text)
    if _PROSE.search(symbols):
        return None
    parser = _Parser(text)
    try:
        node = parser.content()
    except _Invalid:
        return None
    parser.skip()
    return node if parser.position == len(text) else None


class _Invalid(Exception):
    """A text is not an expression."""


class _Scanner:
    """Reads a text from left to right, skipping blanks, up to a maximum depth."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def skip(self) -> None:
        while self.text[self.position : self.position + 1] == " ":
            self.position += 1

    def peek(self) -> str:
        """Return the next character that is not a blank; empty at the end."""
        self.skip()
        return self.text[self.position : self.position + 1]

    def accept(self, literal: str) -> bool:
        self.skip()
        if not self.text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise _Invalid

    def nested(self, parse: Callable[[], ExpressionNode]) -> ExpressionNode:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UngradableError(f"the answer {self.text[:100]!r} is nested too deeply to be compared")
        node = parse()
        self.depth -= 1
        return node

    def variable(self, name: str) -> ExpressionNode:
        """Return a variable with the subscript and primes that follow its name."""
        subscript = self.match(_SUBSCRIPT)
        primes = 0
        while self.text[self.position : self.position + 1] == "'":
            self.position += 1
            primes += 1
        if subscript is not None:
            name += f"_{subscript[1] or subscript[2]}"
        return ExpressionNode("variable", value=name + "'" * primes)


class _Parser(_Scanner):
    """Parses an expression by recursive descent."""

    bars = 0
    """The number of open absolute values within the innermost brackets."""

    def sum(self) -> ExpressionNode:
        if self.accept("-"):
            terms = [ExpressionNode("negative", (self.product(),))]
        else:
            self.accept("+")
            terms = [self.product()]
        while self.peek() in ("+", "-"):
            sign = self.text[self.position]
            self.position += 1
            term = self.product()
            terms.append(term if sign == "+" else ExpressionNode("negative", (term,)))
        return terms[0] if len(terms) == 1 else ExpressionNode("sum", tuple(terms))

    def content(self) -> ExpressionNode:
        """Parse a complete text or group, which `\\over` or `\\choose` may divide."""
        node = self.sum()
        if self.accept("\\choose"):
            return ExpressionNode("binomial", (node, self.sum()))
        return ExpressionNode("ratio", (node, self.sum())) if self.accept("\\over ") else node

    def product(self) -> ExpressionNode:
        factors = [self.factor()]
        while True:
            if self.accept("*"):
                factors.append(self.factor())
            elif self.accept("/"):
                factors[:] = [ExpressionNode("ratio", (_product(factors), self.factor()))]
            elif self.starts_factor():
                factors.append(self.factor())
            else:
                return _product(factors)

    def starts_factor(self) -> bool:
        """Whether a factor follows without an operator, as in 2x; a number before a power or after !: n2^n, 3!7!."""
        following = self.peek()
        if following == "|":
            return self.bars == 0
        if following == "\\":
            command = _COMMAND.match(self.text, self.position)
            return command is not None and command[1] not in ("choose", "over", "rfloor", "rceil")
        if following.isdigit():
            before = self.text[: self.position].rstrip()[-1:]
            return before == "!" or _POWER_AFTER.match(before + self.text[self.position :]) is not None
        return following.isascii() and (following.isalpha() or following in ("(", "{", "["))

    def factor(self) -> ExpressionNode:
        if self.peek() == "-":  # as in 3 * -2 or x^{-1}
            self.position += 1
            return ExpressionNode("negative", (self.nested(self.factor),))
        node = self.atom()
        while True:
            if self.accept("!"):
                if node.name == "factorial":
                    raise _Invalid
                node = ExpressionNode("factorial", (node,))
            elif self.accept("^"):
                if self.accept("\\circ") or self.accept("{\\circ}") or self.accept("{\\circ }"):
                    node = ExpressionNode("product", (node, ExpressionNode("degree")))
                    continue
                return ExpressionNode("power", (node, self.nested(self.exponent)))
            else:
                return node

    def argument(self) -> ExpressionNode:
        """Parse the argument of a command: a group, a command, or a single digit or letter."""
        digit = self.match(_DIGIT)
        if digit is not None:
            return ExpressionNode("number", value=Fraction(digit[0]))
        return self.nested(self.atom)

    def exponent(self) -> ExpressionNode:
        """Parse an exponent: like an argument, but 2^10 is 2^{10}, and it may have a sign."""
        if self.accept("-"):
            return ExpressionNode("negative", (self.nested(self.exponent),))
        return self.nested(self.atom)

    def group(self) -> ExpressionNode:
        closing = _BRACKETS[self.peek()]
        self.position += 1
        bars, self.bars = self.bars, 0
        node = self.content() if closing == "}" else self.sum()
        self.expect(closing)
        self.bars = bars
        return node

    def atom(self) -> ExpressionNode:
        following = self.peek()
        if following in _BRACKETS:
            return self.nested(self.group)
        if following == "|":
            return self.nested(self.absolute)
        if following == "\\":
            return self.command()
        if following.isdigit() or following == ".":
            return self.number()
        word = self.match(_WORD)
        if word is not None:
            return self.function(word[0])
        if self.match(_CHOOSE):
            above = self.nested(self.sum)
            self.expect(",")
            below = self.nested(self.sum)
            self.expect(")")
            return ExpressionNode("binomial", (above, below))
        if not (following.isascii() and following.isalpha()):
            raise _Invalid
        self.position += 1
        return self.variable(following)

    def number(self) -> ExpressionNode:
        repeating = self.match(_REPEATING)
        if repeating is not None:
            return ExpressionNode("number", value=_repeating(repeating))
        match = self.match(_NUMBER)
        if match is None or self.text[self.position : self.position + 1] in ("_", "."):
            raise _Invalid
        number = ExpressionNode("number", value=Fraction(match[0]))
        if _MIXED.match(self.text, self.position) and "." not in match[0]:
            fraction = self.nested(self.atom)
            return ExpressionNode("mixed", (number, fraction)) if _is_proper(fraction) else _invalid()
        return number

    def absolute(self) -> ExpressionNode:
        self.expect("|")
        self.bars += 1
        node = self.sum()
        self.expect("|")
        self.bars -= 1
        return ExpressionNode("absolute", (node,))

    def command(self) -> ExpressionNode:
        match = self.match(_COMMAND)
        if match is None:
            raise _Invalid
        name = match[1]
        if name in ("frac", "binom"):
            operands = (self.nested(self.argument), self.nested(self.argument))
            return ExpressionNode("ratio" if name == "frac" else "binomial", operands)
        if name in ("lfloor", "lceil"):
            node = self.nested(self.sum)
            self.expect(f"\\r{name[1:]}")
            return ExpressionNode(name[1:], (node,))
        if name == "overline" or name not in FUNCTIONS | GREEK:
            raise _Invalid
        return self.variable(f"\\{name}") if name in GREEK else self.function(name)

    def function(self, name: str) -> ExpressionNode:
        """Parse the operands of a function: a bracket, or all factors up to the next sign."""
        if name == "pi":
            return ExpressionNode("pi")
        if name in _SPELLED:
            return self.variable(f"\\{name}")
        if name in ("sqrt", "cbrt"):
            return self.root(2 if name == "sqrt" else 3)
        if name in ("max", "min", "abs"):
            raise _Invalid
        base = self.nested(self.argument) if name == "log" and self.accept("_") else None
        power = self.nested(self.exponent) if self.accept("^") else None
        if power == _MINUS_ONE and name in ("sin", "cos", "tan"):
            name = f"arc{name}"
            power = None
        argument = self.nested(self.factor if self.peek() in _BRACKETS else self.arguments)
        operands = (argument,) if base is None else (argument, base)
        node = ExpressionNode(name, operands)
        return node if power is None else ExpressionNode("power", (node, power))

    def root(self, index: int) -> ExpressionNode:
        degree = ExpressionNode("number", value=Fraction(index))
        if self.peek() == "[":
            degree = self.nested(self.group)
        argument = self.nested(self.group) if self.peek() in _BRACKETS else self.nested(self.radicand)
        return ExpressionNode("root", (argument, degree))

    def radicand(self) -> ExpressionNode:
        """Parse a number, a letter or a command after `\\sqrt`."""
        match = self.match(_NUMBER)
        return self.atom() if match is None else ExpressionNode("number", value=Fraction(match[0]))

    def arguments(self) -> ExpressionNode:
        factors = [self.factor()]
        while self.starts_factor() and self.peek() not in _BRACKETS and not _NO_ANGLE.match(self.text, self.position):
            factors.append(self.factor())
        return _product(factors)


def _product(factors: list[ExpressionNode]) -> ExpressionNode:
    if len(factors) == 1:
        return factors[0]
    first, last = factors[0], factors[-1]
    is_scaled = len(factors) == 2 and first.name == "number" and last.name == "power" and last.operands[0] == _TEN
    name = "scale" if is_scaled and is_signed(last.operands[1]) else "product"
    return ExpressionNode(name, tuple(factors))


def _repeating(match: re.Match[str]) -> Fraction:
    digits = match["head"]
    period = match[4] or match[5] or re.sub(r"[^0-9]", "", match["period"])
    head = Fraction(f"{match['start'] or 0}.{digits or 0}")
    return head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))


def _is_proper(node: ExpressionNode) -> bool:
    above, below = (operand.value for operand in node.operands)
    return isinstance(above, Fraction) and isinstance(below, Fraction) and 0 < above < below


def _invalid() -> ExpressionNode:
    raise _Invalid
