"""The process of a program that is graded: runs it, then answers calls of its functions and objects with plain data.

It imports only the standard library.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

PROGRAM = "program.py"
Value = Any
"""What a program takes and returns, and JSON of it."""
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
PRELUDE = """
import copy, json, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
"""
"""What programs and tests may use without an import, as on the sites whose problems they solve."""
RECURSION_LIMIT = 50_000


def pack(value: Value, refer: Callable[[Value], Value]) -> Value:
    """Return a value as JSON: plain data by its kind, any other object by reference."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [pack(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, refer), pack(item, refer)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), refer)
    return {"object": refer(value)}


def unpack(data: Value, resolve: Callable[[Value], Value]) -> Value:
    """Return the value that `pack` has written."""
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in SEQUENCES:
        return SEQUENCES[kind]([unpack(item, resolve) for item in value])
    if kind == "dict":
        return {unpack(key, resolve): unpack(item, resolve) for key, item in value}
    if kind == "complex":
        return complex(*value)
    return bytes.fromhex(value) if kind == "bytes" else resolve(value)


def main() -> None:
    """Be the program: run it, then answer the questions of standard input on what was standard output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    builtin: dict[str, Value] = dict(vars(builtins))
    exec(PRELUDE, builtin)  # as builtins, so that `space` has what the program defines and nothing else
    space: dict[str, Value] = {"__name__": "solution", "__builtins__": builtin}
    sys.setrecursionlimit(RECURSION_LIMIT)
    with open(PROGRAM, encoding="utf-8") as file:
        exec(compile(file.read(), PROGRAM, "exec", dont_inherit=True), space)
    objects: list[Value] = []

    def refer(value: Value) -> int:
        objects.append(value)
        return len(objects) - 1

    def function(name: str) -> Value:
        return getattr(space["Solution"](), name) if hasattr(space.get("Solution"), name) else space[name]

    def named(name: str) -> Value:
        if name not in space:
            raise NameError(name)
        return space[name]

    actions: dict[str, Callable[..., Value]] = {
        "name": named,
        "function": function,
        "get": getattr,
        "len": len,
        "bool": bool,
        "iter": iter,
        "next": next,
        "str": str,
        "call": lambda target, arguments, named: target(*arguments, **named),
    }
    for line in questions:
        action, values = json.loads(line)
        try:
            result = actions[action](*unpack(values, objects.__getitem__))
            reply = json.dumps(["value", pack(result, refer)])
        except BaseException as error:
            reply = json.dumps(["error", type(error).__name__])
        replies.write(reply + "\n")
        replies.flush()
