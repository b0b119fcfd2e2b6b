"""`rlkit data prepare|show|stats`: write a task's prompts to files; show some as the policy reads them; count them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console

from rlkit.cli.data.prepare import prepare
from rlkit.cli.data.show import show
from rlkit.cli.data.stats import stats
from rlkit.cli.parsing.parser import parse
from rlkit.cli.without_policy import bound_without_policy
from rlkit.data.data import Data
from rlkit.data.prompts import held_out
from rlkit.errors import RecipeError
from rlkit.models.load import context_length, load_config, load_tokenizer, stop_ids
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.dialogue import Dialogue
from rlkit.rollout.participants import Participants
from rlkit.run.folder import output_path

USAGE = """usage: rlkit data show --recipe NAME [overrides]     three training prompts as the policy reads them
       rlkit data stats --recipe NAME [overrides]    lengths in tokens, sources, duplicates, overlap of the splits
       rlkit data prepare --recipe NAME --out DIR [overrides]
    prepare writes DIR/train.jsonl and DIR/validation.jsonl, which the task Jsonl reads:
    rlkit fit --recipe NAME --task Jsonl --task.path DIR/train.jsonl --task.validation_path DIR/validation.jsonl
"""
OUT: tuple[str, dict[str, object]] = ("--out", {"type": str, "help": "The folder to write to."})
JSON: tuple[str, dict[str, object]] = ("--json", {"action": "store_true", "help": "Print JSON instead of text."})


def run(argv: Sequence[str]) -> int:
    """Prepare, show or count; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in ("prepare", "show", "stats"):
        raise RecipeError(f"rlkit data has no verb {argv[0]!r}, expected prepare, show or stats")
    parsed = parse(f"data {argv[0]}", argv[1:], [OUT if argv[0] == "prepare" else JSON])
    if argv[0] == "prepare":
        if parsed.options.out is None:
            raise RecipeError("rlkit data prepare needs --out DIR, the folder to write to")
        prepare(parsed.recipe, output_path(parsed.options.out))
        return 0
    with unchecked_data(parsed.recipe) as data:
        (show if argv[0] == "show" else stats)(data, parsed.options.json)
    return 0


@contextmanager
def unchecked_data(recipe: Recipe) -> Iterator[Data]:
    """Load tokenizer and prompts as a run does, with its tools, but whatever their lengths; no weights are loaded.

    Raises:
        RecipeError: There are no rows, or a row cannot become a prompt.
    """
    with calling(recipe.task, "rows"):
        rows = recipe.task.rows("train")
    if len(rows) == 0:
        raise RecipeError(f"task {type(recipe.task).__name__} has no train rows, expected at least one")
    tokenizer = load_tokenizer(recipe.model)
    context = context_length(load_config(recipe.model)) - recipe.rollout.engine.reserved
    dialogue = Dialogue(recipe, tokenizer, context, stop_ids(recipe.model, tokenizer))
    data = Data(recipe, dialogue, rows, held_out(recipe), show=Console(stderr=True).is_terminal)
    with ExitStack() as stack:
        if recipe.tools:  # some describe themselves only once they are bound
            stack.enter_context(bound_without_policy(recipe, *recipe.tools.values()))
            dialogue.participants = Participants(recipe.tools)
        yield data
