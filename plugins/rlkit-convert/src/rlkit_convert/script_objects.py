"""The objects that a Python script gives to TRL's trainer, and how it changes them. Nothing is run."""

from __future__ import annotations

import ast

from rlkit_convert.source import PeerOptions
from rlkit_convert.syntax import Script, add, arguments, name_of, text_of

LOADING = {"torch_dtype": "dtype", "revision": "model_revision", "pretrained_model_name_or_path": "NAME"}
"""Arguments of `from_pretrained`, and TRL's options for them; `NAME` is the model's own."""
NOT_LEARNT = ("device_map", "low_cpu_mem_usage", "use_cache", "token", "cache_dir", "num_labels")
"""Arguments of `from_pretrained` that change nothing that is learnt."""
CHANGES = {
    "add_callback": "callbacks",
    "add_special_tokens": "processing_class.add_special_tokens",
    "add_tokens": "processing_class.add_tokens",
    "resize_token_embeddings": "model.resize_token_embeddings",
    "load_adapter": "model.load_adapter",
    "add_adapter": "model.add_adapter",
    "load_state_dict": "model.load_state_dict",
    "requires_grad_": "model.requires_grad",
    "requires_grad": "model.requires_grad",
    "chat_template": "processing_class.chat_template",
}
"""Methods and attributes that change a trainer, a tokenizer or a model, and the options under which they are listed."""


def read_model(options: PeerOptions, script: Script, key: str, node: ast.expr) -> None:
    """Read a model's name, or that in `AutoModel….from_pretrained(NAME, …)` with the arguments beside it."""
    if not isinstance(node, ast.Call) or name_of(node.func) != "from_pretrained":
        add(options, script, key, node)
        return
    for argument, value in arguments(node, script, ("pretrained_model_name_or_path",)):
        option = LOADING.get(argument, argument)
        if option == "NAME":
            add(options, script, key, value)
        elif argument == "quantization_config":
            read_quantization(options, script, script.resolve(value))
        elif argument not in NOT_LEARNT and key == "model_name_or_path":
            add(options, script, option, value)


def read_quantization(options: PeerOptions, script: Script, node: ast.expr) -> None:
    """Read `BitsAndBytesConfig(…)`, whose arguments have the names of TRL's options."""
    if isinstance(node, ast.Call) and name_of(node.func) == "BitsAndBytesConfig":
        for option, value in arguments(node, script):
            add(options, script, option, value)
    else:
        options.unresolved["model.quantization_config"] = f"it is `{text_of(node)}`, which is not run"


def read_attributes(options: PeerOptions, script: Script, name: str) -> None:
    """Read the options that a script sets as attributes of its configuration; those in branches are unknown."""
    for node, is_certain in script.assignments:
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == name:
            if is_certain:
                options.unresolved.pop(target.attr, None)
                add(options, script, target.attr, node.value)
            else:
                options.unresolved[target.attr] = f"a branch sets it to `{text_of(node.value)}`"


def read_changes(options: PeerOptions, script: Script, tree: ast.Module) -> None:
    """List what a script changes of its trainer, its tokenizer and its model before it trains."""
    for node, _ in script.assignments:
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and target.attr in CHANGES:
            _list_change(options, target.attr, node)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr in CHANGES:
            _list_change(options, call.func.attr, call)


def _list_change(options: PeerOptions, name: str, node: ast.AST) -> None:
    options.unresolved.setdefault(CHANGES[name], f"the script changes it by `{text_of(node)}`")
