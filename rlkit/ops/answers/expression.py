"""Expressions: parsed from plain LaTeX or programming notation, all of a text or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rlkit.ops.answers.nodes import Node, UngradableError, is_signed

DEEPEST = 40
"""The maximum depth of nested brackets, exponents and arguments."""
GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma", "tau", "phi", "psi"}
    | {"omega", "infty"}
)
"""Commands that stand for a variable or a set, which has no value of its own."""
FUNCTIONS = frozenset(
    {"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "lg"}
    | {"exp", "sqrt", "pi", "abs", "max", "min"}
)
"""Words that are functions or constants, with or without a backslash."""

_DIGIT = re.compile("[0-9]")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline ?(?:\{ ?([0-9]+) ?\}|([0-9]))")
_SUBSCRIPT = re.compile(r"_(?:\{ ?([A-Za-z0-9]{1,8}) ?\}|([A-Za-z0-9]))")
_WORD = re.compile("|".join(sorted(FUNCTIONS, key=len, reverse=True)))
_NAMES = re.compile(rf"\\[A-Za-z]+|(?<![A-Za-z])(?:{_WORD.pattern})(?![A-Za-z])")
_PROSE = re.compile(r"(?<=[\w)}\]!%~] )[A-Za-z]*[a-z]{2}|[A-Za-z]{4}")
"""Words, which are no product of variables: four letters, or two after a blank."""
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MIXED = re.compile(r" ?\\frac ?(?:\{ ?[0-9]+ ?\}|[0-9]) ?(?:\{ ?[0-9]+ ?\}|[0-9])(?![0-9])")


def parse(text: str) -> Node | None:
    """Return the expression that the complete text is; None if it is none.

    Raises:
        UngradableError: It is nested too deeply.
    """
    symbols = _NAMES.sub("~", text)
    return None if _PROSE.search(symbols) else _Parser(text).parse()


class _Invalid(Exception):
    """A text is no expression."""


class _Parser:
    """Reads an expression from left to right, by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.bars = 0

    def parse(self) -> Node | None:
        try:
            node = self.sum()
        except _Invalid:
            return None
        self.skip()
        return node if self.position == len(self.text) else None

    def skip(self) -> None:
        while self.text[self.position : self.position + 1] == " ":
            self.position += 1

    def peek(self) -> str:
        """Return the next character that is no blank; empty at the end."""
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

    def nested(self, read: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UngradableError(f"the answer {self.text[:100]!r} is nested too deeply to be compared")
        node = read()
        self.depth -= 1
        return node

    def sum(self) -> Node:
        terms = [self.signed()]
        while (sign := self.peek()) and sign in "+-":
            self.position += 1
            term = self.product()
            terms.append(term if sign == "+" else Node("negative", (term,)))
        return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))

    def signed(self) -> Node:
        if self.accept("-"):
            return Node("negative", (self.product(),))
        self.accept("+")
        return self.product()

    def product(self) -> Node:
        factors = [self.factor()]
        while True:
            if self.accept("*"):
                factors.append(self.factor())
            elif self.accept("/"):
                factors[:] = [Node("ratio", (_product(factors), self.factor()))]
            elif self.starts_factor():
                factors.append(self.factor())
            else:
                return _product(factors)

    def starts_factor(self) -> bool:
        """Whether a factor follows without an operator, as in 2x; a number may not."""
        following = self.peek()
        if following == "|":
            return self.bars == 0
        if following == "\\":
            command = _COMMAND.match(self.text, self.position)
            return command is not None and command[1] not in ("choose", "rfloor", "rceil")
        return following.isascii() and (following.isalpha() or following in ("(", "{", "["))

    def factor(self) -> Node:
        if self.peek() == "-":  # as in 3 * -2 or x^{-1}
            self.position += 1
            return Node("negative", (self.nested(self.factor),))
        node = self.atom()
        while True:
            if self.accept("!"):
                if node.name == "factorial":
                    raise _Invalid
                node = Node("factorial", (node,))
            elif self.accept("^"):
                if self.accept("\\circ") or self.accept("{\\circ}") or self.accept("{\\circ }"):
                    node = Node("product", (node, Node("degree")))
                    continue
                return Node("power", (node, self.nested(self.exponent)))
            else:
                return node

    def argument(self) -> Node:
        """Return what follows a command: a group, a command, or a single digit or letter."""
        digit = self.match(_DIGIT)
        if digit is not None:
            return Node("number", value=Fraction(digit[0]))
        return self.nested(self.atom)

    def exponent(self) -> Node:
        """Return what follows `^`: as after a command, but 2^10 is 2^{10}, and a sign may precede it."""
        if self.accept("-"):
            return Node("negative", (self.nested(self.exponent),))
        return self.nested(self.atom)

    def group(self) -> Node:
        closing = _BRACKETS[self.peek()]
        self.position += 1
        bars, self.bars = self.bars, 0
        node = self.sum()
        if closing == "}" and self.accept("\\choose"):
            node = Node("binomial", (node, self.sum()))
        self.expect(closing)
        self.bars = bars
        return node

    def atom(self) -> Node:
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
        if not (following.isascii() and following.isalpha()):
            raise _Invalid
        self.position += 1
        return self.variable(following)

    def number(self) -> Node:
        repeating = self.match(_REPEATING)
        if repeating is not None:
            return Node("number", value=_repeating(repeating))
        match = self.match(_NUMBER)
        if match is None or self.text[self.position : self.position + 1] in ("_", "."):
            raise _Invalid
        number = Node("number", value=Fraction(match[0]))
        if _MIXED.match(self.text, self.position) and "." not in match[0]:
            fraction = self.nested(self.atom)
            return Node("mixed", (number, fraction)) if _is_proper(fraction) else _invalid()
        return number

    def variable(self, name: str) -> Node:
        subscript = self.match(_SUBSCRIPT)
        primes = 0
        while self.text[self.position : self.position + 1] == "'":
            self.position += 1
            primes += 1
        if subscript is not None:
            name += f"_{subscript[1] or subscript[2]}"
        return Node("variable", value=name + "'" * primes)

    def absolute(self) -> Node:
        self.expect("|")
        self.bars += 1
        node = self.sum()
        self.expect("|")
        self.bars -= 1
        return Node("absolute", (node,))

    def command(self) -> Node:
        match = self.match(_COMMAND)
        if match is None:
            raise _Invalid
        name = match[1]
        if name in ("frac", "binom"):
            operands = (self.nested(self.argument), self.nested(self.argument))
            return Node("ratio" if name == "frac" else "binomial", operands)
        if name in ("lfloor", "lceil"):
            node = self.nested(self.sum)
            self.expect(f"\\r{name[1:]}")
            return Node(name[1:], (node,))
        if name == "overline" or name not in FUNCTIONS | GREEK:
            raise _Invalid
        return self.variable(f"\\{name}") if name in GREEK else self.function(name)

    def function(self, name: str) -> Node:
        """Return a function of what follows: of all factors up to the next sign, of a bracket, or of one argument."""
        if name == "pi":
            return Node("pi")
        if name == "sqrt":
            return self.root()
        if name in ("max", "min", "abs"):
            raise _Invalid
        base = self.subscript() if name == "log" else None
        power = self.nested(self.exponent) if self.accept("^") else None
        if power == Node("negative", (Node("number", value=Fraction(1)),)) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        argument = self.nested(self.factor if self.peek() in _BRACKETS else self.arguments)
        operands = (argument,) if base is None else (argument, base)
        node = Node(name, operands)
        return node if power is None else Node("power", (node, power))

    def subscript(self) -> Node | None:
        return self.nested(self.argument) if self.accept("_") else None

    def root(self) -> Node:
        degree = Node("number", value=Fraction(2))
        if self.peek() == "[":
            degree = self.nested(self.group)
        argument = self.nested(self.group) if self.peek() in _BRACKETS else self.nested(self.radicand)
        return Node("root", (argument, degree))

    def radicand(self) -> Node:
        """Return a number, a letter or a command after `\\sqrt`."""
        match = self.match(_NUMBER)
        return self.atom() if match is None else Node("number", value=Fraction(match[0]))

    def arguments(self) -> Node:
        factors = [self.factor()]
        while self.starts_factor() and not self.text.startswith("\\", self.position) and self.peek() not in _BRACKETS:
            factors.append(self.factor())
        return _product(factors)


def _product(factors: list[Node]) -> Node:
    if len(factors) == 1:
        return factors[0]
    ten = Node("number", value=Fraction(10))
    last = factors[-1]
    if len(factors) == 2 and factors[0].name == "number" and last.name == "power" and last.operands[0] == ten:
        return Node("scale", tuple(factors)) if is_signed(last.operands[1]) else Node("product", tuple(factors))
    return Node("product", tuple(factors))


def _repeating(match: re.Match[str]) -> Fraction:
    start, digits, period = match[1] or "0", match[2], match[3] or match[4]
    head = Fraction(f"{start}.{digits or 0}")
    return head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))


def _is_proper(node: Node) -> bool:
    above, below = (operand.value for operand in node.operands)
    return isinstance(above, Fraction) and isinstance(below, Fraction) and 0 < above < below


def _invalid() -> Node:
    raise _Invalid
