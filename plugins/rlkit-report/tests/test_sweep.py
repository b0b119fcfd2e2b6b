"""`rlkit sweep`: real runs of each combination, kept, resumed and compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlkit_report.sweep import OPTIONS, SweepRun, _runs, _show, name_of, values_of

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse, split
from rlkit.types import JsonObject
from tests.conftest import read_jsonl

SWEEP = (
    "sweep", "--recipe=quickstart", "--train.prompts_per_step=2", "--rollout.group_size=2", "--train.steps=150",
    "--validation.limit=4", "--validation.samples=0", "--out=sweep", "--json",
)  # fmt: skip
COMPLETE, SHORT = (Path(f"sweep/rollout.max_prompt_tokens={limit}") for limit in (64, 5))


@pytest.mark.slow
def test_runs_are_interrupted_resumed_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = "--rollout.max_prompt_tokens=64,5"  # no prompt has 5 tokens: the data are refused in the run's process
    command = (sys.executable, "-m", "rlkit", *SWEEP, limits)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        metrics = COMPLETE / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        interrupted = json.loads(process.communicate()[0])
    assert process.returncode == 130
    assert [run["status"] for run in interrupted] == ["interrupted", "not started"]
    steps = len(read_jsonl(metrics))
    assert 0 < steps < 150
    assert (COMPLETE / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert not SHORT.exists()

    capsys.readouterr()
    assert main([*SWEEP, limits]) == 1
    complete, failed = json.loads(capsys.readouterr().out)
    assert complete["options"] == {"rollout.max_prompt_tokens": "64"}
    assert (complete["status"], complete["steps"], complete["error"]) == ("ok", 150, None)
    assert [row["step"] for row in read_jsonl(metrics)] == [*range(1, 151)]
    after = complete["validation"]["after"]
    assert after["accuracy_low"] <= after["accuracy"] <= after["accuracy_high"]
    assert (failed["status"], failed["steps"]) == ("failed", None)
    assert "tokens, but rollout.max_prompt_tokens is 5; set it higher" in failed["error"]

    result = (COMPLETE / "result.json").stat().st_mtime_ns
    assert main([*SWEEP[:-1], "--rollout.max_prompt_tokens=0,64"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (COMPLETE / "result.json").stat().st_mtime_ns == result
    assert [line.split()[0] for line in lines if " 150 " in line or "failed" in line] == ["64", "0"]


def test_a_run_is_kept_if_it_has_ended_well_with_this_recipe(tmp_path: Path) -> None:
    result, recipe = tmp_path / "result.json", tmp_path / "recipe.yaml"

    def status() -> str:
        sweep_run = SweepRun({}, ["--recipe=quickstart", "--train.lr=1e-5"], tmp_path)
        sweep_run.check()
        assert (sweep_run.result == {}) == (sweep_run.status != "ok")
        return sweep_run.status

    assert status() == "not started"
    recipe.write_text(parse("fit", ["--recipe=quickstart", "--train.lr=1e-5"]).yaml)
    for ended, expected in (("ok", "ok"), ("interrupted", "not started"), ("failed", "not started")):
        result.write_text(json.dumps({"status": ended, "steps": 3}))
        assert status() == expected
    result.write_text('{"status": "ok"}')
    recipe.write_text(parse("fit", ["--recipe=quickstart", "--train.lr=2e-5"]).yaml)
    assert status() == "not started"


def test_runs_without_the_watched_metric_are_compared_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that returns a number has no accuracy; the run that failed has no validation."""
    ends: list[JsonObject] = [
        {"validation": {"before": {"reward": 0.6}, "after": {"reward": value, "reward_p_start": 0.5}}}
        for value in (0.05, 0.4)
    ]
    runs = [SweepRun({"train.lr": str(i)}, [], tmp_path, result=end) for i, end in enumerate([{}, *ends])]
    _show(runs, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "reward before" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["2", "1", "0"]
    _show(runs[:1], as_json=False)
    assert "accuracy before" in capsys.readouterr().out


def test_runs_without_validation_are_ordered_by_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run that earned 0 in all samples says so; the one that failed is last."""
    runs = [SweepRun({"train.lr": "9"}, [], tmp_path, status="failed", error="no disk")]
    for rate, mean in (("1", 0.0), ("2", 0.75)):
        last = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "steps": 20}
        result: JsonObject = {"steps": 40, "training_reward": {"first": {**last, "low": None}, "last": last}}
        runs.append(SweepRun({"train.lr": rate}, [], tmp_path, status="ok", result=result))
    runs[1].result["diagnosis"] = "reward 0 in all 9 samples of 40 steps, so there is nothing to learn: read them"
    _show(runs, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "training reward" in lines[0]
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == ["2", "1", "9"]
    assert "0.750 (0.65-0.85)" in " ".join(lines)
    _show(runs, as_json=True)
    assert json.loads(capsys.readouterr().out)[1]["diagnosis"].startswith("reward 0 in all 9 samples")


def test_a_run_that_had_nothing_to_learn_from_says_so(tmp_path: Path) -> None:
    sweep_run = SweepRun({}, [], tmp_path, status="ok", result={"diagnosis": "reward 0 in all 9 samples: read them"})
    assert sweep_run.status_text == "ok: reward 0 in all 9 samples"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1, 2", ["0", "1", "2"]),
        ("7", ["7"]),
        ("0,1,0", ["0", "1"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ('{a: 1, b: 2},"x,y",don\'t,z', ["{a: 1, b: 2}", '"x,y"', "don't", "z"]),
    ],
)
def test_commas_separate_values(text: str, values: list[str]) -> None:
    assert values_of("key", text) == values


def test_an_empty_value_is_refused() -> None:
    with pytest.raises(RecipeError, match="--train.seed is '0,', expected values between its commas"):
        values_of("train.seed", "0,")


def test_a_folder_is_named_by_the_options_that_differ() -> None:
    assert name_of({"advantage.eps": "1e-4", "train.seed": "0"}) == "advantage.eps=1e-4,train.seed=0"
    names = [name_of({"model.path": path}) for path in ("a/b", "a:b", "x" * 300, "x" * 301)]
    assert len(set(names)) == 4  # digests tell apart what would be the same names
    assert names[0].startswith("model.path=a-b-")
    assert not any(len(name) > 160 or "/" in name for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--train.seed=0,1",), "rlkit sweep needs --out FOLDER, the folder of its runs"),
        (("--train.seed=0", "--out=x"), "no option with several values, expected one such as --train.seed=0,1"),
        (("--train.sede=0,1", "--out=x"), "unknown option 'train.sede'; did you mean 'train.seed'?"),
        (("stray", "--train.seed=0,1", "--out=x"), "'stray' is no option"),
    ],
)
def test_mistakes_end_before_the_first_run(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--recipe=quickstart", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    assert "usage: rlkit sweep --recipe NAME" in capsys.readouterr().out
    assert main(["sweep"]) == 2


def test_folders_and_tables_have_no_credentials(tmp_path: Path) -> None:
    key = "agent.environment.MODE"
    first, second = (name_of({key: value, "train.lr": "1"}) for value in ("hunter2", "hunter3"))
    assert "hunter" not in first + second
    assert first != second
    words = ["--recipe=quickstart", f"--{key}=hunter2,hunter3", f"--out={tmp_path}"]
    assert [sweep_run.options for sweep_run in _runs(split(words, OPTIONS))] == [{key: "***"}, {key: "***"}]
