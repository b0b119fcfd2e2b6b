"""Rollouts that run ahead of the trainer: `rollout.max_staleness`, through `fit`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_report.comparison import compare
from safetensors.torch import load_file

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.data.data import Data
from rlkit.models.checkpoints import open_checkpoint
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.stream import BesideStream, ColocatedStream, RolloutStream, TrainedGroups
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts
from tests.conftest import read_jsonl

FEW = (
    "--train.prompts_per_step=4", "--rollout.group_size=4", "--validation=null", "--log.rollouts.limit=null",
    "--train.schedule=Constant", "--correction.high=2.0",
)  # fmt: skip

AGAIN = "are sampled again"
"""What a resumed run says of the groups that its checkpoint does not hold."""


def fit(out: Path, *words: str, recipe: str = "quickstart") -> list[dict[str, Any]]:
    assert main(["fit", f"--recipe={recipe}", *FEW, *words, f"--out={out}"]) == 0
    return read_jsonl(out / "metrics.jsonl")


def prompts(out: Path, steps: range) -> Counter[str]:
    """Return how often each prompt was trained on."""
    rows = [row for step in steps for row in read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz")]
    return Counter(row["prompt"] for row in rows if "advantages" in row)


@pytest.mark.slow
def test_without_a_lead_it_is_synchronous_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed, too: no group is sampled ahead of a step, so a checkpoint has all that the next one depends on."""
    words = ("--train.steps=3", "--rollout.max_staleness=2", "--rollout.lead=0", "--save.every=1", "--save.keep_last=3")
    fit(tmp_path / "plain", "--train.steps=3")
    rows = fit(tmp_path / "ahead", *words)
    fit(tmp_path / "resumed", *words, f"--resume={tmp_path}/ahead/checkpoints/step-000001")
    assert AGAIN not in capsys.readouterr().out
    plain, resumed = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "resumed"))
    assert all(torch.equal(plain[name], tensor) for name, tensor in resumed.items())
    assert all(row["staleness/max"] == row["staleness/running"] == 0 for row in rows)
    found = compare(tmp_path / "plain", tmp_path / "ahead", ("staleness/",))
    assert set(found.recipe) == {"rollout.max_staleness", "rollout.lead", "save.every", "save.keep_last"}
    assert (found.step, found.answer, found.tensor) == (None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words"),
    [("quickstart", ()), ("quick_ppo", ()), ("quick_tool", ("--rollout.engine.max_rows=1", "--rollout.group_size=2"))],
)
def test_staleness_0_is_the_synchronous_trainer_bit_for_bit(
    tmp_path: Path, recipe: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO, PPO with a critic, and tools; both streams take the place of what obtains the rollouts of each step.

    With tools which rows share a decode step depends on time, and floating-point noise with it, unless one row does.
    """
    fit(tmp_path / "plain", "--train.steps=3", *words, recipe=recipe)
    for kind in (ColocatedStream, BesideStream):
        streams: list[RolloutStream] = []

        def obtain(data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
            streams[:] = streams or [kind(data, service, TrainedGroups())]  # noqa: B023
            return streams[0](data, service, number, meter)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr("rlkit.run.method.sample", obtain)
            rows = fit(tmp_path / kind.__name__, "--train.steps=3", *words, recipe=recipe)
        assert all(row["staleness/max"] == row["staleness/running"] == row["staleness/waiting"] == 0 for row in rows)
        assert not compare(tmp_path / "plain", tmp_path / kind.__name__, ("staleness/",)).differs
        assert streams[0].trained == TrainedGroups(12)


@pytest.mark.slow
def test_a_resumed_run_trains_on_each_prompt_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At its checkpoint groups of later places have been trained on, and some of earlier ones have not."""
    words = (
        "--rollout.max_staleness=2", "--rollout.lead=1.5", "--train.steps=4", "--save.every=1", "--save.keep_last=4",
    )  # fmt: skip
    fit(tmp_path / "run", *words, recipe="quick_tool")
    states = {n: open_checkpoint(str(tmp_path / f"run/checkpoints/step-{n:06d}")).state for n in range(1, 5)}
    number = next(n for n, state in states.items() if state.trained and len(state.trained) > 1)
    resume = f"--resume={tmp_path / f'run/checkpoints/step-{number:06d}'}"
    assert AGAIN not in capsys.readouterr().out
    fit(tmp_path / "resumed", *words, resume, recipe="quick_tool")
    assert AGAIN in capsys.readouterr().out
    assert prompts(tmp_path / "run", range(1, 5)) == dict.fromkeys(prompts(tmp_path / "run", range(1, 5)), 4)
    found = prompts(tmp_path / "run", range(1, number + 1)) + prompts(tmp_path / "resumed", range(number + 1, 5))
    assert found == prompts(tmp_path / "run", range(1, 5))
    assert len(found) == 16
    assert states[4].trained == [16]
    at_once = ("--recipe=quick_tool", *FEW, *words, "--rollout.max_staleness=0", "--rollout.lead=null", "--force")
    assert main(["fit", *at_once, resume, f"--out={tmp_path / 'synchronous'}"]) == 2
    assert "was trained on some prompts of later steps" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_lead_a_filter_replaces_the_same_prompts(tmp_path: Path) -> None:
    """The answers are the same; log-probs differ by rounding, since others are in the batch beside them."""
    words = (
        "--rollout.filter=ZeroSignal",
        "--rollout.filter.max_refills=2",
        "--rollout.group_size=2",
        "--train.steps=2",
    )
    rows = fit(tmp_path / "plain", *words)
    ahead = fit(tmp_path / "ahead", *words, "--rollout.max_staleness=2", "--rollout.lead=0")
    assert [row["filter/refilled"] for row in ahead] == [row.get("filter/refilled", 0) for row in rows]
    assert [row["filter/dropped"] for row in ahead] == [row["filter/dropped"] for row in rows]
    assert sum(row["filter/refilled"] for row in ahead) > 0
    for step in ("step-00001", "step-00002"):
        found = [
            sorted((row["group"], row["tokens"], "advantages" in row) for row in read_jsonl(path))
            for path in (tmp_path / f"{name}/rollouts/{step}.jsonl.gz" for name in ("plain", "ahead"))
        ]
        assert found[0] == found[1]


def trained_rows(out: Path, steps: range) -> list[list[dict[str, Any]]]:
    rows = [read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz") for step in steps]
    return [[row for row in some if "advantages" in row] for some in rows]


@pytest.mark.slow
def test_groups_are_filtered_and_trained_on_again_repeatably(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tools, S = 2: three groups at most are trained on once more; dropped places are refilled, and some stay empty."""
    words = (
        "--train.steps=6", "--rollout.max_staleness=2", "--rollout.filter=ZeroSignal", "--rollout.filter.max_refills=1",
        "--rollout.replay.size=3", "--save.every=1", "--save.keep_last=6",
    )  # fmt: skip
    metrics = fit(tmp_path / "one", *words, recipe="quick_tool")
    fit(tmp_path / "other", *words, recipe="quick_tool")
    assert not compare(tmp_path / "one", tmp_path / "other").differs
    assert sum(row["filter/refilled"] for row in metrics) > 0
    assert sum(row["replay/groups"] for row in metrics) > 6
    for number, rows in enumerate(trained_rows(tmp_path / "one", range(1, 7))):
        assert all(number - min(v for v in row["versions"] if v >= 0) <= 2 for row in rows)
        groups = {(row["group"], row.get("again", 0)) for row in rows}
        assert {again for slot, again in groups if slot >= 4} <= {1}
        assert {again for slot, again in groups if slot < 4} <= {0}
        assert len([slot for slot, _ in groups if slot >= 4]) == metrics[number]["replay/groups"] <= 3
        assert sum(metrics[number][f"staleness/share/{age}"] for age in range(3)) == pytest.approx(1)
    tokens = Counter(tuple(row["tokens"]) for some in trained_rows(tmp_path / "one", range(1, 7)) for row in some)
    assert max(tokens.values()) > 1
    assert open_checkpoint(str(tmp_path / "one/checkpoints/step-000006")).state.trained == [24]
    again = ["replay", str(tmp_path / "one"), "--step=4", "--phase=learn", f"--out={tmp_path / 'again'}"]
    assert main(again) == 0, capsys.readouterr().out
    resume = f"--resume={tmp_path / 'one/checkpoints/step-000003'}"
    rows = fit(tmp_path / "resumed", *words, resume, recipe="quick_tool")
    assert rows[0]["replay/groups"] == 0  # no checkpoint has them
    assert open_checkpoint(str(tmp_path / "resumed/checkpoints/step-000006")).state.trained == [24]


@pytest.mark.slow
def test_one_version_answers_a_validation(tmp_path: Path) -> None:
    words = (
        "--train.steps=3", "--rollout.max_staleness=2", "--validation.every=1", "--validation.limit=8",
        "--validation.before=false", "--validation.samples=1",
    )  # fmt: skip
    rows = fit(tmp_path / "run", *words, recipe="quick_tool")
    assert rows[0]["staleness/running"] > 0  # interrupted answers wait meanwhile
    for step, name in ((1, "00001"), (2, "00002"), (3, "after")):
        answers = read_jsonl(tmp_path / "run" / "rollouts" / f"validation-{name}.jsonl.gz")
        assert len(answers) == 16
        assert {v for row in answers for v in row["versions"]} == {-1, step}


def test_what_was_trained_on_is_known_whatever_the_order() -> None:
    trained = TrainedGroups(2).plus([4, 2, 6])
    assert trained == TrainedGroups(3, (4, 6))
    assert trained.next_untrained(4) == [3, 5, 7, 8]
    assert trained.plus([3]) == TrainedGroups(5, (6,))


def test_preferences_of_older_weights_need_no_correction() -> None:
    assert parse("fit", ["--recipe=quickstart", "--rollout.max_staleness=2", "--loss=DPO", "--advantage=null"]).recipe


def test_ratios_to_the_policy_that_sampled_are_a_correction() -> None:
    """ScaleRL's loss compares with the engine; a loss without ratios does not."""
    parse("fit", ["--recipe=quick_scalerl", "--rollout.max_staleness=8"])
    for old in ("rollout", "loglinear"):
        with pytest.raises(RecipeError, match="nothing corrects for tokens of older weights"):
            parse("fit", ["--recipe=quick_rloo", "--rollout.max_staleness=2", f"--train.old_logps={old}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--correction=null",), "nothing corrects for tokens of older weights: set train.old_logps: rollout"),
        (("--rollout.lead=3",), "rollout.lead is 3, expected at most rollout.max_staleness, which is 2"),
        (("--rollout.oversample=1.5",), "no step waits for its slowest groups"),
        (("--curriculum=SuccessRate",), "curriculum SuccessRate orders prompts by the outcomes of all previous steps"),
        (("--rollout.max_staleness=0", "--rollout.replay.size=4"), "rollout.replay trains on groups of earlier steps"),
        (
            ("--rollout.engine=SGLangServer", "--rollout.engine.launch.release_memory=true"),
            "rollout.engine SGLangServer cannot be interrupted, and does not sample during training",
        ),
        (("--rollout.max_staleness=0", "--rollout.lead=1"), "rollout.lead is 1, but rollout.max_staleness is 0"),
        (("--rollout.max_conversations=8",), "rollout.max_conversations does not limit"),
        (("--rollout.max_staleness=-1",), "rollout.max_staleness is -1"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse("fit", ["--recipe=quickstart", "--rollout.max_staleness=2", "--correction.high=2.0", *words])
    assert message in str(error.value)
