"""A comparison of two rewards for people."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.cli.views.display import echo, show
from rlkit.cli.views.reward_compare import OUTCOMES, SHOWN, RewardComparison
from rlkit.types import JsonObject


def report(comparison: RewardComparison, files: int) -> None:
    """Print what changes."""
    metrics = comparison.metrics()
    rows = [("reward", _number(metrics["saved"]), _number(metrics["new"]))]
    rows += [(name, _number(x["saved"]), _number(x["new"])) for name, x in metrics["components"].items()]
    show(("mean", "saved", "new"), rows)
    for title, key in (("form of the reference", "reference_forms"), ("form of the answer", "answer_forms")):
        forms = [(form, *(f"{counts[outcome]:,}" for outcome in OUTCOMES)) for form, counts in metrics[key].items()]
        if forms:
            show((title, *OUTCOMES), forms)
    for line in _lines(comparison, metrics, files):
        echo(line)
    for difference in comparison.most_different():
        echo(f"\n{difference.place}: {difference.saved:g} -> {difference.new:g}")
        echo(f"  question: {difference.question}")
        if difference.answer is not None:
            echo(f"  reference: {difference.answer}")
        echo(f"  answer: {difference.text}")


def _lines(comparison: RewardComparison, metrics: JsonObject, files: int) -> Iterator[str]:
    count = metrics["compared"]
    yield f"{count:,} of {comparison.rows:,} rows of {files} file{'s' * (files > 1)} have both rewards"
    if comparison.failed_conversations:
        yield f"{comparison.failed_conversations:,} conversations had failed, and are left out"
    if comparison.without_columns:
        yield (
            f"{comparison.without_columns:,} rows lack columns of the data that were no JSON or too long "
            "(meta_left_out in the file): a reward that reads them may fail"
        )
    if count:
        yield f"{metrics['changed']:,} rewards changed ({metrics['changed'] / count:.1%})"
    if metrics["rank_correlation"] is not None:
        yield f"rank correlation (Spearman) {metrics['rank_correlation']:.3f}"
    if comparison.groups:
        names = ", ".join(comparison.reordered[:SHOWN]) + (", ..." if len(comparison.reordered) > SHOWN else "")
        count = f"{len(comparison.reordered):,} of {comparison.groups:,}"
        yield f"{count} groups are ordered otherwise" + (names and f": {names}")
        yield f"{metrics['agreement']:.1%} of their samples stay on the same side of their group's mean"
    for text, times in comparison.failures.most_common(SHOWN):
        yield f"failed {times:,} times: {text}"
    more = len(comparison.failures) - SHOWN
    if more > 0:
        yield f"and {more:,} other causes; --json has up to 100"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
