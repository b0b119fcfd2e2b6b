"""Reads the tests of programs in the forms that data sets have them in."""

from __future__ import annotations

import ast
import json
import re

from rlkit.base.errors import show
from rlkit.types import Row

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
Case = dict[str, object]
"""`input` and `output` texts; a `function` with `arguments` and a `value`; or `code` that asserts."""


def program_of(text: str) -> str:
    """Return the last fenced block of a completion, which may lack its end; all of it if there is none."""
    blocks = FENCE.findall(text)
    return str(blocks[-1] if blocks else text).encode(errors="replace").decode()


def read_cases(tests: object, row: Row) -> list[Case]:
    """Return the test cases of a row.

    Args:
        tests: An object with `inputs`, `outputs` and perhaps `fn_name` (APPS, TACO, PRIME); a list of objects with
            `input`, `output` and perhaps `fn_name` (LiveCodeBench, SYNTHETIC-1), or an object with it under
            `test_cases`; a list of assertions (MBPP, AceCode); code with assertions, functions `test_...` or a function
            `check` (HumanEval). Objects and lists may be JSON.
        row: Other columns: `entry_point`, which `check` is called with, and `metadata`, which may have a `func_name`.

    Raises:
        ValueError: It has none of these forms.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return _of_code(str(tests), row)
    if isinstance(tests, dict) and "test_cases" in tests:
        tests = tests["test_cases"]
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
            raise ValueError(f"the tests have inputs {show(inputs)} and outputs {show(outputs)}, expected equal lists")
        tests = [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the tests are {show(tests)}, expected inputs and outputs, or assertions")
    if all(isinstance(test, str) for test in tests):
        return [case for test in tests for case in _of_code(test, row)]
    return [_of_pair(test, _function_name(row)) for test in tests]


def setup_of(row: Row) -> str:
    """Return the code before assertions, as MBPP has it: `test_imports` and `test_setup_code`."""
    imports = row.get("test_imports") or ()
    lines = [*([imports] if isinstance(imports, str) else imports), row.get("test_setup_code") or ""]
    return "\n".join(map(str, lines))


def _function_name(row: Row) -> str | None:
    """Return the function that LiveCodeBench's metadata name."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _of_pair(test: object, function: str | None) -> Case:
    """Return the case of an input and an output."""
    if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
        raise ValueError(f"the tests have {show(test)}, expected an object with `input` and `output`")
    inputs, expected = test["input"], test["output"]
    name = test.get("fn_name") or (function if test.get("testtype", "functional") == "functional" else None)
    if name is None:
        return {"input": _text(inputs), "output": _text(expected)}
    arguments = (
        [json.loads(line) for line in inputs.splitlines() if line.strip()] if isinstance(inputs, str) else inputs
    )
    if not isinstance(arguments, list):
        raise ValueError(
            f"the tests call {name} with {show(inputs)}, expected a list of arguments, or one in each line"
        )
    return {"function": str(name), "arguments": arguments, "value": _data(expected)}


def _text(value: object) -> str:
    """Return an input or output as a text; lists are lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _data(value: object) -> object:
    """Return an expected value, which may be JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _of_code(code: str, row: Row) -> list[Case]:
    """Return the cases of code: a call of `check`, one for each function `test_...`, or the code itself.

    Raises:
        ValueError: It is no Python, or asserts nothing that would run.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(f"the tests are {show(code)}, which is neither JSON nor Python: {error.msg}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in functions and row.get("entry_point"):
        return [{"code": f"{code}\ncheck({row['entry_point']})"}]
    named = [name for name in functions if name.startswith("test_")]
    if any(functions[name].args.args for name in named):
        raise ValueError("the tests have functions with arguments, expected none")
    if named:
        return [{"code": f"{code}\n{name}()"} for name in named]
    if not any(isinstance(node, ast.Assert) for node in _at_once(tree)):
        raise ValueError(
            f"the tests are {show(code)}, which assert nothing: expected assertions, functions test_..., or check"
        )
    return [{"code": code}]


def _at_once(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes outside of functions and classes."""
    statements = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for statement in statements for node in ast.walk(statement)]
