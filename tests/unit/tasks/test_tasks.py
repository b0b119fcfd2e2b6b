"""Tasks, and the order of their prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.base.errors import RecipeError
from rlkit.data.data import Data
from rlkit.engines import TorchEngine
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.task import Split, Task
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Model, Train
from rlkit.recipe.method import ReinforcementLearning
from rlkit.rollout.dialogue import Dialogue
from rlkit.tasks import GSM8K, Arithmetic, HFDataset, Jsonl
from rlkit.testing import check_task
from rlkit.types import Prompt


def test_200_problems_of_additions_are_held_out_by_default() -> None:
    assert len(Arithmetic().rows("validation")) == 200


def test_arithmetic_holds_out_problems_that_are_never_trained_on() -> None:
    task = Arithmetic(max_operand=20, validation_size=30)
    train, validation = ({row["question"] for row in task.rows(split)} for split in ("train", "validation"))
    assert len(train | validation) == len(train) + 30
    # 441 pairs, a tenth of them held out
    assert len(train) == 441 - 44
    prompt = check_task(task)[0]
    a, b = prompt.id.removesuffix(" = ?").split(" + ")
    assert prompt.answer == str(int(a) + int(b))


def test_gsm8k_from_a_folder(gsm8k_like: Path) -> None:
    task = GSM8K(str(gsm8k_like), instruction="Be brief.")
    assert (len(task.rows("train")), len(task.rows("validation"))) == (12, 4)
    prompt = check_task(task)[0]
    assert prompt.messages[0]["content"].endswith("are left?\nBe brief.")
    assert prompt.answer is not None
    assert prompt.answer.endswith("#### 6")  # 2 * 4 - 2


def test_gsm8k_from_parquet(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    for name in ("train", "test"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "main" / f"{name}-00000-of-00001.parquet")
    assert check_task(GSM8K(str(tmp_path)))[0].answer == "#### 2"


def test_gsm8k_elsewhere_names_the_nearest_folder(tmp_path: Path) -> None:
    (tmp_path / "gsm9k").mkdir()
    with pytest.raises(RecipeError, match=r"task.path is .*gsm8k', which does not exist; did you mean '.*gsm9k'"):
        GSM8K(str(tmp_path / "gsm8k")).rows("train")


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_takes_texts_and_messages(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", {"q": "hi", "a": 3, "level": "easy"})
    messages = [{"role": "user", "content": "hello"}]
    validation = write(tmp_path / "v.jsonl", {"q": messages, "a": None, "id": "x7"})
    first, second = check_task(Jsonl(train, validation, prompt_field="q", answer_field="a", system="Be kind."))
    assert first.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert (first.id, first.answer, first.meta) == ("0", "3", {"q": "hi", "a": 3, "level": "easy"})
    assert (second.id, second.answer, second.messages[1:]) == ("x7", None, messages)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_hf_dataset_reads_files(tmp_path: Path, suffix: str) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"prompt": f"{n}?", "answer": str(n)} for n in range(3)])
    path = str(tmp_path / f"data.{suffix}")
    {"parquet": data.to_parquet, "jsonl": data.to_json, "csv": data.to_csv}[suffix](path)
    task = HFDataset(path, validation_path=path)
    assert len(task.rows("train")) == 3
    assert check_task(task)[0].messages[0]["content"] == "0?"


def test_hf_dataset_without_a_network_says_what_to_do() -> None:
    with pytest.raises(RecipeError, match=r"'nobody/nothing'.*set task.path to a local folder"):
        HFDataset("nobody/nothing").rows("train")


class Numbered(Task):
    def rows(self, split):
        return [{"n": n} for n in range(10)]

    def prompt(self, row, index):
        raise NotImplementedError("only the order is asked for")


def order(seed: int, steps: int, size: int = 4) -> list[list[int]]:
    train = Train(steps=steps, prompts_per_step=size, seed=seed)
    recipe = type("R", (), {"train": train})()
    data = Data(recipe, Dialogue(recipe, None, context=1), Numbered().rows("train"), held_out=[])
    return [data.order.of_step(step) for step in range(1, steps + 1)]


def test_an_epochs_order_depends_on_the_seed_only() -> None:
    rows = [row for step in order(seed=1, steps=5) for row in step]  # two epochs of ten
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert order(1, 5) == order(1, 5) != order(2, 5)
    assert order(1, 5)[3] == order(1, 9)[3]


class Lengths(Task):
    """Rows of so many letters each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def rows(self, split: Split) -> Sequence[dict[str, int]]:
        return [{"n": n} for n in self.lengths]

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        return Prompt(str(index), [{"role": "user", "content": "x" * row["n"]}])


def lengths(*letters: int, steps: int = 1, overlong: str = "error", tokenizer: Any = None) -> Data:
    """Make data of prompts with so many letters, two a step, for a context that 9 letters fit and 10 do not."""
    tokenizer = tokenizer or load_tokenizer(Model("tiny"))  # a letter is a token
    train = Train(steps=steps, prompts_per_step=2, seed=0)
    rollout = SimpleNamespace(
        sampling_column=None,
        overlong=overlong,
        unscorable="error",
        max_prompt_tokens=None,
        oversample=1,
        engine=TorchEngine(),
    )
    task = Lengths(letters)
    recipe: Any = SimpleNamespace(
        train=train, rollout=rollout, task=task, tools=None, curriculum=None, model=Model("tiny"), teacher=None,
        reward=None, method=ReinforcementLearning(), environment=None, agent=None, needs=Needs.NOTHING,
        measures_losses_alone=False,
    )  # fmt: skip
    dialogue = Dialogue(recipe, tokenizer, 0, frozenset({tokenizer.eos_token_id}))
    data = Data(recipe, dialogue, task.rows("train"), [])
    [dialogue.context] = data.lengths.measure([Prompt("", [{"role": "user", "content": "x" * 10}])])
    return data


def test_exactly_the_prompts_that_the_run_will_use_are_measured() -> None:
    """Six rows, two a step: the last step's rows count, those of no step do not."""
    order = [row for step in (1, 2, 3) for row in lengths(*[1] * 6).order.of_step(step)]
    for place, row in enumerate(order):
        letters = [10 if i == row else 9 for i in range(6)]
        steps_before = place // 2
        if steps_before:
            fine = lengths(*letters, steps=steps_before)
            fine.select_prompts()
            assert fine.longest == fine.dialogue.context - 1
        for steps in (steps_before + 1, 5):
            with pytest.raises(RecipeError, match=rf"prompt '{row}' has \d+ tokens, but the context"):
                lengths(*letters, steps=steps).select_prompts()


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_a_spare_prompt_is_one_that_fits(overlong: str) -> None:
    data = lengths(10, 9, 10, 10, 8, 10, overlong=overlong)
    if overlong == "drop":
        data.select_prompts()
        assert (data.order.rows, data.overlong, data.longest) == ([1, 4], 4, data.dialogue.context - 1)
    found = {data.spare(step, attempt, 0).id for step in range(8) for attempt in range(4)}
    assert found == {"1", "4"}
    assert data.spare(3, 1, 2) == data.spare(3, 1, 2)
    with pytest.raises(RecipeError, match="no spare prompt is short enough"):
        lengths(10, 11).spare(1, 0, 0)


def test_all_rows_that_fit_are_used_where_others_are_left_out() -> None:
    data = lengths(9, 10, 1, 10, 2, steps=3, overlong="drop")
    data.select_prompts()
    used = [int(prompt.id) for step in (1, 2, 3) for _, prompt in data.prompts(step)]
    assert sorted(used[:3]) == sorted(used[3:]) == [0, 2, 4]
    with pytest.raises(RecipeError, match=r"no training prompt has at most \d+ tokens"):
        lengths(10, 11, overlong="drop").select_prompts()
    data = lengths(1, 1, overlong="drop")
    data.held_out = [Prompt("long", [{"role": "user", "content": "x" * 10}])]
    with pytest.raises(RecipeError, match=r"no validation prompt has at most \d+ tokens"):
        data.select_prompts()


@pytest.mark.parametrize(("side", "left"), [("left", "bcdefghij"), ("right", "abcdefghi"), ("middle", "abcdeghij")])
def test_a_long_prompt_is_cut_to_the_limit(side: str, left: str) -> None:
    """A letter is a token, and nine of them fit."""
    data = lengths(1, 1, overlong=side)
    data.held_out = [Prompt("long", [{"role": "user", "content": "abcdefghij"}])]
    data.select_prompts()
    assert (data.overlong, data.longest) == (1, data.lengths.limit)
    [prompt] = data.validation
    assert prompt.messages == [{"role": "user", "content": left}]
    assert data.lengths.measure([prompt])[0] == data.lengths.limit


def test_a_limit_below_the_context_counts_rows_that_exceed_it() -> None:
    data = lengths(9, 8, 1, steps=2)
    data.recipe.rollout.max_prompt_tokens = data.lengths.limit - 2
    with pytest.raises(
        RecipeError,
        match=rf"prompt '0' has {data.dialogue.context - 1} tokens, but rollout.max_prompt_tokens is "
        rf"{data.lengths.limit}; .*rollout.overlong to drop, left, right or middle \(2 prompts are too long",
    ):
        data.select_prompts()  # fmt: skip


def test_examples_are_held_out_ones_or_of_the_first_step() -> None:
    data = lengths(1, 1, 1, 1)
    assert [prompt.id for prompt in data.examples(4)] == [str(row) for row in data.order.of_step(1)]
    data.validation = [Prompt("v", [])]
    assert [prompt.id for prompt in data.examples(4)] == ["v"]


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    tokenizer = load_tokenizer(Model("tiny"))
    data = lengths(1, 2, tokenizer=tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(RecipeError, match=r"prompt '[01]': the chat template cannot render the roles user"):
        data.select_prompts()
