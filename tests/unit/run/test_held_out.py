"""The loss of held-out rows: against transformers alone, and what a run does with it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlkit.cli.main import main
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Model, Validation
from rlkit.records.verdict import merit
from rlkit.run.progress import Progress
from tests.conftest import ROOT, read_jsonl, rlkit, rlkit_in_process
from tests.unit.phases import recipe

TINY = ROOT / "rlkit" / "models" / "tiny"
SUMS = [{"prompt": f"{n} + {n * n} = ?", "completion": str(n + n * n)} for n in range(1, 23)]
HELD_OUT, TRAINED = SUMS[:10], SUMS[10:]
RUN = (
    "--recipe=quick_sft", "--reward=null", "--task=Jsonl", "--task.path=rows.jsonl", "--task.answer_field=null",
    "--task.validation_path=held_out.jsonl", "--train.prompts_per_step=4", "--train.steps=4", "--out=run",
)  # fmt: skip


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def fit(folder: Path, *words: str, rows: Sequence[dict[str, Any]] = TRAINED) -> list[dict[str, Any]]:
    """Train in a folder; return the lines of metrics."""
    write(folder / "rows.jsonl", rows)
    if not (folder / "held_out.jsonl").exists():
        write(folder / "held_out.jsonl", HELD_OUT)
    done = rlkit_in_process("fit", *RUN, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_jsonl(folder / "run" / "metrics.jsonl")


def result(folder: Path) -> Any:
    return json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))


def negative_logps(rows: Sequence[dict[str, Any]]) -> list[tuple[float, int]]:
    """Return the negated log-prob of each completion under the tiny model, and its tokens, by transformers alone."""
    tokenizer = load_tokenizer(Model("tiny"))
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    sums = []
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ids = prompt_ids + tokenizer.encode(row["completion"], add_special_tokens=False) + [tokenizer.eos_token_id]
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = logps[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][len(prompt_ids) - 1 :]
        sums.append((-float(chosen.sum()), len(chosen)))
    return sums


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_it_is_the_mean_over_all_held_out_rows(tmp_path: Path, aggregation: str) -> None:
    """Ten rows of 1 to 3 digits, of which a pass takes 4, 4 and 2: neither these parts nor their lengths count."""
    fit(tmp_path, f"--train.aggregation={aggregation}", "--train.steps=1")
    sums = negative_logps(HELD_OUT)
    assert len({length for _, length in sums}) > 1
    if aggregation == "token_mean":
        expected = sum(total for total, _ in sums) / sum(length for _, length in sums)
    else:
        expected = sum(total / length for total, length in sums) / len(sums)
    validation = result(tmp_path)["validation"]
    assert validation["before"]["loss"] == pytest.approx(expected, abs=1e-5)
    assert validation["after"]["loss"] != validation["before"]["loss"]


def test_pairs_begin_at_log_2_with_no_preference(tmp_path: Path) -> None:
    lines = fit(tmp_path, "--loss=DPO", "--validation.every=4", rows=preferences(tmp_path))
    before = result(tmp_path)["validation"]["before"]
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["margin"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["validation/loss"] < before["loss"]
    assert lines[-1]["validation/preference_accuracy"] > 0.5


def test_a_teacher_that_is_the_policy_has_nothing_to_teach(tmp_path: Path) -> None:
    words = ("--loss=Distillation", "--teacher.path=tiny", "--train.lr=1e-2", "--train.steps=2")
    fit(tmp_path, *words)
    validation = result(tmp_path)["validation"]
    assert validation["before"]["loss"] == pytest.approx(0, abs=1e-6)
    assert validation["after"].keys() == validation["before"].keys()


def test_a_reward_model_has_both_its_loss_and_its_accuracy(tmp_path: Path) -> None:
    done = rlkit_in_process(
        "fit", "--recipe=quick_rm", "--train.steps=1", "--validation.limit=20", "--out=run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {"loss", "accuracy", "margin"} <= result(tmp_path)["validation"]["after"].keys()


def test_validating_changes_no_step(tmp_path: Path) -> None:
    with_validation = fit(tmp_path, "--validation.every=1")
    (tmp_path / "run").rename(tmp_path / "validated")
    without = fit(tmp_path, "--validation=null")
    for validated, line in zip(with_validation, without, strict=True):
        own = {name for name in line if not name.startswith(("time/", "memory/"))}
        assert {name: validated[name] for name in own} == {name: line[name] for name in own}


def test_divergences_weighted_by_ratios_begin_at_ratios_of_1(tmp_path: Path) -> None:
    """The old policy of held-out rows is the current one, as in a step's first pass."""
    fit(tmp_path, "--kl_loss.coef=0.1", "--kl_loss.importance_weighted=true")
    before, after = (result(tmp_path)["validation"][when] for when in ("before", "after"))
    assert before["kl_ref"] == pytest.approx(0, abs=1e-6)
    sums, lengths = zip(*negative_logps(HELD_OUT), strict=True)
    assert before["loss"] == pytest.approx(sum(sums) / sum(lengths), abs=1e-5)
    assert 0 < after["kl_ref"] < 10


def test_a_validation_whose_scores_failed_counts_for_nothing() -> None:
    """The loss that it has does not show that no validation will have a reward."""
    progress = Progress(recipe(validation=Validation(every=1, patience=1, watch="reward")))
    progress.validated({"loss": 0.5, "failed": 0.0, "unscored": 8.0})
    assert progress.waited is None


def test_a_run_with_a_reward_measures_both(tmp_path: Path) -> None:
    words = ("--reward=MathReward", "--task.answer_field=completion", "--validation.every=2")
    lines = fit(tmp_path, *words)
    assert {"validation/loss", "validation/accuracy", "validation/sampled_accuracy"} <= lines[1].keys()
    assert "validation/loss" not in lines[0]


def test_rows_that_record_nothing_are_refused_before_the_first_step(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", TRAINED)
    write(tmp_path / "held_out.jsonl", [{"prompt": "1 + 1 = ?", "answer": "2"}])
    done = rlkit_in_process("fit", *RUN, cwd=tmp_path)
    assert done.returncode == 2
    assert "validation without a `reward:` measures losses, but prompt '0' has no recorded answer" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_lowest_loss_is_kept_and_waited_for(tmp_path: Path) -> None:
    """With this rate the loss falls first; the weights of step 1 or later that had the lowest are kept."""
    words = ("--validation.every=1", "--save.keep_best=validation/loss", "--save.keep_last=1", "--save.every=0")
    lines = fit(tmp_path, *words, "--train.steps=6", "--train.lr=3e-2", "--train.schedule=Constant")
    losses = [line["validation/loss"] for line in lines]
    best = losses.index(min(losses)) + 1
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{best:06d}", "step-000006"}


@pytest.mark.parametrize(
    ("watch", "values", "waits"),
    [
        ("loss", [2.0, 1.0, 1.5, 1.25], 2),
        ("loss", [2.0, float("nan"), 1.5], 0),
        ("loss", [float("nan"), 3.0], 0),
        ("accuracy", [0.25, 0.5, 0.25], 1),
    ],
)
def test_patience_counts_validations_that_are_no_better(watch: str, values: list[float], waits: int) -> None:
    progress = Progress(recipe(validation=Validation(every=1, patience=9, watch=watch)))
    for value in values:
        progress.validated({watch: value})
    assert progress.waited is not None
    assert progress.waited[1] == waits


def test_the_reason_to_end_names_the_direction() -> None:
    progress = Progress(recipe(validation=Validation(every=1, patience=1, watch="loss")))
    for _ in range(2):
        progress.validated({"loss": 0.5})
    assert progress.exhausted() == "1 validations in a row had no lower loss than 0.500"


def test_losses_are_better_if_they_are_lower() -> None:
    assert merit("validation/loss", 0.5) == -0.5
    assert merit("loss", 0.5) == -0.5
    assert merit("validation/accuracy", 0.5) == 0.5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--validation.every=1", "--validation.patience=2"],
            "validation.watch is 'accuracy', but without a `reward:` validation scores nothing; set it to loss",
        ),
        (
            ["--validation.every=1", "--save.keep_best=validation/accuracy"],
            "save.keep_best is 'validation/accuracy', but without a `reward:` validation scores nothing; set it to ",
        ),
    ],
)
def test_metrics_that_a_run_without_a_reward_lacks_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "check", "quick_sft", "--reward=null", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_measure_the_loss_of_one(tmp_path: Path) -> None:
    """Ten rows on two ranks, which have 2, 2 and 1 of each part."""
    losses = []
    for devices in (1, 2):
        words = (f"--fabric.devices={devices}", "--fabric.strategy=ddp")
        write(tmp_path / "rows.jsonl", TRAINED)
        write(tmp_path / "held_out.jsonl", [*HELD_OUT[:9], {"prompt": "a", "completion": "b"}])
        done = rlkit("fit", *RUN, *words, "--train.steps=1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        validation = result(tmp_path)["validation"]
        losses += [validation["before"]["loss"], validation["after"]["loss"]]
        (tmp_path / "run").rename(tmp_path / f"of-{devices}")
    assert losses[:2] == pytest.approx(losses[2:], abs=1e-5)


def validate(folder: Path, *words: str) -> Any:
    """Return the metrics of `rlkit validate` in a folder."""
    done = rlkit_in_process("validate", *words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def preferences(folder: Path) -> list[dict[str, Any]]:
    """Write the held-out pairs of sums and 0; return the others."""
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in SUMS]
    write(folder / "held_out.jsonl", pairs[:10])
    return pairs[10:]


@pytest.mark.parametrize("adapters", ["null", "{rank: 4}"])
def test_validate_measures_a_checkpoint_against_the_policy_at_the_start(tmp_path: Path, adapters: str) -> None:
    fit(tmp_path, "--loss=DPO", "--train.lr=1e-2", f"--model.lora={adapters}", rows=preferences(tmp_path))
    of_run, after = result(tmp_path)["validation"], validate(tmp_path, "--checkpoint=run", "--out=out")
    assert after == pytest.approx(of_run["after"], abs=1e-5)
    assert abs(after["margin"]) > 0.01
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]
    before = validate(tmp_path, "--recipe=run/recipe.yaml")
    assert before == pytest.approx(of_run["before"], abs=1e-6)


def test_validate_prints_the_loss_of_each_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, "--reward=MathReward", "--task.answer_field=completion", "--validation.samples=0")
    alone = validate(tmp_path, "--checkpoint=tiny", "--checkpoint=run", "--recipe=run/recipe.yaml", "--reward=null")
    of_run = result(tmp_path)["validation"]
    losses = [metrics["loss"] for metrics in alone.values()]
    assert losses == pytest.approx([of_run[when]["loss"] for when in ("before", "after")], abs=1e-5)
    assert not any("accuracy" in metrics for metrics in alone.values())
    both = validate(tmp_path, "--checkpoint=run")
    assert both == pytest.approx({name: of_run["after"][name] for name in both}, abs=1e-5)
    assert {"loss", "accuracy"} <= both.keys()


def test_validate_says_that_the_reference_has_moved(tmp_path: Path) -> None:
    fit(tmp_path, "--loss=DPO", "--reference.refresh_every=2", rows=preferences(tmp_path))
    done = rlkit_in_process("validate", "--checkpoint=run", cwd=tmp_path)
    assert done.returncode == 0
    assert "note: losses compare with the policy at the start, which `reference:` has updated since" in done.stderr
