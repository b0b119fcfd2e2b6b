"""The verbs of the command line: rlkit's own, and those that plugins add; what they work with is `rlkit.commands`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.base.errors import CommandError, PluginError, RecipeError, RlkitError, explain_foreign, show

if TYPE_CHECKING:
    from rlkit.base.installed import Plugin

VERBS = {
    "fit": "train a policy from a recipe",
    "sweep": "train with each combination of options' values, and compare the runs",
    "validate": "answer a recipe's validation prompts and score the completions",
    "generate": "hold one conversation with a recipe's policy",
    "explain": "print the objective that a recipe optimises, as formulae",
    "recipe": "list, show, make or check recipes",
    "docs": "show the documentation",
    "plugins": "list, show, make or test plugins",
    "reward": "score saved rollouts with another reward, and compare",
    "data": "show and count a task's prompts, or write them to files",
    "diff": "show where two runs differ",
    "report": "write one HTML file with a run's curves and rollouts",
    "replay": "repeat a step of a run, and compare it with the original",
    "export": "write a checkpoint's policy as a Hugging Face folder",
    "doctor": "check this machine and installation",
    "completion": "print the completion script for bash or zsh",
}
"""rlkit's own verbs, which no plugin can replace."""

SEPARATE = {"convert": "rlkit-convert", "serve": "rlkit-tinker"}
"""Verbs that a distribution of this project provides, by name."""

SYNONYMS = {
    "train": "fit", "run": "fit", "eval": "validate", "evaluate": "validate", "test": "validate", "sample": "generate",
    "chat": "generate", "infer": "generate", "compare": "diff", "list": "recipe", "check": "recipe", "help": "docs",
}  # fmt: skip
"""Verbs of other toolkits, and rlkit's."""

_SECTION = "[rlkit.commands]"


def own_verb(verb: str) -> Callable[[Sequence[str]], int]:
    """Import the function of one of rlkit's own verbs: a module of `rlkit.cli`, or of a package that comes with rlkit.

    Raises:
        PluginError: The package is not part of this installation.
    """
    run: Callable[[Sequence[str]], int]
    if find_spec(f"rlkit.cli.{verb}") is not None:
        run = import_module(f"rlkit.cli.{verb}").run
        return run
    from rlkit.base.installed import COMMANDS, comes_with_rlkit, entry_points

    for entry in entry_points(COMMANDS):
        if entry.name == verb and comes_with_rlkit(entry):
            run = entry.load()
            break
    else:
        raise PluginError(f"no package that comes with rlkit provides the verb {verb!r}; install rlkit again")
    return run


def plugin_verbs() -> dict[str, str]:
    """Return plugins' verbs and their distributions, from the metadata files of installed packages.

    This is for `rlkit --help`: it takes a twentieth of the time of `importlib.metadata`, which running a verb uses.
    """
    verbs: dict[str, str] = {}
    for path in (path for folder in sys.path for path in Path(folder).glob("*.dist-info/entry_points.txt")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):  # `rlkit plugins list` reports broken plugins
            continue
        distribution = path.parent.name.partition("-")[0].replace("_", "-")
        for name in _names(lines):
            if name not in VERBS:
                verbs.setdefault(name, distribution)
    return dict(sorted(verbs.items()))


def _names(lines: Sequence[str]) -> Iterator[str]:
    """Yield the names in the section of verbs."""
    in_section = False
    for line in map(str.strip, lines):
        if line.startswith("["):
            in_section = line == _SECTION
        elif in_section and "=" in line:
            yield line.partition("=")[0].strip()


def run_plugin_verb(verb: str, argv: Sequence[str]) -> int:
    """Run a plugin's verb, and return its exit status.

    Raises:
        RecipeError: The verb does not exist.
        PluginError: The plugin is disabled, broken or made for another rlkit, or two plugins have the verb.
        CommandError: The plugin's function raised an error that is not one of rlkit's.
    """
    plugin = _owner(verb)
    name = f"the verb {verb!r} of {plugin}"
    try:
        function = plugin.commands[verb].load()
    except (Exception, SystemExit) as error:  # a plugin's import may raise anything
        raise PluginError(f"{name} cannot be loaded: importing it raised {explain_foreign(error)}") from error
    try:
        status = function(argv)
    except (RlkitError, MemoryError):
        raise
    except Exception as error:
        raise CommandError(f"{name} raised {explain_foreign(error)}; --debug shows the traceback") from error
    if status is not None and not isinstance(status, int):
        raise CommandError(f"{name} returned {show(status)}, expected an exit status, or None for 0")
    return status or 0


def _owner(verb: str) -> Plugin:
    from rlkit.base.installed import DISABLE_VARIABLE, installed

    plugins = installed()
    owners = [plugin for plugin in plugins if verb in plugin.commands]
    enabled = sorted((plugin for plugin in owners if not plugin.disabled), key=lambda plugin: plugin.name)
    if len(enabled) > 1:
        raise PluginError(
            f"the verb {verb!r} is offered by {enabled[0]} and by {enabled[1]}; uninstall one, or set "
            f"{DISABLE_VARIABLE}={enabled[1].name}"
        )
    if enabled:
        enabled[0].require_healthy()
        return enabled[0]
    if owners:
        raise PluginError(f"{verb!r} is a verb of {owners[0]}, which {DISABLE_VARIABLE} disables; unset it")
    raise RecipeError(_unknown_verb(verb, [*VERBS, *(name for plugin in plugins for name in plugin.commands)]))


def _unknown_verb(verb: str, verbs: Sequence[str]) -> str:
    from difflib import get_close_matches

    if verb in SEPARATE:
        from rlkit.base.installed import plugin_command

        return f"{verb!r} is an unknown verb; {SEPARATE[verb]} provides it: {plugin_command(SEPARATE[verb])}"
    near = [verb] if verb in SYNONYMS else get_close_matches(verb, [*verbs, *SEPARATE, *SYNONYMS], 1)
    hint = f"did you mean {SYNONYMS.get(near[0], near[0])!r}?" if near else f"verbs: {', '.join(verbs)}"
    return f"{verb!r} is no verb of rlkit; {hint}"
