"""`rlkit recipe list|show|check`."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.cli.parser import find, folder, parse
from rlkit.errors import RecipeError

USAGE = """usage: rlkit recipe list                       the shipped recipes
       rlkit recipe show NAME [overrides]      the recipe with every option filled in
       rlkit recipe check NAME [overrides]     check it, its data and its model's context, and load no weights
"""


def run(argv: Sequence[str]) -> int:
    """List, show or check; give the exit status."""
    verb, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if verb else 2
    if verb == "list":
        for path in sorted(folder().glob("*.yaml")):
            print(f"{path.stem:<20} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        return 0
    if verb not in ("show", "check"):
        raise RecipeError(f"rlkit recipe was given {verb!r}, expected list, show or check")
    if rest and not rest[0].startswith("-"):
        rest = ["--recipe", find(rest[0]), *rest[1:]]
    parsed = parse(f"recipe {verb}", rest)
    if verb == "show":
        print(parsed.yaml, end="")
        return 0
    from rlkit.loop.data import load_data

    data = load_data(parsed.recipe)
    train = parsed.recipe.train
    print(
        f"ok: {len(data.train)} training rows, {len(data.validation)} validation prompts, context {data.context}; "
        f"{train.steps} steps of {train.prompts_per_step} prompts x {parsed.recipe.rollout.group} samples, "
        f"{train.minibatches * train.epochs} optimizer steps each"
    )
    return 0
