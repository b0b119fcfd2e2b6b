"""`rlkit data show`: some prompts as the policy reads them."""

from __future__ import annotations

import json

from rlkit.cli.display import echo
from rlkit.data.data import Data
from rlkit.data.prompts import make_prompt
from rlkit.errors import shorten
from rlkit.recipe.unscorable import unscorable_training
from rlkit.types import JsonObject

COUNT = 3
"""Training prompts that are shown: from all over the rows, since files often have one source after another."""

LONGEST = 2000
"""Characters of a prompt's meta that are shown."""


def show(data: Data, as_json: bool) -> None:
    """Print training prompts, special tokens and the tools' schemas included, as the rollout renders them."""
    count = min(COUNT, len(data.train))
    rows = [example(data, i * len(data.train) // count) for i in range(count)]
    if as_json:
        print(json.dumps(rows, default=str))
        return
    for row in rows:
        echo(f"--- row {row['row']}: {row['id']}, {row['tokens']} tokens" + ", shortened" * row["shortened"])
        echo(row["text"])
        echo("---")
        for name in ("source", "tools", "answer"):
            if row[name] not in (None, []):
                echo(f"{name}: {', '.join(row[name]) if name == 'tools' else row[name]}")
        if row["unscorable"] is not None:
            echo(f"the reward cannot score it: {row['unscorable']}")
        if row["meta"]:
            echo(f"meta: {shorten(json.dumps(row['meta'], ensure_ascii=False, default=str), LONGEST)}")
        echo("")


def example(data: Data, index: int) -> JsonObject:
    """Return a training prompt as JSON holds it, with its text as the policy reads it."""
    prompt = data.prompt(index)
    ids = data.dialogue.template.start(prompt.messages, prompt.tools)
    return {
        "row": index,
        "id": prompt.id,
        "tokens": len(ids),
        "shortened": prompt.messages != make_prompt(data.recipe.task, data.train, index).messages,
        "text": data.dialogue.template.codec.decode(ids),
        "source": prompt.source or prompt.meta.get("data_source"),
        "tools": list(data.recipe.tools or ()) if prompt.tools is None else prompt.tools,
        "answer": prompt.answer,
        "unscorable": unscorable_training(data.recipe, [prompt]).get(0),
        "meta": dict(prompt.meta),
    }
