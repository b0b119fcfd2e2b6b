"""Rows as verl and TRL document them, through `rlkit fit`: tools and interactions are those that the row names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from rlkit import commands, hookimpl
from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.interactions import InteractionRouter, Retry
from rlkit.interfaces.tool import State
from rlkit.registry import load_plugins
from rlkit.tasks import TRL, Verl
from rlkit.testing import check_task
from rlkit.tools import Calculator
from tests.conftest import read_jsonl

CREATED: list[object] = []


class Recorder(Calculator):
    """Records what it is created with."""

    async def create(self, state: State, ground_truth: str = "none") -> None:  # type: ignore[override]
        CREATED.append(ground_truth)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    CREATED.clear()
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(Recorder)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("recorder", made)], entry_points=False))


def verl_row(index: int, tools: dict[str, Any] | None = None, interaction: dict[str, Any] | None = None) -> Any:
    """A row as verl's preprocessing of GSM8K for tools and interactions writes it."""
    question, answer = f"{index + 2} + {index + 3} = ?", str(2 * index + 5)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": "train",
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": tools is not None,
            "tools_kwargs": tools,
            "interaction_kwargs": interaction,
        },
    }


def tool(name: str, answer: str) -> dict[str, Any]:
    return {name: {"create_kwargs": {"ground_truth": answer}}}


ROWS = [
    verl_row(0, tool("calculator", "5")),
    verl_row(1, interaction={"name": "retry", "query": "3 + 4 = ?"}) | {"reward_model": {"ground_truth": "8"}},
    verl_row(2),
    verl_row(3, tool("other", "11")),
]


def test_verls_rows_choose_tools_and_interactions(tmp_path: Path) -> None:
    """Parquet, in which every struct has all keys: those that a row has not are null."""
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "tools: {calculator: Recorder, other: Recorder}\n"
        "interaction: {class_path: InteractionRouter, init_args: {interactions: {retry: Retry, unused: Retry}}}\n"
        "reward: {class_path: Router, init_args: {rewards: {openai/gsm8k: MathReward}}}\n"
    )
    options = (
        "--recipe=quick_tool", f"--recipe={recipe}", "--task=Verl", f"--task.path={path}", "--validation=null",
        "--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=4", "--rollout.sampling.max_tokens=48",
        "--train.schedule=Constant",
    )  # fmt: skip
    assert main(["fit", *options, f"--out={tmp_path / 'out'}"]) == 0
    rows = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    by_prompt: dict[str, list[Any]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    assert sorted(by_prompt) == ["0", "1", "2", "3"]
    assert sorted(CREATED) == ["11"] * 4 + ["5"] * 4
    roles = {name: {role for row in some for role, _, _ in row["turns"][1:]} for name, some in by_prompt.items()}
    assert roles["0"] | roles["3"] <= {"assistant", "tool"}
    assert roles["1"] <= {"assistant", "user"}
    assert roles["2"] == {"assistant"}
    retried = [row for row in by_prompt["1"] if len(row["turns"]) > 2]
    assert retried  # since no answer is the row's
    assert all(row["turns"][2][0] == "user" for row in retried)
    assert read_jsonl(tmp_path / "out" / "metrics.jsonl")[0]["update/steps"] == 1


def test_an_unknown_tool_is_named_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(verl_row(0, tool("search", "5"))) + "\n")
    common = ("fit", "--task=Verl", f"--task.path={path}", "--validation=null", f"--out={tmp_path / 'out'}")
    assert main([*common, "--recipe=quick_tool"]) == 2
    message = "prompt '0' names the tool 'search', but the recipe's tools are: calculator"
    assert message in " ".join(capsys.readouterr().err.split())
    assert main([*common, "--recipe=quickstart"]) == 2
    assert "but the recipe's tools are: none" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra_info": [1]}, "'extra_info' is \\[1\\], expected an object"),
        ({"extra_info": {"tools_kwargs": "calculator"}}, "'tools_kwargs' is 'calculator', expected an object"),
        ({"extra_info": {"tools_kwargs": {"calculator": 5}}}, "'calculator' is 5, expected an object"),
        (
            {"extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": []}}}},
            "'create_kwargs' is \\[\\], expected an object",
        ),
        ({"extra_info": {"need_tools_kwargs": True}}, "need_tools_kwargs is true, but extra_info.tools_kwargs has no"),
        ({"extra_info": {"interaction_kwargs": 3}}, "'interaction_kwargs' is 3, expected an object"),
        ({"prompt": None}, "'prompt' is None, expected text"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(verl_row(0)) + "\n" + json.dumps({**verl_row(1), **change}) + "\n")
    with pytest.raises(RecipeError, match=rf"t.jsonl, line 2: .*{message}"):
        Verl(str(path)).rows("train")


def test_verls_answers_and_meta(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    graded = {**verl_row(1), "reward_model": {"style": "model"}}
    plain = {key: value for key, value in verl_row(2).items() if key != "extra_info"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], graded, plain)))
    task = Verl(str(path), validation_split=0.1)
    check_task(task)
    prompts = [task.prompt(row, i) for i, row in enumerate(Verl(str(path)).rows("train"))]
    assert [p.answer for p in prompts] == ["5", None, "9"]
    assert [p.tools for p in prompts] == [["calculator"], [], None]
    assert prompts[0].meta["tools"] == {"calculator": {"create": {"ground_truth": "5"}}}
    assert prompts[0].meta["data_source"] == "openai/gsm8k"
    assert prompts[0].meta["extra_info"]["index"] == 0


TRL_REWARD = """
def close(prompts, completions, solution, level, **columns):
    assert isinstance(prompts[0], list) and isinstance(completions[0], list), (prompts, completions)
    text = completions[0][-1]["content"]
    return [level[0] * float(solution[0] in text)]
"""


def test_trls_rows_reach_reward_functions(tmp_path: Path) -> None:
    path, reward = tmp_path / "t.parquet", tmp_path / "reward.py"
    reward.write_text(TRL_REWARD)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 3 = ?"}], "solution": str(i + 3), "level": 0.5}
        for i in range(4)
    ]
    datasets.Dataset.from_list(rows).to_parquet(path)
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        f"reward: {{class_path: PythonReward, init_args: {{function: '{reward}:close', allow_code: true}}}}\n"
    )
    options = ("--task=TRL", f"--task.path={path}", "--validation=null", "--train.steps=1", "--train.schedule=Constant")
    common = ("--recipe=quickstart", f"--recipe={recipe}", "--train.prompts_per_step=4", f"--out={tmp_path / 'out'}")
    assert main(["fit", *common, *options]) == 0
    logged = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    assert {row["error"] for row in logged} == {None}
    expected = {row["prompt"][0]["content"]: row["solution"] for row in rows}
    for row in logged:
        assert row["answer"] == expected[row["messages"][0]["content"]]
        assert row["reward"] == 0.5 * float(row["answer"] in row["text"])
    assert {row["reward"] for row in logged} == {0.0, 0.5}


def test_trls_answers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows: list[dict[str, object]] = [{"answer": 5}, {"solution": "6", "answer": None}, {"ground_truth": [7]}, {"x": 1}]
    path.write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in rows))
    task = TRL(str(path))
    prompts = [task.prompt(row, i) for i, row in enumerate(task.rows("train"))]
    assert [p.answer for p in prompts] == ["5", "6", "[7]", None]
    assert prompts[3].meta == {"x": 1}


def test_an_interaction_that_there_is_not_is_refused() -> None:
    with pytest.raises(RecipeError, match="InteractionRouter has default='b', expected a name among: a"):
        InteractionRouter({"a": Retry()}, default="b")
