"""Several tasks as one: the shares that the weights ask for, and no row lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_tasks.mix import MixedRows
from rlkit_tasks.rows import Rows
from test_data_files import questions, write

from rlkit.base.errors import RecipeError
from rlkit.tasks import GSM8K, Arithmetic, Mix
from rlkit.testing import check_task


def rows(*names: object) -> Rows:
    return Rows(questions(*names), validation=questions(f"held out of {names[0]}"))


def test_the_tasks_of_a_mix_are_closed_with_it() -> None:
    closed: list[str] = []

    class Closing(Rows):
        def close(self) -> None:
            closed.append(self.train[0]["answer"])

    Mix({"a": Closing(questions("x")), "b": Closing(questions("y"))}).close()
    assert sorted(closed) == ["x", "y"]


def test_rows_are_those_of_all_tasks() -> None:
    mix = Mix({"a": rows(1, 2, 3), "b": rows("x", "y")})
    check_task(mix)
    prompts = [mix.prompt(row, i) for i, row in enumerate(mix.rows("train"))]
    assert [p.id for p in prompts] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert [p.meta["data_source"] for p in prompts] == ["a", "a", "a", "b", "b"]
    assert [p.answer for p in prompts] == ["1", "2", "3", "x", "y"]
    assert [mix.prompt(row, i).answer for i, row in enumerate(mix.rows("validation"))] == [
        "held out of 1",
        "held out of x",
    ]


def test_an_epoch_is_the_shortest_with_the_shares_of_the_weights() -> None:
    """4 and 2 rows have the shares 2 : 1 already; for 1 : 1 the smaller task comes twice."""
    parts = {"a": rows(*range(4)).rows("train"), "b": rows(*range(2)).rows("train")}
    assert len(MixedRows(parts, {"a": 2.0, "b": 1.0})) == 6
    assert len(MixedRows(parts, {"a": 0.5, "b": 0.5})) == 8


def test_weights_repeat_the_rows_of_small_tasks() -> None:
    """Shares of 3/4 and 1/4: with 3 rows of `a`, 9 of `b` need 27 of `a`."""
    mix = Mix({"a": rows(1, 2, 3), "b": rows(*range(9))}, weights={"a": 3.0, "b": 1.0})
    sources = Counter(mix.prompt(row, i).id for i, row in enumerate(mix.rows("train")))
    assert sources == {**{f"a/{i}": 9 for i in range(3)}, **{f"b/{i}": 1 for i in range(9)}}
    assert len(mix.rows("validation")) == 2


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_no_row_is_lost_and_shares_are_those_of_the_weights(tasks: list[tuple[int, float]]) -> None:
    parts = {str(i): [{"row": j} for j in range(size)] for i, (size, _) in enumerate(tasks)}
    weights = {str(i): weight for i, (_, weight) in enumerate(tasks)}
    mixed = MixedRows(parts, weights)
    counts = Counter((row["task"], row["index"]) for row in (mixed[i] for i in range(len(mixed))))
    for name, part in parts.items():
        mine = [counts[name, index] for index in range(len(part))]
        assert min(mine) >= 1
        assert max(mine) - min(mine) <= 1
        assert sum(mine) == pytest.approx(len(mixed) * weights[name] / sum(weights.values()), abs=1 + len(tasks) / 2)


def test_a_source_that_a_task_has_set_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"question": "1 + 1 =", "answer": "#### 2"})
    mix = Mix({"school": GSM8K(str(tmp_path))})
    prompt = mix.prompt(mix.rows("train")[0], 0)
    assert (prompt.meta["data_source"], prompt.meta["row_source"]) == ("school", "openai/gsm8k")


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(RecipeError, match="Mix has no tasks"):
        Mix({})
    with pytest.raises(RecipeError, match="Mix has weights for a, c, expected one for each task: a, b"):
        Mix({"a": Arithmetic(), "b": Arithmetic()}, weights={"a": 1.0, "c": 1.0})
    with pytest.raises(RecipeError, match="task 'b' of Mix has no train rows"):
        Mix({"a": rows(1), "b": Rows([])}).rows("train")
