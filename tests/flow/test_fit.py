"""`rlkit fit` from end to end: what it leaves behind. That it learns, `.ci/run` shows by README's first command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.cli.main import main
from rlkit.testing import save_random_model
from tests.conftest import FAST, read_jsonl

TIMES = ("time/", "memory/")


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def metrics(out: Path) -> list[dict[str, float]]:
    """Return a run's metrics, those that depend on the clock left out."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_jsonl(out / "metrics.jsonl")]


def rows_of(out: Path, step: int) -> list[dict[str, Any]]:
    return read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz")


def fit(out: Path, *options: str, recipe: str = "quickstart") -> int:
    return main(["fit", "--recipe", recipe, *FAST, *options, "--out", str(out)])


def test_a_run_folder_is_complete_and_can_be_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fit(out, "--log.rollouts.limit=8") == 0
    listed = {p.name for p in out.iterdir()}
    assert listed == {
        "recipe.yaml", "environment.json", "metrics.jsonl", "rollouts", "final", "result.json", "checkpoints", "lock",
    }  # fmt: skip
    assert yaml.safe_load((out / "recipe.yaml").read_text())["advantage"]["class_path"] == "rlkit.advantages.GRPO"
    environment = json.loads((out / "environment.json").read_text())
    assert {"python", "packages", "plugins", "command", "git_sha"} <= set(environment)
    rows = rows_of(out, 1)
    assert len(rows) == 16
    row = rows[0]
    assert len(row["tokens"]) == len(row["mask"]) == len(row["logps"]) == len(row["versions"])
    assert {"text", "reward", "components", "messages", "answer", "stop"} <= set(row)
    assert {v for v, m in zip(row["versions"], row["mask"], strict=True) if m} == {0}
    exact, read_only = ([x for row in rows_of(out, step) for x in row["logps"]] for step in (1, 2))
    assert any(round(x, 5) != x for x in exact)  # step 1 can be learned from again
    assert len(rows_of(out, 2)) == 8
    assert all(round(x, 5) == x for x in read_only)
    assert {p.name for p in (out / "rollouts").iterdir()} == {
        "step-00001.jsonl.gz", "step-00002.jsonl.gz", "validation-before.jsonl.gz", "validation-after.jsonl.gz",
        "validation-before.parquet", "validation-after.parquet",
    }  # fmt: skip
    again = tmp_path / "again"
    assert main(["fit", "--recipe", str(out / "recipe.yaml"), "--out", str(again)]) == 0
    assert metrics(again) == metrics(out)
    assert result(again)["validation"] == result(out)["validation"]


@pytest.mark.slow
def test_gsm8k_with_the_tiny_model(tmp_path: Path, gsm8k_like: Path) -> None:
    # the second step spans two epochs of twelve problems
    out = tmp_path / "out"
    options = (
        "--model.path=tiny", f"--task.path={gsm8k_like}", "--fabric.precision=32-true", "--train.prompts_per_step=8",
        "--rollout.sampling.max_tokens=24", "--fabric.accelerator=cpu",
    )  # fmt: skip
    assert fit(out, *options, recipe="grpo_gsm8k") == 0
    first, second = metrics(out)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    assert second["policy/kl_ref"] >= 0
    assert max(first["mismatch/max"], second["mismatch/max"]) < 1e-4
    assert first["rollout/length_max"] <= 24


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--train.minibatches=2", "--train.epochs=2"), ("--train.max_tokens_per_micro_batch=64",)]
)
def test_mini_batches_epochs_and_micro_batches(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert fit(tmp_path / "out", *options, "--train.entropy_coef=0.001", "--train.weight_decay=0.1") == 0
    for row in metrics(tmp_path / "out"):
        assert row["grad_norm"] > 0
        assert row["mismatch/max"] < 1e-4
    if "--train.minibatches=2" in options:  # later optimizer steps are off-policy
        assert abs(row["policy/kl_old"]) > 0


def test_slower_ways_are_named_once_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of decoding, a model with a sliding window; of learning, one whose attention reads plain masks."""
    model = save_random_model(tmp_path / "model", "mistral", sliding_window=64)
    reference, short = "--kl_loss.coef=0.1", ("--train.steps=1", "--validation=null", "--rollout.sampling.max_tokens=8")
    assert fit(tmp_path / "a", f"--model.path={model}", "--model.attention=eager", reference, *short) == 0
    [warning] = json.loads((tmp_path / "a" / "result.json").read_text())["warnings"]
    assert re.match("warning: TorchEngine decodes through the modules of Mistral.*: it attends in a sliding", warning)
    why = "rows are padded instead of packed, which is slower, for: policy, reference; its attention is eager"
    assert capsys.readouterr().out.count(why) == 1
    assert fit(tmp_path / "b", *short) == 0
    assert "padded" not in capsys.readouterr().out
    packed, fused = ([metrics(tmp_path / run)[0][name] for run in "ab"] for name in ("update/packed", "engine/fused"))
    assert packed == fused == [0, 1]


@pytest.mark.slow
def test_validation_while_training(tmp_path: Path) -> None:
    assert fit(tmp_path / "out", "--validation.every=1", "--train.steps=3") == 0
    rows = metrics(tmp_path / "out")
    assert ["validation/accuracy" in row for row in rows] == [True, True, True]
    after = json.loads((tmp_path / "out" / "result.json").read_text())["validation"]["after"]
    last = {name[11:]: x for name, x in rows[-1].items() if name.startswith("validation/")}  # with fewer digits
    assert after == pytest.approx(last)
    names = {path.name for path in (tmp_path / "out" / "rollouts").glob("validation-*.jsonl.gz")}
    assert names == {f"validation-{when}.jsonl.gz" for when in ("before", "00001", "00002", "after")}


def test_bfloat16_autocast_keeps_engine_and_trainer_close(tmp_path: Path) -> None:
    assert fit(tmp_path / "out", "--fabric.precision=bf16-mixed", "--train.steps=1") == 0
    [row] = metrics(tmp_path / "out")
    assert 1e-4 < row["mismatch/max"] < 0.2  # bfloat16 has three digits
    assert row["mismatch/mean"] < 0.01
    assert row["mismatch/k3"] < 2e-4


@pytest.mark.slow
def test_validate_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--recipe", "quickstart", "--json", "--validation.limit=50"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert 0.2 < metrics["sampled_accuracy"] < 0.6
    assert main(["generate", "--recipe", "quickstart", "--prompt", "2 + 3 = ?"]) == 0
    assert "2 + 3 = ?<|im_end|>\n<|im_start|>assistant\n#### " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task=Jsonl", "--task.path=no.jsonl", "--task.validation_path={empty}"), "task.path is 'no.jsonl'"),
        (("--task=Jsonl", "--task.path={empty}", "--task.validation_path={empty}"), "has no train rows"),
        (("--task=Jsonl", "--task.path={long}", "--task.validation_path={long}"), "has 50"),
        (("--task=Nope",), "task is 'Nope', which no plugin offers"),
        (("--model.path=nobody/nothing",), "model.path is 'nobody/nothing', which cannot be loaded"),
    ],
)
def test_bad_input_is_one_message_before_a_model_is_loaded(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.train.models.load_policy", lambda _: pytest.fail("a model was loaded"))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 5000, "answer": "1"}) + "\n")
    filled = [o.format(empty=tmp_path / "empty.jsonl", long=tmp_path / "long.jsonl") for o in options]
    assert main(["fit", "--recipe", "quickstart", *filled, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
