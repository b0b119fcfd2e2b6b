"""Process reward models: their data, their loss in numbers worked by hand, and the scores of turns everywhere alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_tasks.chat import ChatRow
from rlkit_tasks.recorded import recording
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.losses import BinaryCrossEntropy
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.models.save import save_policy
from rlkit.recipe import Model
from rlkit.rewards import ModelReward
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.template import ChatTemplate
from rlkit.run.evaluate import compare_turns
from rlkit.testing import check_loss, save_random_model
from rlkit.train.objective import Objective
from rlkit.types import Message, PolicyOutput, Prompt, RecordedAnswer, Score, TrainBatch, Trajectory
from tests.stubs import classifier_runtime
from tests.unit.losses.test_preference_losses import softplus
from tests.unit.models.test_reward_models import closed, score_model

USER = {"role": "user", "content": "2 + 3 = ?"}
MASK = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
"""A row of two turns, the first of two tokens, and one of one turn."""
LABELS = torch.tensor([[0, 0, 1.0, 0, 0.25, 0], [0, 0.0, 0, 0, 0, 0]])
SCORES = torch.tensor([[0, 9.0, 0.5, 0, -2.0, 0], [0, 1.5, 0, 0, 0, 0]])


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


TALK = [said("5"), USER, said("It is 6.")]


def batch(mask: Tensor = MASK, labels: Tensor = LABELS) -> TrainBatch:
    zeros = torch.zeros(mask.shape)
    return TrainBatch(
        tokens=mask.long(), attention=mask | True, mask=mask, rollout_logps=zeros, group=torch.arange(len(mask)),
        versions=mask.long() - 1, token_rewards=labels, rewards=labels.sum(-1), components=torch.zeros(len(mask), 0),
        component_names=(), advantages=zeros, accepted=mask, trainer_logps=zeros, old_logps=zeros, selected=~mask,
    )  # fmt: skip


def output(scores: Tensor) -> PolicyOutput:
    return PolicyOutput(torch.zeros_like(scores), None, scores=scores)


def test_turns_by_hand() -> None:
    """Scores 0.5 of a right turn and -2 of one that is right by 0.25, and 1.5 of a wrong one; 9 ends no turn."""
    found = BinaryCrossEntropy()(output(SCORES), batch())
    two = (softplus(-0.5) + softplus(-2.0) + 0.25 * 2.0) / 2
    expected = [[0, 0, 0, 0, pytest.approx(two), 0], [0, pytest.approx(softplus(1.5)), 0, 0, 0, 0]]
    assert found.per_token.tolist() == expected
    assert {name: value.item() for name, value in found.metrics.items()} == {
        "margin": pytest.approx(((0.5 + 2.0) / 2 - 1.5) / 2),
        "preference_accuracy": 0.5,
        "score": pytest.approx(((0.5 - 2.0) / 2 + 1.5) / 2),
    }


def test_the_loss_is_the_mean_over_rows_however_split() -> None:
    whole, objective = batch(), Objective(BinaryCrossEntropy(), "seq_mean_token_sum", 1)
    counts = objective.count_over_ranks(whole, [0, 1], 2, lambda x: x)
    expected = ((softplus(-0.5) + softplus(-2.0) + 0.5) / 2 + softplus(1.5)) / 2
    for split in ([[0, 1]], [[0], [1]]):
        parts = [(output(SCORES[rows]), whole.rows(torch.tensor(rows))) for rows in split]
        assert sum(float(objective.share(out, part, counts).loss) for out, part in parts) == pytest.approx(expected)


def test_the_gradient_is_sigmoid_minus_label() -> None:
    scores = SCORES.clone().requires_grad_()
    BinaryCrossEntropy()(output(scores), batch()).per_token.sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(2, 6)
    expected[0, 2], expected[0, 4] = (scores[0, [2, 4]].detach().sigmoid() - torch.tensor([1, 0.25])) / 2
    expected[1, 1] = scores[1, 1].sigmoid().item()
    torch.testing.assert_close(scores.grad, expected)
    check_loss(BinaryCrossEntropy())


@pytest.mark.parametrize("row", [{"messages": [USER, *TALK]}, {"prompt": USER["content"], "completion": TALK}])
def test_columns_of_turns(row: dict[str, Any]) -> None:
    prompted = [USER] if "prompt" in row else None
    [found] = recording(ChatRow({**row, "turn_rewards": [True, 0.25]}), prompted).answers
    assert found == RecordedAnswer(TALK, 0.0, [1.0, 0.25])
    assert recording(ChatRow(row), prompted).answers == [RecordedAnswer(TALK)]
    for wrong in ([1], [1, 0, 1], [1, None], [1, "right"], [1, float("nan")], 1, "11"):
        with pytest.raises(RecipeError, match="^f.jsonl, row 7: 'turn_rewards' is .* a number for each of 2 turns"):
            recording(ChatRow({**row, "turn_rewards": wrong}, "f.jsonl, row 7"), prompted)
    with pytest.raises(RecipeError, match="'turn_rewards' is 1e\\+31, expected a finite number"):
        recording(ChatRow({**row, "turn_rewards": [0, 1e31]}), prompted)


def recorded(section: Model, *answers: RecordedAnswer) -> list[Trajectory]:
    tokenizer = load_tokenizer(section)
    template = ChatTemplate(tokenizer, stop_ids(section, tokenizer))
    return recorded_group(template, Prompt("sum", [USER], recorded=list(answers)), 0, 4096)


def test_the_scores_of_turns_are_those_that_model_reward_returns(tmp_path: Path) -> None:
    """The template adds a line break after each turn's end token; scores are at turns' ends in rows of several."""
    section = Model(str(save_random_model(tmp_path / "m")), head="score")
    model = closed(score_model(section), section)
    assert len(model.closing) == 2
    answers = RecordedAnswer(TALK, 0.0, [1.0, 0.0]), RecordedAnswer([said("6")], 0.0, [0.0])
    trajectories = recorded(section, *answers)
    made = add_rewards(collate(trajectories), trajectories)
    table = model(made.tokens, made.mask).scores.detach()
    save_policy(model.policy, load_tokenizer(section), tmp_path / "rm")
    reward = ModelReward(str(tmp_path / "rm"), batch_size=2, per_turn=True)
    reward.bind(classifier_runtime())
    found = reward._score(trajectories)
    reward.close()
    compare_turns(trajectories, table)
    for trajectory, score, turns in zip(trajectories, found, (2, 1), strict=True):
        assert trajectory.score is not None
        assert (score.reward, len(score.turn_rewards or ())) == (0.0, turns)
        assert trajectory.score.turn_rewards == pytest.approx(score.turn_rewards, abs=1e-4)
    trajectories[0].score, trajectories[1].score = found
    rewards = add_rewards(collate(trajectories), trajectories).token_rewards
    assert (rewards != 0).sum(-1).tolist() == [2, 1]  # what GAE reads


def test_validation_counts_the_turns_on_their_side() -> None:
    """Right: a score above 0 of 0.5 or more; wrong: one above 0 of less; a score of 0 is half right."""
    trajectories = recorded(
        Model("tiny"), RecordedAnswer(TALK, 0.0, [0.5, 0.25]), RecordedAnswer([said("6")], 0.0, [1.0])
    )
    scores = torch.zeros(2, max(len(t.tokens) for t in trajectories))
    first, _, last = trajectories[0].turns[1:]
    scores[0, first.end - 1], scores[0, last.end - 1] = 2.0, 1.0
    answers = compare_turns(trajectories, scores)
    assert [(a.accuracy, a.components) for a in answers] == [(0.5, {"margin": 0.5}), (0.5, {"margin": 0.0})]
    assert [t.score for t in trajectories] == [Score(0.0, {"accuracy": 0.5}, turns) for turns in ([2.0, 1.0], [0.0])]


@pytest.mark.parametrize("columns", [{}, {"turn_rewards": [1, 2]}, {"turn_rewards": [-0.1, 0]}])
def test_turns_without_a_reward_from_0_to_1_are_refused(
    columns: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "sum", "messages": [USER, *TALK], **columns}))
    task = ("--task=Jsonl", f"--task.path={tmp_path / 'rows.jsonl'}", "--task.answer_field=null", "--validation=null")
    words = ("--recipe=quick_rm", *task, "--loss=BinaryCrossEntropy", "--train.steps=1", f"--out={tmp_path / 'run'}")
    assert main(["fit", *words]) == 2
    assert "reads a reward from 0 to 1 of each turn, but an answer to prompt 'sum' has" in capsys.readouterr().err
