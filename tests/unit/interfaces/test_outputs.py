"""What a part returns is checked in a run, and the part, its plugin and its distribution are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.base.errors import PartError, RolloutError
from rlkit.cli.main import main
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.loss import PolicyLoss
from rlkit.losses import ClipLoss
from rlkit.registry import calling, require
from rlkit.testing import example_batch
from rlkit.train.credit import estimate
from rlkit.train.objective import Counts, Objective
from rlkit.types import (
    Completion,
    LossOutput,
    PolicyOutput,
    Prompt,
    RecordedAnswer,
    Request,
    SampleKey,
    Sampling,
    StopReason,
    TrainBatch,
)  # fmt: skip
from tests.conftest import write_plugin

PARTS = """
import torch
from rlkit import hookimpl
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.task import Task
from rlkit.types import Completion, LossOutput, Prompt, StopReason

class NanAdvantage(AdvantageEstimator):
    def estimate(self, batch):
        batch.advantages = torch.full_like(batch.rollout_logps, float("nan"))

class UnsetAdvantage(AdvantageEstimator):
    def estimate(self, batch):
        pass

class RaisingAdvantage(AdvantageEstimator):
    def estimate(self, batch):
        return batch.rewards @ batch.tokens

class ScalarLoss(PolicyLoss):
    def __call__(self, out, batch):
        return LossOutput(-(batch.advantages * out.logps).mean(), {})

class NanLoss(PolicyLoss):
    def __call__(self, out, batch):
        return LossOutput(out.logps * float("nan"), {})

class SilentFilter(GroupFilter):
    def keep(self, group):
        print(len(group))

class TextTask(Task):
    def rows(self, split):
        return ["2 + 2"]

    def prompt(self, row, index):
        return row

class KeyTask(TextTask):
    def prompt(self, row, index):
        return {}[row]

class ShortEngine(RolloutEngine):
    def bind(self, runtime):
        pass

    async def generate(self, request):
        return Completion([5, 6], [-0.5], [0, 0], StopReason.LENGTH)

    async def sync(self, stream, version):
        pass

@hookimpl
def rlkit_register(register):
    for part in (NanAdvantage, UnsetAdvantage, RaisingAdvantage, ScalarLoss, NanLoss, SilentFilter):
        register(part)
    for part in (TextTask, KeyTask, ShortEngine):
        register(part)
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a plugin whose parts all have a fault."""
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path / "site", "faulty", PARTS)))


TINY = ("--train.steps=1", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null",
        "--rollout.sampling.max_tokens=4")  # fmt: skip


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "advantage=NanAdvantage",
            "`estimate` wrote advantages of torch.float32 that are not finite (nan) for rewards [",
        ),
        ("advantage=RaisingAdvantage", "`estimate` raised RuntimeError: "),
        ("loss=ScalarLoss", "`__call__` returned a loss of shape (), expected a LossOutput of shape (4, "),
        ("loss=NanLoss", "`__call__` returned a loss that is not finite"),
        ("rollout.filter=SilentFilter", "`keep` returned None for a group, expected True or False"),
        ("task=TextTask", "`prompt` returned '2 + 2', expected a Prompt with an id"),
        ("task=KeyTask", "`prompt` raised KeyError: '2 + 2' ("),
        ("rollout.engine=ShortEngine", "`generate` returned Completion(tokens=[5, 6]"),
    ],
)
@pytest.mark.usefixtures("faulty")
def test_fit_names_the_part_its_plugin_and_its_distribution(
    tmp_path: Path, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--recipe=quickstart", *TINY, f"--{option}", f"--out={tmp_path / 'out'}"]) == 1
    printed = capsys.readouterr().err
    part = option.partition("=")[2]
    assert printed.startswith(f"error: {part} of plugin 'faulty' (rlkit-faulty 2.1): {message}")
    assert printed.count("\n") == 1
    if not option.startswith("task"):  # nothing has begun
        assert json.loads((tmp_path / "out" / "result.json").read_text())["error"]["type"] == "PartError"


class Sets(AdvantageEstimator):
    """Sets what it is told."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def estimate(self, batch: Any) -> None:
        for name, value in self.fields.items():
            setattr(batch, name, value)


def estimated(batch: Any, critic: bool = False, **fields: Any) -> None:
    estimate(Sets(**fields), batch, has_critic=critic)


def test_advantages_are_checked_and_blamed_fairly() -> None:
    zeros, rows = torch.zeros(4, 6), torch.zeros(4)
    for fields, message in (
        ({}, "Sets of tests: `estimate` left batch.advantages unset"),
        ({"advantages": rows}, r"wrote batch.advantages of shape \(4,\), expected a tensor of shape \(4, 6\)"),
        ({"advantages": 0.0}, r"wrote batch.advantages of type float, expected a tensor"),
        ({"advantages": zeros.double()}, "wrote advantages of torch.float64 for rewards"),
        ({"advantages": zeros + 1}, "wrote advantages outside the mask"),
        ({"advantages": zeros, "returns": zeros / 0}, r"wrote returns of torch.float32 that are not finite \(nan\)"),
    ):
        with pytest.raises(PartError, match=message):
            estimated(example_batch(), **fields)
    estimated(example_batch(), advantages=zeros, returns=zeros)
    with pytest.raises(PartError, match=r"left batch.returns unset, which the critic learns from"):
        estimated(example_batch(), critic=True, advantages=zeros)
    diverged = example_batch()
    diverged.values = zeros / 0  # of the critic
    estimated(diverged, advantages=zeros / 0)


class Returns(PolicyLoss):
    """Returns whatever it is made with."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return self.given  # type: ignore[no-any-return]


def test_a_loss_is_checked() -> None:
    batch = TrainBatch.of(replace(example_batch(), advantages=torch.ones(4, 6)))
    out = PolicyOutput(batch.rollout_logps, torch.zeros(4, 6))

    def called(loss: Any, version: int = 0) -> Any:
        objective = Objective(loss, "token_mean", 1, strict=version == 0)
        return objective.share(out, batch, Counts(torch.tensor(1.0), torch.tensor(1.0)))

    assert called(ClipLoss()).loss.isfinite()
    zeros = torch.zeros(4, 6)
    for given, message in (
        (zeros, "expected a LossOutput of shape"),
        (None, "returned None, expected a LossOutput"),
        (LossOutput(zeros.long(), {}), "returned a loss of torch.int64"),
        (LossOutput(zeros, [1]), r"returned metrics \[1\], expected tensors by name"),  # type: ignore[arg-type]
        (LossOutput(zeros, {"kl": 0.5}), "returned the metric 'kl' as 0.5, expected a tensor"),  # type: ignore[dict-item]
        (LossOutput(zeros, {"kl": zeros}), r"the metric 'kl' as a tensor of shape \(4, 6\)"),
    ):
        with pytest.raises(PartError, match=message):
            called(Returns(given))
    infinite = LossOutput(zeros + torch.inf, {})
    assert called(Returns(infinite), version=3).loss == torch.inf  # the policy may have gone astray by then


def test_selections_completions_and_prompts() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert outputs.of_selection(mask, mask) is None
    assert "selected torch.float32 (2, 3), expected bool (2, 3)" in str(outputs.of_selection(mask.float(), mask))
    request = Request((1, 2), Sampling(max_tokens=2), SampleKey(0, 0, "p", 0), "p")
    fine = Completion([5, 9], [-0.5, 0.0], [3, 3], StopReason.STOP)
    assert outputs.of_engine(fine, request, 3, {9}) is None
    for wrong, expected in (
        (None, "expected a Completion"),
        (Completion([], [], [], StopReason.LENGTH), "1 to max_tokens = 2 tokens"),
        (Completion([5], [-0.5, -1], [3], StopReason.LENGTH), "a log-prob and a version for each token"),
        (Completion([5], [float("nan")], [3], StopReason.LENGTH), "finite log-probs of at most 0"),
        (Completion([5], [0.1], [3], StopReason.LENGTH), "finite log-probs of at most 0"),
        (Completion([5], [-0.5], [2], StopReason.LENGTH), "the version of the last sync, 3"),
        (Completion([5], [-0.5], [3], StopReason.STOP), "the stop id among the tokens"),
    ):
        assert expected in str(outputs.of_engine(wrong, request, 3, {9}))
    messages, said = [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}]
    assert outputs.of_task(Prompt("p", messages)) is None
    assert outputs.of_task(Prompt("p", [], recorded=[RecordedAnswer(said, 1e30, [-1])])) is None
    odd: Any = 3
    for prompt in (
        Prompt("p", []),
        Prompt("p", [{"role": "user"}]),
        Prompt(odd, messages),
        Prompt("p", messages, "", odd),
        Prompt("p", messages, recorded=odd),
        Prompt("p", messages, recorded=[odd]),
        Prompt("p", messages, recorded=[RecordedAnswer(odd)]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, 1e31)]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, 10**400)]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, float("nan"))]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, odd and "1")]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, 0.0, [1.0, 2.0])]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, 0.0, [float("inf")])]),
        Prompt("p", messages, recorded=[RecordedAnswer(said, 0.0, odd)]),
    ):
        assert "expected" in str(outputs.of_task(prompt))


def test_only_what_does_not_explain_itself_is_named() -> None:
    def run(part: object, error: BaseException) -> Callable[[], None]:
        def fail() -> None:
            with calling(part, "work"):
                raise error

        return fail

    for part, error, expected in (
        (Sets(), ValueError("x"), PartError),
        (Sets(), RolloutError("x"), RolloutError),
        (Sets(), MemoryError(), MemoryError),
        (Sets(), torch.cuda.OutOfMemoryError("x"), torch.cuda.OutOfMemoryError),
        (Sets(), KeyboardInterrupt(), KeyboardInterrupt),
        (ClipLoss(), ValueError("x"), ValueError),
    ):
        with pytest.raises(expected):
            run(part, error)()
    with pytest.raises(
        PartError, match=r"Sets of tests: `work` raised ValueError: x \(.*test_outputs.py, line \d+: .*\)"
    ):
        run(Sets(), ValueError("x"))()
    require(Sets(), "work", None)
