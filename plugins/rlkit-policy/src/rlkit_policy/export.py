"""`rlkit export`: a checkpoint's policy as a Hugging Face folder with a model card, and as a repository of the hub."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import unwritable
from rlkit.base.terminal import echo
from rlkit.base.text import similar
from rlkit.models.source import locate
from rlkit.records.folder import home_of, make_private, output_path, write_atomically
from rlkit_policy.card import export_card
from rlkit_policy.folder import export
from rlkit_policy.hub import check_repository, push
from rlkit_policy.scan import refuse_credentials

FLAGS = (
    "--checkpoint",
    "--out",
    "--merge-lora",
    "--dtype",
    "--trust-remote-code",
    "--push",
    "--public",
    "--allow-credentials",
)


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
    parser.add_argument("--push", metavar="NAME", help="Also upload it to this repository of the hub: user/model.")
    parser.add_argument("--public", action="store_true", help="Make a new repository public; by default it is private.")
    parser.add_argument(
        "--allow-credentials", action="store_true", help="Push although files seem to hold credentials."
    )
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise RecipeError(f"rlkit export: {error}") from error
    if unknown and os.path.isdir(unknown[0]):
        raise RecipeError(
            f"{unknown[0]!r} is a folder, expected an option; a run is given by --checkpoint {unknown[0]}"
        )
    if unknown:
        name = unknown[0].partition("=")[0]
        raise RecipeError(f"unknown option {name!r}; {similar(name, FLAGS, 'expected')}")
    if options.checkpoint is None or options.out is None:
        raise RecipeError("rlkit export needs --checkpoint, a checkpoint or a run folder, and --out, a new folder")
    if options.push is not None:
        check_repository(options.push)
    is_new = not os.path.exists(output_path(options.out))
    out = new_folder(options.out)
    if is_new:  # it can be created; a failed export leaves none
        out.rmdir()
    location = export(options.checkpoint, out, options.merge_lora, options.dtype, options.trust_remote_code)
    source = locate(options.checkpoint)
    write_atomically(out / "README.md", export_card(source, home_of(location), out).encode())
    echo(f"{location} is exported to {out}")
    if options.push is not None:
        if not options.allow_credentials:
            refuse_credentials(out, options.push)
        echo(f"pushed to {push(out, options.push, private=not options.public)}")
    return 0


def new_folder(path: str) -> Path:
    """Create a folder for `--out` that only its owner can read.

    Raises:
        RecipeError: The folder is not empty, or cannot be written.
    """
    folder = output_path(path)
    try:
        make_private(folder)
        used = any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"--out is {path!r}, which cannot be written: {unwritable(error)}") from error
    if used:
        raise RecipeError(f"--out is {path!r}, which is not empty; choose a new folder")
    return folder
