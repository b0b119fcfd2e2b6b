"""The data sets of a Python script: `load_dataset(...)`, and the steps that follow it. Nothing is run."""

from __future__ import annotations

import ast

from rlkit_convert.script_steps import WITHOUT_EFFECT, read_step
from rlkit_convert.source import PeerOptions
from rlkit_convert.syntax import Script, Unknown, add, arguments, is_text, name_of, text_of

MAX_STEPS = 100
"""Steps that are followed back to `load_dataset`; a function may return itself."""
SPLITS = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}


def read_dataset(options: PeerOptions, script: Script, key: str, node: ast.expr) -> None:
    """Read `load_dataset(NAME, CONFIG, split=SPLIT)`, also with a split in brackets, and the steps after it."""
    data = node
    split: ast.expr | None = None
    defaults: dict[str, ast.expr] = {}
    steps = 0
    while not (isinstance(data, ast.Call) and name_of(data.func) == "load_dataset"):
        steps += 1
        if steps <= MAX_STEPS and isinstance(data, ast.Subscript):
            split, data = data.slice, script.resolve(data.value)
        elif steps <= MAX_STEPS and isinstance(data, ast.Call) and isinstance(data.func, ast.Attribute):
            if data.func.attr == "train_test_split":
                split = None  # of that step
            if key == "train_dataset":
                read_step(options, script, data)
            elif data.func.attr not in ("map", "train_test_split", *WITHOUT_EFFECT):
                options.unresolved["eval_dataset"] = f"its rows are `{text_of(node)}`, which is not run"
                return
            data = script.resolve(data.func.value)
        elif steps <= MAX_STEPS and isinstance(data, ast.Call) and (result := _result(script, data)) is not None:
            defaults = _defaults(script, data)
            data = script.resolve(result)
        else:
            option = "dataset_name" if key == "train_dataset" else key
            options.unresolved[option] = f"{key} is `{text_of(node)}`, which is not run"
            return
    split = defaults.get(name_of(split), split) if isinstance(split, ast.Name) else split
    keywords = dict(arguments(data, script, ("path", "name")))
    split = keywords.get("split", split)
    if "data_files" in keywords:
        _read_files(options, script, key, keywords["data_files"], split)
        return
    names = [
        (option, keywords[argument])
        for option, argument in (("dataset_name", "path"), ("dataset_config", "name"))
        if argument in keywords
    ]
    if key == "eval_dataset" and any(_differs(options, script, option, value) for option, value in names):
        options.unresolved[key] = f"it is another data set, `{text_of(data)}`"
        return
    for option, value in names:
        add(options, script, option, value)
    if split is not None:
        add(options, script, SPLITS[key], split)


def _differs(options: PeerOptions, script: Script, option: str, node: ast.expr) -> bool:
    """Check whether an option of the training rows has another value."""
    try:
        return options.values.get(option) not in (None, script.value(node))
    except Unknown:
        return True


def _read_files(options: PeerOptions, script: Script, key: str, node: ast.expr, split: ast.expr | None) -> None:
    """Read the files of `load_dataset("csv", data_files=...)`: one, several, or those of each split by its name."""
    files = script.resolve(node)
    option = "dataset_name" if key == "train_dataset" else "dataset_validation_files"
    if not isinstance(files, ast.Dict) or not all(map(is_text, files.keys)):
        add(options, script, option, node)
        return
    by_split = {
        str(ast.literal_eval(name)): value for name, value in zip(files.keys, files.values, strict=True) if name
    }
    try:
        chosen = None if split is None else script.value(split)
    except Unknown:
        chosen = None
    if isinstance(chosen, str) and chosen in by_split:
        add(options, script, option, by_split[chosen])
    elif key == "train_dataset" and "train" in by_split:
        add(options, script, option, by_split["train"])
    else:
        options.unresolved[option] = f"{key} has the files `{text_of(files)}` without one split of them"
    held_out = next((by_split[name] for name in ("validation", "test") if name in by_split), None)
    if held_out is not None and "dataset_validation_files" not in options.values:
        add(options, script, "dataset_validation_files", held_out)


def _result(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the value at the end of a function of the script that is called without arguments."""
    definition = script.definitions.get(name_of(call.func))
    if definition is None or call.args or call.keywords:
        return None
    last = definition.body[-1]
    return last.value if isinstance(last, ast.Return) else None


def _defaults(script: Script, call: ast.Call) -> dict[str, ast.expr]:
    """Return the defaults of a function's arguments by name."""
    arguments = script.definitions[name_of(call.func)].args
    names = [argument.arg for argument in arguments.args]
    return dict(zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True))
