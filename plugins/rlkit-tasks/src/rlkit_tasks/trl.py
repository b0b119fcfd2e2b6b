"""Rows in the form that TRL trains on."""

from __future__ import annotations

from rlkit.interfaces.rows import as_text
from rlkit.types import Row
from rlkit_tasks.files import KnownColumns

ANSWERS = ("answer", "solution", "ground_truth")


class TRL(KnownColumns):
    """TRL's rows for GRPO: `prompt` (messages, or a text, which becomes a user's message) and any other columns.

    Reward functions of `PythonReward` get the columns by name, as TRL passes them. The reference answer of other
    rewards is the column `answer`, `solution` or `ground_truth`, whichever is there first.

    Args:
        path: The training file, a pattern, a list, a folder, or a name on the Hugging Face hub; see `HFDataset`.
        validation_path: The validation files, where `path` is a file.
        name: The data set's configuration.
        train_split: The split to train on.
        validation_split: The split to validate on, or the share of the training rows to hold out.
        system: A system message to put before each prompt.
        split_seed: Seed of the selection of held-out rows.
    """

    def _answer(self, row: Row, location: str) -> str | None:
        answers = [row[name] for name in ANSWERS if row.get(name) is not None]
        return as_text(answers[0]) if answers else None
