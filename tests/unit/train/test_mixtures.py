"""Mixtures: what a step learns from besides its own rollouts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlkit_inspect import estimate
from rlkit_inspect.explain import explain
from safetensors.torch import load_file

import rlkit
from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.data.mixtures import recipe_of
from rlkit.interfaces.callback import TrainingBatch
from rlkit.losses import DPO, CrossEntropy
from rlkit.models.packing import PackedPasses
from rlkit.recipe import KLLoss, Mixture, Recipe, check
from rlkit.run.preflight import plan
from rlkit.run.preflight.dryrun import _longest
from rlkit.run.progress import Progress
from rlkit.tasks import Arithmetic
from rlkit.train.metrics import Meter
from rlkit.train.mixtures import Mixed, answers_to_policy, mixed
from rlkit.train.update import MiniBatch, Term, mixture_term
from rlkit.types import TrainBatch
from tests.conftest import read_jsonl, rlkit_in_process
from tests.unit.phases import LocalRanks, compute_logps, context, ready, recipe, scored, update_policy

ROWS = [0, 1, 2, 3]
SMALL = (
    "--train.steps=3", "--train.prompts_per_step=4", "--rollout.group_size=2", "--validation=null",
    "--train.max_tokens_per_micro_batch=64",
)  # fmt: skip
UNREWARDED = ("--reward=Composite", "--reward.rewards={math: MathReward}", "--reward.weights={math: 0.0}")
TEXT = "--mix.text={weight: 1.0, task: {class_path: Arithmetic, init_args: {max_operand: 49}}}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def fit(folder: Path, *words: str, name: str = "run") -> list[dict[str, Any]]:
    """Train in a folder; return the lines of metrics."""
    done = rlkit_in_process("fit", *words, f"--out={name}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_jsonl(folder / name / "metrics.jsonl")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


PASSES = ("--train.minibatches=2", "--train.epochs=2")


@pytest.mark.slow
def test_a_weight_of_0_changes_nothing_bit_for_bit(tmp_path: Path) -> None:
    """Neither the weights nor any metric, but those of the mixture itself and of time and memory."""
    run = ("--recipe=quickstart", *SMALL, *PASSES)
    plain = fit(tmp_path, *run, name="plain")
    mixed = fit(tmp_path, *run, TEXT, "--mix.text.weight=0", name="mixed")
    assert equal(weights(tmp_path / "plain"), weights(tmp_path / "mixed"))
    for one, other in zip(plain, mixed, strict=True):
        own = {name for name in one if not name.startswith(("time/", "memory/", "engine/"))}
        assert {name: one[name] for name in own} == {name: other[name] for name in own}
        assert {name for name in other if name not in one} == {"mix/text/loss", "mix/text/entropy", "mix/text/tokens"}
        assert 0 < other["mix/text/loss"] < 1


@pytest.mark.slow
def test_weight_1_with_reward_0_is_supervised_bit_for_bit(tmp_path: Path) -> None:
    mixed = fit(tmp_path, "--recipe=quickstart", *SMALL, *PASSES, *UNREWARDED, TEXT, name="mixed")
    plain = fit(tmp_path, "--recipe=quick_sft", *SMALL, *PASSES, "--task.max_operand=49", "--reward=null", name="plain")
    assert equal(weights(tmp_path / "plain"), weights(tmp_path / "mixed"))
    assert [line["mix/text/loss"] for line in mixed] == [line["policy/loss"] for line in plain]
    assert [line["grad_norm"] for line in mixed] == [line["grad_norm"] for line in plain]
    assert {line["advantage/abs_mean"] for line in mixed} == {0}


@pytest.mark.slow
def test_weighted_data_sets_with_preferences_under_adapters(tmp_path: Path) -> None:
    """Recorded answers as the run's own rows, and a loss that reads groups and a reference as the mixture's."""
    words = (
        "--recipe=quick_sft", *SMALL, "--reward=null", "--model.lora.rank=4", "--train.lr=1e-3",
        "--mix.pairs={weight: 0.5, loss: DPO, task: {class_path: Arithmetic, init_args: {mistakes: 1}}}",
        "--mix.pairs.prompts_per_step=2",
    )  # fmt: skip
    first, *_, last = fit(tmp_path, *words)
    assert first["mix/pairs/loss"] == pytest.approx(math.log(2))  # the policy is the reference still
    assert last["mix/pairs/margin"] != 0
    assert "mix/pairs/preference_accuracy" in last


@pytest.mark.slow
def test_what_tools_wrote_is_learned_without_a_task(tmp_path: Path) -> None:
    words = ("--recipe=quick_tool", *SMALL, "--train.prompts_per_step=8", *UNREWARDED)
    lines = fit(tmp_path, *words, "--mix.replies.weight=0.5", "--train.minibatches=2", "--train.lr=1e-3")
    assert all(line["mix/replies/tokens"] > 0 for line in lines)
    assert lines[-1]["mix/replies/loss"] < lines[0]["mix/replies/loss"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_rows_of_mixtures(tmp_path: Path) -> None:
    run = ("--recipe=quickstart", *SMALL, TEXT, "--mix.text.prompts_per_step=3", "--train.schedule=Constant")
    whole = fit(tmp_path, *run, name="whole")
    fit(tmp_path, *run, "--train.steps=1", name="again")
    again = fit(tmp_path, *run, "--resume=auto", name="again")
    assert [line["mix/text/loss"] for line in again] == [line["mix/text/loss"] for line in whole]
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "again"))


def test_the_tokens_that_answer_the_policy() -> None:
    """Those that it did not choose, after its first turn; rows share no prompt, and keep nothing of what they had."""
    batch = scored(advantages=ready().advantages, accepted=torch.zeros(4, 4, dtype=torch.bool))
    batch.mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0]]).bool()
    batch.attention[0] = True
    found = answers_to_policy(batch)
    expected = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).bool()
    assert torch.equal(found.mask, expected)
    assert torch.equal(found.accepted, expected)
    assert found.group.tolist() == [0, 1, 2, 3]
    assert not found.advantages.any()
    assert found.trainer_logps.isnan().all()


def test_replies_are_in_the_mini_batch_of_their_turns() -> None:
    made, meter = context(recipe(mix={"replies": Mixture(0.5)}, train={"minibatches": 2})), Meter()
    made.data.mixtures = {"replies": SimpleNamespace(recipe=recipe_of(Mixture(0.5), made.recipe))}
    batch = scored()
    batch.mask[:, 2:] = False
    [found] = mixed(made.data, made.models, made.service, TrainingBatch(1, batch), meter)
    assert (found.name, found.weight, found.groups) == ("replies", 0.5, [0, 0, 1, 1])
    assert found.data.recipe.groups_per_step == made.recipe.groups_per_step
    assert meter.result(made.ranks) == {"mix/replies/tokens": 1 + 0 + 2 + 1}


def of(weight: float, batch: TrainBatch, made: Any, name: str = "text") -> Mixed:
    """Make a mixture of all rows of a batch."""
    alone = recipe_of(Mixture(weight, Arithmetic()), made.recipe)
    data: Any = SimpleNamespace(**{**vars(made.data), "recipe": alone})
    return Mixed(name, weight, data, batch, batch.group.tolist())


def term_of(made: Any, mixture: Mixed, meter: Meter) -> Term | None:
    """Return the term of all rows of a mixture."""
    rows = list(range(len(mixture.batch)))
    return mixture_term(mixture, made.models.policy, made.service, MiniBatch(mixture.batch, rows), meter)


def step(made: Any, *mixtures: Mixed) -> dict[str, float]:
    """Make an optimizer step with mixtures; return the metrics."""
    meter = Meter()
    terms = [term_of(made, mixture, meter) for mixture in mixtures]
    update_policy(made, MiniBatch(ready(), ROWS), meter, terms)
    return meter.result(made.ranks)


OWN = ((2 + 3) - 4 + 2 * (5 + 1 + 2) - 2 * (3 + 2)) / 8
"""Minus the derivative of the run's own loss, -mean(A w token): see `test_phases_update`."""
OTHER = (2 + 3 + 4) / 3
"""Minus the derivative of the mixture's, -mean(w token) over its own 3 tokens: the rows of group 0."""


def part() -> TrainBatch:
    """Make a mixture's batch with 3 tokens: two rows of one group."""
    return ready().rows(torch.tensor([0, 1]))


@given(limit=st.integers(1, 20), weight=st.sampled_from([0.25, 1.0, 3.0]), packed=st.booleans())
def test_each_stream_is_divided_by_its_own_tokens(limit: int, weight: float, packed: bool) -> None:
    """However they are divided into micro-batches; at temperature 1, whatever that of the rollout is."""
    made = context(recipe(temperature=2.0, train={"max_tokens_per_micro_batch": limit}))
    made.models.policy.inner.passes = PackedPasses(None)
    made.models.policy.inner.passes.packed = packed
    found = step(made, of(weight, part(), made))
    assert made.models.policy.weight == pytest.approx(1 + OWN / 2 + weight * OTHER)
    assert found["policy/loss"] == pytest.approx(-OWN / 2)
    assert found["mix/text/loss"] == pytest.approx(-OTHER)
    assert found["update/steps"] == 1
    passes = [event for event in made.models.policy.events if event.endswith("pass")]
    assert passes == ["pass"] * (len(passes) - 1) + ["last pass"]


def test_counts_are_over_all_ranks_and_several_mixtures_add_up() -> None:
    """A second rank has the same: this one's share of the gradient is half as large."""
    made = context(recipe(), LocalRanks(2))
    found = step(made, of(1.0, part(), made), of(2.0, part(), made, "more"))
    assert made.models.policy.weight == pytest.approx(1 + (OWN + 3 * OTHER) / 2)
    assert found["mix/text/loss"] == pytest.approx(-OTHER)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_a_mixture_teaches_where_the_step_itself_has_no_token(weight: float) -> None:
    made, meter = context(recipe(), LocalRanks(2)), Meter()
    term = term_of(made, of(weight, part(), made), meter)
    none = ready(accepted=torch.zeros(4, 4, dtype=torch.bool))
    update_policy(made, MiniBatch(none, ROWS), meter, [term])
    assert made.models.policy.weight == pytest.approx(1 + weight * OTHER / 2)
    found = meter.result(made.ranks)
    assert (found["update/empty"], found.get("update/steps", 0)) == (1, 1 if weight else 0)
    assert found["mix/text/loss"] == pytest.approx(-OTHER)


def test_a_mixture_without_tokens_changes_nothing() -> None:
    made, empty = context(recipe()), part()
    empty.mask[:] = empty.accepted[:] = False
    assert "mix/text/loss" not in step(made, of(1.0, empty, made))
    assert made.models.policy.weight == pytest.approx(1 + OWN)


def test_a_step_that_learns_from_mixtures_alone_stalls() -> None:
    """Or a reward that always fails would never end the run; a filter that drops all groups is no failure."""
    progress = Progress(recipe(train={"minibatches": 2}))
    made = {"update/steps": 2.0, "rollout/samples": 4.0}
    assert progress.stalls(1, {**made, "update/empty": 2.0})
    assert not progress.stalls(1, {**made, "update/empty": 1.0, "advantage/abs_mean": 1.0})
    assert progress.quiet(1, {**made, "update/empty": 2.0, "filter/dropped": 1.0})


def with_mixture(mixture: Mixture, **changes: Any) -> Recipe:
    return recipe(mix={"text": mixture}, **changes)


def mistakes() -> Iterator[tuple[Recipe, str]]:
    task = Arithmetic()
    yield (
        with_mixture(Mixture(1.0)),
        "mix.text has no task, so it trains on the replies of tools, users and environments",
    )
    yield with_mixture(Mixture(1.0, None, DPO())), "mix.text.loss DPO compares completions by their rewards"
    yield with_mixture(Mixture(1.0, None, None, 4)), "mix.text.prompts_per_step is 4, but mix.text has no task"
    yield (
        with_mixture(Mixture(1.0, task, None, 1), train={"minibatches": 2}),
        "mix.text.prompts_per_step is 1, but train.minibatches is 2",
    )
    yield (
        with_mixture(Mixture(1.0, task, recipe().loss)),
        "mix.text.loss PolicyGradient reads advantages or old log-probs, but a mixture has none",
    )
    scores = parse("fit", ["--recipe=quick_rm"]).recipe
    yield (
        replace(scores, mix={"text": Mixture(1.0, task)}),
        "mix.text.loss is CrossEntropy, which does not fit model.head: score",
    )
    ranked = Mixture(1.0, task, scores.loss)
    yield with_mixture(ranked), "mix.text.loss BradleyTerry does not fit model.head: lm"


@pytest.mark.parametrize(("made", "message"), list(mistakes()), ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_in_a_recipe(made: Recipe, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check(made)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        *(({"text": Mixture(weight)}, "mix.text.weight is ") for weight in (-1.0, math.nan, math.inf)),
        *(({name: Mixture(1.0)}, f"mix has the name {name!r}, expected a name ") for name in ("a/b", "..", "", "a b")),
        ({"text": {"weigth": 1.0}}, "unknown option 'mix.text.weigth'; did you mean 'mix.text.weight'?"),
        (
            {"text": {"weight": 1.0, "task": {"class_path": "Jsonl", "init_args": {"pth": "x"}}}},
            "mix.text.task Jsonl has no option 'pth'; did you mean 'path'?",
        ),
    ],
)
def test_mistakes_in_values_and_names(mix: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        rlkit.Recipe("tiny", "Arithmetic", "ExactReward", mix=mix).yaml()
    assert message in str(raised.value)


def test_a_prompt_for_each_mini_batch_is_enough() -> None:
    check(with_mixture(Mixture(1.0, Arithmetic(), None, 2), train={"minibatches": 2}))


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"prompt": "2 + 3 = ?"}], (), "mix.old: prompt '0' has no recorded answer; rows need a column"),
        ([{"text": "5 " * 5000}], (), "mix.old: prompt '0' has 10002 tokens, but the context of model.path 'tiny'"),
        ([{"prompt": "1", "completion": "1"}], ("--mix.old.loss=SimPO",), "mix.old: loss SimPO compares the answers"),
        ([], (), "mix.old: "),
    ],
)
def test_mistakes_in_the_data(tmp_path: Path, rows: list[dict[str, Any]], words: tuple[str, ...], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(rows)))
    old = f"--mix.old={{weight: 1.0, task: {{class_path: Jsonl, init_args: {{path: {path}, answer_field: null}}}}}}"
    with pytest.raises(RecipeError) as raised:
        load_data(parse("fit", ["--recipe=quickstart", *SMALL, old, *words]).recipe)
    assert str(raised.value).startswith(message)


def test_a_mixture_ignores_the_options_of_the_runs_own_rows() -> None:
    words = (
        "--recipe=quickstart", "--kl_loss.coef=1", "--train.aggregation=token_sum", "--train.entropy_coef=1",
        "--rollout.max_staleness=2", "--train.old_logps=rollout", "--rollout.overlong=drop", TEXT,
        "--train.off_policy_mask_threshold=0.1", "--rollout.sampling.temperature=2.0",
    )  # fmt: skip
    made = parse("fit", [*words, "--mix.text.prompts_per_step=3"]).recipe
    assert made.mix is not None
    alone = recipe_of(made.mix["text"], made)
    check(alone)
    assert (alone.kl_loss, alone.train.aggregation, alone.train.entropy_coef) == (None, None, 0)
    assert (alone.groups_per_step, alone.rollout.overlong, alone.needs_old_logps) == (3, "drop", False)
    assert isinstance(alone.loss, CrossEntropy)
    assert alone.train.off_policy_mask_threshold is None
    of_replies = recipe_of(Mixture(1.0), made).rollout
    assert (of_replies.sampling.temperature, of_replies.max_staleness) == (1.0, 2)
    assert dict(explain(made))["mix text"] == (
        "+ 1 x CrossEntropy: -logp, sum over all tokens / N_tokens, over 3 prompts of Arithmetic with their recorded "
        "answers"
    )


def test_only_those_who_need_it_compare_with_the_reference() -> None:
    made = with_mixture(Mixture(1.0, Arithmetic(), DPO()))
    assert (made.needs_reference, made.needs_ref_logps) == (True, False)
    assert made.mix is not None
    assert {made.mix["text"].task, made.mix["text"].loss} <= set(made.parts())
    assert recipe(kl_loss=KLLoss()).needs_reference
    assert recipe_of(Mixture(1.0, Arithmetic(), DPO()), made).needs_ref_logps
    batch = scored()
    compute_logps(context(made, reference=object(), critic=object()), batch)
    assert (batch.ref_logps, batch.values) == (None, None)


def test_what_is_said_and_measured_of_a_mixture_before_a_run(tmp_path: Path) -> None:
    """Its rows may be longer than any that is sampled."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "5 " * 500}) + "\n")
    task = f"{{class_path: Jsonl, init_args: {{path: {tmp_path / 'rows.jsonl'}, answer_field: null}}}}"
    old = f"--mix.old={{weight: 1.0, task: {task}, prompts_per_step: 2}}"
    data = load_data(parse("fit", ["--recipe=quickstart", *SMALL, old]).recipe)
    said = list(plan.lines(data))
    assert "mix.old: 2 prompts a step with their recorded answers; 6.00 passes over 1 row" in said
    longest = data.mixtures["old"].longest_row
    assert longest > 1000
    assert f"mix.old: longest recorded answer {longest} tokens with its prompt, context 4096" in said
    assert {len(trajectory.tokens) for trajectory in _longest(data)} == {longest}
    assert "not included: the rows of mix.old" in estimate.lines(estimate.setting(data.recipe, 30, data.longest))
