"""`rlkit completion bash|zsh`: a script by which a shell completes verbs, options, parts and recipes.

It is written by shtab from what `--help` prints and from the options of a recipe; completing a word starts no Python.
"""

from __future__ import annotations

import io
import re
from argparse import Action, ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress

import shtab

from rlkit.base.errors import RecipeError, show
from rlkit.base.verbs import VERBS, own_verb, plugin_verbs
from rlkit.registry import Registry, load_plugins
from rlkit_inspect.docs import topics
from rlkit_inspect.keys import values_by_key

Keys = dict[str, tuple[str, ...]]
SHELLS = ("bash", "zsh")
RECIPE = dict.fromkeys(SHELLS, "_rlkit_recipe_files")
"""The function of each shell that completes a recipe."""
USAGE = """usage: rlkit completion bash > ~/.local/share/bash-completion/completions/rlkit
       rlkit completion zsh > ~/.zfunc/_rlkit        with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
    prints a script that completes verbs, options, parts and recipes; write it again once a plugin is installed
"""
FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w-]*)(?:[ =]([A-Z][A-Z_]+|\{[^}]*\}))?(?![\w.])")
"""An option in a verb's help, with the name of its value."""
ONE_OF = re.compile(r"\b([A-Z]+) is one of\s+([\w-]+(?:,\s+[\w-]+)*)")
"""In a verb's help, the values that may stand for a name."""
WORD = re.compile(r"[\w.:+/-]+")
"""What needs no quotes in a shell; other names of plugins are left out, since bash would expand them."""
RECIPES = re.compile(r"--recipe\b|\[overrides\]|--SECTION\.OPTION")
"""What is in the help of verbs that take a recipe's options."""


RECIPE_NAMES = {
    "bash": """_rlkit_recipe_files() {
  compgen -W "%s" -- "$1"
  compgen -f -X '!*.yaml' -- "$1"
  compgen -d -S / -- "$1"
}""",
    "zsh": """_rlkit_recipe_files() {
  _alternative 'recipes:recipe:(%s)' 'files:file:_files -g "*.yaml"'
}""",
}
"""The functions that complete a recipe: a name, or a file."""
EQUALS = """
# --option=value, which bash divides into three words
_rlkit() {
  local words=() place
  for place in "${!COMP_WORDS[@]}"; do
    if [ "${COMP_WORDS[place]}" != "=" ]; then
      words+=("${COMP_WORDS[place]}")
    elif [ "$place" -eq "$COMP_CWORD" ]; then
      words+=("")
    fi
    [ "$place" -eq "$COMP_CWORD" ] && break
  done
  COMP_WORDS=("${words[@]}")
  COMP_CWORD=$((${#words[@]} - 1))
  _shtab_rlkit
}
complete -o bashdefault -F _rlkit rlkit"""


def run(argv: Sequence[str]) -> int:
    """Print a shell's script; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise RecipeError(f"rlkit completion has {show(' '.join(argv), 60)}, expected {' or '.join(SHELLS)}")
    print(script(argv[0], load_plugins()))
    return 0


def script(shell: str, registry: Registry) -> str:
    """Return the script of a shell."""
    preamble = {shell: RECIPE_NAMES[shell] % " ".join(filter(WORD.fullmatch, registry.recipes))}
    text: str = shtab.complete(verbs_parser(registry), shell, preamble=preamble)  # type: ignore[arg-type]
    return f"{text}\n{EQUALS}" if shell == "bash" else text


def verbs_parser(registry: Registry) -> ArgumentParser:
    """Return a parser of all verbs, for its words alone."""
    parser = ArgumentParser(prog="rlkit")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    keys = values_by_key(registry)
    for verb, what in VERBS.items():
        added = verbs.add_parser(verb, help=what, add_help=False)
        text = _help_of(verb)
        nested = list(dict.fromkeys(re.findall(rf"^(?:usage:)? *rlkit {verb} ([a-z]+)\b", text, re.M)))
        if nested:
            subverbs = added.add_subparsers()
            for name in nested:
                lines = re.findall(rf"^(?:usage:)? *rlkit {verb} ({name}\b.*(?:\n {{10,}}\S.*)*)", text, re.M)
                _fill(subverbs.add_parser(name, help=name, add_help=False), verb, "\n".join(lines), registry, keys)
        else:
            _fill(added, verb, text, registry, keys)
    for verb in filter(WORD.fullmatch, plugin_verbs()):
        added = verbs.add_parser(verb, help=verb, add_help=False)
        _complete(added.add_argument("names", nargs="*"), shtab.FILE)
    return parser


def _help_of(verb: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):  # of argparse, once it is printed
        own_verb(verb)(["--help"])
    return out.getvalue()


def _fill(parser: ArgumentParser, verb: str, text: str, registry: Registry, keys: Keys) -> None:
    """Add the options that a verb's help names, and those of a recipe where it takes one."""
    keys = keys if RECIPES.search(text) else {}
    listed = {value: re.split(r",\s+", choices) for value, choices in ONE_OF.findall(text)}
    for flag, value in dict(reversed(FLAG.findall(text))).items():
        if flag.removeprefix("--") in keys:
            continue
        choices = value.strip("{}").split(",") if value.startswith("{") else listed.get(value)
        if flag in ("--recipe", "--from"):
            _complete(parser.add_argument(flag), RECIPE)
        elif value or choices:
            _complete(parser.add_argument(flag), choices or shtab.FILE)
        else:
            parser.add_argument(flag, action="store_true")
    for key, values in keys.items():
        parser.add_argument(f"--{key}", choices=values or None)
    parts = [name for of_kind in registry.parts.values() for name in of_kind]
    first: Collection[str] = {"docs": topics(), "recipe": RECIPE, "plugins": parts, "completion": SHELLS}.get(
        verb, shtab.FILE
    )
    _complete(parser.add_argument("names", nargs="*"), first)


def _complete(action: Action, values: Collection[str] | Mapping[str, object]) -> None:
    """Let the value of an option be one of some words, or what a function of the shell returns."""
    if isinstance(values, Mapping):
        action.complete = values  # type: ignore[attr-defined]
    else:
        action.choices = list(filter(WORD.fullmatch, values))
