"""`rlkit export`: a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rlkit.base.errors import RecipeError
from rlkit.cli.views.display import echo
from rlkit.run.checkpoint.export import export
from rlkit.run.folder import output_path


def run(argv: Sequence[str]) -> int:
    """Export; return the exit status."""
    parser = argparse.ArgumentParser(prog="rlkit export", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--checkpoint", help="A run folder, its final/, or a checkpoint, here or at any fsspec URL.")
    parser.add_argument("--out", help="The folder to write; it must not hold anything yet.")
    parser.add_argument("--merge-lora", action="store_true", help="Write the whole model, the adapter merged into it.")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="Of a whole model's weights."
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="Run code that comes with the base model.")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise RecipeError(f"rlkit export: {error}") from error
    if unknown:
        raise RecipeError(
            f"rlkit export has no option {unknown[0]!r}, expected --checkpoint, --out, --merge-lora, --dtype and "
            "--trust-remote-code"
        )
    if options.checkpoint is None or options.out is None:
        raise RecipeError("rlkit export needs --checkpoint, a checkpoint or a run folder, and --out, a new folder")
    out = output_path(options.out)
    if os.path.exists(out) and any(out.iterdir()):
        raise RecipeError(f"--out is {options.out!r}, which holds something; choose a new folder")
    source = export(options.checkpoint, out, options.merge_lora, options.dtype, options.trust_remote_code)
    echo(f"{source} is exported to {out}")
    return 0
