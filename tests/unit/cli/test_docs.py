"""README and the pages of `rlkit docs`: their form, and what they list; test_pages runs them."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import sys
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from PIL import Image
from rlkit_authors import reference
from rlkit_authors.scaffold import PLURALS, WRITTEN
from rlkit_inspect.docs import ORDER, PLUGINS, find, notebook, page, title, topics

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.hooks import KINDS
from rlkit.ops.correction import LogpMismatch
from rlkit.parsers.detect import detect
from rlkit.recipe import Recipe
from rlkit.recipe.parsing.compose import Composer
from rlkit.recipe.parsing.reader import load
from rlkit.registry import load_plugins
from rlkit.rewards import MathReward
from rlkit.testing import ExampleRuntime, check_agent, check_reward, check_task
from rlkit.types import Batch, RolloutBatch
from tests.conftest import FAST, ROOT
from tests.flow.test_architectures import KINDS as KINDS_OF_MODELS
from tests.gates.test_words import WORDS
from tests.pages import README, Block, blocks, commands, own_example, text_of, write_files
from tests.vendors import NAMES, template_text

PAGES = [*topics(), README]
registry = cache(load_plugins)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    place = tmp_path_factory.mktemp("trained") / "run"
    words = ("--train.warmup_steps=0", "--validation.every=1", f"--out={place}")
    assert main(["fit", "--recipe=quickstart", *FAST, "--train.steps=1", "--validation.limit=4", *words]) == 0
    return place


def test_every_page_is_listed_and_short() -> None:
    pages = {path.stem for path in (ROOT / "rlkit" / "docs").glob("*.md")}
    assert pages == set(ORDER)
    assert set(topics()) - pages == {PLUGINS + kind for kind in WRITTEN}
    for topic in PAGES:
        assert text_of(topic).startswith("# ")
        assert text_of(topic).count("\n") <= 200
    assert all(f"(rlkit/docs/{topic}.md)" in text_of(README) for topic in ORDER)


def test_the_hours_of_gsm8k_are_those_that_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    hours = []
    for engine in ("TorchEngine", "SGLangEngine"):
        assert main(["recipe", "check", "grpo_gsm8k", "--gpu=h100", f"--rollout.engine={engine}"]) == 0
        estimate = re.search(r"([0-9.]+) h for 1,752 steps", capsys.readouterr().out)
        assert estimate is not None
        hours.append(round(float(estimate[1])))
    torch_hours, sglang_hours = hours
    estimates = f"time ({torch_hours} hours on an H100, {sglang_hours} with `SGLangEngine`)"
    assert estimates in text_of("recipes")
    assert f"estimates {sglang_hours} hours on an H100 instead of {torch_hours}" in text_of("servers")


def test_pages_explain_in_800_words_beside_tables_and_examples() -> None:
    for topic in PAGES:
        prose = re.sub(r"```.*?```", "", text_of(topic), flags=re.S)
        assert sum(len(line.split()) for line in prose.splitlines() if not line.startswith("|")) <= 800, topic


def test_pages_are_in_the_fields_words() -> None:
    assert {topic: words for topic in PAGES if (words := WORDS.findall(text_of(topic)))} == {}


def test_every_fence_is_of_a_language_that_is_tested() -> None:
    for topic in PAGES:
        fences = re.findall(r"^```(.*)$", text_of(topic), re.M)
        assert len(fences) == 2 * (len(list(blocks(topic))) + 2 * (topic == README)), topic
        assert {block.language for block in blocks(topic)} <= {
            "bash", "python", "yaml", "csv", "text", "toml", "dockerfile",
        }, topic  # fmt: skip
        assert all(block.file for block in blocks(topic) if block.language in ("csv", "text")), topic


def test_the_first_commands_of_readme_are_those_that_ci_runs() -> None:
    first, second, *_ = re.findall(r"^```bash\n(.*?)^```$", text_of(README), re.M | re.S)
    install = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert first == f"{install}. && .venv/bin/rlkit fit --recipe quickstart\n"
    assert second == f"{install}'.[test,agents]' && .venv/bin/pytest -n 2\n"
    script = (ROOT / ".ci" / "gate.py").read_text(encoding="utf-8")
    assert "README.md" in script
    assert "block(1)" in script
    assert "block(2)" in script


def test_the_image_is_installed_as_the_readme_does() -> None:
    [image] = [block.text for topic in PAGES for block in blocks(topic) if block.language == "dockerfile"]
    instructions = [line.split(" ", 1) for line in image.splitlines()]
    assert [name for name, _ in instructions] == ["FROM", "COPY", "RUN", "WORKDIR", "ENTRYPOINT"]
    base, copied, installs, _, entry = (words for _, words in instructions)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert base.removeprefix("python:") == project["requires-python"].removeprefix(">=")
    assert installs == f"cd {copied.split()[1]} && pip install --no-cache-dir -q -e ."
    assert json.loads(entry) == ["rlkit"]
    assert "rlkit" in project["scripts"]


def test_links_lead_to_files() -> None:
    for topic in PAGES:
        folder = ROOT if topic == README else (ROOT / "rlkit" / "docs" / topic).parent
        links = re.findall(r"\]\(([^)#]+)\)", re.sub(r"^```.*?^```$", "", text_of(topic), flags=re.M | re.S))
        assert [link for link in links if not (folder / link).exists()] == [], topic


def test_recipes_of_pages_name_what_there_is() -> None:
    recipes = [block for topic in PAGES if not topic.startswith(PLUGINS) for block in blocks(topic)]
    for block in recipes:
        if block.language == "yaml":
            composer = Composer(registry())
            composer.add(load(block.text))
            assert composer.problems == [], block


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_page_on_a_kind_shows_the_package_that_is_written(kind: str, folder: Path) -> None:
    """Its code and its recipe are those of `plugins new`, whose packages are trained with in test_written_packages."""
    found: dict[str, str] = {}
    for block in blocks(PLUGINS + kind):
        found.setdefault(block.language, block.text)
    for words in commands(Block(kind, "bash", found["bash"], None)):
        assert main(words[1:]) == 0
    [module] = folder.glob("rlkit-*/src/*/__init__.py")
    assert found["python"] == module.read_text(encoding="utf-8")
    [readme] = folder.glob("rlkit-*/README.md")
    [*recipes] = folder.glob("rlkit-*/src/*/recipes/*.yaml")
    if kind in PLURALS:
        assert f"    {found['yaml']}" in readme.read_text(encoding="utf-8")
        names: dict[str, object] = {"__name__": module.parent.name}
        exec(compile(found["python"], str(module), "exec"), names)
        assert KINDS[PLURALS[kind]].key.partition(".")[0] in found["yaml"]
    assert [path.read_text(encoding="utf-8") for path in recipes] == ([found["yaml"]] if kind == "recipe" else [])


@pytest.mark.parametrize("kind", ["task", "agent", "reward"])
def test_further_classes_of_a_page_keep_their_contract(kind: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PLUGINS + kind):
        if block.language == "python":
            exec(compile(block.text, kind, "exec"), names)
    if kind == "task":
        Image.new("RGB", (8, 8)).save("squares.png")
        assert len(check_task(names["CountSquares"]())) == 2
    elif kind == "agent":
        check_agent(names["Adder"])
        check_agent(names["Debate"])
    else:
        reward = names["ShortEnough"](MathReward(), limit=6)
        reward.bind(ExampleRuntime())
        assert [score.reward for score in check_reward(reward, ("#### 4", "#### 12345"))] == [1.0, 0.0]


@pytest.mark.slow
def test_the_way_from_a_table_and_a_function_to_a_report(folder: Path) -> None:
    """All commands on the example are run; it learns, as README says, and the recipe is the one that README shows."""
    write_files(README, folder)
    shown = (folder / "mine.yaml").read_text(encoding="utf-8")
    (folder / "mine.yaml").unlink()
    for words in own_example():
        assert main(words[1:]) == 0, words
    assert yaml.safe_load((folder / "mine.yaml").read_text(encoding="utf-8")) == yaml.safe_load(shown)
    result = json.loads((folder / "runs" / "mine" / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["verdict"]["change"], result["verdict"]["metric"]) == ("ok", "improved", "reward")
    assert result["verdict"]["p_value"] < 0.01
    assert result["verdict"]["after"] > result["verdict"]["before"] + 0.1
    assert (folder / "runs" / "mine" / "report.html").is_file()


def metrics_of(text: str) -> set[str]:
    """Return the names in the tables of the page on metrics."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def is_listed(name: str, listed: set[str]) -> bool:
    patterns = (re.sub(r"NAME|SOURCE|\bK\b", "*", one) for one in listed if "advantage" not in one)
    return name in listed or any("*" in one and fnmatchcase(name, one) for one in patterns)


def test_every_metric_of_a_run_is_listed(trained: Path) -> None:
    listed = metrics_of(page("metrics"))
    row = json.loads((trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    metrics = [name.removeprefix("validation/").removeprefix("sampled_") for name in row if name != "step"]
    assert len(metrics) > 50
    assert [name for name in metrics if not is_listed(name, listed)] == []


def test_every_metric_in_the_code_is_listed() -> None:
    listed = metrics_of(page("metrics"))
    found = set()
    for path in (ROOT / "rlkit").rglob("*.py"):
        for name in re.findall(r'meter\.(?!timed)\w+\(\s*f?"([^"]+)"', path.read_text(encoding="utf-8")):
            found.add(re.sub(r"\{prefix\}", "policy", re.sub(r"\{(?!prefix)\w+\}", "anything", name)))
    groups = {name.partition("/")[0] for name in found if "/" in name} | {"memory", "checkpoint"}
    literal = re.compile(rf'"((?:{"|".join(groups)})/[a-z_]+)"')
    for folder in ("train", "run"):
        for path in (ROOT / "rlkit" / folder).rglob("*.py"):
            found |= {
                name for name in literal.findall(path.read_text(encoding="utf-8")) if name != "rollouts/validation"
            }
    assert len(found) > 50
    dynamic = {
        "mismatch/anything",
        "time/anything",
        "imbalance/anything",
        "advantage/anything",
    }  # whose names a run shows
    names = {name.removeprefix("validation/") for name in found - dynamic}  # the page says so of the prefix
    assert sorted(name for name in names if not is_listed(name, listed)) == []


@pytest.mark.parametrize(
    ("folder", "pattern", "prefix"),
    [
        ("losses", r'"(\w+)"\]?(?:: | = )masked_mean', "policy"),
        ("rollout", r'conversation\.count\("(\w+)"\)|self\.counts\["(\w+)"\] =', "conversation"),
        ("train", r'meter\.timed\("(\w+)"\)', "time"),
    ],
)
def test_metrics_named_elsewhere_are_listed_by_name(folder: str, pattern: str, prefix: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "rlkit" / folder).rglob("*.py")]
    found = {name for text in texts for groups in re.findall(pattern, text, re.M) for name in tuple_of(groups) if name}
    assert len(found) > 1
    assert {f"{prefix}/{name}" for name in found} - metrics_of(page("metrics")) == set()


def test_every_gauge_of_an_engine_is_listed() -> None:
    names = set()
    for path in (*ROOT.glob("plugins/rlkit-engine-torch/src/**/*.py"), *ROOT.glob("plugins/rlkit-servers/src/**/*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name in ("health", "gauges"):
                constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
                names |= {value for value in constants if isinstance(value, str) and value.isidentifier()}
    assert {"restarts", "servers_down", "rows_peak", "fused", "sync_seconds"} <= names
    assert {f"engine/{name}" for name in names} - metrics_of(page("metrics")) == set()


def tuple_of(groups: str | tuple[str, ...]) -> tuple[str, ...]:
    return (groups,) if isinstance(groups, str) else groups


def test_every_metric_of_the_mismatch_is_listed() -> None:
    assert {f"mismatch/{name}" for name in LogpMismatch._fields} - metrics_of(page("metrics")) == set()


def test_types_and_shapes_are_those_of_the_code() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page("data-types").splitlines() if "| `" in line]
    types = [row for row in rows if row[0].lstrip("| `")[0].isupper()]
    known = reference.public_classes()
    assert len(types) > 6
    for name, cells in ((row[0].strip("| `"), row[1]) for row in types):
        cls: type = known[name]
        members = getattr(cls, "_fields", None) or getattr(cls, "__members__", None)
        fields = members or [field.name for field in dataclasses.fields(cls)]
        assert set(re.findall(r"`(\w+)`", cells)) <= set(fields), name
    tensors = {row[0].strip("| `"): row[1] for row in rows if row not in types}
    documented = f"{RolloutBatch.__doc__}{Batch.__doc__}"
    assert [name for name, shape in tensors.items() if f" {name}: {shape}" not in documented] == []
    assert {field.name for field in dataclasses.fields(Batch)} - set(tensors) == {
        "component_names", "declared", "fields", "sum_pi_squared", "media", "metrics", "role_names",
    }  # fmt: skip


def test_tested_models_are_those_of_the_tests() -> None:
    rows = [line.strip("| ").split(" | ") for line in page("tested-models").splitlines() if line.startswith("| `")]
    templates = {name: detect(template_text(name)) for name in NAMES}
    listed = [[f"`{name}`", *([f"`{parser.__name__}`"] if parser else [])] for name, parser in templates.items()]
    kinds = [*KINDS_OF_MODELS, *KINDS_OF_MODELS]  # in two tables
    assert [row[0].strip("`") for row in rows[: len(kinds)]] == kinds
    assert rows[len(kinds) :] == listed


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
    pattern = r"`((?:train|rollout|kl_loss|kl_reward|fabric|save|conversation)\.[\w.]+)`"
    for key in sorted({key for topic in ORDER for key in re.findall(pattern, page(topic))}):
        composer = Composer(registry())
        composer.add({"rollout.engine": "SGLangEngine"})
        before = len(composer.problems)
        composer.add({key: "\ue000"})
        assert not [p for p in composer.problems[before:] if "unknown option" in p or "has no option" in p], key


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*ORDER, "plugins/KIND"]


def test_a_page_is_printed_as_it_is_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "metrics"]) == 0
    assert capsys.readouterr().out == page("metrics")


def test_cat_is_no_pager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setattr("pydoc.pager", pytest.fail)
    monkeypatch.setenv("PAGER", "cat")
    assert main(["docs", "lora"]) == 0
    assert title(page("lora")) in capsys.readouterr().out


def test_a_terminal_gets_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("pydoc.pager", lambda text: shown.append(f"{os.environ['LESS']}\n{text}"))
    monkeypatch.setenv("LESS", "-F")  # a pager that would show codes of colours gets none
    assert main(["docs", "lora"]) == 0
    assert "\x1b" not in shown.pop()
    monkeypatch.delenv("LESS")
    assert main(["docs", "lora"]) == 0
    assert shown[0].startswith("FRX\n")
    assert "\x1b[" in shown[0]
    assert "```" not in shown[0]
    assert title(page("lora")) in shown[0]


@pytest.mark.parametrize(
    ("given", "topic"),
    [
        ("tools", "tools-and-environments"),
        ("LoRA", "lora"),
        ("data-t", "data-types"),
        ("plug", "plugins"),
        ("reward", "plugins/reward"),
        ("plugins/optim", "plugins/optimizer"),
        ("verl", "from-verl"),
        ("memory", "out-of-memory"),
        ("TRL", "from-trl"),
    ],
)
def test_the_beginning_or_a_word_of_a_name_is_enough(given: str, topic: str) -> None:
    assert find(given) == topic


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("metrcs", "did you mean metrics"),
        ("data", "data-and-rewards or data-types"),
        ("rewards", "data-and-rewards or json-and-format-rewards"),
        ("num_generations", "pages that mention it, in the title first: from-trl"),
        ("ppo_mini_batch_size", "pages that mention it, in the title first: from-verl"),
        ("DAPO", "pages that mention it, in the title first: algorithms"),
        ("", "topics:"),
        ("../x", "topics:"),
    ],
)
def test_a_topic_that_is_none_is_explained(given: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=hint):
        find(given)


def test_topics_that_messages_and_pages_name_are_there() -> None:
    places = [*(ROOT / "rlkit").rglob("*.py"), *(ROOT / "rlkit" / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        name for path in places for name in re.findall(r"rlkit docs ([a-z][\w/-]*)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert all(find(name) in topics() for name in named - {"plugins/KIND", "takes"})


def test_two_topics_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "lora", "metrics"]) == 2
    assert "takes one topic" in capsys.readouterr().err


def test_the_notebook_is_the_page_and_replaces_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "python", "--notebook", "a.ipynb"]) == 0
    written = nbformat.read(folder / "a.ipynb", as_version=4)
    nbformat.validate(written)
    cells = written.cells
    assert [cell.cell_type for cell in cells[:4]] == ["code", "markdown", "code", "markdown"]
    assert cells[0].source.startswith("%pip install -q -e .")
    [*shown] = blocks("python")
    code = [cell.source.removeprefix("%%bash\n") + "\n" for cell in cells[1:] if cell.cell_type == "code"]
    assert code == [block.text for block in shown]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    outside = re.sub(r"^```.*?^```$", "", page("python"), flags=re.M | re.S)
    assert prose.split() == outside.split()
    before = (folder / "a.ipynb").read_bytes()
    assert main(["docs", "python", "--notebook", "a.ipynb"]) == 2
    assert "name a new file" in capsys.readouterr().err
    assert (folder / "a.ipynb").read_bytes() == before


@pytest.mark.parametrize("words", [["lora", "--notebook", "a.ipynb"], ["python", "--notebook"], ["--notebook", "a"]])
def test_a_notebook_of_another_page_is_refused(words: list[str], folder: Path) -> None:
    assert main(["docs", *words]) == 2
    assert [*folder.iterdir()] == []


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel; the run is shorter than on the page."""
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    text = page("python").replace("steps=20", "steps=1, prompts_per_step=2")
    cells = nbformat.from_dict(notebook(text))
    NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    [output] = [cell.outputs for cell in cells.cells if "fit(" in cell.source and cell.cell_type == "code"]
    assert "step 1/1  reward" in "".join(part.text for part in output)
    assert [len(run.read_text().splitlines()) for run in folder.glob("runs/*/metrics.jsonl")] == [1]
    [script] = [cell.outputs for cell in cells.cells if cell.source.startswith("%%bash")]
    assert "from rlkit import" in script[0].text


def test_pages_are_in_the_wheel() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert built["packages"][0] == "rlkit"  # with all files in it but pictures, which a terminal does not show
    assert built["exclude"] == ["rlkit/docs/report", "rlkit/docs/architecture.svg"]
