"""The order of training rows under curricula and over-sampling: repeatable, and no row is ever lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.base.errors import RecipeError
from rlkit.base.tasks import run_first
from rlkit.cli.main import main
from rlkit.curricula import Difficulty, SuccessRate
from rlkit.data.order import POSTPONED, Order, RowOrder
from rlkit.recipe import Train
from rlkit.types import Prompt
from tests.conftest import read_jsonl
from tests.unit.simulation import VirtualLoop


def step(order: Order, count: int, **waits: int | None) -> list[int]:
    """Draw rows and record how long each waits: `r3=4` for row 3, one epoch for those that are not named."""
    drawn = order.draw(count)
    order.record(drawn, [waits.get(f"r{one.row}", 1) for one in drawn])
    return [one.row for one in drawn]


def test_without_waiting_each_epoch_is_a_permutation() -> None:
    order = Order(5, seed=3)
    rows = [row for _ in range(5) for row in step(order, 3)]
    assert [sorted(rows[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert rows[:5] != rows[5:10]
    other = Order(5, seed=3)
    assert [row for _ in range(5) for row in step(other, 3)] == rows


def test_without_a_seed_the_data_sets_order_stays() -> None:
    """A curriculum's difficulty comes first; rows of one difficulty keep their order."""
    order = Order(5, seed=None)
    assert [row for _ in range(3) for row in step(order, 3)] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    easier_last = torch.tensor([2.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    assert step(Order(4, seed=None, difficulty=easier_last), 4) == [1, 3, 0, 2]
    recipe: Any = SimpleNamespace(
        train=Train(steps=1, prompts_per_step=2, shuffle=False), rollout=SimpleNamespace(oversample=1.0)
    )
    rows = RowOrder(recipe, rows=[4, 7, 9])
    assert [rows.of_step(number) for number in (1, 2, 3)] == [[4, 7], [9, 4], [7, 9]]


def test_drawing_changes_nothing_until_its_outcome_is_recorded() -> None:
    order = Order(7, seed=0)
    assert order.draw(4) == order.draw(4)
    first = order.draw(4)
    order.record(first, [1] * 4)
    assert not {one.row for one in first} & {one.row for one in order.draw(3)}


def test_a_row_that_waits_four_epochs_misses_three() -> None:
    order = Order(3, seed=1)
    epochs = [sorted(step(order, 3 if i == 0 else 2, r1=4)) for i in range(4)]
    assert epochs == [[0, 1, 2], [0, 2], [0, 2], [0, 2]]
    assert order.waiting() == 0  # row 1 is due in the next epoch
    assert sorted(step(order, 3)) == [0, 1, 2]


def test_where_all_rows_wait_the_next_epoch_that_has_any_begins() -> None:
    order = Order(2, seed=1)
    step(order, 2, r0=4, r1=6)
    assert [(d.row, d.epoch) for d in order.draw(1)] == [(0, 4)]
    assert [(d.row, d.epoch) for d in order.draw(2)] == [(0, 4), (0, 5)]  # row 1 is due in the sixth


def test_postponed_rows_come_first_and_are_marked() -> None:
    order = Order(6, seed=2)
    first = order.draw(4)
    late = {first[1].row, first[2].row}
    order.record(first, [None if one.row in late else 1 for one in first])
    assert int((order.due == POSTPONED).sum()) == 2
    second = order.draw(4)
    assert [one.postponed for one in second] == [True, True, False, False]
    assert {one.row for one in second[:2]} == late
    assert len({one.row for one in first} | {one.row for one in second}) == 6


def test_easy_rows_come_first_and_equal_ones_at_random() -> None:
    difficulty = torch.tensor([2.0, 0.0, 1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    order = Order(6, seed=0, difficulty=difficulty)
    epochs = [step(order, 6) for _ in range(6)]
    assert all([float(difficulty[row]) for row in epoch] == [0, 0, 1, 1, 2, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@settings(max_examples=30, deadline=None)
@given(data=st.data(), rows=st.integers(1, 30), size=st.integers(1, 8), every=st.integers(1, 5))
def test_no_row_is_lost(data: st.DataObject, rows: int, size: int, every: int) -> None:
    """Whatever waits, and whichever of the rows that may be stopped are: all have ended within a bounded time."""
    order, count = Order(rows, seed=0), 2 * size
    ended: Counter[int] = Counter()
    resumed = Order(rows, seed=0)
    for _ in range((every + 2) * (rows // size + 2)):
        drawn = order.draw(count)
        first = sum(one.postponed for one in drawn)
        assert all(one.postponed for one in drawn[:first])
        assert first <= size  # what must end fits what a step trains on
        free = list(range(first, count))
        stopped = set(data.draw(st.permutations(free))[: count - max(size, first)])
        waits = [None if i in stopped else data.draw(st.integers(1, every)) for i in range(count)]
        order.record(drawn, waits)
        ended.update(one.row for i, one in enumerate(drawn) if i not in stopped)
        for name, tensor in order.tensors().items():  # a checkpoint, and a run that goes on from it
            resumed.tensors()[name].copy_(tensor)
        assert resumed.draw(count) == order.draw(count)
    assert set(ended) == set(range(rows))


@pytest.mark.parametrize(("size", "oversample", "count"), [(10, 1.1, 11), (32, 1.2, 39), (4, 1.0, 4), (3, 2.0, 6)])
def test_prompts_that_a_step_starts(size: int, oversample: float, count: int) -> None:
    """10 times 1.1 is 11.000000000000002, and 32 times 1.2 is 38.4."""
    recipe: Any = SimpleNamespace(
        train=SimpleNamespace(prompts_per_step=size), rollout=SimpleNamespace(oversample=oversample)
    )
    assert RowOrder(recipe).count == count


def test_built_in_curricula() -> None:
    rates = SuccessRate(every=3, unsolved=0.1, solved=0.9)
    assert [rates.wait(rate) for rate in (0, 0.1, 0.11, 0.89, 0.9, 1)] == [3, 3, 1, 1, 3, 3]
    assert rates.difficulty(Prompt("p", [])) == 0
    with pytest.raises(RecipeError, match="unsolved=1.0 and solved=1.0, expected unsolved < solved"):
        SuccessRate(unsolved=1.0)
    prompt = Prompt("p", [], meta={"level": 3, "extra": {"level": "4.5"}, "a.b": 7, "none": None, "x": "nan"})
    assert Difficulty("level").difficulty(prompt) == 3
    assert Difficulty("extra.level", hardest_first=True).difficulty(prompt) == -4.5
    assert Difficulty("a.b").difficulty(prompt) == 7
    for name, value in (("none", "None"), ("missing", "None"), ("level.x", "None"), ("x", "'nan'"), ("extra", "{")):
        with pytest.raises(RecipeError, match=rf"prompt 'p' has {name} {value}.*, expected a finite number"):
            Difficulty(name).difficulty(prompt)


def test_work_is_stopped_once_enough_has_ended() -> None:
    closed: list[int] = []

    async def work(number: int, seconds: float) -> int:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            closed.append(number)
            raise
        return number

    def run(*seconds: float) -> list[int | None]:
        closed.clear()
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(run_first(2, *(work(i, s) for i, s in enumerate(seconds))))

    assert run(0.2, 0.0, 9.0, 0.05) == [None, 1, None, 3]
    assert closed == [0, 2]
    assert run(0.1, 0.0) == [0, 1]
    assert run(0.0, 0.0, 0.0) == [0, 1, None]  # never more than enough

    async def fail() -> int:
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        asyncio.run(run_first(1, work(0, 9.0), fail()))


FIT = (
    "--recipe=quickstart", "--validation=null", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--train.schedule=Constant", "--task=HFDataset",
)  # fmt: skip


def fit(out: Path, rows: Path, *options: str) -> list[list[str]]:
    """Return the prompts of each step, in their order."""
    assert main(["fit", *FIT, f"--task.path={rows}", *options, f"--out={out}"]) == 0
    steps = sorted((out / "rollouts").glob("step-*.jsonl.gz"))
    return [list(dict.fromkeys(row["prompt"] for row in read_jsonl(path))) for path in steps]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve sums: four that the model always solves or never does are among them."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {"id": f"{i}", "prompt": f"{3 * i} + {5 * i + 1} = ?", "answer": "-1" if i % 3 == 0 else str(8 * i + 1),
         "difficulty": (7 * i) % 12}
        for i in range(12)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


CASES = {
    "success rate": ("--curriculum=SuccessRate", "--curriculum.every=3"),
    "difficulty": ("--curriculum=Difficulty",),
    "over-sampling": ("--rollout.oversample=1.5",),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_order_goes_on_after_a_resume(tmp_path: Path, rows: Path, options: tuple[str, ...]) -> None:
    """Seven steps of four prompts each, in one run or interrupted after three: the same prompts and metrics."""
    whole = fit(tmp_path / "whole", rows, *options, "--train.steps=7")
    fit(tmp_path / "parted", rows, *options, "--train.steps=3")
    parted = fit(tmp_path / "parted", rows, *options, "--train.steps=7", "--resume=auto")
    assert parted == whole
    assert all(len(prompts) >= 3 for prompts in whole)  # a step may span two epochs, and have a prompt of each
    metrics = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "parted")]
    timed = ("time/", "memory/", "checkpoint/", "engine/prefilled_tokens")  # a start samples, too
    plain = [[{k: v for k, v in row.items() if not k.startswith(timed)} for row in one] for one in metrics]
    assert plain[0] == plain[1]


def test_prompts_that_teach_nothing_come_less_often(tmp_path: Path, rows: Path) -> None:
    """Answers of `-1` are never right: within six epochs' worth of steps such prompts come in every third alone."""
    steps = fit(tmp_path / "run", rows, *CASES["success rate"], "--train.steps=14")
    counts = Counter(prompt for prompts in steps for prompt in prompts)
    assert set(counts) == {str(i) for i in range(12)}
    never = max(counts[str(i)] for i in range(0, 12, 3))
    assert never < max(counts.values())
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[2]["curriculum/epoch"] == 0
    assert metrics[-1]["curriculum/epoch"] >= 4
    assert any(row["curriculum/waiting"] > 0 for row in metrics)


def test_difficulty_orders_an_epoch(tmp_path: Path, rows: Path) -> None:
    steps = fit(tmp_path / "run", rows, *CASES["difficulty"], "--train.steps=3")
    difficulty = [(7 * int(prompt)) % 12 for prompts in steps for prompt in prompts]
    assert [sorted(difficulty[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


PASSES = ("--train.steps=null", "--train.max_rows=10", "--train.data_epochs=1.5")


def test_the_length_in_passes_over_the_first_rows(tmp_path: Path, rows: Path) -> None:
    """Ten rows of twelve, 1.5 times: 15 prompts are 4 steps of 4, and 2 passes are 5, of which the schedule knows."""
    steps = fit(tmp_path / "run", rows, *PASSES, "--train.schedule=Linear", "--train.lr=1", "--train.warmup_steps=0")
    assert len(steps) == 4
    prompts = [prompt for prompts in steps for prompt in prompts]
    assert sorted(prompts[:10], key=int) == [str(i) for i in range(10)]
    assert set(prompts[10:]) < set(prompts[:10])
    assert [row["lr"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1.0, 0.75, 0.5, 0.25]
    longer = fit(tmp_path / "run", rows, *PASSES[:2], "--train.data_epochs=2", "--resume=auto", "--train.lr=1",
                 "--train.schedule=Linear", "--train.warmup_steps=0")  # fmt: skip
    assert len(longer) == 5
    assert longer[:4] == steps
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[4]["lr"] == pytest.approx(0.2)  # the last of 5 steps


def test_a_curriculum_orders_the_first_rows(tmp_path: Path, rows: Path) -> None:
    first = ("--train.steps=null", "--train.max_rows=8", "--train.data_epochs=1")
    steps = fit(tmp_path / "run", rows, *CASES["difficulty"], *first)
    difficulty = [sorted((7 * int(prompt)) % 12 for prompt in prompts) for prompts in steps]
    assert difficulty == [[0, 1, 2, 4], [6, 7, 9, 11]]  # of 0, 7, 2, 9, 4, 11, 6, 1


@pytest.mark.parametrize(
    ("rows", "passes", "steps"), [(8, 1, 2), (9, 1, 3), (12, 0.1, 1), (1, 0.1, 1), (120, 0.1, 3), (7, 3, 6)]
)
def test_steps_of_passes(rows: int, passes: float, steps: int) -> None:
    """Rows x passes / 4, rounded up: 120 x 0.1 is 12 although in floating point 0.1 is a little more."""
    train = Train(data_epochs=passes, prompts_per_step=4)
    with pytest.raises(RecipeError, match=r"train\.data_epochs has no number of steps before the data are loaded"):
        train.total_steps  # noqa: B018
    train.set_steps(rows)
    assert train.total_steps == steps
    train.set_steps(1000)
    assert train.total_steps == steps


def test_over_sampling_trains_on_as_many_groups_and_loses_none(tmp_path: Path, rows: Path) -> None:
    steps = fit(tmp_path / "run", rows, *CASES["over-sampling"], "--train.steps=6")
    assert [len(prompts) for prompts in steps] == [4] * 6
    counts = Counter(prompt for prompts in steps for prompt in prompts)
    assert set(counts) == {str(i) for i in range(12)}
    assert [row["rollout/postponed"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [2.0] * 6


def test_what_does_not_go_together_is_refused(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert main(["fit", *FIT, f"--task.path={rows}", *options, f"--out={tmp_path / 'out'}"]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "needs a greedy completion" in refused("--advantage=ReMax", "--rollout.oversample=1.5")
    assert "rollout.oversample" in refused("--rollout.oversample=2.5")
    assert "train.steps is 100 and train.data_epochs 2, expected one of them" in refused("--train.data_epochs=2")
    assert "train needs 'steps', which is not given" in refused("--train.steps=null")
    assert "profile.steps has 5, expected steps up to train.steps, which is 4" in refused(
        *PASSES, "--profile.steps=[5]"
    )
    assert "has level None, expected a finite number" in refused("--curriculum=Difficulty", "--curriculum.field=level")
