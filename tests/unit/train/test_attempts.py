"""SDPO: a teacher that reads the solutions and the feedback which the step itself produced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkit.base.errors import RecipeError
from rlkit.data.teacher import NO_TEXTS, AttemptTexts, TeacherPrompts, attempt_texts
from rlkit.interfaces.reward import RewardFunction, as_score
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Attempts, Model, Teacher
from rlkit.rewards import PythonReward
from rlkit.rollout.collate import collate
from rlkit.train.teacher import teacher_rows
from rlkit.types import Prompt, Rendered, Score, StopReason, Trajectory
from tests.conftest import FAST, read_jsonl, rlkit_in_process
from tests.unit.train.test_teacher_context import by_transformers, taught

RUN = ("--recipe=quick_distill", *FAST, "--validation=null", "--out=run")


def sample(group: int, text: str, reward: float | None, feedback: str | None = None) -> Trajectory:
    prompt = Prompt(str(group), [{"role": "user", "content": "q"}])
    score = Score(reward, feedback=feedback)
    return Trajectory(
        prompt, group, [1, 2, 3], [False, True, True], [0.0] * 3, [0] * 3, StopReason.STOP, text=text, score=score
    )


def test_a_sample_learns_from_the_best_other_solution() -> None:
    """By hand, with solutions from a reward of 1 on: the best has the second best; a group without has feedback."""
    rows = [
        sample(0, "a", 1.0),
        sample(0, "b", 0.9),
        sample(0, "c", 2.0),
        sample(1, "d", 0.5, "wrong"),
        sample(1, "e", 1.0),
    ]
    branch = sample(1, "f", 1.0)
    rows[4].span.branches = [branch]
    rows.append(branch)
    texts = attempt_texts(Attempts(), rows)
    assert [text.solution for text in texts] == ["c", "c", "a", "e", None, None]
    assert [text.feedback for text in texts] == [None, None, None, "wrong", None, None]
    feedback_only = attempt_texts(Attempts(solution=None), rows)
    assert feedback_only == [*[NO_TEXTS] * 3, AttemptTexts(None, "wrong"), *[NO_TEXTS] * 2]
    assert attempt_texts(Attempts(success=2.5, feedback=None), rows) == [NO_TEXTS] * 6


def test_the_papers_template_has_what_there_is() -> None:
    section = Teacher(attempts=Attempts())
    prompts = TeacherPrompts(100, section.template, attempts=section.attempts)
    prompt = Prompt("p", [{"role": "user", "content": "2 + 2?"}], meta={"solution": "of the row"})
    end = "\n\nCorrectly solve the original question."
    solution, feedback = "\n\nCorrect solution:\n\n{4}", "\n\nFeedback on an earlier attempt:\n\nno"
    for texts, middle in (
        (AttemptTexts("{4}", "no"), solution + feedback),
        (AttemptTexts("{4}"), solution),
        (AttemptTexts(None, "no"), feedback),
        (NO_TEXTS, ""),
    ):
        assert prompts.prompt(prompt, texts).messages[0]["content"] == f"2 + 2?{middle}{end}"


def test_a_row_without_a_start_is_not_read() -> None:
    rows = [sample(0, "a", 1.0), sample(0, "b", 0.0)]
    read = teacher_rows(collate(rows), rows, [None, Rendered([9, 9])], context=100)
    assert read.read.tolist() == [[False] * 3, [False, True, True]]
    restored = read.restore(read.batch.tokens.float()).nan_to_num(-1)
    assert restored.tolist() == [[0, -1, -1], [0, 2, 3]]


class Digits(RewardFunction):
    """The share of digits in a text; texts without any get feedback only."""

    def grade(self, trajectory: Trajectory) -> Score:
        digits = sum(character.isdigit() for character in trajectory.text)
        return Score(digits / max(len(trajectory.text), 1), feedback=None if digits else "Write digits.")

    def grade_at_once(self, trajectory: Trajectory) -> Score:
        return self.grade(trajectory)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["PolicyGradient", "Distillation"])
def test_the_teacher_reads_the_steps_own_samples(tmp_path: Path, loss: str) -> None:
    """Log-probs are those of transformers with the solution in the first message; other rows are not read."""
    attempts = {"success": 0.2, "solution": " {text}", "feedback": None}
    teacher = {"context": "{prompt}{solution}", "attempts": attempts}
    seen = taught(tmp_path, reward=Digits(), teacher=teacher, loss=loss)
    [batch], [line] = seen.batches, read_jsonl(tmp_path / "run" / "metrics.jsonl")
    unread = solved = 0
    for i, row in enumerate(seen.trajectories):
        first, [ask] = row.mask.index(True), row.prompt.messages
        others = [t for t in seen.trajectories if t.group == row.group and t is not row and (t.reward or 0) >= 0.2]
        tokens = slice(first, len(row.tokens))
        logps = batch.teacher_logps if loss == "PolicyGradient" else batch.teacher_top_logps[..., 0]
        if not others:
            assert logps[i, tokens].isnan().all()
            unread += row.response_length
            continue
        solved += 1
        best = max(others, key=lambda t: t.reward or 0)
        student = load_tokenizer(Model("tiny")).decode(row.tokens[:first])
        rendered = student.replace(ask["content"], f"{ask['content']} {best.text}")
        expected = by_transformers("tiny", rendered, row.tokens[first:])
        if loss == "PolicyGradient":
            torch.testing.assert_close(logps[i, tokens], expected, rtol=1e-4, atol=1e-4)
        else:
            assert (logps[i, tokens] >= expected - 1e-4).all()  # the most likely token of the same distribution
    assert solved
    assert line["teacher/unread"] == unread
    assert line["teacher/solutions"] == pytest.approx(solved / len(seen.trajectories))
    assert line["teacher/feedback"] == 0


def test_feedback_is_plain_text() -> None:
    assert as_score(Score(0.0, feedback="x" * 9000)).feedback == f"{'x' * 1980} [… 5040 characters …] {'x' * 1980}"
    assert as_score(Score(0.0, feedback="")).feedback is None
    assert "expected finite numbers up to 1e+30, and text as feedback" in str(as_score(Score(0.0, feedback=3)).error)  # type: ignore[arg-type]


def test_a_function_returns_feedback(tmp_path: Path) -> None:
    """By the key `feedback`, null for nothing; a number there is a component."""
    code = "def grade(text):\n    return {'reward': 1.0, 'feedback': {'a': 'no', 'b': None, 'c': 2}[text]}\n"
    (tmp_path / "reward.py").write_text(code, encoding="utf-8")
    reward = PythonReward(f"{tmp_path / 'reward.py'}:grade", allow_code=True)
    scores = [as_score(reward.grade(sample(0, text, None))) for text in "abc"]
    assert [(score.reward, score.feedback) for score in scores] == [(1.0, "no"), (1.0, None), (1.0, None)]
    assert [score.components for score in scores] == [{}, {}, {"feedback": 2.0}]


@pytest.mark.parametrize(
    ("attempts", "text", "message"),
    [
        (Attempts(), "{prompt} {solution}", "expected only {text} in the first, and {feedback} in the second"),
        (Attempts(solution="{answer}"), "{prompt}{solution}{feedback}", "teacher.attempts.solution is '{answer}'"),
        (Attempts(solution="yes"), "{prompt}{solution}{feedback}", "expected a column in it"),
    ],
)
def test_what_is_no_template_of_attempts(attempts: Attempts, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        TeacherPrompts(100, text, attempts=attempts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reward=null",), "teacher.attempts are sampled completions with their rewards"),
        (("--teacher.attempts.feedback=null", "--rollout.group_size=1"), "with rollout.group_size 1, so the teacher"),
    ],
)
def test_what_is_refused_before_the_run(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = rlkit_in_process("fit", *RUN, "--teacher.path=null", "--teacher.attempts={}", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
