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
        ("? 0xHUGE\n: 1", "line 1 has '0xfff.*, expected a whole number of at most 4,300 digits"),
        ("a:\n  {yes: 1}", "line 2 has the key yes, which is no text: write 'yes'"),
        ("~: 1", "line 1 has the key ~, which is no text"),
        ("a: 1\nb: [0xHUGE]", r"line 2 has '0xfff.*, expected a whole number of at most 4,300 digits"),
        ("a: 1\nb: 999HUGE", "line 2 has '999.*, expected a whole number of at most 4,300 digits"),
        ("a: !!int '0xHUGE'", "line 1 has '0xfff.*, expected a whole number of at most 4,300 digits"),
        ("a: 1" + ":59" * 3000 + ".5", "line 1 has .*, expected a number"),
        ("a: 1:30", "line 1 has '1:30', which YAML reads as 90; write that, or quote the text"),
        ("a: -010", "line 1 has '-010', which YAML reads as -8; write that, or quote the text"),
        ("a: !!int abc", "line 1 has 'abc', expected a whole number"),
        ("a: !!bool abc", "line 1 has 'abc', expected true or false"),
        ("a: !!float ''", "line 1 has '', expected a number"),
        ("a: !!timestamp abc", "line 1 has the tag 'tag:yaml.org,2002:timestamp'"),
        ("a: !!binary aGVsbG8=", "line 1 has the tag 'tag:yaml.org,2002:binary'"),
        ("a: !!set {b}", "line 1 has the tag 'tag:yaml.org,2002:set'"),
        ('a: 1\nb: "\\UFFFFFFFF"', r"line 2: the code after .U is no character"),
        ("a: 1\nb: \0", "line 2: unacceptable character #x0000"),
        ("a: 1\n\tb: 2", r"line 2, column 1.*indent with spaces"),
        ("a: *b", "found undefined alias, line 1, column 4"),
        ("[" * 21, "line 1: it is nested more than 20 deep"),
        ("a: !!python/name:os.system x", "line 1 has the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ],
)
def test_what_would_surprise_a_reader_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reader.load(text.replace("0xHUGE", "0x" + "f" * 5000).replace("HUGE", "9" * 5000))


@pytest.mark.parametrize(("text", "value"), [("!!float 1e-4", 1e-4), ("!!str 010", "010"), ("!!int 7", 7)])
def test_a_tag_of_plain_data_is_followed(text: str, value: object) -> None:
    assert reader.load(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("value", ["010", "1:30", "0x" + "f" * 5000, "9" * 5000])
def test_a_text_that_is_no_plain_number_stays_a_text(value: str) -> None:
    assert reader.convert(value, str | int) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model:\n  path: tiny\n".encode("utf-16"), ":1 is UTF-16, expected UTF-8; save it as UTF-8"),
        ("a: b\nc: \u00e4\n".encode("latin-1"), ":2 is not UTF-8; save it as UTF-8"),
        (b"# nothing\n", " holds nothing, expected sections"),
    ],
)
def test_a_file_that_holds_no_recipe_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        reader.read_recipe(path)
    assert str(error.value).startswith(f"{path}{message}")


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
