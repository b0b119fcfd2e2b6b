"""Every estimator and every loss from `rlkit fit`: what the run wrote equals a few lines of numpy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from rlkit.cli.main import main
from rlkit.models.load import load_policy
from rlkit.recipe import Model
from tests.conftest import FAST, read_jsonl

Rows = list[dict[str, Any]]
STEPS = 3


def fit(out: Path, *options: str) -> tuple[list[dict[str, float]], list[Rows]]:
    """Train for three steps; give each step's metrics, and the rollouts that it trained on."""
    assert main(["fit", "--recipe=quickstart", *FAST, f"--train.steps={STEPS}", *options, f"--out={out}"]) == 0
    metrics = read_jsonl(out / "metrics.jsonl")
    rollouts = [read_jsonl(out / "rollouts" / f"step-{n:05d}.jsonl.gz") for n in range(1, STEPS + 1)]
    return metrics, [[r for r in rows if "advantages" in r] or rows for rows in rollouts]


def rewards(rows: Rows) -> np.ndarray:
    return np.array([r["reward"] for r in rows])


def in_groups(rows: Rows, of: Callable[[np.ndarray, Rows], np.ndarray], values: np.ndarray | None = None) -> np.ndarray:
    """Apply a formula to the rewards (or other values) of each group."""
    values = rewards(rows) if values is None else values
    groups, result = np.array([r["group"] for r in rows]), np.zeros(len(rows))
    for group in set(groups):
        index = groups == group
        result[index] = of(values[index], [r for r, i in zip(rows, index, strict=True) if i])
    return result


def centred(x: np.ndarray, rows: Rows) -> np.ndarray:
    return x - x.mean()


def scaled(x: np.ndarray, rows: Rows) -> np.ndarray:
    return np.zeros_like(x) if x.max() == x.min() else (x - x.mean()) / (x.std(ddof=1) + 1e-6)


def opo(x: np.ndarray, rows: Rows) -> np.ndarray:
    lengths = np.array([sum(r["mask"]) for r in rows])
    return x - (lengths * x).sum() / lengths.sum()


def best(x: np.ndarray, rows: Rows) -> np.ndarray:
    second, first = np.sort(x)[-2:]
    lead = (first - second) / (x.std(ddof=1) + 1e-6)
    return np.where(np.arange(len(x)) == x.argmax(), lead, 0.0)


def max_rl(x: np.ndarray, rows: Rows) -> np.ndarray:
    return (x - x.mean()) / x.mean() if x.mean() > 0 else np.zeros_like(x)


def repeated(values: np.ndarray, rows: Rows) -> list[np.ndarray]:
    """Return each row's value to all of its tokens."""
    return [np.full(sum(r["mask"]), v) for r, v in zip(rows, values, strict=True)]


def whitened(tokens: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate(tokens)
    return [(x - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for x in tokens]


def gae(rows: Rows) -> list[np.ndarray]:
    """With gamma = lam = 1 the estimate is the return less the value."""
    values = [np.array(r["values"])[np.array(r["mask"], bool)] for r in rows]
    return whitened([r["reward"] - v for r, v in zip(rows, values, strict=True)])


def gdpo(rows: Rows) -> list[np.ndarray]:
    accuracy, form = (np.array([r["components"][name] for r in rows]) for name in ("accuracy", "format"))
    return whitened(repeated(in_groups(rows, scaled, accuracy) + 0.5 * in_groups(rows, scaled, form), rows))


def optimal_token_baseline(rows: Rows) -> list[np.ndarray]:
    """Probabilities anew, at temperature 1.5, from the model as it was before the first step."""
    policy, energies = load_policy(Model("tiny")), []
    for r in rows:
        with torch.no_grad():
            p = torch.softmax(policy(input_ids=torch.tensor([r["tokens"]])).logits[0].double() / 1.5, -1)
        start = r["mask"].index(1)
        own = p[range(start - 1, len(r["tokens"]) - 1), r["tokens"][start:]]
        energies.append(np.cumsum((1 - 2 * own + (p[start - 1 : -1] ** 2).sum(-1)).numpy()))
    result = []
    for r, energy in zip(rows, energies, strict=True):
        mates = [(m["reward"], e) for m, e in zip(rows, energies, strict=True) if m["group"] == r["group"]]
        baseline = np.zeros(len(energy))
        for t in range(len(energy)):
            there = [(g, e[t]) for g, e in mates if len(e) > t]
            if len(there) > 1:
                total = sum(w for _, w in there)
                # where the policy is sure, float32 cannot tell the weights from 0
                baseline[t] = sum(g * w for g, w in there) / (total + 1e-8) if total > 1e-3 else np.nan
        result.append(r["reward"] - baseline)
    return result


ESTIMATORS: dict[str, tuple[tuple[str, ...], Callable[[Rows], list[np.ndarray]]]] = {
    "GRPO": ((), lambda rows: repeated(in_groups(rows, scaled), rows)),
    "GRPO --advantage.scale_by_std=false": ((), lambda rows: repeated(in_groups(rows, centred), rows)),
    "RLOO": ((), lambda rows: repeated(in_groups(rows, lambda x, _: centred(x, _) * 4 / 3), rows)),
    "OPO": ((), lambda rows: repeated(in_groups(rows, opo), rows)),
    "PassK": ((), lambda rows: repeated(in_groups(rows, best), rows)),
    "GPG": (
        (),
        lambda rows: repeated(in_groups(rows, centred) * len(rows) / max((rewards(rows) != 0).sum(), 1), rows),
    ),
    "MaxRL": ((), lambda rows: repeated(in_groups(rows, max_rl), rows)),
    "ReinforcePP": ((), lambda rows: whitened(repeated(rewards(rows), rows))),
    "ReinforcePPBaseline": ((), lambda rows: whitened(repeated(in_groups(rows, centred), rows))),
    "ReMax": ((), lambda rows: repeated(rewards(rows) - [r["greedy_reward"] for r in rows], rows)),
    "GAE": (("--critic.lr=0.01",), gae),
    "GDPO": (("--advantage.weights={accuracy: 1.0, format: 0.5}",), gdpo),
    "OptimalTokenBaseline": (("--rollout.sampling.temperature=1.5",), optimal_token_baseline),
}


def chosen(row: dict[str, Any], name: str) -> np.ndarray:
    return np.array(row[name])[np.array(row["mask"], bool)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_in_a_run(tmp_path: Path, name: str) -> None:
    options, reference = ESTIMATORS[name]
    metrics, steps = fit(tmp_path / "out", *f"--advantage={name}".split(), *options)
    for rows in steps[:1] if name == "OptimalTokenBaseline" else steps:
        for row, expected in zip(rows, reference(rows), strict=True):
            known = ~np.isnan(expected)
            np.testing.assert_allclose(chosen(row, "advantages")[known], expected[known], rtol=1e-3, atol=1e-4)
            assert not np.array(row["advantages"])[~np.array(row["mask"], bool)].any()
    assert any(chosen(row, "advantages").any() for rows in steps for row in rows)
    assert_moved(tmp_path / "out")
    if name == "GAE":
        assert any(chosen(row, "values").any() for row in steps[-1])  # the head starts at 0 and learns
        assert metrics[-1]["critic/loss"] > 0


def assert_moved(out: Path) -> None:
    after = load_policy(Model(str(out / "final"))).state_dict()
    assert any((after[name] != value).any() for name, value in load_policy(Model("tiny")).state_dict().items())


def token_mean(values: list[np.ndarray]) -> float:
    return float(np.concatenate(values).mean())


def sequence_mean(values: list[np.ndarray]) -> float:
    return float(np.mean([v.mean() for v in values]))


def plain(rows: Rows) -> list[np.ndarray]:
    return [-chosen(r, "advantages") for r in rows]


def times_logps(rows: Rows) -> list[np.ndarray]:
    return [-chosen(r, "advantages") * chosen(r, "logps") for r in rows]


def sapo(rows: Rows) -> list[np.ndarray]:
    """At a ratio of 1 the gate is 1/2 * 4 / tau."""
    return [-a * 2 / np.where(a > 0, 1.0, 1.05) for a in (chosen(r, "advantages") for r in rows)]


LOSSES: dict[str, tuple[tuple[str, ...], Callable[[Rows], float]]] = {
    "ClipLoss": ((), lambda rows: token_mean(plain(rows))),
    "PolicyGradient": ((), lambda rows: token_mean(times_logps(rows))),
    "GSPO": ((), lambda rows: sequence_mean(plain(rows))),
    "CISPO": ((), lambda rows: token_mean(times_logps(rows))),
    "SAPO": ((), lambda rows: sequence_mean(sapo(rows))),
    "GMPO": ((), lambda rows: sequence_mean(plain(rows))),
    "DPPO": ((), lambda rows: token_mean(times_logps(rows))),
    "DPPO --loss.kind=kl": ((), lambda rows: token_mean(times_logps(rows))),
    "ClipCov": (("--loss.cov_low=1e6", "--loss.cov_high=1e7"), lambda rows: token_mean(plain(rows))),  # none selected
    "M2PO": ((), lambda rows: token_mean(plain(rows))),  # rounding apart, the policy is the one that sampled
    "VESPO": ((), lambda rows: token_mean(times_logps(rows))),
    "TOPR": ((), lambda rows: float(np.mean([v.sum() for v in times_logps(rows)]))),
    "DRO": ((), lambda rows: token_mean(times_logps(rows))),
    "KLCov": (("--loss.fraction=0.1",), lambda rows: token_mean(plain(rows))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_a_run(tmp_path: Path, name: str) -> None:
    """On-policy, where the dumped rollouts hold all that a loss reads; the advantages of unequal lengths add up."""
    options, reference = LOSSES[name]
    length = ("--reward=Composite", "--reward.rewards={m: MathReward, n: {class_path: Overlong, init_args: "
              "{max_tokens: 12, buffer: 8}}}")  # fmt: skip
    metrics, steps = fit(tmp_path / "out", *f"--loss={name}".split(), *options, *length)
    for row, rows in zip(metrics, steps, strict=True):
        assert row["policy/loss"] == pytest.approx(reference(rows), rel=1e-3, abs=1e-4)
    assert any(chosen(row, "advantages").any() for rows in steps for row in rows)
    assert_moved(tmp_path / "out")


def test_truncated_completions_are_masked_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 8 tokens at most, sums of three digits are cut off; with 2, all are, and the run says so."""
    options = ("--train.mask_truncated=true", "--rollout.group_size=4")
    metrics, steps = fit(tmp_path / "some", *options, "--rollout.sampling.max_tokens=8")
    stops = {r["stop"] for rows in steps for r in rows}
    assert stops == {"stop", "length"}
    for row, rows in zip(metrics, steps, strict=True):
        finished = [r for r in rows if r["stop"] == "stop"]
        assert row["policy/loss"] == pytest.approx(token_mean(plain(finished)), rel=1e-3, abs=1e-4)
    assert any(chosen(row, "advantages").any() for rows in steps for row in rows if row["stop"] == "length")
    every = ("fit", "--recipe=quickstart", *FAST, *options, "--rollout.sampling.max_tokens=2", "--train.steps=3")
    assert main([*every, f"--out={tmp_path / 'none'}"]) == 1
    assert "no sample was left to train on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ClipLoss", "GSPO", "KLCov", "M2PO"])
def test_a_loss_off_policy(tmp_path: Path, name: str) -> None:
    metrics, _ = fit(tmp_path / "out", f"--loss={name}", "--train.minibatches=2", "--train.epochs=2", "--train.lr=1e-3")
    assert all(np.isfinite(row["policy/loss"]) and row["policy/kl_old"] != 0 for row in metrics)
    assert all(row["mismatch/max"] < 1e-4 for row in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_truncated_sampling_trains_over_its_candidates(tmp_path: Path, ahead: bool) -> None:
    """Engine, trainer and reference renormalise over the tokens that the limits left, also in interrupted turns."""
    options = ["--rollout.sampling={temperature: 1.2, top_p: 0.8, top_k: 6}", "--kl_loss={coef: 0.01}"]
    if ahead:
        options += ["--rollout.max_staleness=2", "--correction={}", "--rollout.lead=1"]
    metrics, steps = fit(tmp_path / "out", *options, "--train.lr=1e-4")
    assert all(row["mismatch/max"] < 1e-4 and row["mismatch/mean"] < 2e-6 for row in metrics)
    assert metrics[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) != metrics[-1]["policy/kl_ref"]
    for rows in steps:
        tokens = [
            (t, ids)
            for row in rows
            for t, ids, m in zip(row["tokens"], row["candidates"], row["mask"], strict=True)
            if m
        ]
        assert all(token in ids and len(ids) <= 6 for token, ids in tokens)
        assert {len(ids) for _, ids in tokens} > {1, 2}
        surprises = [-x for row in rows for x, m in zip(row["logps"], row["mask"], strict=True) if m]
        assert all(surprise < 1e-6 for surprise, (_, ids) in zip(surprises, tokens, strict=True) if len(ids) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_structured_answers_train_over_their_candidates(tmp_path: Path, ahead: bool) -> None:
    """Also where turns are interrupted: what follows continues the structure."""
    options = ["--rollout.sampling={structure: {regex: '[0-9]{1,2}(,[0-9]){2}'}, top_k: 8}"]
    if ahead:
        options += ["--rollout.max_staleness=2", "--correction={}", "--rollout.lead=1"]
    metrics, steps = fit(tmp_path / "out", *options, "--train.lr=1e-4", "--train.prompts_per_step=64")
    assert all(row["mismatch/max"] < 1e-4 and row["mismatch/mean"] < 2e-6 for row in metrics)
    texts = [row["text"] for rows in steps for row in rows]
    assert all(re.fullmatch("[0-9]{1,2},[0-9],[0-9]", text) for text in texts)
    assert len(set(texts)) > 30
    assert ahead == any(len(set(row["versions"])) > 2 for rows in steps for row in rows)


@pytest.mark.slow
def test_a_step_of_truncated_sampling_is_learned_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fit(out, "--rollout.sampling={top_p: 0.8, top_k: 6}", "--save.every=1")
    assert main(["replay", str(out), "--step=2", "--phase=learn"]) == 0


def over_pairs(of: Callable[[float, float], float], rows: Rows) -> float:
    """Return the mean over groups of the mean over pairs of rows with unequal rewards, by their mean log-probs."""
    groups: dict[int, list[float]] = {}
    for better in rows:
        for worse in rows:
            if better["group"] == worse["group"] and better["reward"] > worse["reward"]:
                value = of(chosen(better, "logps").mean(), chosen(worse, "logps").mean())
                groups.setdefault(better["group"], []).append(value)
    return float(np.mean([np.mean(pairs) for pairs in groups.values()]))


def odds_ratio(better: float, worse: float) -> float:
    log_odds = [x - np.log1p(-np.exp(x)) for x in (better, worse)]
    return float(-better + 0.1 * np.log1p(np.exp(log_odds[1] - log_odds[0])))


PREFERENCES: dict[str, Callable[[Rows], float]] = {
    "DPO": lambda rows: math.log(2),
    "KTO": lambda rows: 0.5,
    "SimPO": lambda rows: over_pairs(lambda better, worse: np.log1p(np.exp(1 - 2 * (better - worse))), rows),
    "ORPO": lambda rows: over_pairs(odds_ratio, rows),
}
"""What a loss of preferences is where the policy is the reference."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("options", [(), ("--train.minibatches=2",), ("--model.lora.rank=4", "--train.lr=1e-2")])
def test_a_loss_of_preferences_in_a_run(tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    """The first step's loss is that of the rollouts; the policy then leaves the reference, which LoRA has without."""
    metrics, steps = fit(tmp_path / "out", f"--loss={name}", "--advantage=null", "--rollout.group_size=4", *options)
    if "--train.minibatches=2" not in options:
        assert metrics[0]["policy/loss"] == pytest.approx(PREFERENCES[name](steps[0]), rel=1e-3)
    assert all(0 <= row["policy/preference_accuracy"] <= 1 for row in metrics)
    assert metrics[-1]["policy/margin"] != 0
    assert_moved(tmp_path / "out")


@pytest.mark.slow
def test_recorded_preferences_teach_what_is_then_generated(tmp_path: Path) -> None:
    assert main(["fit", "--recipe=quick_dpo", "--train.steps=30", f"--out={tmp_path / 'out'}"]) == 0
    validation = json.loads((tmp_path / "out" / "result.json").read_text())["validation"]
    assert validation["before"]["accuracy"] < 0.75
    assert validation["after"]["accuracy"] >= 0.8
    assert read_jsonl(tmp_path / "out" / "metrics.jsonl")[-1]["policy/preference_accuracy"] > 0.8


@pytest.mark.slow
def test_recorded_preferences_refer_to_the_base_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters begin as the reference, at a loss of log 2, and leave it; what is shown is about pairs."""
    out = tmp_path / "out"
    words = ("--validation=null", "--model.lora.rank=4", "--train.lr=1e-2", "--train.warmup_steps=0")
    assert main(["fit", "--recipe=quick_dpo", *words, "--train.steps=3", f"--out={out}"]) == 0
    first, _, last = read_jsonl(out / "metrics.jsonl")
    assert (first["policy/loss"], first["policy/margin"]) == (pytest.approx(math.log(2)), 0)
    assert last["policy/loss"] < math.log(2)
    assert last["policy/margin"] > 0
    assert "reward/mean" not in last  # it is the data's, whatever the policy does
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3/3")]
    assert f"  preferred {last['policy/preference_accuracy']:.2f}  margin {last['policy/margin']:.2f}  " in line
    assert "reward" not in line


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quick_ppo", "quick_remax", "quick_rloo", "quick_online_dpo"])
def test_a_recipe_learns_to_carry(tmp_path: Path, recipe: str) -> None:
    """Within half of its 60 steps."""
    words = ("--validation.samples=0", "--train.steps=30")
    assert main(["fit", f"--recipe={recipe}", *words, f"--out={tmp_path / 'out'}"]) == 0
    validation = json.loads((tmp_path / "out" / "result.json").read_text())["validation"]
    assert validation["before"]["accuracy"] < 0.75
    assert validation["after"]["accuracy"] >= 0.85
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    # a byte that no text has now and then leads where float32 noise grows: the mean tells whether the engines agree
    assert all(row["mismatch/mean"] < 1e-5 and row["mismatch/max"] < 2e-3 for row in rows)
    if recipe == "quick_ppo":
        explained = [row["critic/explained_variance"] for row in rows]
        assert fmean(explained[-10:]) > explained[0] + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ClipCov --loss.cov_low=0 --loss.cov_high=99", "KLCov"])
def test_the_first_step_on_a_rollout_selects_tokens_too(tmp_path: Path, loss: str) -> None:
    """Where the old policy is the one that learns, its log-probs are known before tokens are selected."""
    metrics, steps = fit(tmp_path / "out", *f"--loss={loss} --loss.fraction=0.25".split())
    for row, rows in zip(metrics, steps, strict=True):
        tokens = sum(sum(r["mask"]) for r in rows)
        assert int(0.25 * tokens) / tokens <= row["policy/cov_fraction"] + 1e-6  # equal samples are selected together
        assert row["policy/cov_fraction"] < 0.6


def test_kl_in_the_reward_reaches_the_advantages(tmp_path: Path) -> None:
    options = ("--kl_reward.coef=0.5", "--kl_reward.target=0.01", "--advantage=RLOO", "--train.lr=0.01")
    metrics, steps = fit(tmp_path / "out", *options)
    assert metrics[0]["reward/kl_reward"] == pytest.approx(0, abs=1e-6)
    assert metrics[0]["reward/kl_coef"] == 0.5
    assert metrics[1]["reward/kl_coef"] < 0.5  # KL 0 is below the target
    plain_rloo = repeated(in_groups(steps[2], lambda x, _: centred(x, _) * 4 / 3), steps[2])
    gaps = [np.abs(chosen(r, "advantages") - e).max() for r, e in zip(steps[2], plain_rloo, strict=True)]
    assert max(gaps) > 1e-3


@pytest.mark.slow
def test_a_reference_that_follows_the_policy(tmp_path: Path) -> None:
    options = ("--kl_loss.coef=0.01", "--reference.refresh_every=1", "--train.lr=0.01")
    metrics, _ = fit(tmp_path / "out", *options)
    assert all(row["policy/kl_ref"] == pytest.approx(0, abs=1e-6) for row in metrics)


@pytest.mark.slow
def test_an_average_of_the_weights_is_saved_beside_them(tmp_path: Path) -> None:
    fit(tmp_path / "out", "--train.ema=0.9")
    final, average = (load_policy(Model(str(tmp_path / "out" / name))).state_dict() for name in ("final", "ema"))
    start = load_policy(Model("tiny")).state_dict()
    moved, followed = (sum(float((x[n] - start[n]).norm()) for n in start) for x in (final, average))
    assert 0 < followed < 0.5 * moved


@pytest.mark.slow
def test_a_filter_drops_or_refills_groups_without_signal(tmp_path: Path) -> None:
    dropping, kept = fit(tmp_path / "a", "--rollout.filter=ZeroSignal", "--rollout.group_size=2")
    for row, rows in zip(dropping, kept, strict=True):
        groups = [r["group"] for r in rows]
        assert row["filter/dropped"] == 1 - len(set(groups)) / 4
        assert row.get("groups/no_signal", 0) == 0
    assert any(row["filter/dropped"] > 0 for row in dropping)
    refill = ("--rollout.filter=ZeroSignal", "--rollout.filter.max_refills=20", "--rollout.group_size=2")
    refilled, kept = fit(tmp_path / "b", *refill)
    assert all({r["group"] for r in rows} == {0, 1, 2, 3} for rows in kept)
    assert any(row.get("filter/refilled", 0) > 0 for row in refilled)


@pytest.mark.slow
def test_the_old_policy_may_be_the_engine(tmp_path: Path) -> None:
    options = ("--train.old_logps=rollout", "--train.minibatches=2", "--train.epochs=2")
    metrics, _ = fit(tmp_path / "out", *options)
    recomputed, _ = fit(tmp_path / "again", *options[1:])
    # engine and trainer agree in float32, so the first step's loss does too
    assert metrics[0]["policy/loss"] == pytest.approx(recomputed[0]["policy/loss"], abs=1e-4)
    assert all(row["mismatch/max"] < 1e-4 for row in metrics)


def test_shaped_rewards_change_advantages_and_not_the_log(tmp_path: Path) -> None:
    metrics, steps = fit(tmp_path / "out", "--shaping.clip=0.5", "--advantage=RLOO")
    for row, rows in zip(metrics, steps, strict=True):
        assert row["reward/mean"] == pytest.approx(rewards(rows).mean())
        halved = repeated(in_groups(rows, lambda x, _: centred(x, _) * 4 / 3) / 2, rows)
        for r, expected in zip(rows, halved, strict=True):
            np.testing.assert_allclose(chosen(r, "advantages"), expected, atol=1e-5)


def test_explain_prints_the_numbers_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--loss.clip_high=0.3", "--kl_loss.coef=0.02", "--rejection.high=1.5", "--train.ema=0.9")
    assert main(["explain", "--recipe=dapo_gsm8k", *options]) == 0
    text = capsys.readouterr().out
    for expected in ("A = (R - mean_group) / (std_group + 1e-06)", "1 + 0.3", "+ 0.02 k3", "keep 0.666667 <= k1(token)",
                     "decay 0.9", "sum over all tokens / N_tokens", "4 optimizer steps", "ZeroSignal"):  # fmt: skip
        assert expected in text


def test_explain_prints_corrections_for_another_policy(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--rejection.statistic=binary_kl",
        "--train.old_logps=loglinear",
        "--train.off_policy_mask_threshold=0.1",
    )
    assert main(["explain", "--recipe=scalerl_gsm8k", "--loss=M2PO", *options]) == 0
    text = capsys.readouterr().out
    for expected in ("keep binary_kl(token) <= 0.1", "log pi_engine / d + (1 - 1 / d) log pi", "N_prompts",
                     "0 where A < 0 and the sequence's mean", "std_batch(R - mean_group)", "at most 0.04"):  # fmt: skip
        assert expected in text
