"""Recipe files as plain data: how large they may be, and what in YAML would surprise a reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.base.errors import RecipeError
from rlkit.recipe import yaml_text
from rlkit.recipe.parsing import reader

TREES: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner),
    max_leaves=12,
)


def nodes(tree: Any) -> int:
    """Count values, lists, mappings and the keys of these."""
    if isinstance(tree, dict):
        return 1 + sum(1 + nodes(inner) for inner in tree.values())
    return 1 + sum(map(nodes, tree)) if isinstance(tree, list) else 1


def depth(tree: Any) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def load(text: str, **limits: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(yaml_text, name, limit)
        return reader.load(text)


@given(TREES)
def test_a_recipe_may_be_as_large_as_the_limits(tree: Any) -> None:
    text, large, deep = json.dumps(tree), nodes(tree), depth(tree)
    assert load(text, MAX_NODES=large, MAX_DEPTH=deep) == tree
    with pytest.raises(ValueError, match=f"or has more than {large - 1} nodes"):
        load(text, MAX_NODES=large - 1)
    if deep:
        with pytest.raises(ValueError, match=f"nested more than {deep - 1} deep"):
            load(text, MAX_DEPTH=deep - 1)


def test_an_alias_counts_as_what_it_stands_for() -> None:
    """A mapping, two keys, what is named, and a list of it twice: 1 + 2 + 3 + 1 + 2 x 3, or 1 + 2 + 1 + 1 + 2 x 1."""
    for text, value, count in (("[1, 2]", [1, 2], 13), ("1", 1, 7)):
        recipe = f"a: &x {text}\nb: [*x, *x]"
        assert load(recipe, MAX_NODES=count) == {"a": value, "b": [value, value]}
        with pytest.raises(ValueError, match=f"more than {count - 1} nodes"):
            load(recipe, MAX_NODES=count - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3 has the key 'a' a second time"),
        ("x:\n  a: 1\n  a: 2", "line 3 has the key 'a' a second time"),
        ("- &x [1, *x]", r"line 1 has \*x inside of &x itself"),
        ("5:", "its only key is not text"),
        ("{0}", "its only key is not text"),
        ("a: !!python/name:os.system x", "line 1 has the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ],
)
def test_what_would_surprise_a_reader_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reader.load(text)


def test_values_may_repeat_and_so_may_keys_of_different_mappings() -> None:
    assert reader.load("a: b\nb: a\nc: {a: a, b: a}\nd: [a, a]") == {
        "a": "b", "b": "a", "c": {"a": "a", "b": "a"}, "d": ["a", "a"],
    }  # fmt: skip


def test_a_file_of_the_largest_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: 1\n")
    monkeypatch.setattr(reader, "MAX_BYTES", 5)
    assert reader.read_recipe(path) == {"a": 1}
    monkeypatch.setattr(reader, "MAX_BYTES", 4)
    with pytest.raises(RecipeError, match="has 5 bytes, expected a recipe of at most 4"):
        reader.read_recipe(path)
