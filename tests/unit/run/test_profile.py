"""`profile:` traces single steps, and changes nothing that is learned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from rlkit_report.comparison import compare

from rlkit.cli.main import main

FEW = (
    "--recipe=quickstart", "--train.steps=3", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation=null",
)  # fmt: skip


@pytest.mark.slow
def test_a_step_is_traced_and_learns_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *FEW, f"--out={tmp_path / 'plain'}"]) == 0
    assert main(["fit", *FEW, "--profile.steps=[2, 3]", f"--out={tmp_path / 'traced'}"]) == 0
    assert "USDT" not in capfd.readouterr().err
    files = sorted(path.name for path in (tmp_path / "traced" / "profile").iterdir())
    assert files == [f"step-0000{n}.{end}" for n in (2, 3) for end in ("trace.json.gz", "txt")]
    trace = json.loads(gzip.decompress((tmp_path / "traced" / "profile" / files[0]).read_bytes()))
    phases = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in phases if "#" not in name] == [
        "sample", "logps", "score", "advantages", "update", "sync",
    ]  # fmt: skip
    threads = {event["tid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert len(threads) > 1  # that of sampling, too
    assert "aten::addmm" in (tmp_path / "traced" / "profile" / "step-00002.txt").read_text()
    difference = compare(tmp_path / "plain", tmp_path / "traced")
    assert difference.recipe == {"profile.steps": (None, [2, 3]), "profile.tool": (None, "torch")}
    assert (difference.step, difference.answer, difference.tensor) == (None, None, None)


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile").write_text("a file stands where the folder should be")
    assert main(["fit", *FEW, "--train.steps=2", "--profile.steps=[1]", f"--out={tmp_path / 'out'}"]) == 0
    assert "warning: profile/step-00001: " in capsys.readouterr().out


def test_steps_that_there_are_not_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *FEW, "--profile.steps=[2, 4]", f"--out={tmp_path / 'out'}"]) == 2
    assert "profile.steps has 4, expected steps up to train.steps, which is 3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_phases_of_these_steps_are_nvtx_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    nvtx, profiler = torch.cuda.nvtx, torch.cuda.profiler
    monkeypatch.setattr(nvtx, "range_push", lambda name: calls.append(name))
    monkeypatch.setattr(nvtx, "range_pop", lambda: calls.append("pop"))
    monkeypatch.setattr(profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr("rlkit.run.session.torch.cuda.is_available", lambda: True)
    options = ("--profile.steps=[2]", "--profile.tool=nsight", "--fabric.accelerator=cpu", "--fabric.devices=1")
    assert main(["fit", *FEW, *options, f"--out={tmp_path / 'out'}"]) == 0
    phases = ("sample", "logps", "score", "advantages", "update", "sync", "save")
    assert calls == ["start", *(call for phase in phases for call in (phase, "pop")), "stop"]
    assert not (tmp_path / "out" / "profile").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nsight_without_a_gpu_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--train.steps=1", "--profile.steps=[1]", "--profile.tool=nsight")
    assert main(["fit", *FEW, *options, f"--out={tmp_path / 'out'}"]) == 0
    assert "warning: profile.tool is nsight, which profiles GPUs, but this run has none" in capsys.readouterr().out
