"""What the command line answers: all slips at once, parts that are not there, help, and the metrics of a check."""

from __future__ import annotations

import re
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_authors import plugins
from rlkit_inspect import doctor

from rlkit import commands, hookimpl
from rlkit.base import installed
from rlkit.base.errors import RecipeError
from rlkit.base.installed import Plugin
from rlkit.cli.display import comparison
from rlkit.cli.main import main
from rlkit.recipe import Recipe
from rlkit.recipe.parsing.help import SECTIONS
from rlkit.recipe.parsing.suggest import PACKAGES, nearest
from rlkit.registry import Registry, load_plugins
from rlkit.rewards import MathReward
from tests.conftest import ROOT, FakeDistribution


def refusal(*argv: str) -> str:
    with pytest.raises(RecipeError) as refused:
        commands.parse("fit", argv)
    return str(refused.value)


def test_all_slips_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "train: {lr: fast, stepz: 3}\nreward: {class_path: Composite, init_args: {rewards: {a: Maths}}}\nmodle: {}\n"
    )
    said = refusal(
        "quickstart", f"--recipe={tmp_path / 'bad.yaml'}", "--fabric.devices=none", "train.steps=1", "--save"
    )
    assert [line.partition(" ")[0] for line in said.splitlines()] == [
        "'train.steps=1'", "--save", "train.lr", "unknown", "reward.rewards.a", "unknown", "fabric.devices",
    ]  # fmt: skip


def test_what_follows_from_a_slip_is_not_reported() -> None:
    assert refusal("quickstart", "--reward=Math", "--reward.depth=3").count("\n") == 0
    assert refusal("quickstart", "--train=3", "--train.stepz=3").count("\n") == 0


def test_a_slip_that_is_put_right_later_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("train: {lr: fast}\n")
    assert "train.lr is 'fast'" in refusal("quickstart", f"--recipe={tmp_path / 'bad.yaml'}", "--train.lr=1e-5")


@pytest.mark.parametrize(
    ("recipe", "option", "nearest"),
    [
        ("quickstart", "--lr=1", "'train.lr'?"),
        ("ppo_gsm8k", "--lr=1", "'critic.lr' or 'train.lr'?"),
        ("quickstart", "--rank=1", "'model.lora.rank'?"),
        ("quickstart", "--rollout.temperature=1", "'rollout.sampling.temperature'?"),
        ("quickstart", "--max_tokens=1", "'rollout.sampling.max_tokens'?"),
        ("quickstart", "--model.pat=1", "'model.path'?"),
        ("quickstart", "--rollout.engine.max_row=1", "'max_rows'?"),
        ("quickstart", "--trian.steps=1", "'train.steps'?"),
    ],
)
def test_the_nearest_option_is_one_of_this_recipe(recipe: str, option: str, nearest: str) -> None:
    assert refusal(recipe, option).endswith(f"did you mean {nearest}")


def test_no_more_than_three_near_options_are_named() -> None:
    keys = [f"{section}.rate" for section in "abcd"]
    assert nearest("rate", keys, keys) == "did you mean 'a.rate' or 'b.rate' or 'c.rate'?"
    assert nearest("x.rate", keys, keys[1:2]) == "did you mean 'b.rate'?"  # the one that this recipe has


def test_an_option_is_a_word_after_its_name_or_an_equals_sign() -> None:
    one = commands.parse("fit", ["quickstart", "--train.lr", "0.5", "--advantage", "RLOO", "--save.every=3"])
    other = commands.parse("fit", ["--train.lr=0.5", "--save.every", "3", "--recipe", "quickstart", "--advantage=RLOO"])
    assert one.yaml == other.yaml
    assert one.name == other.name == "quickstart"


def test_a_new_class_has_its_defaults_and_the_same_keeps_options(tmp_path: Path) -> None:
    def loss(*options: str) -> dict[str, Any]:
        return vars(commands.parse("fit", ["quickstart", "--loss.clip_low=0.1", *options]).recipe.loss)

    assert loss("--loss=ClipLoss", "--loss.clip_high=0.3") == {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": None}
    assert loss("--loss=GSPO")["clip_low"] != 0.1
    (tmp_path / "more.yaml").write_text("loss: {init_args: {clip_high: 0.4}}\n")
    assert loss(f"--recipe={tmp_path / 'more.yaml'}") == {"clip_low": 0.1, "clip_high": 0.4, "clip_dual": None}


def test_parts_of_plugins_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distribution is not installed, its plugin is disabled, or does not register the class."""
    dist = FakeDistribution("rlkit-length-reward", "0.1.0")
    entry = SimpleNamespace(name="length", value="rlkit_length_reward", dist=dist, load=pytest.fail)
    monkeypatch.setattr(installed, "entry_points", lambda group: [])
    assert (
        "LengthReward', which rlkit-length-reward offers, which is not installed: pip install "
        "./plugins/rlkit-length-reward in a checkout" in (refusal("quickstart", "--reward=LengthReward"))
    )
    path = "--reward=rlkit_length_reward.LengthReward"
    assert "no plugin of a package 'rlkit_length_reward' is installed" in refusal("quickstart", path)
    monkeypatch.setattr(installed, "entry_points", lambda group: [entry] if group == "rlkit" else [])
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "length")
    assert "the plugin 'length' offers, but RLKIT_DISABLE_PLUGINS disables it; unset it" in refusal(
        "quickstart", "--reward=LengthReward"
    )
    assert "of the plugin 'length', which RLKIT_DISABLE_PLUGINS disables; unset it" in refusal("quickstart", path)
    assert "disabled by RLKIT_DISABLE_PLUGINS: length" in refusal("quickstart", "--reward=Zzz")
    monkeypatch.setattr(
        commands, "load_plugins", lambda: load_plugins([("mine", sys.modules[__name__])], entry_points=False)
    )
    unregistered = f"--reward={__name__}.Unregistered"
    assert "which the plugin 'mine' does not register; known rewards: " in refusal("quickstart", unregistered)
    assert "argument 'depth' of NoType of tests has no type; annotate it (" in refusal("quickstart", "--reward=NoType")


class Unregistered(MathReward):
    """A reward that no hook offers."""


class NoType(MathReward):
    """A reward whose author left out a type."""

    def __init__(self, depth) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.depth = depth


@hookimpl
def rlkit_register(register: Any) -> None:
    """Offer it: this module is a plugin."""
    register(NoType)


def test_the_parts_of_the_repository_s_plugins_are_known() -> None:
    offered = {}
    for folder in (ROOT / "plugins").iterdir():
        if (folder / "pyproject.toml").is_file():
            name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
            text = "\n".join(path.read_text() for path in folder.glob("src/*/__init__.py"))
            offered |= {line.split("(")[1].rstrip(")"): name for line in text.splitlines() if "  register(" in line}
    assert offered == PACKAGES


def printed_help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *argv])
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("verb", ["fit", "validate", "generate", "data show", "reward try", "recipe check", "explain"])
def test_help_fits_a_screen(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        main([*verb.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120


def test_help_names_every_section_once() -> None:
    names = [name for section_names in SECTIONS.values() for name in section_names]
    assert sorted(names) == sorted(field.name for field in fields(Recipe))


def test_help_of_a_section_follows_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_help(capsys, "--help", "train")
    assert "--train.lr" in text
    assert "--model.path" not in text
    assert text == printed_help(capsys, "--train.help")


def test_help_asks_for_nothing_that_a_recipe_gives(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_help(capsys, "--help-all")
    assert "required" not in text
    assert "configuration file" not in text
    assert "--recipe" in text
    assert "--resume" in text
    assert "--fabric.strategy" in text


def test_help_of_parts_and_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--reward.max_tokens MAX_TOKENS The length at which" in (
        text := printed_help(capsys, "--reward.help=Overlong")
    )
    assert "required" in text  # which the class itself asks for
    assert "--help" not in text  # which is the command's, and shows all options
    assert "--model.lora.alpha" in printed_help(capsys, "quickstart", "--model.lora.help")
    assert "--fabric.strategy.tensor_parallel" in printed_help(capsys, "--fabric.strategy.help")
    assert "--tools.bonus" in printed_help(capsys, "--tools.help", "Calculator")


def test_a_check_plans_with_the_ranks_that_share_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks, of which pairs share each matrix, are two for the data and four for the weights."""
    four = ("--fabric.accelerator=cpu", "--fabric.devices=4", "--train.prompts_per_step=5")
    weights = {}
    for strategy in ("ddp", "FSDP2"):
        tensor = ("--fabric.strategy.tensor_parallel=2", "--rollout.engine=SGLangServer") if strategy == "FSDP2" else ()
        assert main(["recipe", "check", "quickstart", *four, f"--fabric.strategy={strategy}", *tensor]) == 0
        text = capsys.readouterr().out
        assert f"{2 if tensor else 4} ranks: " in text
        [size] = re.findall(r"weights and optimizer +│ +([\d.]+)", text)
        weights[strategy] = float(size)
    assert weights["ddp"] == pytest.approx(4 * weights["FSDP2"], abs=2)


def test_a_check_calls_rewards_that_hold_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", "quick_dapo"]) == 0
    text = capsys.readouterr().out
    assert "warning" not in text
    assert "reward: 1 for the reference answer " in text
    router = ["--reward=Router", "--reward.rewards={a: MathReward}", "--reward.default=a"]
    assert main(["recipe", "check", "quickstart", *router]) == 0
    assert "reward: 1 for the reference answer " in capsys.readouterr().out
    assert main(["recipe", "check", "quickstart", "--reward=ModelReward", "--reward.path=nowhere"]) == 0
    assert "reward: not tried, since it loads nowhere; add --deep to try it" in capsys.readouterr().out


def test_what_export_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for argv, said in (
        (["--checkpoint=a", f"--out={tmp_path / 'full'}"], "choose a new folder"),
        (
            ["--checkpoint=a", f"--out={tmp_path / 'new'}", "--merge"],
            "unknown option '--merge'; did you mean '--merge-lora'?",
        ),
        (["--out=b"], "--checkpoint"),
    ):
        assert main(["export", *argv]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_listings_show_what_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = load_plugins(entry_points=False)
    registry = Registry(
        known.parts, plugins=[*known.plugins, Plugin("sick", "rlkit-sick", "1.2", "sick", error="it [/sneezed]")]
    )
    for module, argv in ((plugins, ["plugins", "list"]), (doctor, ["doctor"])):
        monkeypatch.setattr(module, "load_plugins", lambda: registry)
        assert main(argv) == 2
        text = capsys.readouterr().out
        assert "BROKEN: it [/sneezed]" in text
        assert "rlkit-sick" in text
        assert "GRPO" in text


def test_a_comparison_leaves_out_failures_that_did_not_happen() -> None:
    before = {"accuracy": 0.5, "failed": 0.0, "unscored": 0.0, "old": 1.0}
    table = comparison(before, {"accuracy": 0.75, "failed": 2.0, "unscored": 0.0})
    columns = [list(map(str, column.cells)) for column in table.columns]
    assert columns == [["accuracy", "failed", "old"], ["0.500", "0.000", "1.000"], ["0.750", "2.000", "-"]]
