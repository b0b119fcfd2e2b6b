"""`rlkit recipe show --python`: the script that it prints is the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlkit_inspect.script import as_python

import rlkit
from rlkit import Recipe
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.registry.builtin import rlkit_recipes
from tests.conftest import FAST, read_jsonl

QUICK = (*FAST, "--fabric.accelerator=cpu")


def run(script: str, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Run a script up to its call of `fit`; return the recipe."""
    given: list[Recipe] = []
    monkeypatch.setitem(vars(rlkit), "fit", given.append)
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    monkeypatch.undo()
    return given[0]


@pytest.mark.parametrize("path", sorted(rlkit_recipes().glob("*.yaml")), ids=lambda path: path.stem)
def test_the_script_of_every_shipped_recipe_is_the_recipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse("recipe show", [str(path)])
    script = as_python(parsed.yaml, parsed.name, parsed.registry)
    assert run(script, monkeypatch).yaml() == parsed.yaml
    assert max(map(len, script.splitlines())) <= 120


def test_overrides_nulls_and_plugins_are_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "quick_ppo", "--validation=null", "--train.steps=7", "--fabric.strategy=FSDP2", "--reward=RemoteReward",
        "--reward.url=https://host/${RLKIT_X}", "--fabric.devices=[0, 1]",
        '--log.loggers=[{"class_path": "Wandb", "init_args": {"project": "a\\"b\\\\c\\n"}}]',
    )  # fmt: skip
    monkeypatch.setenv("RLKIT_X", "secret")
    parsed = parse("recipe show", words)
    script = as_python(parsed.yaml, "words", parsed.registry)
    assert "validation=None," in script
    assert "critic=Critic(" in script
    assert "secret" not in script
    with monkeypatch.context() as inner:
        made = run(script, inner)
    assert made.yaml() == parsed.yaml


def test_two_classes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit_inspect.script import _Made, _Printer

    printer = _Printer()
    first, second = (type("Model", (), {"__module__": name}) for name in ("rlkit.recipe", "tests.conftest"))
    for cls, module in ((first, "rlkit.recipe"), (second, "tests.conftest")):
        monkeypatch.setattr(f"{module}.Model", cls, raising=False)
    assert printer.call("f", {"a": _Made(first, {}), "b": _Made(second, {})}, 0) == "f(a=Model(), b=Model_())"
    assert printer.imports() == "from rlkit.recipe import Model\nfrom tests.conftest import Model as Model_\n"


def test_long_lines_are_broken_at_their_depth() -> None:
    """The inner list has 98 characters: too many after four blanks, though not at the start of a line."""
    from rlkit_inspect.script import _Printer

    x, y = "x" * 45, "y" * 45
    assert _Printer()._value([x, y], 0) == f'["{x}", "{y}"]'
    lines = ["[", "    [", f'        "{x}",', f'        "{y}",', "    ],", "    1,", "]"]
    assert _Printer()._value([[x, y], 1], 0) == "\n".join(lines)
    assert _Printer().call("f", {"a": [x, y]}, 0) == f'f(\n    a=[\n        "{x}",\n        "{y}",\n    ],\n)'


@pytest.mark.slow
def test_a_printed_script_trains_as_the_recipe_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def metrics(out: str) -> list[dict[str, Any]]:
        rows = read_jsonl(tmp_path / out / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]

    assert main(["recipe", "show", "quick_grpo", *QUICK, "--python"]) == 0
    script = capsys.readouterr().out.replace("fit(recipe)", f"fit(recipe, out={str(tmp_path / 'python')!r})")
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    assert "Result(status='ok'" in capsys.readouterr().out
    assert main(["fit", "quick_grpo", *QUICK, "--out", str(tmp_path / "yaml")]) == 0
    assert metrics("python") == metrics("yaml") != []
    assert (tmp_path / "python" / "recipe.yaml").read_text() == (tmp_path / "yaml" / "recipe.yaml").read_text()
