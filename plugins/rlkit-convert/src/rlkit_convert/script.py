"""A Python script that trains with TRL, read as a syntax tree: what its configuration and its trainer are given.

Nothing is run: an argument counts if it is a literal, a name that is bound to a literal outside of branches and loops,
or one of a few well-known calls, such as `load_dataset("name")`. Any other one is listed with its text.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkit.base.errors import RecipeError, shorten
from rlkit.base.text import redact_option
from rlkit_convert.source import LARGEST, PeerOptions

KINDS = ("GRPO", "RLOO", "PPO", "GOLD")
"""Before `Config` and `Trainer` in the names of TRL's classes."""
ADAPTERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
"""Arguments of peft's `LoraConfig`, and the options of TRL's command line."""
SPLITS = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}
TRAINER_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""The arguments of a trainer by position."""
IGNORED = {"args", "processing_class", "tokenizer", "optimizers", "reward_processing_classes"}
"""Arguments of a trainer that are read elsewhere, or that rlkit finds in the model's folder."""


MAX_NAMES = 20
"""Names that are followed to a value, each bound to the next."""


class Unknown(Exception):
    """The value of an expression is known only by running it."""


@dataclass
class Script:
    """The parts of a script.

    Args:
        bindings: The lines at which a name is bound, in order, each with its expression.
        functions: Names of the functions at the top.
        imports: `module:name` by the name that the script uses.
        has_guard: Whether it tests `__name__`, so that it does not train when it is imported.
    """

    bindings: dict[str, list[tuple[int, ast.expr]]]
    functions: set[str]
    imports: dict[str, str]
    has_guard: bool

    @classmethod
    def of(cls, tree: ast.Module) -> Script:
        """Read the definitions of a syntax tree."""
        imports = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imports |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        return cls(_bindings(tree), functions, imports, any(map(_is_guard, tree.body)))

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name is bound to where it is used, or the node itself."""
        for _ in range(MAX_NAMES):
            bindings = self.bindings.get(node.id, []) if isinstance(node, ast.Name) else []
            earlier = [expression for line, expression in bindings if line < node.lineno]
            if not earlier:
                break
            node = earlier[-1]
        return node

    def value(self, node: ast.expr) -> object:
        """Return the value of a literal, or of a name that is bound to one.

        Raises:
            Unknown: It is any other expression.
        """
        resolved = self.resolve(node)
        try:
            value = ast.literal_eval(resolved)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = self._collection(resolved)
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise Unknown
        if not isinstance(value, str | int | float | list | tuple | dict | None):
            raise Unknown
        return list(value) if isinstance(value, tuple) else value

    def _collection(self, node: ast.expr) -> object:
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        raise Unknown


def _bindings(tree: ast.Module) -> dict[str, list[tuple[int, ast.expr]]]:
    """Return the bindings of names that are bound in one sequence of statements, outside of branches and loops."""
    names = Counter(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    names.update(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    bindings: dict[str, list[tuple[int, ast.expr]]] = {}
    for statements in _sequences(tree):
        own: dict[str, list[tuple[int, ast.expr]]] = {}
        for node in statements:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                own.setdefault(node.targets[0].id, []).append((node.end_lineno or node.lineno, node.value))
        bindings |= {name: lines for name, lines in own.items() if len(lines) == names[name]}
    return bindings


def _sequences(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statements of the script itself, with those that run if it is the main module, and of each function."""
    top: list[ast.stmt] = []
    for node in tree.body:
        top += node.body if isinstance(node, ast.If) and _is_guard(node) else [node]
    yield top
    yield from (node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def read_script(content: str, name: str) -> tuple[PeerOptions, str]:
    """Return the options of a script, of its configuration, trainer, adapters and data sets, and the trainer.

    The trainer is empty if the script has none that rlkit knows.

    Raises:
        RecipeError: It is no Python.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of the script's own style
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"{name} is no Python script: {' '.join(str(error).split())}") from error
    options, script, trainer = PeerOptions(), Script.of(tree), ""
    for kind, part, call in _calls(tree):
        if part == "Config":
            for key, value in _arguments(call, script, ("output_dir",)):
                _add(options, script, key, value)
        else:
            _read_trainer(options, script, call, name)
        trainer = trainer or kind.lower()
    return options, trainer


def _calls(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the calls of TRL's configurations and trainers, the configurations first."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for part in ("Config", "Trainer"):
        for call in calls:
            kind = next((kind for kind in KINDS if _name_of(call.func) == f"{kind}{part}"), None)
            if kind is not None:
                yield kind, part, call


def _name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call, script: Script, names: Sequence[str] = ()) -> Iterator[tuple[str, ast.expr]]:
    """Yield a call's arguments by name: those by position, by keyword, and of a dictionary that is unpacked."""
    yield from zip(names, call.args, strict=False)
    for keyword in call.keywords:
        unpacked = script.resolve(keyword.value)
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(unpacked, ast.Dict) and all(map(_is_text, unpacked.keys)):
            yield from (
                (str(ast.literal_eval(key)), value) for key, value in zip(unpacked.keys, unpacked.values, strict=True)
            )
        else:
            yield f"**{ast.unparse(keyword.value)}", ast.Call(ast.Name("dict"), [], [keyword])


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _add(options: PeerOptions, script: Script, key: str, node: ast.expr) -> None:
    """Set an option to the value of an expression, unless that is None; record why it is unknown."""
    try:
        value = script.value(node)
    except Unknown:
        expression = redact_option(key, shorten(ast.unparse(node), 80))
        options.unresolved[key] = f"its value is `{expression}`, which is not run"
        return
    if value is not None:
        options.values[key] = value


def _read_trainer(options: PeerOptions, script: Script, call: ast.Call, name: str) -> None:
    for key, node in _arguments(call, script, TRAINER_ARGUMENTS):
        if key == "model":
            _add(options, script, "model_name_or_path", _model_of(script.resolve(node)))
        elif key == "teacher_model":
            _add(options, script, "teacher_model_name_or_path", _model_of(script.resolve(node)))
        elif key == "reward_funcs":
            _read_rewards(options, script, node, name)
        elif key == "peft_config":
            _read_adapters(options, script, script.resolve(node))
        elif key in SPLITS:
            _read_dataset(options, script, key, script.resolve(node))
        elif key not in IGNORED:
            options.unresolved[key] = f"an argument of the trainer, `{shorten(ast.unparse(node), 80)}`"


def _model_of(node: ast.expr) -> ast.expr:
    """Return the name in `AutoModel….from_pretrained(NAME)`, or the node itself."""
    if isinstance(node, ast.Call) and _name_of(node.func) == "from_pretrained" and node.args:
        return node.args[0]
    return node


def _read_adapters(options: PeerOptions, script: Script, node: ast.expr) -> None:
    if not isinstance(node, ast.Call) or _name_of(node.func) != "LoraConfig":
        options.unresolved["use_peft"] = f"its adapters are `{shorten(ast.unparse(node), 80)}`, which is not run"
        return
    options.values["use_peft"] = True
    for key, value in _arguments(node, script):
        _add(options, script, ADAPTERS.get(key, key), value)


def _read_dataset(options: PeerOptions, script: Script, key: str, node: ast.expr) -> None:
    """Read `load_dataset(NAME, CONFIG, split=SPLIT)`, also with a split in brackets; a `map` after it is named."""
    data = node
    split: ast.expr | None = None
    while not (isinstance(data, ast.Call) and _name_of(data.func) == "load_dataset"):
        if isinstance(data, ast.Subscript):
            split, data = data.slice, script.resolve(data.value)
        elif isinstance(data, ast.Call) and isinstance(data.func, ast.Attribute):
            step = f"`.{data.func.attr}(…)` of {key} is not run: rows must have what it makes of them"
            options.unresolved.setdefault("dataset_map", step)
            data = script.resolve(data.func.value)
        else:
            options.unresolved["dataset_name"] = f"{key} is `{shorten(ast.unparse(node), 80)}`, which is not run"
            return
    keywords = dict(_arguments(data, script, ("path", "name")))
    split = keywords.get("split", split)
    if "data_files" in keywords:
        _read_files(options, script, key, keywords["data_files"], split)
        return
    for option, argument in (("dataset_name", "path"), ("dataset_config", "name")):
        if argument in keywords:
            _add(options, script, option, keywords[argument])
    if split is not None:
        _add(options, script, SPLITS[key], split)


def _read_files(options: PeerOptions, script: Script, key: str, node: ast.expr, split: ast.expr | None) -> None:
    """Read the files of `load_dataset("csv", data_files=...)`: one, several, or those of each split by its name."""
    files = script.resolve(node)
    option = "dataset_name" if key == "train_dataset" else "dataset_validation_files"
    if not isinstance(files, ast.Dict) or not all(map(_is_text, files.keys)):
        _add(options, script, option, node)
        return
    by_split = {
        str(ast.literal_eval(name)): value for name, value in zip(files.keys, files.values, strict=True) if name
    }
    try:
        chosen = None if split is None else script.value(split)
    except Unknown:
        chosen = None
    if isinstance(chosen, str) and chosen in by_split:
        _add(options, script, option, by_split[chosen])
    elif key == "train_dataset" and "train" in by_split:
        _add(options, script, option, by_split["train"])
    else:
        options.unresolved[option] = (
            f"{key} has the files `{shorten(ast.unparse(files), 80)}` without one split of them"
        )
    held_out = next((by_split[name] for name in ("validation", "test") if name in by_split), None)
    if held_out is not None and "dataset_validation_files" not in options.values:
        _add(options, script, "dataset_validation_files", held_out)


def _read_rewards(options: PeerOptions, script: Script, node: ast.expr, name: str) -> None:
    """Name each reward function by where it is: `module:name`, or `FILE.py:name` of the script's own."""
    resolved = script.resolve(node)
    functions = resolved.elts if isinstance(resolved, ast.List | ast.Tuple) else [resolved]
    names = []
    for function in functions:
        label = _name_of(function)
        if label in script.functions:
            names.append(f"{name if script.has_guard else 'rewards.py'}:{label}")
            if not script.has_guard:
                options.unresolved[f"def {label}"] = f"it is in {name}, which trains when it is imported"
        elif label in script.imports:
            names.append(script.imports[label])
        elif isinstance(function, ast.Constant) and isinstance(function.value, str):
            names.append(function.value)
        else:
            text = shorten(ast.unparse(function), 80)
            options.unresolved["reward_funcs"] = f"`{text}` is neither a function at the top of the script nor imported"
            return
    options.values["reward_funcs"] = names
