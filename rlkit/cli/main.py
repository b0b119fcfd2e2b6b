"""The `rlkit` command: finds the verb and runs it. Nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from rlkit import __version__
from rlkit.cli.streams import unfailing
from rlkit.errors import RecipeError, RlkitError, shorten
from rlkit.text import safe

LONGEST = 20_000
"""Characters of an error that are shown."""

VERBS = {
    "fit": "train a policy from a recipe",
    "validate": "answer a recipe's validation prompts and score the answers",
    "generate": "hold one conversation with a recipe's policy",
    "explain": "print the objective that a recipe optimises, as formulae",
    "recipe": "list, show or check recipes",
    "plugins": "list, show, make or test plugins",
    "data": "write a task's prompts to files",
    "export": "write a checkpoint's policy as a Hugging Face folder",
    "doctor": "look at this machine and installation",
}


def usage() -> str:
    """Return the text of `rlkit --help`."""
    verbs = "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items())
    return (
        "usage: rlkit VERB [options]\n\n"
        "Post-train language models with reinforcement learning, from plugins and recipes.\n\n"
        f"verbs:\n{verbs}\n\n"
        "  rlkit fit --recipe quickstart          train a tiny model on this machine, in minutes\n"
        "  rlkit VERB --help                      all of a verb's options\n"
        "  --debug, after any verb                show the traceback of an error\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status: 0 ok, 1 the run failed, 2 usage or recipe, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    with unfailing():
        status = _run(args)
    if argv is None:  # the process exits with this status, whatever signal still comes
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return status


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"rlkit {__version__}")
        return 0
    debug = "--debug" in args
    rest = [a for a in args[1:] if a != "--debug"]
    try:
        if args[0] not in VERBS:
            raise RecipeError(_unknown_verb(args[0]))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return int(import_module(f"rlkit.cli.{args[0]}").run(rest))
    except RlkitError as error:
        if debug:
            raise
        rank = os.environ.get("LOCAL_RANK", "0")
        text = safe(shorten(str(error), LONGEST))
        print(f"{'' if rank == '0' else f'[rank {rank}] '}error: {text}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        return 130


def _unknown_verb(given: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(given, VERBS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"verbs: {', '.join(VERBS)}"
    return f"{given!r} is no verb of rlkit; {hint}"
