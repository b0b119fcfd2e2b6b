"""The steps that a Python script applies to a data set, such as `.map(...)`: simple forms are read, others listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rlkit_convert.source import PeerOptions
from rlkit_convert.syntax import Script, Unknown, add, name_of, text_of

WITHOUT_EFFECT = ("shuffle", "remove_columns", "select_columns", "with_format", "cast_column", "flatten_indices")
"""Steps that change neither the prompts nor their answers; rlkit shuffles."""


def read_step(options: PeerOptions, script: Script, call: ast.Call) -> None:
    """Read one step: the columns that it makes, the rows that it selects or holds out."""
    method = name_of(call.func)
    arguments = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else next(iter(arguments.values()), None)
    if method in WITHOUT_EFFECT:
        return
    try:
        if method == "map" and first is not None and _read_map(options, script, arguments.get("function", first)):
            return
    except RecursionError:  # a text of thousands of parts
        pass
    if method == "select" and isinstance(first, ast.Call) and name_of(first.func) == "range" and len(first.args) == 1:
        add(options, script, "select", first.args[0])
    elif method == "train_test_split" and first is not None and "train_size" not in arguments:
        add(options, script, "train_test_split", arguments.get("test_size", first))
    elif method == "rename_column" and len(call.args) == 2 and _is_text(call.args[1], "prompt", "answer"):
        add(options, script, f"map.{ast.literal_eval(call.args[1])}", call.args[0])
    else:
        step = f"`.{method}({', '.join(map(text_of, call.args))})` of train_dataset is not run"
        options.unresolved.setdefault("dataset_map", f"{step}: rows must have what it makes of them")


def _is_text(node: ast.expr, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def _read_map(options: PeerOptions, script: Script, function: ast.expr) -> bool:
    """Read the columns that a function makes of a row; return whether all of its prompt could be read."""
    row, mapping = _row_and_result(script, function)
    if not row or mapping is None:
        return False
    columns = {
        str(key.value): value
        for key, value in zip(mapping.keys, mapping.values, strict=True)
        if isinstance(key, ast.Constant)
    }
    if len(columns) != len(mapping.keys) or ("prompt" in columns and not _read_prompt(options, script, columns, row)):
        return False
    for name, value in columns.items():
        column = _template(script, value, row)
        if name == "answer" and column is not None and _column(column):
            options.values["map.answer"] = _column(column)
        elif name != "prompt" and (column is None or _column(column) != name):
            reason = f"`.map(…)` makes the column {name!r} as `{text_of(value)}`"
            options.unresolved.setdefault(f"map.{name}", reason)
    return True


def _row_and_result(script: Script, function: ast.expr) -> tuple[str, ast.Dict | None]:
    """Return the name of the row and the mapping that a function returns, if it has no branches."""
    if isinstance(function, ast.Lambda) and function.args.args:
        return function.args.args[0].arg, function.body if isinstance(function.body, ast.Dict) else None
    definition = script.definitions.get(name_of(function))
    if definition is None or not definition.args.args:
        return "", None
    plain = (ast.Assign, ast.Return, ast.Expr)
    result = definition.body[-1]
    if not all(isinstance(line, plain) for line in definition.body) or not isinstance(result, ast.Return):
        return "", None
    value = None if result.value is None else script.resolve(result.value)
    return definition.args.args[0].arg, value if isinstance(value, ast.Dict) else None


def _read_prompt(options: PeerOptions, script: Script, columns: dict[str, ast.expr], row: str) -> bool:
    """Read a prompt that is a column or a text with columns, perhaps as a user's message after a system's."""
    prompt = script.resolve(columns["prompt"])
    messages = [*_messages(script, prompt)] if isinstance(prompt, ast.List) else [("user", prompt)]
    roles = [role for role, _ in messages]
    if roles not in (["user"], ["system", "user"]):
        return False
    text = _template(script, messages[-1][1], row)
    if text is None:
        return False
    if roles[0] == "system":
        try:
            options.values["map.system"] = script.value(messages[0][1])
        except Unknown:
            return False
    column = _column(text)
    options.values["map.prompt" if column else "map.template"] = column or text
    if not isinstance(prompt, ast.List):
        options.remarks["map.prompt" if column else "map.template"] = (
            "the text becomes a user's message; model.chat_template: plain writes it as it is"
        )
    return True


def _messages(script: Script, prompt: ast.List) -> Iterator[tuple[str, ast.expr]]:
    """Yield the role and the content of each message."""
    for message in map(script.resolve, prompt.elts):
        fields = {}
        if isinstance(message, ast.Dict):
            fields = {
                key.value: value
                for key, value in zip(message.keys, message.values, strict=True)
                if isinstance(key, ast.Constant)
            }
        role = fields.get("role")
        yield str(role.value) if isinstance(role, ast.Constant) else "", fields.get("content", ast.Constant(None))


def _template(script: Script, node: ast.expr, row: str) -> str | None:
    """Return a text with columns in braces, as `task.template` has it; None if it is made in another way."""
    resolved = script.resolve(node)
    column = _path(resolved, row)
    if column:
        return f"{{{column}}}"
    pieces: list[str | None]
    if isinstance(resolved, ast.JoinedStr):
        pieces = [_template(script, part, row) for part in resolved.values]
    elif isinstance(resolved, ast.FormattedValue) and resolved.conversion == -1 and resolved.format_spec is None:
        pieces = [_template(script, resolved.value, row)]
    elif isinstance(resolved, ast.BinOp) and isinstance(resolved.op, ast.Add):
        pieces = [_template(script, part, row) for part in (resolved.left, resolved.right)]
    else:
        try:
            value = script.value(resolved)
        except Unknown:
            return None
        pieces = [value.replace("{", "{{").replace("}", "}}")] if isinstance(value, str) else [None]
    return None if None in pieces else "".join(piece for piece in pieces if piece is not None)


def _path(node: ast.expr, row: str) -> str:
    """Return the column in `row["a"]`, `a.b` for `row["a"]["b"]`; empty for anything else."""
    names: list[str] = []
    while (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    ):
        names.insert(0, node.slice.value)
        node = node.value
    return ".".join(names) if names and isinstance(node, ast.Name) and node.id == row else ""


def _column(template: str) -> str:
    """Return the column that is all of a template; empty if it has more."""
    name = template[1:-1]
    return name if template == f"{{{name}}}" and not set("{}") & set(name) else ""
