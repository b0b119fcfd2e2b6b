"""`rlkit replay`: a step of a run again, bit for bit."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rlkit_authors.models import save_random_model

from rlkit.cli.main import main
from rlkit.train import saved
from tests.conftest import read_jsonl

FEW = (
    "--recipe=quickstart", "--train.steps=4", "--train.prompts_per_step=4", "--rollout.group_size=2",
    "--validation.limit=2", "--validation.every=2", "--save.every=2", "--save.keep_last=3",
)  # fmt: skip
SAME = (
    "metrics: the same in the 1 step that both have",
    "answers: the same in all rollouts that both have",
)

Say = Callable[[], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate falls, with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["fit", *FEW, f"--out={folder}"]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    capsys.readouterr()

    def both() -> str:
        found = capsys.readouterr()
        return found.out + found.err

    return both


@pytest.mark.parametrize("phase", [(), ("--phase=learn",)])
def test_the_last_step_is_the_same_bit_for_bit(run: Path, tmp_path: Path, said: Say, phase: tuple[str, ...]) -> None:
    """Steps 3 and 4 from the checkpoint of step 2: metrics, answers, and the weights and moments of step 4."""
    assert main(["replay", str(run), "--step=4", f"--out={tmp_path / 'out'}", *phase]) == 0
    printed = said()
    assert "metrics: the same in the 2 steps that both have" in printed
    assert "answers: the same in all rollouts that both have" in printed
    assert "tensors: the same in step-000004" in printed
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [3, 4]


@pytest.mark.parametrize("phase", [(), ("--phase=learn",)])
def test_a_first_step_is_replayed_from_the_start(run: Path, tmp_path: Path, said: Say, phase: tuple[str, ...]) -> None:
    assert main(["replay", str(run), "--step=1", f"--out={tmp_path / 'out'}", *phase]) == 0
    printed = said()
    assert all(line in printed for line in SAME)
    assert "weights: not compared, no checkpoint of this step was kept" in printed


def test_another_learning_rate_on_the_same_answers(run: Path, tmp_path: Path, said: Say) -> None:
    words = ("--step=3", "--phase=learn", "--train.lr=0.003", f"--out={tmp_path / 'out'}")
    assert main(["replay", str(run), *words]) == 1
    printed = said()
    assert "changed: train.lr: 0.001 in the checkpoint, 0.003 now" in printed
    assert "metrics: the first step that differs is 3: lr " in printed
    assert "answers: the same" in printed


def test_the_experts_of_another_engine_are_learned_again(tmp_path: Path, said: Say) -> None:
    """No server is there; its rollouts have the experts that it selected, which float32 in this process leaves out."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_random_model(tmp_path / "model", "qwen3_moe", **experts)
    words = (f"--model.path={tmp_path / 'model'}", "--validation=null", "--train.router_replay=true")
    assert main(["fit", *FEW[:1], "--train.steps=1", *FEW[2:4], *words, f"--out={tmp_path / 'a'}"]) == 0, said()
    replay = ("replay", str(tmp_path / "a"), "--step=1", "--phase=learn", "--rollout.engine=SGLangServer")
    assert main([*replay, "--train.router_replay=auto", f"--out={tmp_path / 'b'}"]) == 0, said()
    assert "metrics: the same in the 1 step that both have" in said()
    assert "router/differs" in read_jsonl(tmp_path / "b" / "metrics.jsonl")[0]
    assert main([*replay, "--train.router_replay=false", f"--out={tmp_path / 'c'}"]) == 2
    assert "has a field 'expert_routes' that no part fills; leave out --phase learn" in said()


def test_the_run_itself_stays_as_it_was(run: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(run), "--step=3"]) == 0
    assert [path.name.startswith("run-step-00003-") for path in Path("runs").iterdir()] == [True]
    assert main(["replay", str(run), "--step=3", f"--out={run}"]) == 2
    assert "choose a new folder" in said()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ("--advantage=ReMax", "--shaping.clip=0.5"),
        ("--rollout.filter=ZeroSignal", "--train.offload_during_rollout=true"),
        ("--rollout.oversample=1.5", "--curriculum=SuccessRate"),
        ("--critic.path=null", "--advantage=GAE"),
        ("--correction.level=token", "--train.minibatches=2"),
        ("--recipe=quick_tool", "--kl_reward.coef=0.01"),
    ],
)
def test_what_a_step_depends_on_is_all_there(tmp_path: Path, said: Say, extra: tuple[str, ...]) -> None:
    """Learning from what was kept needs each part of it: greedy rewards, dropped groups, the order's state …"""
    words = (*FEW, "--validation=null", "--train.steps=2", "--save.every=1", f"--out={tmp_path / 'a'}")
    assert main(["fit", *words, *extra]) == 0, said()
    assert main(["replay", str(tmp_path / "a"), "--step=2", "--phase=learn", f"--out={tmp_path / 'b'}"]) == 0, said()
    assert "tensors: the same in step-000002" in said()


@pytest.mark.slow
def test_a_step_that_was_sampled_ahead_is_learned_again(tmp_path: Path, said: Say) -> None:
    words = ("--rollout.max_staleness=1", "--correction.high=2.0", "--save.every=1", f"--out={tmp_path / 'a'}")
    assert main(["fit", *FEW, *words, "--validation=null"]) == 0
    assert main(["replay", str(tmp_path / "a"), "--step=3"]) == 2
    assert "cannot be sampled again; add --phase learn" in said()
    assert main(["replay", str(tmp_path / "a"), "--step=3", "--phase=learn", f"--out={tmp_path / 'b'}"]) == 0
    assert "tensors: the same in step-000003" in said()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--step is missing, expected one from 1 to 4"),
        (("--step=0",), "--step is 0, expected one from 1 to 4"),
        (("--step=5",), "--step is 5, expected one from 1 to 4"),
        (("--step=1e400",), "--step is 1e400, expected one from 1 to 4"),
        (("--step=1", "--phase=dream"), "--phase is 'dream', expected learn"),
    ],
)
def test_what_cannot_be_replayed_is_refused(run: Path, said: Say, words: tuple[str, ...], message: str) -> None:
    assert main(["replay", str(run), *words]) == 2
    assert message in said()


@pytest.mark.slow
def test_learning_needs_all_trajectories(run: Path, tmp_path: Path, said: Say) -> None:
    shutil.copytree(run, tmp_path / "less")
    path = tmp_path / "less" / "rollouts" / "step-00003.jsonl.gz"
    lines = [json.dumps(row) + "\n" for row in read_jsonl(path)[:6]]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    words = ("replay", str(tmp_path / "less"), "--step=3", "--phase=learn", f"--out={tmp_path / 'out'}")
    assert main(list(words)) == 2
    assert "has kept 6 of the 8 trajectories of step 3 on 1 rank; step 1 and the steps" in said()
    row = json.loads(lines[0])
    path.write_bytes(gzip.compress(json.dumps({**row, "tokens": [*row["tokens"][:-1], 264]}).encode()))
    assert main([*words[:-1], f"--out={tmp_path / 'strange'}"]) == 2
    assert "step-00003.jsonl.gz, line 1 has token ids that the policy has not, expected 0 to 263" in said()
    path.write_bytes(path.read_bytes()[:100])
    assert main([*words[:-1], f"--out={tmp_path / 'again'}"]) == 2
    assert "step-00003.jsonl.gz cannot be read" in said()


def test_a_line_without_its_number_of_samples_is_named(run: Path, tmp_path: Path, said: Say) -> None:
    shutil.copytree(run, tmp_path / "less")
    path = tmp_path / "less" / "metrics.jsonl"
    lines = [{name: x for name, x in row.items() if name != "rollout/samples"} for row in read_jsonl(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["replay", str(tmp_path / "less"), "--step=3", "--phase=learn", f"--out={tmp_path / 'out'}"]
    assert main(words) == 2
    assert f"error: {path} has no rollout/samples for step 3, with which its rollouts are compared\n" in said()


def test_a_folder_that_is_no_run(tmp_path: Path, said: Say) -> None:
    assert main(["replay", str(tmp_path), "--step=1"]) == 2
    assert "is no run folder" in said()


@pytest.mark.slow
def test_steps_after_a_checkpoint_are_kept_complete(tmp_path: Path, said: Say) -> None:
    """Of 72 trajectories a step keeps 64 by default; steps 1 and 3 keep all, so that they can be learned from."""
    few = ("--train.steps=3", "--train.prompts_per_step=9", "--validation=null", "--save.every=2")
    assert main(["fit", "--recipe=quickstart", *few, f"--out={tmp_path / 'run'}"]) == 0
    rows = [len(read_jsonl(tmp_path / "run" / "rollouts" / f"step-0000{number}.jsonl.gz")) for number in (1, 2, 3)]
    assert rows == [72, 64, 72]
    said()
    for number, status in ((1, 0), (2, 2), (3, 0)):
        words = [f"--step={number}", "--phase=learn", f"--out={tmp_path / str(number)}"]
        assert main(["replay", str(tmp_path / "run"), *words]) == status
    text = said()
    assert "kept 64 of the 72 trajectories of step 2" in text
    assert "step 1 and the steps after a checkpoint are kept complete" in text


def test_a_large_step_is_not_kept_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "COMPLETE_BYTES", 1000)
    few = ("--train.steps=1", "--train.prompts_per_step=9", "--validation=null")
    assert main(["fit", "--recipe=quickstart", *few, f"--out={tmp_path / 'run'}"]) == 0
    assert len(read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")) == 64
