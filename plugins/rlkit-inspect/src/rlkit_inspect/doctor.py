"""`rlkit doctor`: look at this machine and installation."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata

import torch
from rlkit_authors.installed import show_plugins

from rlkit.api.policy import chat_template, check_template
from rlkit.base.errors import RecipeError
from rlkit.base.installed import extra_command
from rlkit.base.terminal import echo, show
from rlkit.base.text import similar
from rlkit.models.config import context_length, load_config
from rlkit.models.load import is_reward_model
from rlkit.models.size import size_of
from rlkit.recipe import Model
from rlkit.records.environment import PACKAGES
from rlkit.registry import Registry, load_plugins

USAGE = """usage: rlkit doctor                 this machine and installation
       rlkit doctor --model PATH    a model: its size, and whether its chat template can be trained with
"""


def run(argv: Sequence[str]) -> int:
    """Print what is there; exit 2 where a plugin is broken."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    path = _model(argv)
    if path is not None:
        return _examine(Model(path))
    registry = load_plugins()
    show(("what", "found"), facts(registry))
    show_plugins(registry)
    return 2 if any(plugin.error for plugin in registry.plugins) else 0


def _model(argv: Sequence[str]) -> str | None:
    """Return the path after `--model`, if that is what was asked."""
    if not argv:
        return None
    words = [*argv[0].split("=", 1), *argv[1:]]
    if words[0].startswith("--") and words[0] != "--model":
        raise RecipeError(f"unknown option {words[0]!r}; {similar(words[0], ['--model'], 'expected')}")
    if len(words) != 2 or words[0] != "--model" or not words[1]:
        raise RecipeError(f"the arguments of rlkit doctor are {' '.join(argv)!r}, expected none, or --model and a path")
    return words[1]


def _examine(model: Model) -> int:
    """Check a model's chat template; exit 1 if a problem is found."""
    config, template = load_config(model), chat_template(model)
    weights = size_of(config, trust_remote_code=model.trust_remote_code, scores=is_reward_model(model)).base
    size = f"{weights:,} parameters, context {context_length(config)}"
    echo(f"{model.path}: {config.model_type}, {size}")
    echo(f"a turn ends with: {', '.join(repr(template.tokenizer.decode([i])) for i in sorted(template.stop_ids))}")
    check = check_template(template)
    for fact in check.facts:
        echo(f"template: {fact}")
    for warning in check.warnings:
        echo(f"warning: {warning}")
    return 1 if check.warnings else 0


def facts(registry: Registry) -> list[tuple[str, str]]:
    """Return the facts about this machine."""
    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, torch.__version__ if name == "torch" else metadata.version(name)) for name in PACKAGES]
    checks: dict[str, Callable[[str], str]] = {"wandb": str, "tensorboard": str}
    for part in registry.parts["engines"].values():
        checks |= part.cls.packages  # type: ignore[attr-defined]
    for name, check in checks.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        rows.append((name, check(version) or f"not installed ({extra_command(name)})"))
    rows.append(("CPUs", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows.append(("GPUs", ", ".join(gpus) or "none: runs use the CPU"))
    return rows
