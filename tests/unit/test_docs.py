"""The pages of `rlkit docs`: every command, recipe and snippet in them works, and every metric is listed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from rlkit.cli.docs import ORDER, find, page, title
from rlkit.cli.main import main
from rlkit.cli.parsing.compose import Composer
from rlkit.cli.parsing.parser import parse
from rlkit.cli.parsing.reader import load
from rlkit.commands import VERBS
from rlkit.errors import RecipeError
from rlkit.recipe import Recipe
from rlkit.registry import load_plugins
from tests.conftest import ROOT
from tests.gates.test_words import WORDS

QUICK = {
    "recipe list",
    "recipe show",
    "recipe new",
    "explain",
    "plugins list",
    "plugins show",
    "plugins new",
    "convert",
}
QUICK |= {"data show", "data stats"}
"""What is run as it stands; of other verbs recipe and options are parsed, and a run's folder is not read."""
WHOLE = {"data-and-rewards"}
"""Pages whose commands are all run: the way from a table and a function to a trained model."""
PARSED = {"fit", "validate", "generate", "recipe check"}
ELSEWHERE = {
    "reward try": {"--rollouts", "--reward"},
    "export": {"--checkpoint", "--merge-lora", "--out"},
    "doctor": {"--model"},
}
"""What needs a finished run or looks at the machine: its options are those in the verb's own tests."""
OF_THE_VERB = {"--out", "--prompt", "--resume", "--checkpoint"}


class Block(NamedTuple):
    """A fenced block: its page, language, text, and the file that the text before it names."""

    topic: str
    language: str
    text: str
    file: str | None


def blocks(topic: str) -> Iterator[Block]:
    """Yield the blocks of a page; one after a paragraph that ends in "`name`:" is that file."""
    text = page(topic)
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        before = text[: found.start()].rstrip().rsplit("\n", 1)[-1]
        named = re.search(r"`([\w.-]+\.(?:csv|py|yaml|sh))`(?:, [^`]*)?:$", before)
        yield Block(topic, found[1], found[2], named[1] if named else None)


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.splitlines():
        yield shlex.split(line)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_every_page_is_listed_and_short() -> None:
    pages = {path.stem for path in (ROOT / "rlkit" / "docs").iterdir()}
    assert pages == set(ORDER)
    assert len(pages) <= 15
    for topic in ORDER:
        assert page(topic).startswith("# ")
        assert page(topic).count("\n") < 150


@pytest.mark.parametrize("topic", ORDER)
def test_pages_are_in_the_fields_words(topic: str) -> None:
    assert not WORDS.search(page(topic))


@pytest.mark.parametrize("topic", ORDER)
def test_every_fence_is_of_a_language_that_is_tested(topic: str) -> None:
    fences = re.findall(r"^```(.*)$", page(topic), re.M)
    assert len(fences) == 2 * len(list(blocks(topic)))
    assert {block.language for block in blocks(topic)} <= {"bash", "python", "yaml", "csv", "text"}
    assert all(block.file for block in blocks(topic) if block.language in ("csv", "text"))


@pytest.mark.parametrize("topic", ORDER)
def test_recipes_of_pages_name_what_there_is(topic: str) -> None:
    for block in blocks(topic):
        if block.language == "yaml":
            composer = Composer(load_plugins())
            composer.add(load(block.text))
            assert composer.problems == []


@pytest.mark.parametrize("topic", ORDER)
def test_snippets_of_python_run(topic: str, folder: Path) -> None:
    for block in blocks(topic):
        if block.language == "python":
            exec(compile(block.text, topic, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("topic", ORDER)
def test_commands_of_pages_work(topic: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(topic):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        if block.language != "bash":
            continue
        for program, verb, *rest in commands(block):
            if program == "pip":
                assert [verb, *rest] == ["install", "rlkit-fabric[sglang]"]
                continue
            assert program == "rlkit"
            assert verb in VERBS
            if topic in WHOLE:
                assert main([verb, *rest]) == 0
            else:
                check_command(verb, rest, folder)
    assert "Traceback" not in capsys.readouterr().err


def check_command(verb: str, rest: list[str], folder: Path) -> None:
    """Run a command if it is quick; parse its recipe and options otherwise."""
    full = " ".join([verb, *rest[:1]])
    if verb in QUICK or full in QUICK:
        target = folder / "mine.yaml"
        if full == "recipe new" and target.exists():
            target.unlink()
        assert main([verb, *rest]) == 0, full
        return
    if full in ELSEWHERE or verb in ELSEWHERE:
        known = ELSEWHERE.get(full) or ELSEWHERE[verb]
        assert {word for word in rest if word.startswith("--")} <= known
        return
    assert verb in PARSED or full in PARSED, full
    if full in PARSED:
        rest = rest[1:]
    words, index = [], 0
    while index < len(rest):
        skipped = rest[index] in OF_THE_VERB
        words += [] if skipped else [rest[index]]
        index += 2 if skipped else 1
    words = ["tiny" if word.startswith("runs/") else word for word in words]
    if any(word == "--recipe" or not word.startswith("--") for word in words[:1]) or "--recipe" in words:
        if any(".help" in word for word in words):
            with pytest.raises(SystemExit):
                parse(verb, words)
        else:
            assert isinstance(parse(verb, words).recipe, Recipe)
    else:
        assert words == []  # a run's folder alone


def metrics_of(text: str) -> set[str]:
    """Return the names in the tables of the page on metrics."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def is_listed(name: str, listed: set[str]) -> bool:
    patterns = (re.sub(r"NAME|SOURCE|\bK\b", "*", one) for one in listed if "advantage" not in one)
    return name in listed or any("*" in one and fnmatchcase(name, one) for one in patterns)


def test_every_metric_of_a_run_is_listed(folder: Path) -> None:
    words = [
        "--recipe",
        "quickstart",
        "--train.steps",
        "1",
        "--train.prompts_per_step",
        "4",
        "--train.warmup_steps",
        "0",
    ]
    assert main(["fit", *words, "--validation.limit", "4", "--validation.every", "1", "--out", "run"]) == 0
    listed = metrics_of(page("metrics"))
    row = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    figures = [name.removeprefix("validation/").removeprefix("sampled_") for name in row if name != "step"]
    assert len(figures) > 50
    assert [name for name in figures if not is_listed(name, listed)] == []


def test_every_metric_in_the_code_is_listed() -> None:
    listed = metrics_of(page("metrics"))
    found = set()
    for path in (ROOT / "rlkit").rglob("*.py"):
        for name in re.findall(r'meter\.\w+\(\s*f?"([^"]+)"', path.read_text()):
            found.add(re.sub(r"\{prefix\}", "policy", re.sub(r"\{(?!prefix)\w+\}", "anything", name)))
    assert len(found) > 40
    dynamic = {"mismatch/anything", "time/anything", "imbalance/anything"}  # whose names a run shows
    assert sorted(name for name in found - dynamic if not is_listed(name, listed)) == []


def test_every_algorithm_is_listed() -> None:
    text = page("algorithms")
    parts = load_plugins(entry_points=False).parts
    for kind in ("advantages", "losses"):
        assert [name for name in parts[kind] if f"`{name}`" not in text] == []


def test_every_section_is_listed() -> None:
    text = page("recipes")
    assert [name for name in Recipe.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_keys_in_tables_exist() -> None:
    """Keys of rlkit's in the second column of the tables of from-trl and from-verl, and in remedies."""
    sections = set(Recipe.__dataclass_fields__)
    for topic in ORDER:
        for key in re.findall(r"`((?:train|rollout|kl_loss|kl_reward|fabric|save|conversation)\.[\w.]+)`", page(topic)):
            composer = Composer(load_plugins())
            composer.override("rollout.engine", "SGLangEngine")
            before = len(composer.problems)
            composer.override(key, "\ue000")
            assert not [p for p in composer.problems[before:] if "unknown option" in p or "has no option" in p], key
            assert key.partition(".")[0] in sections


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ORDER)


def test_a_page_is_printed_as_it_is_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "metrics"]) == 0
    assert capsys.readouterr().out == page("metrics")


def test_a_terminal_gets_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setattr("pydoc.pager", shown.append)
    assert main(["docs", "lora"]) == 0
    assert len(shown) == 1
    assert "```" not in shown[0]
    assert title(page("lora")) in shown[0]


@pytest.mark.parametrize(
    ("given", "topic"), [("tools", "tools-and-environments"), ("LoRA", "lora"), ("data-t", "data-types")]
)
def test_the_beginning_of_a_name_is_enough(given: str, topic: str) -> None:
    assert find(given) == topic


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("metrcs", "did you mean metrics"),
        ("data", "data-and-rewards or data-types"),
        ("", "topics:"),
        ("../x", "topics:"),
    ],
)
def test_a_topic_that_is_none_is_explained(given: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=hint):
        find(given)


def test_two_topics_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "lora", "metrics"]) == 2
    assert "takes one topic" in capsys.readouterr().err


def test_pages_are_in_the_wheel() -> None:
    import tomllib

    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built["packages"] == ["rlkit"]  # with all files in it
    assert "exclude" not in built
