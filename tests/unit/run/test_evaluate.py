"""Metrics of validation, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.cli.display import comparison
from rlkit.cli.main import main
from rlkit.models.checkpoint_schema import Numbers, RunState
from rlkit.ops.statistics import bootstrap, wilson
from rlkit.recipe import Validation
from rlkit.records.sources import MAX_SOURCES
from rlkit.records.validation_metrics import GradedCompletion, metric_rows, metrics
from rlkit.records.verdict import verdict_on
from rlkit.run.evaluate import Evaluation, samplings
from rlkit.run.progress import Progress
from rlkit.testing import example_trajectory
from rlkit.types import Sampling
from tests.conftest import read_jsonl
from tests.unit.phases import recipe


def answer(prompt: int, accuracy: float | None, *, finished: bool = True, source: str = "") -> GradedCompletion:
    reward = None if accuracy is None else 2 * accuracy
    return GradedCompletion(prompt, source, False, finished, 10 * (prompt + 1), reward, accuracy)


def test_greedy_answers() -> None:
    """Prompts 0 and 1 are right, the second was cut off; the score of 3 is missing and the conversation of 4 failed."""
    given = [answer(0, 1.0), answer(1, 1.0, finished=False), answer(2, 0.0), answer(3, None)]
    given.append(GradedCompletion(4, "", True, False, 5, None, None))
    found = dict(metrics(given))
    assert (found.pop("accuracy_low"), found.pop("accuracy_high")) == wilson(2, 3)
    assert found == {
        "accuracy": 2 / 3, "finished_accuracy": 1 / 3, "reward": 4 / 3, "length": 21.0, "stopped": 0.6, "failed": 1.0,
        "unscored": 1.0,
    }  # fmt: skip


def test_a_reward_without_accuracy_has_an_interval() -> None:
    """Prompts earn 0.5, 1.5 and 2 on average; where all earn the same, an interval would have no width."""
    rewards = ((0, 0.0), (0, 1.0), (1, 1.5), (2, 2.0))
    found = dict(metrics([GradedCompletion(i, "", False, True, 9, x, None) for i, x in rewards]))
    assert found["reward"] == pytest.approx(4 / 3)
    assert (found["reward_low"], found["reward_high"]) == bootstrap([0.5, 1.5, 2.0])
    right = dict(metrics([GradedCompletion(i, "", False, True, 9, float(i < 2), None) for i in range(3)]))
    assert (right["reward_low"], right["reward_high"]) == wilson(2, 3)
    equal = dict(metrics([GradedCompletion(i, "", False, True, 9, 0.5, None) for i in range(3)]))
    assert "reward_low" not in equal


def test_sampled_answers_are_means_over_prompts() -> None:
    """Of three samples of prompt 0 two are right, of four of prompt 1 one is: pass@2 is 1 and 1 - 3/6."""
    given = [answer(0, x) for x in (1.0, 1.0, 0.0)] + [answer(1, x) for x in (1.0, 0.0, 0.0, 0.0)]
    found = dict(metrics(given))
    assert found["accuracy"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert (found["accuracy_low"], found["accuracy_high"]) == bootstrap([2 / 3, 1 / 4])
    assert found["pass@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["pass@3"] == pytest.approx((1 + 3 / 4) / 2)
    assert "pass@4" not in found


def test_a_completion_that_failed_renames_no_pass_at_k() -> None:
    """One of prompt 0's four failed, and one of prompt 1's has no score; only prompt 2 has four that are graded."""
    failed = GradedCompletion(0, "", True, False, 5, None, None)
    given = [failed, *(answer(0, x) for x in (1.0, 1.0, 0.0)), *(answer(1, x) for x in (None, 0.0, 0.0, 0.0))]
    found = dict(metrics([*given, *(answer(2, x) for x in (1.0, 0.0, 0.0, 0.0))]))
    assert {name: value for name, value in found.items() if name.startswith("pass@")} == {
        "pass@2": pytest.approx((1 + 0 + 1 / 2) / 3), "pass@4": 1.0
    }  # fmt: skip
    assert not any(name.startswith("pass@4") for name in dict(metrics(given)))


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_samples_that_are_all_alike_prove_no_certainty(accuracy: float) -> None:
    """Draws from equal values would all be equal: two prompts say as little as two single answers."""
    found = dict(metrics([answer(prompt, accuracy) for prompt in (0, 0, 0, 1, 1, 1)]))
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(round(2 * accuracy), 2)
    assert found["accuracy_high"] - found["accuracy_low"] > 0.5


def test_the_majority_of_the_samples_of_a_prompt() -> None:
    """Prompt 0: two of three answer 7, which is right. 1: one right and one wrong answer. 2: no answer was found."""

    def vote(prompt: int, accuracy: float | None, final: str | None) -> GradedCompletion:
        return answer(prompt, accuracy)._replace(final=final)

    given = [vote(0, 1.0, "7"), vote(0, 1.0, "7"), vote(0, 0.0, "8"), vote(1, 1.0, "7"), vote(1, 0.0, "8")]
    given += [vote(1, None, None), vote(2, 0.0, ""), vote(2, 0.0, "")]
    assert dict(metrics(given))["maj@3"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    others = [vote(3, 1.0, None), vote(3, 1.0, None)]  # of a reward that looks for none
    assert dict(metrics(given + others))["maj@3"] == pytest.approx(1 / 2)
    for none in (others, [vote(0, 1.0, "7"), vote(1, 0.0, "8")], [vote(0, 0.5, "7"), vote(0, 1.0, "7")]):
        assert not any(name.startswith("maj@") for name, _ in metrics(none))


def test_what_is_strictly_right_is_shown_where_the_reward_tells() -> None:
    strict = [answer(i, 1.0)._replace(components={"strict": x}) for i, x in enumerate((1.0, 0.0, 1.0, 0.0))]
    found = dict(metrics([*strict, answer(4, 1.0)]))
    assert (found["accuracy"], found["strict_accuracy"]) == (1, 0.5)
    assert "strict_accuracy" not in dict(metrics([answer(0, 1.0)]))


def test_components_of_greedy_and_sampled_are_named() -> None:
    evaluation = Evaluation()
    evaluation.add("", [], [answer(0, 1.0)._replace(components={"format": 1.0})])
    evaluation.add("sampled_", [], [answer(0, 1.0)._replace(components={"length": 0.5}), answer(1, None)])
    assert evaluation.components == {"format", "length"}


def test_greedy_completions_are_never_truncated_by_top_p() -> None:
    sampled = Sampling(temperature=0.7, max_tokens=9, top_p=0.9, top_k=5, min_p=0.1)
    greedy = Sampling(temperature=0.0, max_tokens=9, top_p=1.0, top_k=0, min_p=0.0)
    assert samplings(recipe(validation=Validation(sampling=sampled))) == (greedy, sampled)


def test_sources_are_shown_apart_where_there_are_several() -> None:
    given = [answer(0, 1.0, source="gsm8k"), answer(1, 0.0, source="gsm8k"), answer(2, 1.0)]
    found = dict(metrics(given))
    assert (found["accuracy/gsm8k"], found["accuracy/other"]) == (0.5, 1.0)
    assert not any("/" in name for name, _ in metrics(given[:2]))


def test_a_row_cannot_make_a_metrics_name_long_or_unprintable() -> None:
    trajectory = example_trajectory("7")
    trajectory.prompt.meta["data_source"] = "\x1b[2J" + "x" * 3000
    name = GradedCompletion.of(trajectory).source
    assert name.isprintable()
    assert len(name) <= 120


def test_rewards_that_are_no_shares_have_no_pass_at_k() -> None:
    assert not any(name.startswith("pass@") for name, _ in metrics([answer(0, 0.5), answer(0, 1.0)]))
    assert dict(metrics([])) == {"failed": 0, "unscored": 0}


def test_each_component_has_its_mean_over_the_prompts_that_have_it() -> None:
    """Prompt 0: (1 + 0) / 2 = 0.5 for `right`; prompt 1: 1; `short` is missing in prompt 1."""
    given = [
        answer(0, None)._replace(components={"right": 1.0, "short": -2.0}),
        answer(0, None)._replace(components={"right": 0.0, "short": -4.0}),
        answer(1, None)._replace(components={"right": 1.0}),
    ]
    means = {name: value for name, value in metrics(given) if name.startswith("reward/")}
    assert means == {"reward/right": 0.75, "reward/short": -3.0}
    many = answer(0, None)._replace(components={f"criterion {i}": 1.0 for i in range(MAX_SOURCES + 1)})
    assert not any(name.startswith("reward/") for name, _ in metrics([many]))
    strict = {"strict": 1.0}  # with an accuracy it is `strict_accuracy`
    assert dict(metrics([answer(0, None)._replace(components=strict)]))["reward/strict"] == 1
    assert "reward/strict" not in dict(metrics([answer(0, 1.0)._replace(components=strict)]))
    assert dict(metrics([answer(0, None)])) == {"length": 10, "stopped": 1, "failed": 0, "unscored": 1}


def test_two_validations_are_compared_on_the_prompts_of_both() -> None:
    """Greedily five of five that differ are better: p = 2/32; the samples of the prompts are the same: p = 1."""
    before = {"": dict.fromkeys(range(9), 0.0), "sampled_": {0: 0.5}}
    after = Evaluation({}, {}, {"": {i: float(i < 5) for i in range(12)}, "sampled_": {0: 0.5, 1: 1.0}, "other_": {}})
    after.compare("start", before)
    assert after.metrics == {"accuracy_p_start": 0.0625, "sampled_accuracy_p_start": 1.0}


def test_rewards_are_compared_where_there_is_no_accuracy() -> None:
    """Nine of nine prompts earn more: p = 2 / 512; with an accuracy, rewards are not compared."""
    before, after = Evaluation(), Evaluation()
    before.add("", [], [answer(i, None)._replace(reward=0.0) for i in range(9)])
    after.add("", [], [answer(i, None)._replace(reward=1.0) for i in range(9)])
    after.compare("start", before.accuracies)
    assert after.metrics["reward_p_start"] == pytest.approx(2 / 512)
    verdict = verdict_on(before.metrics, after.metrics)
    assert verdict is not None
    assert (verdict.metric, verdict.change) == ("reward", "improved")
    graded = Evaluation()
    graded.add("", [], [answer(i, 1.0) for i in range(9)])
    assert list(graded.accuracies) == [""]


def test_a_checkpoint_holds_the_baseline_of_validation() -> None:
    earlier = {"start": {"": {0: 1.0, 7: 0.0}, "sampled_": {}}, "last": {"": {3: 0.25}}}
    state = RunState(step=1, recipe={}, numbers=Numbers(version=1), earlier=earlier)
    assert RunState.model_validate_json(state.model_dump_json()).earlier == earlier


def test_intervals_and_p_values_are_shown_beside_their_metric() -> None:
    before = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "length": 3.0}
    after = {**before, "accuracy": 0.75, "accuracy_p_start": 0.0123, "accuracy_p_last": 0.5}
    assert metric_rows(after) == [("accuracy", "0.750 (0.40-0.60)"), ("length", "3.000")]
    columns = [list(map(str, column.cells)) for column in comparison(before, after).columns]
    assert columns[1:] == [
        ["0.500 (0.40-0.60)", "3.000"], ["0.750 (0.40-0.60)", "3.000"], ["0.012", ""]
    ]  # fmt: skip


def test_sources_whose_names_end_as_those_of_bounds_do_are_shown() -> None:
    assert metric_rows({"accuracy/math_low": 0.5, "sampled_accuracy_low": 0.1}) == [("accuracy/math_low", "0.500")]


@pytest.mark.slow
def test_patience_ends_the_training_and_a_resumed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a learning rate of 1e-9 nothing gets better: the first validation of two that are not is that of step 2."""
    few = ("--train.steps=9", "--train.prompts_per_step=4", "--validation.limit=4", "--validation.samples=0")
    patient = ("--validation.every=2", "--validation.patience=2", "--train.lr=1e-9", "--save.every=1")
    assert main(["fit", "--recipe=quickstart", *few, *patient, f"--out={tmp_path / 'out'}"]) == 0
    assert "the training ends after step 4: 2 validations in a row had no higher accuracy than" in (
        capsys.readouterr().out
    )
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["steps"] == 4
    last = read_jsonl(tmp_path / "out" / "metrics.jsonl")[-1]
    assert result["validation"]["after"] == {  # that of the last step, which is not repeated
        name.removeprefix("validation/"): value for name, value in last.items() if name.startswith("validation/")
    }
    assert not list((tmp_path / "out" / "rollouts").glob("validation-after*"))
    assert main(["fit", f"--resume={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--validation.patience=2",), "validation.patience counts the validations of steps; set validation.every"),
        (("--validation.patience=2", "--validation.every=1", "--validation.watch=loss"), "expected one of accuracy, "),
        (
            ("--validation.patience=2", "--validation.every=1", "--validation.watch=sampled_pass@2",
             "--validation.samples=0"),
            "but validation.samples is 0",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_watched(options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", "--recipe=quickstart", *options]) == 2
    assert problem in capsys.readouterr().err


def test_a_validation_that_failed_counts_for_no_patience() -> None:
    progress = Progress(recipe(validation=Validation(every=1, patience=1)))
    for metrics_of_step in ({"failed": 3.0}, {"accuracy": 0.5, "reward": 0.5}, {"failed": 3.0}, {"reward": 0.5}):
        progress.validated(metrics_of_step)
    assert (progress.waited, progress.exhausted()) == ((0.5, 0), None)


def test_a_metric_that_validation_does_not_have_is_named() -> None:
    progress = Progress(recipe(validation=Validation(every=1, patience=1, watch="accuracy/gsm8k")))
    with pytest.raises(RecipeError, match=r"watch is 'accuracy/gsm8k', expected a metric of validation: accuracy, re"):
        progress.validated({"accuracy": 1.0, "reward": 1.0})
