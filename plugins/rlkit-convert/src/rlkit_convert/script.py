"""A Python script that trains with TRL, read as a syntax tree: what its configuration and its trainer are given.

Nothing is run: an argument counts if it is a literal, a name that is bound to a literal outside of branches and loops,
or one of a few well-known calls, such as `load_dataset("name")`. Any other one is listed with its text.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping

from rlkit.base.errors import RecipeError
from rlkit_convert.script_data import SPLITS, read_dataset
from rlkit_convert.script_objects import read_attributes, read_changes, read_model, read_quantization
from rlkit_convert.source import PeerOptions
from rlkit_convert.syntax import Script, add, arguments, name_of, text_of
from rlkit_convert.trl_trainer import OTHERS, RECORDED, TRAINERS, refuse

KINDS = {kind: trainer for trainer, kind in TRAINERS.items()}
"""The trainers by what is before `Config` and `Trainer` in TRL's classes: those to read first, if there are several."""
ADAPTERS = {
    "r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}  # fmt: skip
"""Arguments of peft's `LoraConfig` that have other names in the options of TRL's command line."""
RECORDED_ARGUMENTS = ("args", "data_collator", "train_dataset", "eval_dataset")
TRAINER_ARGUMENTS = {
    **dict.fromkeys(("SFT", "Reward", "ORPO", "CPO"), ("model", *RECORDED_ARGUMENTS)),
    **dict.fromkeys(("DPO", "KTO"), ("model", "ref_model", *RECORDED_ARGUMENTS)),
    **dict.fromkeys(("GKD", "GOLD"), ("model", "teacher_model", *RECORDED_ARGUMENTS)),
    "OnlineDPO": ("model", "ref_model", "reward_funcs", *RECORDED_ARGUMENTS),
    "Distillation": ("model", "teacher_model", "args", "train_dataset", "eval_dataset"),
}
"""The arguments of trainers by position; of others, `SAMPLING_ARGUMENTS`."""
SAMPLING_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
MODELS = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path", "ref_model": "ref_model"}
"""Arguments of a trainer that are models, and the options of their names."""
OLD_ARGUMENTS = {
    "dataset_text_field", "max_seq_length", "packing", "beta", "loss_type", "label_smoothing", "max_length",
    "max_prompt_length", "desirable_weight", "undesirable_weight",
}  # fmt: skip
"""Options that earlier versions of trainers of recorded completions took as arguments."""
TRANSFORMERS_RATE = 5e-5
"""The learning rate of `TrainingArguments` by default."""
IGNORED = {"processing_class", "tokenizer", "reward_processing_classes"}
"""Arguments of a trainer that rlkit finds in the model's folder."""


def read_script(content: str, name: str, wanted: str) -> tuple[PeerOptions, str]:
    """Return the options of a script, of its configuration, trainer, adapters and data sets, and the trainer.

    The trainer is empty if the script has none that rlkit knows. Of several, the `wanted` one is read.

    Raises:
        RecipeError: It is no Python, or its trainer is not converted.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of the script's own style
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "it is nested too deep"  # a MemoryError of the parser has no text
        raise RecipeError(f"{name} is no Python script: {reason}") from error
    options, script, subclasses = PeerOptions(), Script.of(tree), _subclasses(tree)
    calls = list(_calls(tree, subclasses))
    order = [*KINDS]
    kinds = sorted({kind for kind, _, _ in calls if kind}, key=lambda kind: (KINDS[kind] != wanted, order.index(kind)))
    if not kinds:
        _refuse_others(tree, name)
        return options, ""
    for kind in kinds[1:]:
        options.unresolved[f"{kind}Trainer"] = f"the script also trains with it, and is read as {kinds[0]}"
    trainer = KINDS[kinds[0]]
    calls = [call for call in calls if call[0] == kinds[0] or (not call[0] and trainer in RECORDED)]
    for kind, part, call in calls:
        if part == "Config":
            for key, value in arguments(call, script, ("output_dir",)):
                add(options, script, key, value)
        else:
            _read_trainer(options, script, kind, call, name)
        if name_of(call.func) in subclasses:
            options.unresolved[f"class {name_of(call.func)}"] = f"it changes {kind}{part}"
    read_changes(options, script, tree)
    if any(part == "Config" for _, part, _ in calls):
        options.unresolved.pop("args", None)
    if any(not kind for kind, _, _ in calls) and not options.has("learning_rate"):
        options.values["learning_rate"] = TRANSFORMERS_RATE
        options.remarks["learning_rate"] = "the default of TrainingArguments, which the trainer takes over"
    return options, trainer


def _subclasses(tree: ast.Module) -> dict[str, str]:
    """Return the classes of TRL from which classes of the script are derived, by the names of the latter."""
    bases = {f"{kind}{part}" for kind in KINDS for part in ("Config", "Trainer")}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: name_of(base) for node in classes for base in node.bases if name_of(base) in bases}


def _calls(tree: ast.Module, subclasses: Mapping[str, str]) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the calls of TRL's configurations and trainers, the configurations first.

    The kind of `TrainingArguments`, which trainers of recorded completions take as well, is empty.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for part in ("Config", "Trainer"):
        for call in calls:
            name = subclasses.get(name_of(call.func), name_of(call.func))
            kind = next((kind for kind in KINDS if name == f"{kind}{part}"), None)
            if part == "Config" and name == "TrainingArguments":
                kind = ""
            if kind is not None:
                yield kind, part, call


def _refuse_others(tree: ast.Module, name: str) -> None:
    """Refuse a script that trains with a class of TRL that is not converted.

    Raises:
        RecipeError: It does.
    """
    called = {name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for trainer, kind in OTHERS.items():
        if called & {f"{kind}Config", f"{kind}Trainer"}:
            refuse(name, trainer)


def _read_trainer(options: PeerOptions, script: Script, kind: str, call: ast.Call, name: str) -> None:
    for key, node in arguments(call, script, TRAINER_ARGUMENTS.get(kind, SAMPLING_ARGUMENTS)):
        if text_of(script.resolve(node)) == "None":
            continue
        if key in MODELS:
            read_model(options, script, MODELS[key], script.resolve(node))
        elif key == "args":
            options.unresolved["args"] = f"it is `{text_of(node)}`, which a command line sets"
            if isinstance(node, ast.Name):
                read_attributes(options, script, node.id)
        elif key == "reward_funcs":
            _read_rewards(options, script, node, name)
        elif key == "quantization_config":
            read_quantization(options, script, script.resolve(node))
        elif key == "peft_config":
            _read_adapters(options, script, script.resolve(node))
        elif key in OLD_ARGUMENTS and KINDS[kind] in RECORDED:
            add(options, script, key, node)
        elif key in SPLITS:
            read_dataset(options, script, key, script.resolve(node))
        elif key not in IGNORED:
            options.unresolved[key] = f"an argument of the trainer, `{text_of(node)}`"


def _read_adapters(options: PeerOptions, script: Script, node: ast.expr) -> None:
    if not isinstance(node, ast.Call) or name_of(node.func) != "LoraConfig":
        options.unresolved["use_peft"] = f"its adapters are `{text_of(node)}`, which is not run"
        return
    options.values["use_peft"] = True
    for key, value in arguments(node, script):
        add(options, script, ADAPTERS.get(key, key), value)


def _read_rewards(options: PeerOptions, script: Script, node: ast.expr, name: str) -> None:
    """Name each reward function by where it is: `module:name`, or `FILE.py:name` of the script's own."""
    resolved = script.resolve(node)
    functions = resolved.elts if isinstance(resolved, ast.List | ast.Tuple) else [resolved]
    names = []
    for function in functions:
        label = name_of(function)
        if label in script.functions:
            names.append(f"{name if script.has_guard else 'rewards.py'}:{label}")
            if not script.has_guard:
                options.unresolved[f"def {label}"] = f"it is in {name}, which trains when it is imported"
        elif label in script.imports:
            names.append(script.imports[label])
        elif isinstance(function, ast.Constant) and isinstance(function.value, str):
            names.append(function.value)
        else:
            text = text_of(function)
            options.unresolved["reward_funcs"] = f"`{text}` is neither a function at the top of the script nor imported"
            return
    options.values["reward_funcs"] = names
