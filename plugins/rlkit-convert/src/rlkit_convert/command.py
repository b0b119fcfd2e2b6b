"""The verb: `rlkit convert --from SYSTEM FILE` prints a peer's configuration as a recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlkit.base.errors import RecipeError, show
from rlkit.base.text import safe
from rlkit_convert import openrlhf, prime_rl, slime, slime_parts, trl, trl_parts, verl, verl_parts
from rlkit_convert.conversion import Conversion
from rlkit_convert.source import read_text
from rlkit_convert.trl_trainer import TRAINER, TRAINERS
from rlkit_convert.write import one_line, recipe_problems, recipe_text, remark

USAGE = """usage: rlkit convert --from verl FILE [key=value ...]      a YAML file, or a shell script that runs main_ppo
       rlkit convert --from trl FILE [TRAINER] [--option value ...]
                                                            a YAML file of `trl`, a script with the command line, or a
                                                            Python script with GRPOConfig(...) and GRPOTrainer(...);
                                                            TRAINER, if FILE names none, such as grpo, sft, dpo, kto
       rlkit convert --from openrlhf FILE [--option value ...]    a shell script that runs train_ppo_ray
       rlkit convert --from prime-rl FILE [--option value ...]    a TOML file of `rl`
       rlkit convert --from slime FILE [--option value ...]       a shell script that runs train.py or train_async.py
    Prints a recipe that names the source of each option, followed by the options that have no equivalent and what to do
    about each. Options after FILE are options of that system, and override those in FILE. Nothing in FILE is run.

    rlkit convert --from verl run_grpo.sh > mine.yaml && rlkit recipe check mine.yaml
"""
PEERS = ("verl", "trl", "openrlhf", "prime-rl", "slime")
HEAD = "# From {source}: {file}. The comment after each option names the option of {peer} that it comes from."
NO_ACTION = "nothing to do"
"""Marks the remark on an option that asks nothing of the user."""


def run(argv: Sequence[str]) -> int:
    """Convert a file and print its recipe; return the exit status."""
    words = [*argv[0].split("=", 1), *argv[1:]] if argv else []
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if len(words) < 3 or words[0] != "--from" or words[2].startswith("--"):
        raise RecipeError("rlkit convert needs the system and a file: rlkit convert --from verl run_grpo.sh")
    _, peer, file, *overrides = words
    if peer not in PEERS:
        raise RecipeError(f"rlkit convert cannot read {show(peer, 60)}, expected --from {' or --from '.join(PEERS)}")
    conversion = convert(peer, read_text(file), file, overrides)
    text = recipe_text(conversion)
    lines = [remark(conversion, key) for key in conversion.notes if key not in conversion.by_hand]
    by_hand = [remark(conversion, key) for key in conversion.notes if key in conversion.by_hand]
    by_hand += recipe_problems(text)
    trainer = conversion.options.values.get(TRAINER)
    source = f"{peer} (read as {TRAINERS[str(trainer)]})" if trainer else peer
    print(safe(f"{HEAD.format(peer=peer, source=source, file=one_line(file))}\n{text}"), end="")
    _print_list("Not carried over as they are", [line for line in lines if NO_ACTION not in line])
    _print_list("Without an effect here", [line for line in lines if NO_ACTION in line])
    _print_list("To be set by hand", by_hand)
    counts = f"{len(conversion.recipe)} options set, {len(lines)} listed, {len(by_hand)} to be set by hand"
    print(counts, file=sys.stderr)
    return 0


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"\n# {title}:", *(f"# - {line}" for line in lines)]))


def convert(peer: str, content: str, name: str, overrides: Sequence[str]) -> Conversion:
    """Return the conversion of a file's text, with options that override those in it.

    Raises:
        RecipeError: The text has no options of that system, or is not plain text.
    """
    read, functions = {
        "verl": (verl.read, verl_parts.FUNCTIONS),
        "trl": (trl.read, trl_parts.FUNCTIONS),
        "openrlhf": (openrlhf.read, openrlhf.FUNCTIONS),
        "prime-rl": (prime_rl.read, prime_rl.FUNCTIONS),
        "slime": (slime.read, slime_parts.FUNCTIONS),
    }[peer]
    options = read(content, name, list(overrides))
    if not options.values and not options.unresolved:
        raise RecipeError(
            f"{name} has no options of {peer}; expected a YAML or TOML file, its command line in a shell script, or a "
            "Python script of TRL"
        )
    defaults, rules = {
        "verl": (verl.DEFAULTS, verl.RULES),
        "openrlhf": (openrlhf.DEFAULTS, openrlhf.RULES),
        "prime-rl": (prime_rl.DEFAULTS, prime_rl.RULES),
        "slime": (slime.DEFAULTS, slime.RULES),
    }.get(peer) or (trl.defaults(options), trl.rules(options))
    conversion = Conversion(options, defaults, rules)
    conversion.apply(functions)
    return conversion
