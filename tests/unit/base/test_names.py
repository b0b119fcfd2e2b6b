"""Hostile names and paths, for every option that becomes a file, a column, a metric or a tag."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlkit import Recipe
from rlkit.base.errors import RecipeError
from rlkit.base.names import FileName, source_name
from rlkit.base.ranges import expected
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.rewards import Composite, ExactReward

HOSTILE = [
    "", " ", ".", "..", "../x", "x/..", "../../site-packages/x.pth", "/etc/passwd", "/", "//", "a/../../b", "./a", "a/",
    "~", "~/x", "~root/x", "a\nb", "a\r\nb", "a\tb", "a\0b", "\0", "a b", " a", "a ", "a,b", "a;b", "a|b", "a&b", "a>b",
    "a*", "a?", "[a]", "{a}", "$(touch x)", "`touch x`", "$HOME", "%s", "%n", "{0}", "a'b", 'a"b', "a\\b", "C:\\x",
    "a:b", "-x", "--out", ".hidden", "file:///tmp/x", "memory://x", "s3://b/x", "ö", "名", "\u202ea", "a\u200bb",
    "\x1b[2J", "=1+1", "@/../x", "a" * 65, "a" * 300, "a" * 100_000,
]  # fmt: skip

PLAIN = ["math", "gsm8k", "a.b", "a-b", "A_1", "x@2", "@a", "7", "a" * 64]

OWN_FILES = ["recipe.yaml", "metrics.jsonl", "lock", "result.json", "environment.json", "checkpoints", "Lock"]

SHORT = (
    "--recipe=quickstart", "--train.steps=1", "--rollout.group_size=2", "--train.prompts_per_step=2",
    "--validation=null",
)  # fmt: skip

NAMED: dict[str, Callable[[list[str]], dict[str, object]]] = {
    "log.loggers": lambda names: {
        "log": {"loggers": [{"class_path": "CSV", "init_args": {"file": name}} for name in names]}
    },
    "reward.rewards": lambda names: {
        "reward": {"class_path": "Composite", "init_args": {"rewards": dict.fromkeys(names, "ExactReward")}}
    },
    "validation.tasks": lambda names: {"validation": {"tasks": dict.fromkeys(names)}},
    "mix": lambda names: {"mix": {name: {"weight": 1.0, "task": "Arithmetic"} for name in names}},
    "tools": lambda names: {"tools": dict.fromkeys(names, "Calculator")},
    "task.tasks": lambda names: {
        "task": {"class_path": "Mix", "init_args": {"tasks": dict.fromkeys(names, "Arithmetic")}}
    },
    "teacher.sources": lambda names: {"teacher": {"sources": dict.fromkeys(names, "tiny")}},
}
"""Recipes with these names, by the option that takes them."""

ELSEWHERE: dict[str, Callable[[str], dict[str, object]]] = {
    "save.folder": lambda path: {"save": {"folder": path}},
    "log.loggers.0.folder": lambda path: {
        "log": {"loggers": [{"class_path": "TensorBoard", "init_args": {"folder": path}}]}
    },
    "log.loggers.0.tracking_uri": lambda path: {
        "log": {"loggers": [{"class_path": "MLflow", "init_args": {"tracking_uri": path}}]}
    },
    "log.loggers.0.space_id": lambda path: {
        "log": {"loggers": [{"class_path": "Trackio", "init_args": {"space_id": path}}]}
    },
    "rollout.engine.urls": lambda path: {
        "rollout": {"engine": {"class_path": "SGLangServer", "init_args": {"urls": [f"http://{path}"]}}}
    },
    "rollout.engine.router": lambda path: {
        "rollout": {"engine": {"class_path": "SGLangServer", "init_args": {"urls": ["http://h"], "router": path}}}
    },
    "rollout.engine.folder": lambda path: {
        "rollout": {"engine": {"class_path": "SGLangServer", "init_args": {"transport": "disk", "folder": path}}}
    },
    "rollout.engine.launch.args": lambda path: {
        "rollout": {"engine": {"class_path": "SGLangEngine", "init_args": {"launch": {"args": ["--log", path]}}}}
    },
}


def refusal(tmp_path: Path, sections: dict[str, object]) -> str:
    """Return why a recipe file with these sections is refused, a text that YAML escapes included."""
    path = tmp_path / "hostile.yaml"
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        parse("fit", ["--recipe=quickstart", f"--recipe={path}"], trains=True)
    return str(caught.value)


@pytest.mark.parametrize("key", NAMED)
def test_each_hostile_name_is_refused(key: str, tmp_path: Path) -> None:
    names = [*HOSTILE, *(OWN_FILES if key == "log.loggers" else [])]
    lines = refusal(tmp_path, NAMED[key](names)).splitlines()
    assert len(lines) == len(names)
    assert all(line.startswith(key) and "expected" in line for line in lines)


def test_plain_names_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(NAMED["validation.tasks"](PLAIN)), encoding="utf-8")
    validation = parse("fit", ["--recipe=quickstart", f"--recipe={path}"], trains=True).recipe.validation
    assert validation is not None
    assert set(validation.tasks or ()) == set(PLAIN)


@pytest.mark.parametrize("key", ELSEWHERE)
def test_only_the_user_sends_what_a_run_writes_elsewhere(key: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, ELSEWHERE[key](str(tmp_path / "victim")))
    assert f"{key} is" in said
    assert "no recipe file may set" in said
    assert f"pass --{'log.loggers' if key.startswith('log') else key}=" in said


def test_an_option_of_the_user_replaces_what_a_recipe_file_sets(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.yaml"
    path.write_text(yaml.safe_dump(ELSEWHERE["save.folder"]("/victim")), encoding="utf-8")
    words = ["--recipe=quickstart", f"--recipe={path}"]
    assert (
        parse("fit", [*words, f"--save.folder={tmp_path}/mine"], trains=True).recipe.save.folder == f"{tmp_path}/mine"
    )
    assert parse("fit", [*words, "--save.folder=null"], trains=True).recipe.save.folder is None
    assert parse("validate", words).recipe.save.folder == "/victim"  # which a verb that only reads does not write


def test_names_of_objects_in_python_are_checked_too() -> None:
    recipe = Recipe("tiny", "Arithmetic", Composite({"a\nb": ExactReward()}))
    with pytest.raises(RecipeError, match=r"reward\.rewards has the name"):
        recipe.yaml()


@pytest.mark.slow
def test_a_run_writes_no_file_that_a_recipe_could_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["fit", *SHORT, "--train.ema=0.9", "--save.every=1", f"--out={out}"]) == 0
    files = {path.name for path in out.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "lock", "checkpoints", "final"} <= files
    assert all(expected(FileName, name) is not None for name in files), files


def test_sources_of_rows_are_plain_in_metrics() -> None:
    assert source_name("openai/gsm8k") == "openai/gsm8k"
    assert source_name("Algebra (hard)\n\x1b[2J") == "Algebra__hard____2J"
    assert source_name("../../x") == "_./_./x"
    assert source_name("a" * 100) == "a" * 64
    assert source_name("") == ""


@pytest.mark.parametrize("out", ["", " ", "a\0b", "a" * 300])
def test_out_that_is_no_path_is_refused(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", "--train.steps=1", f"--out={out}"]) == 2
    assert "--out is" in capsys.readouterr().err


def test_out_begins_at_home_and_is_readable_to_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir(mode=0o755)
    assert main(["fit", *SHORT, "--out=~/mine"]) == 0
    assert (tmp_path / "mine" / "result.json").is_file()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("option", ["--model.path", "--teacher.path", "--critic.path", "--task.path", "--resume"])
def test_a_path_that_the_system_refuses_is_an_error_in_words(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = ["--task=Jsonl"] if option == "--task.path" else []
    gae = ["--advantage=GAE"] if option == "--critic.path" else []
    for name in ("x" * 300, "a\0b", "~nobody-here/x"):
        assert main(["fit", "--recipe=quickstart", *task, *gae, f"{option}={name}"]) in (1, 2)
        assert capsys.readouterr().err.startswith("error: ")


def files_under(*folders: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of change of each file, by its path."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_nothing_outside_of_the_run_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused writes nothing, and what is accepted writes into the run folder alone."""
    work, victim, recipe = tmp_path / "work", tmp_path / "victim", tmp_path / "hostile.yaml"
    work.mkdir()
    victim.mkdir()
    (victim / "x").write_text("mine", encoding="utf-8")
    monkeypatch.chdir(work)
    packages = Path(sysconfig.get_path("purelib"))
    before = files_under(victim), sorted(packages.glob("*.pth"))
    files = (*HOSTILE, *OWN_FILES, str(victim / "x"), "../victim/x", "fine.csv")
    hostile = [NAMED["log.loggers"]([name]) for name in files]
    hostile += [ELSEWHERE[key](path) for key in ELSEWHERE for path in (str(victim), "../victim", f"file://{victim}")]
    hostile += [NAMED[key](["../../victim/x"]) for key in NAMED]
    statuses = []
    for sections in hostile:
        recipe.write_text(yaml.safe_dump(sections), encoding="utf-8")
        statuses.append(main(["fit", *SHORT, f"--recipe={recipe}", "--out=run"]))
        assert (files_under(victim), sorted(packages.glob("*.pth"))) == before, sections
        assert set(os.listdir(work)) <= {"run"}, sections
        assert set(os.listdir(tmp_path)) == {"work", "victim", "hostile.yaml"}, sections
    assert statuses.count(0) == 1  # fine.csv
    assert (work / "run" / "fine.csv").is_file()
