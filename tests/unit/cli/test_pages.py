"""The pages of `rlkit docs` and README, run as a reader meets them: each block in its order, in an empty folder.

Files are written as the page shows them, commands and Python run in processes of their own, and packages are installed
only where the page says so. What this machine cannot run is named in `NOT_HERE`, with the reason, and is parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import tomllib
from pathlib import Path

import pytest
from rlkit_inspect.docs import PLUGINS, topics

from rlkit.base.verbs import VERBS, plugin_verbs
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.recipe import Recipe
from tests import forks
from tests.conftest import ROOT, read_jsonl, write_metadata
from tests.pages import README, Block, blocks, commands, write_files

PAGES = [topic for topic in [*topics(), README] if not topic.startswith(PLUGINS)]
"""The pages on a kind of plugin show the package that `plugins new` writes: test_docs compares and runs them."""
NOT_HERE = {
    r"^rlkit (fit|sweep|validate|data prepare)\b.*(_gsm8k|Qwen/)": "models and data of the hub",
    r"^(torchrun|ray) ": "several machines",
    r"^pip install -e '\.\[": "an index of packages",
    r"^rlkit \S+ .*--launcher (Slurm|Ray)": "a cluster",
    r"^rlkit validate .*--harness": "data of the hub",
    r"^mkdir|^rlkit completion": "files in the reader's home",
    r"^rlkit replay .*--step 101\b": "a run of 101 steps",
    r"^(vllm|curl|python -m sglang|python llama\.cpp)": "a server or converter of another project",
    r"^rlkit serve|^python sky\.py": "Tinker's SDK: tests/tinker runs them",
}
"""Commands that no machine of the gate runs, and what they need."""
GIVEN = {"looking-at-a-run": ("runs/a", "runs/b"), "why-it-does-not-learn": ("runs/mine",)}
"""Pages about runs that the reader already has, and the names of these runs."""
FEW_STEPS = ("--train.steps=2", "--train.warmup_steps=0")
FEW_PROMPTS = ("--validation.limit=4", "--validation.samples=1")
"""Options that are added where a page runs a recipe that rlkit ships: other tests run those to their end."""
PORT = "30000"
TRAINING = r"^rlkit (fit|sweep|validate|replay|data prepare|generate|recipe check)\b(?!.*help)"
"""Commands that take seconds."""
MANY = 3
"""Commands of a page that runs with the fast tests."""


def not_here(line: str) -> bool:
    return any(re.search(pattern, line) for pattern in NOT_HERE)


def lines_of(topic: str) -> list[str]:
    """Return the commands of a page, each in a line."""
    shown = (block for block in blocks(topic) if block.language == "bash")
    return [shlex.join(words) for block in shown for words in commands(block) if words]


def is_slow(topic: str) -> bool:
    """Whether a page trains, or has many commands."""
    trains = any(block.language == "python" and "fit(" in block.text for block in blocks(topic))
    lines = [line for line in lines_of(topic) if not not_here(line)]
    return trains or topic in GIVEN or len(lines) > MANY or any(re.search(TRAINING, line) for line in lines)


class Reader:
    """Does in a folder what a page says.

    Args:
        folder: An empty folder.
        port: The port on which a server of the page listens, instead of the one in its text.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.port = port
        self.servers: list[forks.Started] = []
        self.sites: list[str] = []
        """Folders of the packages that the page has installed."""
        self.files: set[str] = set()
        """The names of files that the page shows."""

    def follow(self, block: Block) -> None:
        if block.file is not None:
            (self.folder / block.file).write_text(block.text.replace(PORT, str(self.port)), encoding="utf-8")
            self.files.add(block.file)
        elif block.language == "python":
            script = self.folder / "block.py"
            script.write_text(block.text, encoding="utf-8")
            self.run(str(script))
            script.unlink()
        elif block.language == "bash":
            for words in commands(block):
                self.type(words)

    def type(self, words: list[str]) -> None:
        """Run a command, unless this machine cannot."""
        line = shlex.join(words)
        if not_here(line):
            return
        if words[:2] == ["pip", "install"]:
            self.install(words[-1])
            return
        if words[0] == "python" and words[-1] == "&":
            self.servers.append(forks.start(words[1:-1], self.folder))
            return
        if words[0] == "python":
            self.run(*words[1:])
            return
        assert words[0] == "rlkit", line
        printed = self.run("-m", *words, *self.shorter(words))
        if words[1:3] == ["reward", "try"]:
            assert not re.search(r"^ reward .* 0\.0000 *$", printed, re.M), f"scores everything 0: {line}"

    def shorter(self, words: list[str]) -> list[str]:
        """Return options that shorten a command with recipes of rlkit's, unless the page chooses the length."""
        line = " ".join(words)
        if (
            words[1] not in ("fit", "sweep", "validate")
            or re.search(r"help|--resume (?!auto)", line)
            or self.files & set(words)
        ):
            return []
        steps = FEW_STEPS if words[1] != "validate" and "--train.steps" not in line else ()
        return [*steps, *(FEW_PROMPTS if "--validation" not in line else ())]

    def install(self, package: str) -> None:
        """Put a package on the path, as pip does."""
        source = ROOT / package if package.startswith("./") else self.folder / package
        site = self.folder / ".site" / source.name
        write_metadata(source, site)
        self.sites += [str(source / "src"), str(site)]

    def run(self, *words: str) -> str:
        """Run `python WORDS`; return what it prints."""
        done = forks.run(words, self.folder, site=os.pathsep.join(self.sites))
        differs = words[1:3] == ("rlkit", "diff") and done.returncode == 1
        assert done.returncode == 0 or differs, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout


@pytest.mark.parametrize("topic", [pytest.param(t, marks=pytest.mark.slow if is_slow(t) else ()) for t in PAGES])
def test_a_page_runs_from_its_first_block_to_its_last(topic: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        reader = Reader(tmp_path, port=probe.getsockname()[1])
    for run in GIVEN.get(topic, ()):
        reader.type(["rlkit", "fit", "--recipe", "quickstart", "--train.steps=3", "--validation.limit=4", "--out", run])
    try:
        for block in blocks(topic):
            reader.follow(block)
    finally:
        for server in reader.servers:
            server.kill()
    for metrics in tmp_path.glob("runs/*/metrics.jsonl"):
        rewards = [row["reward/mean"] for row in read_jsonl(metrics) if "reward/mean" in row]
        assert not rewards or any(rewards), f"{metrics.parent}: every reward is 0"


def check_options(words: list[str]) -> None:
    """Check the verb, the recipe and the options of a command that is not run, or the extra that it installs."""
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        assert words[-1].strip(".[]") in extras
    if "rlkit" not in words:
        return
    verb, *rest = words[words.index("rlkit") + 1 :]
    assert verb in {*VERBS, *plugin_verbs()}
    if verb not in ("fit", "validate"):
        return
    names = {place for place, word in enumerate(rest) if word in ("--out", "--resume", "--checkpoint", "--harness")}
    rest = [word for place, word in enumerate(rest) if not {place, place - 1} & names and word != "--json"]
    rest = [re.sub(r"^runs/.*recipe.yaml|^\w+\.yaml", "quickstart", word) for word in rest]
    rest = [re.sub(r"^runs/.*", "tiny", word) for word in rest]
    if any(word == "--help" or word.endswith(".help") for word in rest):
        with pytest.raises(SystemExit):
            parse(verb, rest)
    elif "--recipe" in rest:
        assert isinstance(parse(verb, rest).recipe, Recipe)


@pytest.mark.parametrize("topic", [topic for topic in PAGES if lines_of(topic)])
def test_recipes_and_options_of_commands_exist(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are not run here, or in slow tests only."""
    monkeypatch.chdir(tmp_path)
    write_files(topic, tmp_path)
    reader = Reader(tmp_path)
    for words in map(shlex.split, lines_of(topic)):
        if words[:2] == ["pip", "install"] and not words[-1].startswith(".["):
            reader.install(words[-1])
            for site in reader.sites:
                monkeypatch.syspath_prepend(site)
        elif words[:3] == ["rlkit", "plugins", "new"]:
            assert main(words[1:]) == 0
        else:
            check_options(words)


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    lines = [line for topic in PAGES for line in lines_of(topic)]
    assert [pattern for pattern in NOT_HERE if not any(re.search(pattern, line) for line in lines)] == []
