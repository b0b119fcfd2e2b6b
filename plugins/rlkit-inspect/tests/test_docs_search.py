"""`rlkit docs WORD`: the pages that it proposes, those whose title has the word first."""

from __future__ import annotations

import pytest
from rlkit_inspect import docs

from rlkit.base.errors import RecipeError

PAGES = {
    "tutorial": "# Tutorial\n\nsft, sft, sft: dpo\n",
    "algorithms": "# Algorithms\n\nsft, sft; dpo, dpo, dpo, dpo\n",
    "faq": "# Questions\n\nsft; dpo, dpo\n",
    "recipes": "# Recipes and DPOs\n\ndpo\n",
    "supervised": "# Supervised training: SFT, preferences (DPO), reward models\n\ndpo, dpo\n",
    "lora": "# Adapters\n\n",
}


@pytest.mark.parametrize(
    ("word", "pages"),
    [
        ("sft", "supervised, tutorial, algorithms"),  # one mention in the title before three in a text
        ("DPO", "supervised, recipes, algorithms"),  # of two titles, the one whose page has it more often
        ("adapters", "lora"),
    ],
)
def test_pages_whose_title_has_the_word_are_proposed_first(
    word: str, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "page", PAGES.__getitem__)
    monkeypatch.setattr(docs, "topics", lambda: list(PAGES))
    monkeypatch.setattr(docs, "ORDER", ("tutorial", "algorithms"))
    with pytest.raises(RecipeError, match=f"pages that mention it, in the title first: {pages}$"):
        docs.find(word)
