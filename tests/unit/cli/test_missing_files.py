"""The files that a recipe names: all that are missing, at once, each with where it was looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlkit.base import files
from rlkit.cli.main import main
from rlkit.interfaces.runtime import RunPart
from rlkit.recipe.parsing.build import Builder
from rlkit.recipe.parsing.problems import Problems
from rlkit.registry import Registry

RECIPE = """\
model:
  path: ./model
  chat_template: chat.jinja
task:
  class_path: Jsonl
  init_args: {path: [a.jsonl, b.jsonl], validation_path: held.jsonl}
reward: {class_path: PythonReward, init_args: {function: "reward.py:score", allow_code: true}}
validation: {tasks: {other: {class_path: HFDataset, init_args: {path: other.csv}}}}
tools: {search: {class_path: SearchTool, init_args: {corpus: corpus.jsonl}}}
parser: HermesParser
callbacks: [{class_path: Missing}]
advantage: GRPO
loss: ClipLoss
train: {steps: 1, prompts_per_step: 2, lr: 1.0e-4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    files.recipe_folders.clear()
    return tmp_path


@pytest.mark.parametrize("verb", [["fit"], ["recipe", "check"]])
def test_all_missing_files_are_said_at_once(verb: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = RECIPE.replace("callbacks: [{class_path: Missing}]\n", "").replace("tools: ", "# ").replace("parser: ", "# ")
    Path("mine.yaml").write_text(text)
    assert main([*verb, "--recipe=mine.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    here = folder / "work"
    expected = (
        f"model.path is './model', which does not exist; {here} holds: mine.yaml (mine.yaml:2)",
        f"model.chat_template is 'chat.jinja', which does not exist; {here} holds: mine.yaml (mine.yaml:3)",
        f"task.path is 'a.jsonl', which does not exist; {here} holds: mine.yaml (mine.yaml:6)",
        f"task.path is 'b.jsonl', which does not exist; {here} holds: mine.yaml (mine.yaml:6)",
        f"task.validation_path is 'held.jsonl', which does not exist; {here} holds: mine.yaml (mine.yaml:6)",
        "PythonReward has function='reward.py:score', but there is no file 'reward.py'; "
        f"{here} holds: mine.yaml (mine.yaml:7)",
        f"validation.tasks.other.path is 'other.csv', which does not exist; {here} holds: mine.yaml (mine.yaml:8)",
    )
    assert sorted([lines[0].removeprefix("error: "), *lines[1:]]) == sorted(expected)


def test_a_file_beside_the_recipe_is_offered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beginning, end = RECIPE.split("validation:", maxsplit=1)[0], RECIPE[RECIPE.index("advantage:") :]
    (folder / "recipes" / "mine.yaml").write_text(beginning + end)
    for name in ("chat.jinja", "a.jsonl", "b.jsonl", "held.jsonl", "reward.py"):
        (folder / "recipes" / name).write_text("")
    (folder / "recipes" / "model").mkdir()
    assert main(["recipe", "check", "../recipes/mine.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, name in zip(sorted(lines), ("reward.py", "model", "chat.jinja", "a.jsonl"), strict=False):
        assert name in line
    beside = "beside the recipe there is one: write '../recipes/"
    assert len(lines) == 6
    assert all(beside in line and "since paths begin in the working folder" in line for line in lines)


def test_verbs_that_read_no_data_need_no_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "model: {path: tiny}\ntask: {class_path: Jsonl, init_args: {path: a.jsonl}}\nreward: MathReward\n"
        + RECIPE[RECIPE.index("advantage:") :]
    )
    assert main(["recipe", "show", "mine.yaml"]) == 0
    assert "a.jsonl" in capsys.readouterr().out


AGENT = """\
model: {path: tiny}
task: {class_path: Jsonl, init_args: {path: a.jsonl, validation_split: 0.5}}
reward: MathReward
agent: {class_path: CommandAgent, init_args: {command: python agent.py, allow_code: true}}
"""


def test_the_script_of_an_agent_is_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here, beside the recipe, and among the files of each row."""
    Path("mine.yaml").write_text(AGENT + RECIPE[RECIPE.index("advantage:") :])
    row = '{"prompt": "%s", "answer": "2", "files": {%s}}\n'
    Path("a.jsonl").write_text("".join(row % (number, "") for number in range(8)))
    assert main(["recipe", "check", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert (
        f"agent.command names 'agent.py', which does not exist; {folder / 'work'} holds: a.jsonl, mine.yaml; " in error
    )
    assert "nor is it in the row's column `files`" in error
    assert error.count("\n") == 1
    Path("a.jsonl").write_text("".join(row % (number, '"agent.py": "0"') for number in range(8)))
    assert main(["recipe", "check", "mine.yaml"]) == 0
    Path("a.jsonl").write_text("".join(row % (number, "") for number in range(8)))
    Path("agent.py").write_text("")
    assert main(["recipe", "check", "mine.yaml"]) == 0


@pytest.mark.parametrize("name", ["tiny", "Qwen/Qwen2.5-0.5B"])
def test_a_name_on_the_hub_is_none_of_a_folder_beside_the_recipe(name: str, folder: Path) -> None:
    (folder / "recipes" / name).mkdir(parents=True)
    recipe = f"model: {{path: {name}}}\ntask: Arithmetic\nreward: MathReward\n" + RECIPE[RECIPE.index("advantage:") :]
    (folder / "recipes" / "mine.yaml").write_text(recipe)
    assert main(["recipe", "show", "../recipes/mine.yaml"]) == 0


def test_a_template_in_jinja_is_no_file(folder: Path) -> None:
    template = "{{ messages[0].content }} is in notes.txt"
    recipe = "model: {path: tiny}\ntask: Arithmetic\nreward: MathReward\n" + RECIPE[RECIPE.index("advantage:") :]
    (folder / "work" / "mine.yaml").write_text(recipe)
    assert main(["recipe", "show", "mine.yaml", f"--model.chat_template={template}"]) == 0


def test_a_file_that_cannot_be_read_is_not_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "work" / "loop.jsonl").symlink_to("loop.jsonl")
    text = "model: {path: tiny}\ntask: {class_path: Jsonl, init_args: {path: loop.jsonl}}\nreward: MathReward\n"
    Path("mine.yaml").write_text(text + RECIPE[RECIPE.index("advantage:") :])
    assert main(["recipe", "check", "mine.yaml"]) == 2
    assert "task.path is 'loop.jsonl', which cannot be read: Too many levels" in capsys.readouterr().err


class _Texts(RunPart):
    def files(self) -> Any:
        return ["a.txt"]


class _Raising(RunPart):
    def files(self) -> Any:
        raise RuntimeError("broken")


class _Other:
    """No part of a run, with another meaning of `files`."""

    def files(self, folder: str) -> list[str]:
        return [folder]


@pytest.mark.parametrize(
    ("part", "problem"), [(_Texts, "raised ValueError: too many"), (_Raising, "raised RuntimeError: broken")]
)
def test_files_of_a_plugin_that_fail_are_a_line(part: type, problem: str) -> None:
    problems = Problems()
    assert Builder(Registry(), problems, needs_files=True).construct("tools.a", part, {}) is None
    assert len(problems) == 1
    assert problem in problems[0]


def test_files_of_a_section_are_its_own() -> None:
    problems = Problems()
    assert isinstance(Builder(Registry(), problems, needs_files=True).construct("a", _Other, {}), _Other)
    assert not problems
