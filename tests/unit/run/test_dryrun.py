"""The step that measures memory: on rows of maximum length, and without a change of any weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlkit.commands import parse
from rlkit.data.data import Data, load_data
from rlkit.run.preflight.dryrun import _longest, dry_run
from rlkit.train import update
from rlkit.train.setup import TrainContext, fabric_for, prepare_training

SMALL = (
    "--recipe=quick_ppo", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null",
    "--train.minibatches=1", "--fabric.accelerator=cpu",
)  # fmt: skip


@pytest.fixture
def context() -> Iterator[TrainContext]:
    recipe = parse("fit", [*SMALL, "--train.max_tokens_per_micro_batch=100"]).recipe
    fabric = fabric_for(recipe)
    fabric.launch()
    made = prepare_training(recipe, load_data(recipe), fabric)
    yield made
    made.service.close()


def test_a_dry_run_changes_no_weight(context: TrainContext) -> None:
    models = [trained.inner for trained in (context.models.policy, context.models.critic) if trained is not None]
    before = [{name: p.clone() for name, p in model.named_parameters()} for model in models]
    measured = dry_run(context)
    assert list(measured) == ["models loaded", "sampling", "log-probs", "learning"]
    peaks = list(measured.values())
    assert 0 < peaks[0] <= peaks[1] <= peaks[2] <= peaks[3]
    assert len(models) == 2
    for model, weights in zip(models, before, strict=True):
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("loss", ["DPO", "{class_path: BradleyTerry, init_args: {centre: 0.01}}"])
def test_a_comparison_of_its_rows_has_a_gradient(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    monkeypatch.setattr(update, "log_update", lambda done, *_: norms.append(float(done.norm)))
    head = ("--model.head=lm" if loss == "DPO" else "--model.head=score", f"--loss={loss}")
    words = ("--train.max_tokens_per_micro_batch=200", "--train.prompts_per_step=2", "--validation=null", *head)
    recipe = parse("fit", ["--recipe=quick_rm", *words]).recipe
    fabric = fabric_for(recipe)
    fabric.launch()
    made = prepare_training(recipe, load_data(recipe), fabric)
    dry_run(made)
    made.service.close()
    assert len(norms) == 1
    assert norms[0] > 0.01


@pytest.mark.parametrize(("limit", "rows"), [(100, 2), (41, 1), (10_000, 4)])
def test_trial_rows_are_the_longest_and_as_many_as_fit(limit: int, rows: int) -> None:
    """A prompt of 30 tokens and an answer of 12; a step has 2 x 2."""
    data: Data = load_data(parse("fit", [*SMALL, f"--train.max_tokens_per_micro_batch={limit}"]).recipe)
    made = _longest(data)
    assert [t.group for t in made] == [0, 1, 0, 1][:rows]
    assert {t.reward for t in made} == {0}
    for trajectory in made:
        assert len(trajectory.tokens) == len(trajectory.logps) == len(trajectory.versions) == 42
        assert trajectory.mask == [False] + [True] * 41
        assert trajectory.versions == [-1] + [0] * 41


@pytest.mark.parametrize(("limit", "groups"), [(41, [0, 0]), (200, [0, 0, 1, 1]), (10_000, [0, 0, 1, 1, 2, 2])])
def test_trial_groups_are_complete_and_have_pairs(limit: int, groups: list[int]) -> None:
    words = (f"--train.max_tokens_per_micro_batch={limit}", "--train.prompts_per_step=3")
    for recorded in ((), ("--rollout.engine=Recorded", "--task.mistakes=1", "--rollout.group_size=5")):
        made = _longest(load_data(parse("fit", ["--recipe=quick_online_dpo", *words, *recorded]).recipe))
        if not recorded:
            assert [t.group for t in made] == groups
        assert [t.reward for t in made] == [0, 1] * (len(made) // 2)
