"""The script that runs everything for GPUs, as far as it goes without one."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from rlkit.testing import save_random_model
from tests.conftest import ROOT
from tests.gpu.beside import main as beside
from tests.gpu.beside import summary as summary_beside
from tests.gpu.beside import wrong as wrong_beside
from tests.gpu.profile import main as profile
from tests.gpu.trial import KEY_BIAS, wrong
from tests.gpu.trial import main as trial

SCRIPT = ("bash", str(ROOT / "tests" / "gpu" / "all.sh"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*SCRIPT, *arguments), capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def fake_python(folder: Path, body: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_what_would_be_run_is_listed(tmp_path: Path) -> None:
    done = run("--dry-run", str(tmp_path))
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:3] == ["model", "alone", "lora-offload"]  # what may fail first
    assert {"tests-kernels", "step-trl", "decode", "fsdp2", "sglang-steps", "sglang-lora", "sampling-sglang"} <= set(
        names
    )
    assert (tmp_path / "table.txt").read_text().splitlines() == done.stdout.splitlines()[:-1]


@pytest.mark.parametrize("group", ["core", "tests", "speed", "sglang", "sglang-more", "sglang-speed"])
def test_a_group_ends_within_nine_minutes(group: str, tmp_path: Path) -> None:
    rows = run("--dry-run", group, str(tmp_path)).stdout.splitlines()[:-1]
    limits = [int(seconds) for row in rows for seconds in re.findall(r"not run +(\d+) s ", row)]
    assert 2 <= len(limits) <= len(rows)
    assert sum(limits) <= 540


def test_modules_beside_adapters_are_as_in_the_recipe(tmp_path: Path) -> None:
    [row] = [row for row in run("--dry-run", "core", str(tmp_path)).stdout.splitlines() if "lora-offload" in row]
    assert row.startswith("lora-offload")
    script = Path(SCRIPT[1]).read_text()
    options = dict(re.findall(r"--([\w.]+)=(\S+?)[\s)]", script[script.index("lora=(") : script.index("beside=(")]))
    recipe = yaml.safe_load((ROOT / "recipes" / "grpo_gsm8k_lora_7b.yaml").read_text())
    expected = {f"model.lora.{name}": value for name, value in recipe["model"]["lora"].items()}
    expected |= {"model.dtype": recipe["model"]["dtype"], "kl_loss.coef": recipe["kl_loss"]["coef"]}
    expected |= {"train.checkpoint_activations": recipe["train"]["checkpoint_activations"]}
    expected["train.offload_during_rollout"] = True
    assert {name: yaml.safe_load(value) for name, value in options.items()} == expected


@pytest.mark.parametrize("checks", ["ok", "FAILED"])
def test_what_matters_most_comes_first(tmp_path: Path, checks: str) -> None:
    """Its folder gets few and small files, whatever became of the checks."""
    body = f"""case "$*" in
        *cuda.device_count*) echo 1 ;;
        *"gpu.bench step"*) echo trl is not installed; exit 3 ;;
        *fsdp2*) echo fine; exit {int(checks == "FAILED")} ;;
        *) echo fine ;;
    esac"""
    script, folder = str(ROOT / "tests" / "gpu" / "first.sh"), tmp_path / "out"
    environment = {**os.environ, "PYTHON": fake_python(tmp_path, body)}
    for options, limit in (("--dry-run",), "not run"), ((), "ok"):
        done = subprocess.run(
            ("bash", script, *options, str(folder)), capture_output=True, text=True, check=False, env=environment
        )
        table = {line.split()[0]: line for line in (folder / "table.txt").read_text().splitlines()}
        names = ("model", "tests-kernels", "tests-memory", "alone", "lora-offload", "profile-steps", "profile-passes")
        assert all(limit in table[name] for name in names)
        assert done.stdout.endswith((folder / "table.txt").read_text())
    assert done.returncode == int(checks == "FAILED")
    assert checks in table["fsdp2"]
    assert table["step-trl"].endswith("trl is not installed")
    assert {file.name for file in folder.iterdir()} == {
        "table.txt", "profile-steps.log", "profile-passes.log", "logs.tar.gz",
    }  # fmt: skip
    with tarfile.open(folder / "logs.tar.gz") as logs:
        assert {"./alone.log", "./doctor.log", "./tests-kernels.log", "./table.txt"} <= set(logs.getnames())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("echo 0", "no GPU: nothing was run"),
        ("exit 1", "has no rlkit"),
        ('case "$*" in *version*) exit 1 ;; *) echo 1 ;; esac', "has no rlkit: nothing was run; install it"),
    ],
)
def test_without_a_gpu_nothing_is_run(tmp_path: Path, body: str, why: str) -> None:
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body))
    assert done.returncode == 2
    assert why in done.stdout


def test_the_table_says_how_each_check_went(tmp_path: Path) -> None:
    """One GPU, no SGLang, a bench that fails, one whose package is missing, and one that lasts too long."""
    body = """case "$*" in
        *cuda.device_count*) echo 1 ;;
        *sglang*) echo "No module named sglang" >&2; exit 1 ;;
        *bench.decode*) echo broken; exit 1 ;;
        *"gpu.bench step"*) echo trl is not installed; exit 3 ;;
        *fsdp2*) exit 124 ;;
        *test_kernels*) echo "test_one PASSED"; echo "test_two"; exit 124 ;;
        *) echo fine ;;
    esac"""
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body))
    assert done.returncode == 1
    table = {line.split()[0]: line for line in (tmp_path / "table.txt").read_text().splitlines()}
    assert table["alone"].split()[1] == "ok"
    assert table["alone"].endswith("fine")
    assert "FAILED" in table["decode"]
    assert table["decode"].endswith("broken")
    assert "not run" in table["step-trl"]
    assert table["step-trl"].endswith("trl is not installed")
    assert "TIMEOUT" in table["fsdp2"]
    assert table["tests-kernels"].endswith("test_two")
    assert "test_one PASSED" in (tmp_path / "tests-kernels.log").read_text()
    assert table["fsdp2-two"].endswith("one GPU")
    assert table["sglang"].endswith("it cannot be imported: No module named sglang")


def test_what_there_is_no_time_for_is_not_run(tmp_path: Path) -> None:
    body = 'case "$*" in *cuda.device_count*) echo 1 ;; *sglang*) exit 1 ;; *) echo ran >>"$(dirname "$0")/ran" ;; esac'
    done = run(str(tmp_path), PYTHON=fake_python(tmp_path, body), SECONDS_IN_ALL="10")
    assert done.returncode == 0
    assert "10 s have passed" in done.stdout
    assert (tmp_path / "ran").read_text() == "ran\n" * 2  # whether rlkit is installed, and rlkit doctor


def test_a_pack_comes_before_all_other_packages(tmp_path: Path) -> None:
    body = 'echo "$PYTHONPATH" >>"$(dirname "$0")/ran"; case "$*" in *cuda.device_count*) echo 0 ;; esac'
    done = run("sglang", str(tmp_path), PYTHON=fake_python(tmp_path, body), PACK="/pack", PYTHONPATH="/other")
    assert done.stdout == "no GPU: nothing was run\n"
    assert set((tmp_path / "ran").read_text().splitlines()) == {"/pack:/other"}


STEP = {
    "rollout/failed": 0.0, "mismatch/mean": 1e-3, "engine/restarts": 1.0, "time/sample": 2.0, "time/update": 1.0,
    "engine/sync_seconds": 0.5, "time/sync": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sampling", "problem"),
    [
        ({}, 40.0, None),
        ({"engine/restarts": 0.0}, 40.0, "engine/restarts is 0, expected 1"),
        ({"rollout/failed": 2.0}, 40.0, "step 4: rollout/failed is 2"),
        ({"mismatch/mean": math.nan}, 40.0, "step 4: mismatch/mean is nan"),
        ({}, 41.0, "memory in sampling grows from 40.0 GiB in step 3 to 41.0"),
    ],
)
def test_a_run_beside_sglang_that_leaks_or_loses_is_wrong(
    change: dict[str, float], sampling: float, problem: str | None
) -> None:
    """Memory of the first steps, which compile, does not count."""
    rows = [STEP, STEP, STEP, STEP | change]
    peaks = {"sampling": [60.0, 50.0, 40.0, sampling], "learning": [30.0, 30.0, 20.0, 20.25]}
    assert wrong_beside(rows, peaks, restarts=1) == ([] if problem is None else [problem])
    if problem is None:
        assert summary_beside(rows, peaks, weights=1.0) == (
            "4 steps: sample 2.00, update 1.00, sync 0.500 s (2.0 GiB/s); GiB on the GPU from step 3 to the last: "
            "sampling 40.0 to 40.0, learning 20.0 to 20.2; mismatch 1.0e-03"
        )


GOOD = {
    "grad_norm": 0.1, "groups/no_signal": 0.0, "update/packed": 1.0, "update/steps": 1.0, "engine/fused": 1.0,
    "mismatch/mean": 1e-3, "engine/slow_path": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"groups/no_signal": 0.5}, None),
        ({"grad_norm": 0.0}, "step 2: grad_norm is 0"),
        ({"grad_norm": math.nan}, "step 2: grad_norm is nan"),
        ({"groups/no_signal": 1.0}, "step 2: groups/no_signal is 1"),
        ({"update/packed": 0.5}, "step 2: update/packed is 0.5"),
        ({"update/steps": 0.0}, "step 2: update/steps is 0"),
        ({"engine/fused": 0.0}, "step 2: engine/fused is 0"),
        ({"mismatch/mean": 0.2}, "step 2: mismatch/mean is 0.2"),
        ({"time/mfu": math.inf}, "step 2: time/mfu is inf"),
    ],
)
def test_a_run_that_trains_nothing_or_goes_a_slow_way_is_wrong(change: dict[str, float], problem: str | None) -> None:
    assert wrong([GOOD, GOOD | change, GOOD], half=True) == ([] if problem is None else [problem])


@pytest.mark.parametrize("missing", ["grad_norm", "groups/no_signal", "update/packed", "update/steps"])
def test_what_is_not_measured_is_wrong(missing: str) -> None:
    row = {name: value for name, value in GOOD.items() if name != missing}
    assert wrong([GOOD, GOOD, row], half=True) == [f"step 3: {missing} is nan"]
    assert wrong([GOOD], half=True) == ["1 steps, expected 3"]


@pytest.mark.slow
def test_a_random_model_is_trained(tmp_path: Path) -> None:
    """With more ids than its tokenizer has texts for, as the model for GPUs."""
    save_random_model(tmp_path / "model", key_bias=KEY_BIAS, vocab_size=2000)
    options = ("--fabric.accelerator=cpu", "--fabric.precision=32-true", "--train.prompts_per_step=2")
    assert trial([str(tmp_path / "model"), str(tmp_path / "run"), *options]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "said"),
    [
        (("steps", "--prompts=2", "--length=4", "--steps=3"), "step 1: "),
        (("passes", "--rows", "8", "--engine-rows", "16", "--length=4", "--groups", "1"), "ms a step by rows: 8: "),
    ],
)
def test_steps_and_passes_are_profiled(
    part: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_random_model(tmp_path / "model", vocab_size=520)
    name, *options = part
    assert profile([name, str(tmp_path / "model"), *options]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_steps_are_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU, in the trainer's process."""
    save_random_model(tmp_path / "model", key_bias=KEY_BIAS, vocab_size=520)
    words = ("--alone", "--steps=4", "--prompts=2", "--length=4")
    assert beside([str(tmp_path / "model"), *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 steps: sample ")
