"""`rlkit completion`: a real bash completes verbs, options, parts and recipes, and starts nothing for it."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from rlkit_inspect.completion import script

from rlkit.base.verbs import VERBS
from rlkit.cli.main import main
from rlkit.recipe.parsing.suggest import known_keys
from rlkit.registry import load_plugins
from rlkit.registry.builtin import rlkit_recipes

RECIPES = sorted(path.stem for path in rlkit_recipes().glob("*.yaml"))
CASES = {
    "rlkit ": [*VERBS],
    "rlkit exp": ["explain", "export"],
    "rlkit fit --recip": ["--recipe"],
    "rlkit fit --recipe quick_r": ["quick_reinforce_pp", "quick_remax", "quick_rloo"],
    "rlkit fit --recipe min": ["mine.yaml"],
    "rlkit fit --recipe=quick_p": ["quick_ppo"],
    "rlkit fit --recipe quickstart --loss Clip": ["ClipCov", "ClipLoss"],
    "rlkit fit --loss=": [*load_plugins(entry_points=False).parts["losses"]],
    "rlkit fit --recipe quickstart --advantage.scale": ["--advantage.scale_by_std"],
    "rlkit fit --advantage.scale_by_std ": ["true", "false", "batch"],
    "rlkit fit --fabric.prec": ["--fabric.precision"],
    "rlkit fit --fabric.precision bf16": ["bf16-mixed", "bf16-true"],
    "rlkit fit --rollout.engine.launch.rel": ["--rollout.engine.launch.release_memory"],
    "rlkit fit --resume ru": ["runs"],
    "rlkit sweep --recipe quickstart --js": ["--json"],
    "rlkit sweep --advantage.scale": ["--advantage.scale_by_std"],
    "rlkit recipe ": ["list", "show", "new", "check"],
    "rlkit recipe show ": [*RECIPES, "mine.yaml", "runs/"],
    "rlkit recipe new x.yaml --from quick_l": ["quick_lora"],
    "rlkit recipe check --de": ["--deep"],
    "rlkit data prepare --o": ["--out"],
    "rlkit reward try --rollouts ": ["mine.yaml", "runs"],
    "rlkit plugins new x --kind cu": ["curriculum"],
    "rlkit replay runs --phase learn --loss.clip_l": ["--loss.clip_low"],
    "rlkit docs plugins/s": ["plugins/schedule"],
    "rlkit export --dtype ": ["float32", "bfloat16"],
    "rlkit export --checkpoint runs --mer": ["--merge-lora"],
    "rlkit doctor --": ["--model"],
    "rlkit completion ": ["bash", "zsh"],
}


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, in a folder with a recipe and a folder of runs."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "rlkit.bash").write_text(script("bash", load_plugins(entry_points=False)))
    (folder / "files" / "runs").mkdir(parents=True)
    (folder / "files" / "mine.yaml").touch()
    return folder / "rlkit.bash"


def test_bash_completes_all_of_it_without_starting_anything(bash_script: Path) -> None:
    lines = [f"source {bash_script}", "PATH=/nowhere"]
    for line in CASES:
        words = shlex.split(line.replace("=", " = ")) + [""] * (line[-1] in " ")
        lines.append(f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _rlkit 2>&1; ")
        lines.append('(IFS="|"; echo "${COMPREPLY[*]}")')
    done = subprocess.run(
        ("bash", "--norc", "-c", "\n".join(lines)),
        cwd=bash_script.parent / "files",
        capture_output=True,
        text=True,
        check=True,
    )
    for (line, expected), text in zip(CASES.items(), done.stdout.splitlines(), strict=True):
        found = text.split("|")
        assert [word for word in expected if word not in found] == [], line
        typed = re.split("[ =]", line)[-1]
        assert [word for word in found if not word.startswith(typed)] == [], line


def test_a_tab_in_a_terminal_fills_in_a_recipe(bash_script: Path) -> None:
    """In an interactive bash with a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {"PATH": "/nowhere", "TERM": "dumb", "PS1": "ready> "}
    words = (shutil.which("bash") or "bash", "--norc", "--noprofile", "-i")
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True):
        read_until(ours, "ready> ")
        os.write(ours, f"source {bash_script}; echo sour''ced\n".encode())
        read_until(ours, "sourced\nready> ")
        os.write(ours, b"rlkit fit --recipe quicks\t--train.ste\t")
        shown = read_until(ours, "--train.steps")
        os.write(ours, b"\x15exit\n")
    os.close(ours)
    os.close(theirs)
    assert "rlkit fit --recipe quickstart --train.steps" in shown


def read_until(terminal: int, words: str) -> str:
    """Return what a terminal shows up to some words, or all that it shows within its deadline."""
    text, end = "", time.monotonic() + 20
    while words not in text and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 65536).decode(errors="replace").replace("\r", "")
    return text


def test_every_option_of_a_recipe_is_in_the_script(bash_script: Path) -> None:
    registry = load_plugins(entry_points=False)
    words = set(re.split(r"[\s()]+", bash_script.read_text()))
    assert [key for key in known_keys(registry, {}) if f"--{key}" not in words] == []


def test_zsh_gets_the_same_words() -> None:
    text = script("zsh", load_plugins(entry_points=False))
    assert text.startswith("#compdef rlkit")
    assert all(word in text for word in (*VERBS, *RECIPES, "--advantage.scale_by_std", "_rlkit_recipe_files"))


def test_names_that_a_shell_would_expand_are_left_out(tmp_path: Path) -> None:
    registry = load_plugins(entry_points=False)
    file = registry.recipes["quickstart"]
    registry.recipes |= {"a$(touch trap)": file, "b;touch trap": file, "c'd": file, "fine-1.2": file}
    (tmp_path / "bash").write_text(script("bash", registry))
    done = subprocess.run(
        ("bash", "--norc", "-c", "source ./bash; COMP_WORDS=(rlkit fit --recipe ''); COMP_CWORD=3; _rlkit; "
         'COMP_WORDS=(rlkit recipe show f); _rlkit; echo "${COMPREPLY[@]}"'),
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "fine-1.2\n"
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bash"]


def test_usage_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2
    assert main(["completion", "--help"]) == 0
    assert main(["completion", "fish"]) == 2
    assert "'fish', expected bash or zsh" in capsys.readouterr().err
