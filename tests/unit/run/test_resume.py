"""What a resumed run may change, and what a checkpoint must have for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.cli.main import main
from rlkit.models.checkpoint_schema import Numbers, RunState
from rlkit.models.checkpoints import CheckpointRef
from rlkit.models.store import Store
from rlkit.recipe import GroupReplay, KLReward, Rollout, Shaping
from rlkit.records.folder import recipe_data
from rlkit.run.checkpoint.resume import compare, rollout_differences
from rlkit.run.checkpoint.state import numbers, restore
from rlkit.train.credit import RewardTransforms
from tests.conftest import FAST

RECIPE: dict[str, Any] = {
    "model": {"path": "tiny", "lora": {"rank": 4}},
    "train": {"steps": 3, "lr": 0.1, "schedule": {"class_path": "rlkit.schedules.Constant"}, "ema": None},
    "save": {"every": 1},
}


def checkpoint(tmp_path: Path, saved: Numbers | None = None) -> CheckpointRef:
    state = RunState(step=3, recipe=RECIPE, numbers=saved or Numbers(version=3))
    return CheckpointRef(Store(str(tmp_path)), "step-000003", state)


def changed(**changes: dict[str, Any]) -> str:
    return yaml.safe_dump(RECIPE | {key: RECIPE.get(key, {}) | section for key, section in changes.items()})


def test_nothing_has_changed_in_the_same_recipe(tmp_path: Path) -> None:
    assert compare(checkpoint(tmp_path), changed(), force=False) == []


def test_options_that_an_older_recipe_lacks_are_off(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4, "use_dora": False}}
    assert compare(checkpoint(tmp_path), changed(model=lora), force=False) == []
    with pytest.raises(RecipeError, match=r"model\.lora\.use_dora: None in the checkpoint, True now"):
        compare(checkpoint(tmp_path), changed(model={"lora": {"rank": 4, "use_dora": True}}), force=True)


def test_what_changes_no_learning_is_only_shown(tmp_path: Path) -> None:
    recipe = changed(train={"steps": 9}, save={"every": 5}, log={"rollouts": {"every": 7}})
    assert compare(checkpoint(tmp_path), recipe, force=False) == [
        "log.rollouts.every: None in the checkpoint, 7 now",
        "save.every: 1 in the checkpoint, 5 now",
        "train.steps: 3 in the checkpoint, 9 now",
    ]


def test_the_learning_rate_and_the_number_of_steps_may_change(tmp_path: Path) -> None:
    """With a schedule that depends on the number of steps, the message says so."""
    section = {"lr": 0.2, "steps": 9, "schedule": {"class_path": "rlkit.schedules.Cosine"}}
    assert compare(checkpoint(tmp_path), changed(train=section), force=False) == [
        "train.lr: 0.1 in the checkpoint, 0.2 now; it holds from the next step on",
        "train.schedule.class_path: 'rlkit.schedules.Constant' in the checkpoint, 'rlkit.schedules.Cosine' now; "
        "it holds from the next step on",
        "train.steps: 3 in the checkpoint, 9 now; the next step has the learning rate of a run of 9 steps",
    ]


def test_passes_over_the_data_may_change(tmp_path: Path) -> None:
    section = {"steps": None, "data_epochs": 2.0}
    assert compare(checkpoint(tmp_path), changed(train=section), force=False) == [
        "train.data_epochs: None in the checkpoint, 2.0 now",
        "train.steps: 3 in the checkpoint, None now",
    ]
    decaying = {**section, "warmup_ratio": 0.1}
    lines = compare(checkpoint(tmp_path), changed(train=decaying), force=True)
    assert lines[0].endswith("2.0 now; the next step has the learning rate of a run of 2.0 passes over the data")


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = [*FAST, "--train.steps=1", "--validation=null", f"--out={out}"]
    assert main(["fit", "--recipe=quickstart", *options]) == 0
    assert main(["fit", f"--resume={out}"]) == 0
    assert "nothing is left to train: to go on, set train.steps above 1" in capsys.readouterr().out
    shutil.rmtree(out / "checkpoints")  # as a run that was killed before its first checkpoint
    assert main(["fit", f"--resume={out}"]) == 1
    assert f"the run in '{out}' ended before its first complete checkpoint (save.every)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_code_of_its_own_goes_on_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(text):\n    return float(len(text))\n")
    reward = ("--reward=PythonReward", "--reward.function=mine.py:score", "--reward.allow_code=true")
    options = [*FAST, *reward, "--train.steps=1", "--validation=null", "--out=run"]
    assert main(["fit", "--recipe=quickstart", *options]) == 0
    assert main(["fit", "--resume=run", "--train.steps=2"]) == 2
    assert "if you trust it, add --allow-code, or name it yourself: --recipe run/recipe.yaml" in capsys.readouterr().err
    assert main(["fit", "--resume=run", "--train.steps=2", "--allow-code"]) == 0
    assert main(["fit", "--resume=run", "--train.steps=3", "--recipe=run/recipe.yaml"]) == 0


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_elsewhere_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own folder comes first: an earlier part of the run may have saved there."""
    monkeypatch.chdir(tmp_path)
    options = [*FAST, "--train.steps=1", "--validation=null", "--out=run"]
    assert main(["fit", "--recipe=quickstart", *options, "--save.folder=elsewhere"]) == 0
    resume = ["fit", "--resume=run", "--train.steps=2"]
    assert main(resume) == 2
    assert "or pass --save.folder=... on the command line" in capsys.readouterr().err
    assert main([*resume, "--save.folder=mistyped"]) == 1
    assert "there is no complete checkpoint at 'mistyped'" in capsys.readouterr().err
    assert main([*resume, "--save.folder=elsewhere"]) == 0
    assert "resumed from elsewhere/step-000001: step 1 is done" in capsys.readouterr().out
    Path("elsewhere").rename("run/checkpoints")
    assert main([*resume, "--save.folder=new"]) == 0
    assert "resumed from run/checkpoints/step-000002" in capsys.readouterr().out


@pytest.mark.parametrize("section", [{"warmup_ratio": 0.1}, {"epochs": 2}])
def test_what_changes_the_learning_needs_force(tmp_path: Path, section: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=rf"train.{next(iter(section))}: .*(\n.*)*alters.*add --force"):
        compare(checkpoint(tmp_path), changed(train=section), force=False)
    assert len(compare(checkpoint(tmp_path), changed(train=section), force=True)) == len(section)


@pytest.mark.parametrize(
    "sections", [{"model": {"path": "other"}}, {"model": {"lora": {"rank": 8}}}, {"critic": {"lr": 1.0}},
                 {"train": {"ema": 0.9}}, {"train": {"optimizer": {"class_path": "rlkit.optimizers.Muon"}}}]
)  # fmt: skip
def test_what_does_not_fit_the_state_is_refused_by_force_too(tmp_path: Path, sections: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="the recipe does not fit .*step-000003"):
        compare(checkpoint(tmp_path), changed(**sections), force=True)


def transforms(coef: float = 0.5, count: float = 2.0) -> RewardTransforms:
    restored = RewardTransforms(Shaping(), KLReward())
    assert restored.shaper is not None
    assert restored.kl_penalty is not None
    restored.shaper.count, restored.shaper.mean, restored.shaper.squares = count, 1.5, 0.25
    restored.kl_penalty.coef = coef
    return restored


def test_numbers_come_back(tmp_path: Path) -> None:
    saved = numbers(7, transforms())
    assert saved == Numbers(version=7, kl_coef=0.5, shaper=(2.0, 1.5, 0.25))
    later = transforms(coef=9.0, count=0.0)
    restore(later, checkpoint(tmp_path, Numbers.model_validate_json(saved.model_dump_json())))
    assert numbers(7, later) == saved


@pytest.mark.parametrize("name", ["kl_coef", "shaper"])
def test_a_state_without_what_the_run_needs_is_refused(tmp_path: Path, name: str) -> None:
    saved = numbers(7, transforms())
    setattr(saved, name, None)
    with pytest.raises(CheckpointError, match=f"its state has no {name}, which its recipe needs"):
        restore(transforms(), checkpoint(tmp_path, saved))


@pytest.mark.parametrize(
    ("rollout", "reasons"),
    [
        (Rollout(), []),
        (Rollout(max_staleness=2, lead=0), []),
        (Rollout(max_staleness=2, lead=0, replay=GroupReplay(8)), ["rollout.replay starts empty"]),
        (
            Rollout(max_staleness=2, lead=1, replay=GroupReplay(8)),
            [
                "groups that were sampled ahead are sampled again, with the checkpoint's weights",
                "rollout.replay starts empty",
            ],
        ),
    ],
)
def test_what_a_checkpoint_lacks_of_rollouts_is_said(rollout: Rollout, reasons: list[str]) -> None:
    assert rollout_differences(rollout) == reasons


def test_a_recipe_is_kept_without_aliases_and_what_json_lacks() -> None:
    text = "a: &x [1, 2]\nb: *x\nc: .inf\nd: 2024-01-01\n1: one\n"
    assert recipe_data(text) == {"a": [1, 2], "b": [1, 2], "c": "Infinity", "d": "2024-01-01", "1": "one"}
