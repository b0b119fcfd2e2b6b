"""`rlkit validate`: answer a recipe's validation prompts and score the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlkit.cli.checkpoint import CHECKPOINT, with_checkpoint
from rlkit.cli.display import figure_rows, show
from rlkit.cli.parsing.parser import parse
from rlkit.errors import RecipeError
from rlkit.train.data import load_data
from rlkit.train.evaluate import evaluate
from rlkit.train.setup import fabric_for, prepare_rollouts

JSON = ("--json", {"action": "store_true", "help": "Print the figures as a JSON object."})


def run(argv: Sequence[str]) -> int:
    """Validate and print the figures; return the exit status."""
    parsed = parse("validate", with_checkpoint(argv), [JSON, CHECKPOINT])
    if parsed.recipe.validation is None:
        raise RecipeError("validation is off, so there is nothing to validate: set the section validation")
    data = load_data(parsed.recipe)
    fabric = fabric_for(parsed.recipe)
    fabric.launch()
    rollouts = prepare_rollouts(parsed.recipe, data, fabric)
    try:
        rollouts.sync_weights()
        figures = evaluate(rollouts, data.validation).figures
    finally:
        rollouts.close()
    if not fabric.is_global_zero:
        return 0
    if parsed.options.json:
        print(json.dumps(figures))
        return 0
    show(("validation", f"{len(data.validation)} prompts"), figure_rows(figures))
    return 0
