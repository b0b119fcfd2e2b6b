"""The `rlkit` command: finds the verb and runs it. Nothing heavy is imported here."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

from rlkit import __version__
from rlkit.base.errors import RlkitError, shorten
from rlkit.base.garbage import permanent
from rlkit.base.text import safe
from rlkit.base.verbs import VERBS, own_verb, plugin_verbs, run_plugin_verb
from rlkit.cli.streams import unfailing

LONGEST = 20_000
"""Characters of an error that are shown."""


def usage() -> str:
    """Return the text of `rlkit --help`."""
    verbs = "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items())
    added = "".join(f"  {safe(verb):<10} from {safe(source)}\n" for verb, source in plugin_verbs().items())
    return (
        "usage: rlkit VERB [options]\n\n"
        "Post-train language models with reinforcement learning, from plugins and recipes.\n\n"
        f"verbs:\n{verbs}\n{added}\n"
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
        gc.freeze()  # otherwise the interpreter looks through all modules several times before it ends
    return status


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"rlkit {__version__}")
        return 0
    debug = "--debug" in args
    arguments = [a for a in args[1:] if a != "--debug"]
    try:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if args[0] not in VERBS:
            return run_plugin_verb(args[0], arguments)
        from rlkit.base.imports import import_lazily

        import_lazily()
        with permanent():
            run = own_verb(args[0])
        return int(run(arguments))
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
