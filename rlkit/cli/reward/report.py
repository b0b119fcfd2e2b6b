"""A comparison of two rewards for people."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.cli.display import echo, show
from rlkit.cli.reward.compare import OUTCOMES, SHOWN, Comparison
from rlkit.types import JsonObject


def report(found: Comparison, files: int) -> None:
    """Print what changes."""
    metrics = found.metrics()
    rows = [("reward", _number(metrics["saved"]), _number(metrics["new"]))]
    rows += [(name, _number(x["saved"]), _number(x["new"])) for name, x in metrics["components"].items()]
    show(("mean", "saved", "new"), rows)
    for title, key in (("form of the reference", "reference_forms"), ("form of the answer", "answer_forms")):
        forms = [(form, *(f"{counts[outcome]:,}" for outcome in OUTCOMES)) for form, counts in metrics[key].items()]
        if forms:
            show((title, *OUTCOMES), forms)
    for line in _lines(found, metrics, files):
        echo(line)
    for one in found.most_different():
        echo(f"\n{one.place}: {one.saved:g} -> {one.new:g}")
        echo(f"  question: {one.question}")
        if one.answer is not None:
            echo(f"  reference: {one.answer}")
        echo(f"  answer: {one.text}")


def _lines(found: Comparison, metrics: JsonObject, files: int) -> Iterator[str]:
    count = metrics["compared"]
    yield f"{count:,} of {found.rows:,} rows of {files} file{'s' * (files > 1)} have both rewards"
    if found.failed_conversations:
        yield f"{found.failed_conversations:,} conversations had failed, and are left out"
    if found.without_columns:
        yield (
            f"{found.without_columns:,} rows lack columns of the data that were no JSON or too long (meta_left_out in "
            "the file): a reward that reads them may fail"
        )
    if count:
        yield f"{metrics['changed']:,} rewards changed ({metrics['changed'] / count:.1%})"
    if metrics["rank_correlation"] is not None:
        yield f"rank correlation (Spearman) {metrics['rank_correlation']:.3f}"
    if found.groups:
        names = ", ".join(found.reordered[:SHOWN]) + (", ..." if len(found.reordered) > SHOWN else "")
        yield f"{len(found.reordered):,} of {found.groups:,} groups are ordered otherwise" + (names and f": {names}")
        yield f"{metrics['agreement']:.1%} of their samples stay on the same side of their group's mean"
    for text, times in found.failures.most_common(SHOWN):
        yield f"failed {times:,} times: {text}"
    if (more := len(found.failures) - SHOWN) > 0:
        yield f"and {more:,} other causes; --json has up to 100"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
