"""What plugins add: parts, verbs, recipes; the documentation's example of each seam is used as a plugin here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rlkit_authors.plugins import EXAMPLES

from rlkit.cli.main import main
from rlkit.registry import load_plugins
from tests.conftest import FAST, ROOT, read_jsonl

MADE_FOR = "rlkit-fabric>=0.1,<0.2"


class Site:
    """A folder on the path in which distributions lie as pip leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, entry_points: str, needs: str = MADE_FOR, **modules: str) -> None:
        info = self.folder / f"rlkit_{name}-2.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: rlkit-{name}\nVersion: 2.1\nRequires-Dist: {needs}\n"
        )
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return Site(tmp_path / "site")


def command(name: str, source: str, site: Site, **options: str) -> None:
    """Install a plugin `name` with one verb of that name, whose function `run` has the source."""
    module = f"rlkit_{name}_{site.folder.parent.name.replace('-', '_')}"
    site.install(name, f"[rlkit.commands]\n{name} = {module}:run\n", **options, **{module: source})


def test_the_example_of_a_part_is_used_by_fit(site: Site) -> None:
    site.install("brevity", "[rlkit]\nbrevity = brevity_example\n", brevity_example=EXAMPLES["part"].read_text())
    options = ("--reward=Brevity", "--reward.limit=3", "--train.steps=1", "--out=out")
    assert main(["fit", "--recipe=quickstart", *FAST, *options]) == 0
    for row in read_jsonl(Path("out/rollouts/step-00001.jsonl.gz")):
        assert row["reward"] == float(len(row["text"]) <= 3)


BROKEN = """
from rlkit.hooks import hookimpl
from rlkit.losses import ClipLoss
from rlkit.rewards import MathReward

class BrokenLoss(ClipLoss):
    def __init__(self):
        raise KeyError("colour")

class BrokenReward(MathReward):
    def __init__(self):
        raise KeyError("colour")

@hookimpl
def rlkit_register(register):
    register(BrokenLoss)
    register(BrokenReward)
"""


@pytest.mark.parametrize("option", ["--loss=BrokenLoss", "--reward=BrokenReward"])
def test_what_a_constructor_raises_is_an_error(option: str, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("broken", "[rlkit]\nbroken = broken_parts\n", broken_parts=BROKEN)
    assert main(["fit", "--recipe=quickstart", option]) == 2
    name = option.partition("=")[2]
    printed = capsys.readouterr().err
    assert f"error: the recipe cannot be built: {name} of plugin 'broken' (rlkit-broken 2.1) raised" in printed
    assert "KeyError: 'colour' (" in printed
    assert ': raise KeyError("colour")); its constructor only stores options\n' in printed


def test_the_example_of_a_command_is_run_by_the_command_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("rows", "[rlkit.commands]\nrows = rows_example:run\n", rows_example=EXAMPLES["command"].read_text())
    assert main(["rows", "--recipe=quickstart", "--first=2"]) == 0
    first, second, count = capsys.readouterr().out.splitlines()
    assert first != second
    assert first.startswith("[{'role': 'user', 'content': '")
    assert count == "9000 rows"
    assert main(["rows", "--recipe=quickstart", "--first=all"]) == 2
    assert "error: --first is 'all', expected a whole number" in capsys.readouterr().err
    assert main(["plugins", "test", "rlkit-rows"]) == 0
    assert main(["plugins", "list"]) == 0
    assert "commands: rlkit rows" in capsys.readouterr().out


def test_a_verb_of_a_missing_package_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "verl", "run.sh"]) == 2
    remedy = "rlkit-convert provides it: pip install ./plugins/rlkit-convert in a checkout of rlkit"
    assert capsys.readouterr().err == f"error: 'convert' is an unknown verb; {remedy}\n"
    assert main(["conver"]) == 2
    assert "did you mean 'convert'?" in capsys.readouterr().err


def test_the_example_of_a_recipe_is_found_by_name_and_trains(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("twelves", "[rlkit]\ntwelves = twelves_example\n", twelves_example=EXAMPLES["recipe"].read_text())
    shutil.copytree(EXAMPLES["recipe"].parent / "recipes", site.folder / "recipes")
    assert main(["recipe", "list"]) == 0
    [listed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("twelves")]
    assert re.match(r"twelves +Additions of numbers up to 6 with the shipped", listed)
    assert listed.endswith("(from rlkit-twelves)")
    assert main(["recipe", "show", "twelves"]) == 0
    assert "max_operand: 6" in capsys.readouterr().out
    assert main(["recipe", "check", "twelves"]) == 0
    assert main(["plugins", "test", "twelves"]) == 0
    assert main(["fit", "--recipe=twelves", "--train.steps=1", "--out=out"]) == 0
    assert len(read_jsonl(Path("out/metrics.jsonl"))) == 1
    assert main(["fit", "--recipe=twelvs"]) == 2
    assert "neither a file nor a known recipe; did you mean 'twelves'?" in capsys.readouterr().err


def test_examples_are_short_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"part", "command", "recipe", "callback", "logger", "optimizer", "schedule"} == set(EXAMPLES)
    for seam, path in EXAMPLES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 40, seam
        assert main(["plugins", "show", seam]) == 0
        assert capsys.readouterr().out == text
    shown = (ROOT / "rlkit" / "docs" / "plugins.md").read_text()
    assert EXAMPLES["part"].read_text().partition('"""\n\n')[2] in shown


def rlkit_help(site: Site, script: str = "") -> str:
    done = subprocess.run(
        (sys.executable, "-c", f"import sys; from rlkit.cli.main import main; main(['--help']); {script}"),
        env={**os.environ, "PYTHONPATH": str(site.folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_help_lists_verbs_of_plugins_without_importing_anything(site: Site) -> None:
    command("hello", "raise SystemExit('imported')", site)
    site.install("shadow", "[rlkit.commands]\nfit = shadow:run\n")
    site.install("other", "[console_scripts]\nnothing = other:run\n")
    (site.folder / "rlkit_broken-1.dist-info").mkdir()
    (site.folder / "rlkit_broken-1.dist-info" / "entry_points.txt").write_bytes(b"[rlkit.commands]\n\xff = x")
    text = rlkit_help(site, "print([m for m in ('importlib.metadata', 'pluggy', 'packaging') if m in sys.modules])")
    assert "\n  hello      from rlkit-hello\n" in text
    assert "shadow" not in text
    assert "nothing" not in text
    assert text.endswith("[]\n")


def test_what_a_verb_returns_is_the_exit_status(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    source = "def run(argv):\n    print(argv)\n    return {'none': None, 'three': 3, 'text': 'done'}[argv[0]]\n"
    command("hello", source, site)
    assert main(["hello", "none", "--x=1"]) == 0
    assert capsys.readouterr().out == "['none', '--x=1']\n"
    assert main(["hello", "three"]) == 3
    assert main(["hello", "text"]) == 1
    error = capsys.readouterr().err
    assert "verb 'hello' of plugin 'rlkit-hello' of rlkit-hello 2.1 returned 'done', expected an exit status" in error


def test_errors_of_a_verb_name_its_plugin(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    command("hello", "def run(argv):\n    raise ValueError('no such moon')\n", site)
    assert main(["hello"]) == 1
    error = capsys.readouterr().err
    assert "the verb 'hello' of plugin 'rlkit-hello' of rlkit-hello 2.1 raised ValueError: no such moon (" in error
    assert ".py, line 2: raise ValueError('no such moon')); --debug shows the traceback" in error
    with pytest.raises(Exception, match="no such moon") as raised:
        main(["hello", "--debug"])
    assert isinstance(raised.value.__cause__, ValueError)
    command("gone", "import left_pad\n", site)
    assert main(["gone"]) == 2
    error = capsys.readouterr().err
    assert (
        "'gone' of plugin 'rlkit-gone' of rlkit-gone 2.1 cannot be loaded: importing it raised ModuleNotFoundError"
        in error
    )


def test_a_verb_of_rlkit_is_never_replaced(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    command("doctor", "def run(argv):\n    raise SystemExit(77)\n", site)
    assert main(["doctor", "--help"]) == 0
    assert "usage: rlkit doctor" in capsys.readouterr().out
    [note] = load_plugins().notes
    assert "plugin 'rlkit-doctor' of rlkit-doctor 2.1 has a verb 'doctor', which is a verb of rlkit" in note
    assert main(["plugins", "test", "rlkit-doctor"]) == 1
    assert "it is rlkit's own verb, which no plugin can replace" in capsys.readouterr().out


def test_a_verb_of_two_plugins_is_refused_with_both_named(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        site.install(name, f"[rlkit.commands]\nhello = {name}:run\n", **{f"verb_{name}": "def run(argv): return 0\n"})
    assert main(["hello"]) == 2
    error = capsys.readouterr().err
    assert (
        "'hello' is offered by plugin 'rlkit-one' of rlkit-one 2.1 and by plugin 'rlkit-two' of rlkit-two 2.1" in error
    )
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "rlkit-one,rlkit-two")
    assert main(["hello"]) == 2
    assert "which RLKIT_DISABLE_PLUGINS disables; unset it" in capsys.readouterr().err
    assert main(["helo"]) == 2
    assert "'helo' is no verb of rlkit; did you mean 'hello'?" in capsys.readouterr().err


def test_a_plugin_made_for_another_rlkit_is_refused_by_name(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("hello", "def run(argv): return 0\n", site, needs="rlkit-fabric>=9,<10")
    assert main(["hello"]) == 2
    error = capsys.readouterr().err
    assert "plugin 'rlkit-hello' of rlkit-hello 2.1 cannot be loaded: it needs rlkit-fabric<10,>=9, but 0." in error
    assert "install versions of rlkit-hello and rlkit-fabric that fit" in error
    assert main(["plugins", "list"]) == 2
    assert "<10,>=9" in capsys.readouterr().out
    assert main(["fit", "--recipe=quickstart"]) == 2
    assert "plugin 'rlkit-hello' of rlkit-hello 2.1 cannot be loaded" in capsys.readouterr().err
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "rlkit-hello")
    assert main(["plugins", "list"]) == 0
    assert main(["recipe", "show", "quickstart"]) == 0


def test_a_plugin_that_states_no_range_of_rlkit_fails_its_test(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    command("hello", "def run(argv): return 0\n", site, needs="rlkit-fabric")
    assert main(["plugins", "test", "rlkit-hello"]) == 1
    assert "state the versions that it is made for: dependencies = " in capsys.readouterr().out


RECIPES = """from pathlib import Path
from rlkit.hooks import hookimpl

@hookimpl
def rlkit_recipes():
    return {value}
"""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Path(__file__).parent / 'nowhere'", "nowhere'), expected a folder of recipes; is it in the wheel?"),
        ("3", "rlkit_recipes returned 3, expected a folder of recipes"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_folder_of_recipes_that_is_none_is_refused(
    value: str, message: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"lost_{abs(hash(value))}"
    site.install("lost", f"[rlkit]\nlost = {module}\n", **{module: RECIPES.format(value=value)})
    assert main(["fit", "--recipe=quickstart"]) == 2
    error = capsys.readouterr().err
    assert "plugin 'lost' of rlkit-lost 2.1 cannot be loaded: " in error
    assert message in error


def test_two_recipes_of_one_name_are_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("mine", "[rlkit]\nmine = mine_recipes\n", mine_recipes=RECIPES.format(value="Path(__file__).parent"))
    (site.folder / "quickstart.yaml").write_text("model: {path: tiny}\n")
    assert main(["fit", "--recipe=quickstart"]) == 2
    expected = "plugins 'builtin' (rlkit-fabric) and 'mine' (rlkit-mine) both offer a recipe 'quickstart'"
    assert expected in capsys.readouterr().err


def test_a_recipe_of_a_plugin_is_data(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It names only what plugins register, and a tag or a module in it is refused as in any other recipe."""
    site.install("evil", "[rlkit]\nevil = evil_recipes\n", evil_recipes=RECIPES.format(value="Path(__file__).parent"))
    (site.folder / "tagged.yaml").write_text("model: !!python/object/apply:os.system ['touch ran']\n")
    (site.folder / "named.yaml").write_text("reward: {class_path: subprocess.run, init_args: {args: [touch, ran]}}\n")
    (site.folder / "blank.yaml").mkdir()
    for name, message in (
        ("tagged", "has the tag 'tag:yaml.org,2002:python/object/apply:os.system', expected plain data"),
        ("named", "no plugin of a package 'subprocess' is installed"),
        ("blank", "cannot be read: Is a directory"),
    ):
        assert main(["recipe", "show", name]) == 2
        assert message in capsys.readouterr().err
    assert main(["recipe", "list"]) == 0
    assert "blank" in capsys.readouterr().out
    assert main(["plugins", "test", "evil"]) == 1
    assert not Path("ran").exists()


CLOSING = """from pathlib import Path
from rlkit.advantages import GRPO
from rlkit.filters import ZeroSignal
from rlkit.hooks import hookimpl
from rlkit.losses import PolicyGradient
from rlkit.rewards import MathReward
from rlkit.tasks import Arithmetic

def closing(base):
    def close(self):
        with Path("closed").open("a") as file:
            print(type(self).__name__, file=file)
        if base is MathReward:
            raise OSError("no such connection")
    return type("Closing" + base.__name__, (base,), {"close": close, "__module__": __name__})

PARTS = [closing(base) for base in (GRPO, ZeroSignal, PolicyGradient, MathReward, Arithmetic)]
globals().update({part.__name__: part for part in PARTS})

@hookimpl
def rlkit_register(register):
    for part in PARTS:
        register(part)
"""


def test_every_part_is_closed_at_the_end_of_a_run(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """One whose `close` raises keeps no other open."""
    site.install("closing", "[rlkit]\nclosing = closing_parts\n", closing_parts=CLOSING)
    named = (
        "advantage=ClosingGRPO",
        "loss=ClosingPolicyGradient",
        "reward=ClosingMathReward",
        "task=ClosingArithmetic",
    )
    options = [f"--{key}" for key in named]
    main(
        [
            "fit",
            f"--recipe={EXAMPLES['recipe'].parent / 'recipes' / 'twelves.yaml'}",
            *options,
            "--rollout.filter=ClosingZeroSignal",
            "--train.steps=1",
            "--out=out",
        ]
    )
    assert Path("closed").read_text().split() == [
        "ClosingMathReward", "ClosingGRPO", "ClosingPolicyGradient", "ClosingArithmetic", "ClosingZeroSignal",
    ]  # fmt: skip
    assert "ClosingMathReward of plugin 'closing' (rlkit-closing 2.1): `close` raised" in capsys.readouterr().out


def use(seam: str, name: str, site: Site, *options: str) -> list[dict[str, float]]:
    """Install the example of a seam as a plugin, train with it, and return the metrics."""
    module = f"{name}_example"
    site.install(name, f"[rlkit]\n{name} = {module}\n", **{module: EXAMPLES[seam].read_text()})
    assert main(["plugins", "test", name]) == 0
    assert main(["fit", "--recipe=quickstart", *FAST, "--validation.samples=0", *options, "--out=out"]) == 0
    return read_jsonl(Path("out/metrics.jsonl"))


def test_the_example_of_a_callback_ends_a_run(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    patience = "[{class_path: EarlyStopping, init_args: {validations: 1}}]"
    rows = use("callback", "patience", site, f"--callbacks={patience}", "--train.steps=9", "--validation.every=1",
               "--validation.limit=1", "--train.lr=1e-9")  # fmt: skip
    assert len(rows) == 1  # no validation was better than that before training
    assert "callback EarlyStopping of plugin 'patience' (rlkit-patience 2.1) ended the training after step 1" in (
        capsys.readouterr().out
    )
    assert Path("out/checkpoints/step-000001").is_dir()


def test_the_example_of_a_logger_logs(site: Site) -> None:
    import sqlite3

    rows = use("logger", "sqlite", site, "--log.loggers=[Sqlite]")
    found = sqlite3.connect("out/metrics.db").execute("SELECT step, value FROM metrics WHERE name = 'reward/mean'")
    assert sorted(found) == [(row["step"], row["reward/mean"]) for row in rows]


def test_the_examples_of_an_optimizer_and_a_schedule_train(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("sd", "[rlkit]\nsd = sd_example\n", sd_example=EXAMPLES["schedule"].read_text())
    schedule = ("--train.schedule=StableDecay", "--train.schedule.decay=1", "--train.lr=1e-5", "--train.warmup_steps=0")
    rows = use("optimizer", "sign", site, "--train.optimizer=Sign", *schedule)
    assert [row["lr"] for row in rows] == [1e-5, 5e-6]
    assert main(["explain", "quickstart", "--train.optimizer=Sign", *schedule]) == 0
    assert "Sign, lr 1e-05 (StableDecay to 0 in the last 100% of the steps, 0 steps of warm-up)" in (
        capsys.readouterr().out
    )
