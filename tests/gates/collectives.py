"""Finds collectives whose call depends on what one rank alone may know: the others would wait for it in vain.

A call is collective if it is one of `Ranks`' (or of what a part is given of them), or calls a function that contains
one. It is guarded by the tests of `if`, `while`, `... if ... else ...`, `and` and `or` around it, by the iterables of
loops around it, by `except`, and by earlier tests that leave the block. A guard is agreed if it consists of constants,
results of collectives, the recipe and what is made of these alone. Where a value is agreed for another reason, the line
says so:

    if number % every == 0:  # agreed: every rank counts the same steps
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARK = re.compile(r"#\s*agreed: \S.{6,}")
"""A reason why all ranks have the same value, on the line of the guard or the one before it."""

CONTRACT = re.compile(r"\b(all|every|all its|whose) ranks? must (call|enter|read|ask)", re.IGNORECASE)

OWNERS = {"ranks", "_ranks", "_side_ranks", "runtime", "_runtime"}
"""What collectives are called on, by its name."""

PASSED = {"reduce", "gather", "agree"}
"""Collectives that are handed over as functions, or set as attributes of estimators and losses."""

OF_RUNTIME = {"reduce", "gather", "gather_world", "broadcast_tp", "logits", "unsharded"}

OF_RECIPE = {"recipe", "section", "models", "callbacks", "watching", "teacher_prompts", "by_outcome"}
OF_RECIPE |= {"adapter_only", "aggregation"}
OF_COMMAND_LINE = {"parsed", "job", "replay"}
OF_FABRIC = {"strategy", "sharded", "world_size", "tensor_parallel"}
COUNTED = {"step", "steps"}
AGREED = OF_RECIPE | OF_COMMAND_LINE | OF_FABRIC | COUNTED
"""Names and attributes that are alike on all ranks, with all that hangs on them: each has this one meaning."""

OF_ONE_TYPE = {"module", "tensor"}
"""What all ranks have of the same type, sharded on all of them or on none, while its values may differ."""

PART_ROOMS = {"advantages", "losses", "engines", "filters", "rewards", "interactions"}
"""Where constructors take what the recipe says."""

COMMON = {n for kind in (dict, list, set, str, Path, re.Pattern, asyncio.Future) for n in dir(kind)} | {
    "step",
    "close",
    "train",
    "launch",
}
"""Methods that foreign objects have, too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """A file of the code.

    Args:
        path: Relative to the repository, for messages.
        room: The room that it is in.
        text: What is in it.
    """

    path: str
    room: str
    text: str
    tree: ast.Module = field(init=False)
    parents: dict[ast.AST, ast.AST] = field(init=False)
    own: set[str] = field(init=False)
    """Names that are defined in this file, or imported from another one of rlkit."""
    foreign: set[str] = field(init=False)
    """Names that are imported from elsewhere."""

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [(a.asname or a.name, str(getattr(i, "module", None) or a.name)) for i in imports for a in i.names]
        self.foreign = {name.partition(".")[0] for name, module in names if not module.startswith("rlkit")}
        self.own = {name for name, _ in names} - self.foreign | {function.name for function in self.functions()}

    def functions(self) -> Iterator[Function]:
        """Return all functions and methods."""
        yield from (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def marked(self, node: ast.AST) -> bool:
        """Return whether a reason is given on a node's first line, or on the one before it."""
        lines = self.text.splitlines()
        around = lines[max(0, node.lineno - 2) : node.lineno]  # type: ignore[attr-defined]
        return any(MARK.search(line) for line in around)


def names_of(chain: ast.AST) -> list[str]:
    """Return the names of `a.b.c`, calls in it left out; none for anything else."""
    if isinstance(chain, ast.Name):
        return [chain.id]
    if isinstance(chain, ast.Attribute):
        inner = names_of(chain.value)
        return [*inner, chain.attr] if inner else []
    return []


class Collectives:
    """Which functions are collective, in a set of files.

    Args:
        sources: All files in which functions may be called.
        methods: The names of the collectives of `Ranks`.
    """

    def __init__(self, sources: list[Source], methods: set[str]) -> None:
        self.sources = sources
        self.methods = methods
        self.config = {
            node.name for s in sources if "/recipe/" in s.path for node in s.tree.body
            if isinstance(node, ast.ClassDef)
        }  # fmt: skip
        self.functions: set[str] = set()
        self.calls: dict[Function, list[ast.Call]] = {}
        """Those of each function itself."""
        self.given: set[str] = set()
        """Of these functions those that are collective only where they are given a collective."""
        defined: dict[str, list[tuple[Source, Function]]] = {}
        for source in sources:
            for function in source.functions():
                if not _is_stub(function) or _is_contract(function):
                    defined.setdefault(function.name, []).append((source, function))
        while True:  # until no further function contains one
            found = {
                name for name, bodies in defined.items()
                if name not in COMMON and all(_is_contract(b) or any(self._called(s, b)) for s, b in bodies)
            }  # fmt: skip
            if found == self.functions:
                break
            self.functions = found
            self.given = {name for name in found if all(_takes_collective(body) for _, body in defined[name])}

    def is_collective(self, source: Source, call: ast.AST) -> bool:
        """Return whether a call in a file is collective."""
        if not isinstance(call, ast.Call):
            return False
        *owner, name = names_of(call.func) or ["", getattr(call.func, "attr", "")]
        if not owner and name in PASSED:
            return True
        if owner and owner[-1] in OWNERS and name in (self.methods if "ranks" in owner[-1] else OF_RUNTIME):
            return True
        if owner == ["self"] and name in PASSED:
            return True
        if name not in self.functions or (name not in source.own if not owner else owner[0] in source.foreign):
            return False
        return name not in self.given or any(map(self._is_handed_over, _arguments(call)))

    def _is_handed_over(self, value: ast.AST) -> bool:
        chain = names_of(value)
        return bool(chain) and (chain[-1] in PASSED | OWNERS or (len(chain) > 1 and chain[-2] in OWNERS))

    def _called(self, source: Source, function: Function) -> Iterator[ast.AST]:
        """Return the collectives that a function calls itself."""
        if function not in self.calls:
            self.calls[function] = [node for node in _own_nodes(function) if isinstance(node, ast.Call)]
        return (call for call in self.calls[function] if self.is_collective(source, call))

    def problems(self) -> Iterator[str]:
        """Return where a collective's call depends on what is not agreed."""
        for source in self.sources:
            for function in source.functions():
                calls = list(self._called(source, function))
                known = Known(self, source, function) if calls else None
                for call in calls:
                    for guard in guards(source, function, call):
                        if known and not source.marked(guard) and not known.agreed(guard):
                            yield f"{source.path}:{guard.lineno} `{_text(guard)}` decides about {_text(call)}"  # type: ignore[attr-defined]


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _takes_collective(function: Function) -> bool:
    """Return whether a function is handed a collective, or the ranks where there are several."""
    arguments = (*function.args.args, *function.args.kwonlyargs)
    optional = {a.arg for a in arguments if a.annotation is not None and "None" in ast.unparse(a.annotation)}
    return bool(PASSED & {a.arg for a in arguments} or OWNERS & optional)


def _is_contract(function: Function) -> bool:
    """Return whether a docstring says that all ranks have to call this."""
    return bool(CONTRACT.search(" ".join((ast.get_docstring(function) or "").split())))


def _is_stub(function: Function) -> bool:
    """Return whether a function only declares what others do."""
    return all(isinstance(node, ast.Expr | ast.Raise | ast.Pass) for node in function.body)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Return the nodes of a function without those of functions and lambdas inside of it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def guards(source: Source, function: Function, call: ast.AST) -> Iterator[ast.AST]:
    """Return what decides whether, and how often, a call in a function is reached."""
    node: ast.AST = call
    while node is not function:
        parent = source.parents[node]
        if isinstance(parent, ast.If | ast.While | ast.IfExp) and node is not parent.test:
            yield parent.test
        elif isinstance(parent, ast.BoolOp):
            yield from parent.values[: parent.values.index(node)]  # type: ignore[arg-type]
        elif isinstance(parent, ast.For | ast.AsyncFor) and node is not parent.iter:
            yield parent.iter
        elif isinstance(parent, ast.ExceptHandler):
            yield parent
        elif isinstance(parent, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            yield from (x for g in parent.generators if g is not node for x in (g.iter, *g.ifs))
        if isinstance(node, ast.stmt):
            yield from _left_before(parent, node)
        node = parent


def _left_before(parent: ast.AST, statement: ast.stmt) -> Iterator[ast.AST]:
    """Return the tests of earlier statements of a block that may leave it; an error ends the run on all ranks."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            for earlier in block[: block.index(statement)]:
                if isinstance(earlier, ast.If) and any(
                    isinstance(node, ast.Return | ast.Continue | ast.Break) for node in ast.walk(earlier)
                ):
                    yield earlier.test


class Known:
    """What all ranks have alike in a function.

    Args:
        collectives: Which calls are.
        source: The file.
        function: Whose names they are.
    """

    def __init__(self, collectives: Collectives, source: Source, function: Function) -> None:
        self.collectives = collectives
        self.source = source
        self.names = set(AGREED)
        self.own: set[str] = set()
        """Attributes of `self`."""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        self.names |= {a.arg for a in arguments if a.annotation is not None and self._is_config(a.annotation)}
        enclosing = source.parents.get(function)
        if isinstance(enclosing, ast.ClassDef):
            self._read_constructor(enclosing, source.room in PART_ROOMS)
        self._read_assignments(function)

    def _is_config(self, annotation: ast.AST) -> bool:
        return any(isinstance(node, ast.Name) and node.id in self.collectives.config for node in ast.walk(annotation))

    def _read_constructor(self, owner: ast.ClassDef, is_part: bool) -> None:
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = [*method.args.args, *method.args.kwonlyargs][1:]
                config = {a.arg for a in arguments if is_part or (a.annotation and self._is_config(a.annotation))}
                for node in ast.walk(method):
                    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in config:
                        self.own |= {n[1] for t in node.targets if (n := names_of(t))[:1] == ["self"] and len(n) == 2}

    def _read_assignments(self, function: Function) -> None:
        """Add names that are only ever given agreed values."""
        values: dict[str, list[ast.AST]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name, value in _pairs(target, node.value):
                        values.setdefault(name, []).append(value)
            elif isinstance(node, ast.NamedExpr | ast.AugAssign) and isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                for name, value in _pairs(node.target, node.iter):
                    values.setdefault(name, []).append(value)
        parameters = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        assumed = values.keys() - parameters - self.names
        self.names |= assumed  # names may be of each other's values; those that are of another one are removed
        while wrong := {name for name in assumed & self.names if not all(map(self.agreed, values[name]))}:
            self.names -= wrong
        self.names |= {name for name in values.keys() & parameters if all(map(self.agreed, values[name]))}

    def agreed(self, node: ast.AST) -> bool:
        """Return whether an expression has the same value on every rank."""
        if isinstance(node, ast.Constant) or self.collectives.is_collective(self.source, node):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot) and _is_present(node.left):
            return True
        if chain := names_of(node):
            attributes = chain[2:] if chain[0] == "self" else chain[1:]
            return (
                chain[0] in self.names
                or (chain[0] == "self" and len(chain) > 1 and chain[1] in self.own | AGREED)
                or bool(AGREED.intersection(attributes))
                or (len(chain) > 1 and chain[-2] in OWNERS and chain[-1] == "count")
            )
        if isinstance(node, ast.Call):
            pure = isinstance(node.func, ast.Name) and node.func.id in PURE
            if names_of(node.func) == ["isinstance"]:
                return names_of(node.args[0])[-1:] in [[name] for name in OF_ONE_TYPE] or self.agreed(node.args[0])
            return (pure or self.agreed(node.func)) and all(map(self.agreed, _arguments(node)))
        if isinstance(node, ast.ExceptHandler | ast.Lambda):
            return False
        inner = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr | ast.comprehension)]
        return all(map(self.agreed, inner)) and (bool(inner) or isinstance(node, ast.Dict | ast.List | ast.Tuple))


PURE = {"abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min"}
PURE |= {"range", "set", "sorted", "str", "sum", "tuple", "zip"} | {"mini_batches"}
"""Functions that make the same of the same; `mini_batches` draws by the seed."""


def _is_present(value: ast.AST) -> bool:
    """Return whether all ranks have a value or none: what agrees itself, and fields of a batch, by the recipe."""
    chain = names_of(value)
    return bool(chain) and (chain[-1] in OWNERS or chain[0] == "batch")


def _pairs(target: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Return the names of an assignment, each with what it is made of."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _pairs(target.value, value)
    elif isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
        for i, inner in enumerate(target.elts):
            yield from _pairs(inner, value if parts is None else parts[i])
