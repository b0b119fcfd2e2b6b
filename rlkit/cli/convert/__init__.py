"""`rlkit convert --from verl|trl FILE`: another system's configuration as a recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlkit.cli.convert import trl, trl_parts, verl, verl_parts
from rlkit.cli.convert.source import read_text
from rlkit.cli.convert.table import Conversion
from rlkit.cli.convert.write import left_out, one_line, problems, recipe_text
from rlkit.errors import RecipeError, show
from rlkit.registry import load_plugins
from rlkit.text import safe

USAGE = """usage: rlkit convert --from verl FILE [key=value ...]      a YAML file, or a shell script that runs main_ppo
       rlkit convert --from trl FILE [--option value ...]   a YAML file of `trl`, or a script with the command line
    prints a recipe, each option with what it came from, and then each option that has no equivalent, with what to do.
    What follows FILE are options of that system, which win over those in FILE. Nothing in FILE is run.

    rlkit convert --from verl run_grpo.sh > mine.yaml && rlkit recipe check mine.yaml
"""
PEERS = ("verl", "trl")
NOTHING = "nothing to do"
"""In the line of an option that asks nothing of the user."""


def run(argv: Sequence[str]) -> int:
    """Convert; return the exit status."""
    words = [word for one in argv[:1] for word in one.split("=", 1)] + list(argv[1:])
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if len(words) < 3 or words[0] != "--from" or words[2].startswith("--"):
        raise RecipeError("rlkit convert needs the system and a file: rlkit convert --from verl run_grpo.sh")
    _, peer, file, *more = words
    if peer not in PEERS:
        raise RecipeError(f"rlkit convert reads no {show(peer, 60)}, expected --from {' or --from '.join(PEERS)}")
    found = convert(peer, read_text(file), file, more)
    text = recipe_text(found)
    listed, wrong = left_out(found), problems(text, load_plugins())
    print(safe(f"# From {peer}: {one_line(file)}. The comment after an option names {peer}'s.\n{text}"), end="")
    for title, lines in (
        ("Not carried over as they are", [line for line in listed if NOTHING not in line]),
        ("Without an effect here", [line for line in listed if NOTHING in line]),
        ("To be set before it runs", wrong),
    ):
        if lines:
            print("\n".join([f"\n# {title}:", *(f"# - {line}" for line in lines)]))
    print(f"{len(found.recipe)} options set, {len(listed)} listed, {len(wrong)} to be set by hand", file=sys.stderr)
    return 0


def convert(peer: str, content: str, name: str, more: Sequence[str]) -> Conversion:
    """Return a file's conversion, with more options after those in it.

    Raises:
        RecipeError: It has no options of that system, or is not plain text.
    """
    read, rules, functions = {
        "verl": (verl.read, verl.RULES, verl_parts.FUNCTIONS),
        "trl": (trl.read, trl.RULES, trl_parts.FUNCTIONS),
    }[peer]
    given = read(content, name, list(more))
    if not given.values and not given.unknown:
        raise RecipeError(f"{name} has no options of {peer}; expected a YAML file, or its command line in a script")
    found = Conversion(given, verl.DEFAULTS if peer == "verl" else trl.defaults(given), rules)
    found.apply(functions)
    return found
