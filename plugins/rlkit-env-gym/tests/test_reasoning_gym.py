"""ReasoningGym with the real package: the package's own rows and scores, hostile answers, and generators that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from rlkit_env_gym import ReasoningGym, ReasoningGymScore
from rlkit_env_gym.generators import is_formula
from rlkit_env_gym.reasoning import answer_of

from rlkit.base.errors import RecipeError
from rlkit.interfaces.reward import as_score
from rlkit.testing import check_reward, check_task
from rlkit.types import Prompt, Score, StopReason, Trajectory
from tests.conftest import ROOT

NAMES = sorted(DATASETS.keys() - {"composite"})


def first_prompt(name: str, **options: Any) -> Prompt:
    task = ReasoningGym(name, size=2, validation_size=1, **options)
    return task.prompt(task.rows("train")[0], 0)


def prompt_of(name: str, answer: str | None, metadata: dict[str, Any] | None = None) -> Prompt:
    entry = {"question": "?", "answer": answer, "metadata": {"source_dataset": name, **(metadata or {})}}
    return Prompt("p", [], answer, meta={"data_source": name, "config": {}, "entry": entry})


def grade(prompt: Prompt, text: str, reward: ReasoningGymScore | None = None) -> Score:
    trajectory = Trajectory(prompt, 0, [1], [True], [0.0], [0], StopReason.STOP, text=text)
    return as_score((reward or ReasoningGymScore()).grade(trajectory))


@pytest.mark.parametrize(
    ("name", "reference", "metadata", "text", "expected"),
    [
        ("basic_arithmetic", "42", {}, "so <answer> 42 </answer>", 1.0),
        ("basic_arithmetic", "42", {}, "<answer>1</answer> no, <answer>42</answer>", 1.0),
        ("basic_arithmetic", "42", {}, "<answer>43</answer>", 0.0),
        ("basic_arithmetic", "42", {}, "42", 0.0),  # without a tag
        ("basic_arithmetic", "42", {}, "<answer>it is 42</answer>", 2 / 8),  # two of eight characters
        ("chain_sum", "1000", {}, "<answer>+01,000.00</answer>", 1.0),
        ("spell_backward", "olleh", {}, "<think><answer>no</answer></think><answer>olleh</answer>", 1.0),
        ("countdown", "8*5+2", {"target": 42, "numbers": [2, 5, 8]}, "<answer>2+5*8</answer>", 1.0),
        ("n_queens", "", {"valid_answers": ["Q _"]}, "<answer>[['Q', '_']]</answer>", 0.5),  # a list of rows
    ],
)
def test_scores_are_those_worked_by_hand(
    name: str, reference: str, metadata: dict[str, Any], text: str, expected: float
) -> None:
    score = grade(prompt_of(name, reference, metadata), text)
    assert score.reward == pytest.approx(expected)
    assert score.components == {"accuracy": float(expected == 1)}


def test_answers_without_tags_are_the_end_of_the_text() -> None:
    texts = ("<think>7</think> 1 #### 42 ", "42", "<answer>42</answer> #### 7", "</answer>42<answer>")
    assert [answer_of(text, tagged=False) for text in texts] == ["42", "42", "42", "</answer>42<answer>"]
    assert [answer_of(text, tagged=True) for text in texts] == [None, None, "42", None]


def test_rows_are_those_of_the_package() -> None:
    task = ReasoningGym("leg_counting", size=5, validation_size=2, seed=7, config={"max_animals": 3})
    own = reasoning_gym.create_dataset("leg_counting", seed=7, size=7, max_animals=3)
    for split, indices in (("train", range(5)), ("validation", range(5, 7))):
        rows = task.rows(split)
        assert [row["entry"] for row in rows] == [own[i] for i in indices]
    prompt = task.prompt(task.rows("train")[3], 3)
    assert prompt.id == "leg_counting-7-3"
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[1]["content"] == own[3]["question"]
    assert (prompt.answer, prompt.source_name) == (own[3]["answer"], "leg_counting")


def test_a_mixture_has_its_weights_and_its_scorers() -> None:
    weights = {"chain_sum": 3.0, "spell_backward": 1.0}
    task = ReasoningGym(weights, size=400, config={"chain_sum": {"max_terms": 2}}, instructions="")
    prompts = [task.prompt(row, i) for i, row in enumerate(task.rows("train"))]
    sums = [p for p in prompts if p.source_name == "chain_sum"]
    assert 270 < len(sums) < 330  # 300 are expected, the deviation is 9
    assert {p.source_name for p in prompts} == set(weights)
    assert all(p.messages[0]["content"].count("+") + p.messages[0]["content"].count(" - ") <= 1 for p in sums)
    assert {grade(p, f"<answer>{p.answer}</answer>").reward for p in prompts} == {1.0}


@pytest.mark.slow
def test_one_seed_is_one_set_of_rows_in_every_process() -> None:
    script = (
        "import hashlib; from rlkit_env_gym import ReasoningGym\n"
        "rows = ReasoningGym({'basic_arithmetic': 1, 'maze': 1, 'leg_counting': 2}, size=20).rows('train')\n"
        "print(hashlib.md5(repr(list(rows)).encode()).hexdigest())"
    )
    command = (sys.executable, "-c", script)
    packages = os.pathsep.join([str(ROOT / "plugins" / "rlkit-env-gym" / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": packages}
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert runs[0] == runs[1] != ""


HOSTILE = [
    "",
    "NaN",
    "inf",
    "1e999999999",
    "-",
    "\x00",
    "\U0001d518\u0661",
    "9" * 20_000,
    "[" * 3000,
    "<answer>" * 9000,
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["basic_arithmetic", "countdown", "n_queens"])  # compared, parsed, evaluated
def test_a_hostile_answer_earns_nothing(name: str, answer: str) -> None:
    prompt = first_prompt(name)
    try:
        score = grade(prompt, f"<answer>{answer}</answer>")
    except Exception:  # in a run the worker reports it, and the control shows that the answer is at fault
        control = ReasoningGymScore().control(Trajectory(prompt, 0, [1], [True], [0.0], [0], StopReason.STOP))
        assert control is not None
        assert grade(prompt, control.text).reward == 1.0
    else:
        assert score.error is None
        assert score.reward is not None
        assert score.reward < 0.5


PAYLOADS = (
    "[open({path!r}, 'w')]",
    "__import__('pathlib').Path({path!r}).touch()",
    "[[().__class__.__base__.__subclasses__(), open({path!r}, 'w')]]",
    "exec({codes})",
    "x + eval({codes})",
    "(lambda: open({path!r}, 'w'))()",
    "[exec({codes}) for q in (1,)]\n",
)


def hostile(path: Path) -> list[str]:
    code = f"open({str(path)!r}, 'w')"
    codes = "+".join(f"chr({ord(c)})" for c in code)
    return [payload.format(path=str(path), codes=codes) for payload in PAYLOADS]


def test_no_scorer_runs_an_answer(tmp_path: Path) -> None:
    """The scorers that evaluate answers, and what each accepts instead."""
    path = tmp_path / "ran"
    for name in (*sorted({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}), "countdown", "puzzle24"):
        prompt = first_prompt(name)
        for payload in hostile(path):
            try:
                score = grade(prompt, f"<answer>{payload}</answer>")
            except Exception:  # a worker's to report
                continue
            assert (score.reward or 0) < 0.5, (name, payload)
        assert not path.exists(), name


@pytest.mark.parametrize(
    ("answer", "safe"),
    [
        ("x**2/2 + 3.5*sin(x) - C", True), ("(1 + 2) * 3.0", True), ("x. real", False), ("(x).real", False),
        ("x.__class__", False), ("'a'", False), ("chr(97)", False), ("lambda: 1", False), ("exec(x)", False),
        ("1.", True), ("1 .real", False), ("x\u00b2", False),
    ],
)  # fmt: skip
def test_a_formula_names_nothing_else(answer: str, safe: bool) -> None:
    assert is_formula(answer) == safe


class Faulty:
    """Raises for some rows."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"no row {index}")
        return {"question": str(index), "answer": "1", "metadata": {}}


def test_a_row_that_fails_is_replaced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # of rows 0 to 4, row 2 fails, and so does 5 + 3 * 2, its first spare
    monkeypatch.setattr("rlkit_env_gym.reasoning.make_generator", lambda *options: Faulty({2, 11}))
    rows = ReasoningGym(size=4, validation_size=1).rows("train")
    with pytest.warns(UserWarning, match="row 2 of reasoning-gym is replaced by another: ValueError: no row 2"):
        assert [row["entry"]["question"] for row in rows] == ["0", "1", "12", "3"]
    monkeypatch.setattr("rlkit_env_gym.reasoning.make_generator", lambda *options: Faulty(set(range(10_000))))
    with pytest.raises(RecipeError, match="cannot generate row 0, nor 3 others: ValueError: no row 0"):
        ReasoningGym(size=4).rows("train")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "basic_arithmetics"}, "has no data set 'basic_arithmetics'; did you mean 'basic_arithmetic'"),
        ({"dataset": "composite"}, "has no data set 'composite'"),
        ({"dataset": {}}, "has no data sets"),
        ({"dataset": {"chain_sum": 1.0, "chain_sums": 1.0}}, "did you mean 'chain_sum'"),
        ({"dataset": {"chain_sum": 1.0}, "config": {"maze": {}}}, "a config for maze, expected only: chain_sum"),
        ({"config": {"terms": 3}}, "refuses the config .*'terms'"),
        ({"config": {"min_terms": -1}}, "refuses the config"),
        ({"dataset": "word_ladder"}, "depend on Python's hash seed.*PYTHONHASHSEED=0"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(RecipeError, match=message):
        ReasoningGym(**options).rows("train")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.base.imports.metadata.version", lambda package: "0.2.0")
    with pytest.raises(RecipeError, match=r"reasoning-gym is 0.2.0, but rlkit-env-gym supports >=0.1.25,<0.2"):
        ReasoningGym().rows("train")


def test_a_prompt_of_another_task_is_an_error_of_its_row() -> None:
    score = grade(Prompt("p", [], "4"), "<answer>4</answer>")
    assert "has no data_source, config, entry in its meta; use `task: ReasoningGym`" in (score.error or "")


def test_the_contracts_hold() -> None:
    train, held_out = check_task(ReasoningGym(size=3, validation_size=2))
    assert train.id != held_out.id
    check_reward(ReasoningGymScore())


@pytest.mark.slow
def test_each_scorer_takes_its_reference_and_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All data sets of the package but the slowest."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    path = tmp_path / "ran"
    for name in NAMES:
        if name == "knight_swap":  # takes longer than all others
            continue
        prompt = first_prompt(name)
        if prompt.answer is not None:
            assert (grade(prompt, f"<answer>{prompt.answer}</answer>").reward or 0) > 0, name
        for payload in hostile(path):
            with suppress(Exception):  # a worker's to report
                grade(prompt, f"<answer>{payload}</answer>")
        assert not path.exists(), name
