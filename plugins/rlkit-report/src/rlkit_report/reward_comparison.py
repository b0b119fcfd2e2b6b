"""A comparison of two rewards on the same rollouts, and its report."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import NamedTuple

from rlkit_math.answers import form_of_completion, form_of_reference

from rlkit.base.errors import shorten
from rlkit.base.terminal import echo, show
from rlkit.interfaces.parser import after_thinking
from rlkit.records.rows import SavedRow
from rlkit.types import JsonObject, Score, Trajectory
from rlkit_report.agreement import rank_correlation

SAME = 6
"""Decimal places in which rewards are compared: the same model in another batch rounds otherwise."""

SHOWN, LONGEST = 5, 400
"""The largest differences, causes of failures and groups that are kept for people, and the characters of a text."""

UNSAVED = 10
"""Completions without a saved reward that are shown."""

OUTCOMES = ("right", "wrong", "failed")


@dataclass
class RescoredGroup:
    """The rows of a prompt's samples, of which the trajectories have their new scores."""

    rows: list[SavedRow]

    def pairs(self) -> list[tuple[SavedRow, float, float]]:
        """Return the rows that have both rewards, each with the saved and the new one."""
        rewards = ((row, row.reward, row.trajectory.reward) for row in self.rows if not row.failed)
        return [(row, old, new) for row, old, new in rewards if old is not None and new is not None]

    def lines(self) -> Iterator[JsonObject]:
        """Yield what is written of each row."""
        for row in self.rows:
            trajectory, score = row.trajectory, row.trajectory.score
            yield {
                "place": row.location,
                "prompt": trajectory.prompt.id,
                "group": trajectory.group,
                "messages": trajectory.prompt.messages,
                "answer": trajectory.prompt.answer,
                "text": trajectory.text,
                "saved": {"reward": row.reward, "components": row.components},
                "new": {"reward": trajectory.reward, "components": {} if score is None else score.components},
                "error": "the conversation failed" if row.failed else score and score.error,
            }


class Difference(NamedTuple):
    """A row on which two rewards differ, its texts shortened."""

    size: float
    number: int
    place: str
    saved: float
    new: float
    question: str
    answer: str | None
    text: str


@dataclass
class RewardComparison:
    """What the new reward changes, collected group by group."""

    rows: int = 0
    failed_conversations: int = 0
    without_columns: int = 0
    """Rows of whose data a column is missing in the file."""
    scored: int = 0
    """Rows with a new reward, be there a saved one or not."""
    unsaved: list[float] = field(default_factory=list)
    """The new rewards of rows without a saved one, such as completions written by hand."""
    unsaved_texts: list[str] = field(default_factory=list)
    """The first of their completions."""
    saved: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    components: dict[str, tuple[list[float], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    failures: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    """Groups of at least two rows with both rewards."""
    reordered: list[str] = field(default_factory=list)
    compared: int = 0
    agreeing: int = 0
    differences: list[Difference] = field(default_factory=list)
    reference_forms: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by the form of their reference and by `right`, `wrong` or `failed`, if the new reward has an accuracy."""
    answer_forms: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same by the form of the final answer."""

    def add(self, group: RescoredGroup) -> None:
        """Take part in all metrics."""
        self.rows += len(group.rows)
        for row in group.rows:
            score = row.trajectory.score
            self.failed_conversations += row.failed
            self.without_columns += bool(row.left_out)
            self.scored += row.trajectory.reward is not None
            if score is not None and score.error is not None:
                self.failures[shorten(score.error, LONGEST)] += 1
            if score is not None:
                self._add_forms(row.trajectory, score)
            if row.reward is None and row.trajectory.reward is not None:
                self.unsaved.append(row.trajectory.reward)
                if len(self.unsaved_texts) < UNSAVED:
                    self.unsaved_texts.append(shorten(row.trajectory.text, LONGEST))
        pairs = group.pairs()
        for row, saved, new in pairs:
            self._add_pair(row, saved, new)
        if len(pairs) > 1:
            self._add_group(pairs)

    def _add_forms(self, trajectory: Trajectory, score: Score) -> None:
        reference = trajectory.prompt.answer
        if reference is None or (score.error is None and "accuracy" not in score.components):
            return
        outcome = "failed" if score.error else "right" if score.components["accuracy"] > 0 else "wrong"
        self.reference_forms[form_of_reference(reference), outcome] += 1
        answer = after_thinking(trajectory.opened_thinking + trajectory.text)
        self.answer_forms[form_of_completion(answer), outcome] += 1

    def _add_pair(self, row: SavedRow, saved: float, new: float) -> None:
        self.saved.append(saved)
        self.new.append(new)
        score = row.trajectory.score
        for side, components in enumerate((row.components, {} if score is None else score.components)):
            for name, value in components.items():
                self.components[name][side].append(value)
        size = round(abs(new - saved), SAME)
        if size > 0:
            prompt = row.trajectory.prompt
            question = shorten(str(prompt.messages[-1]["content"]), LONGEST)
            answer = None if prompt.answer is None else shorten(prompt.answer, LONGEST)
            text = shorten(row.trajectory.text, LONGEST)
            difference = Difference(size, -len(self.saved), row.location, saved, new, question, answer, text)
            heapq.heappush(self.differences, difference)
            if len(self.differences) > SHOWN:
                heapq.heappop(self.differences)

    def _add_group(self, pairs: Sequence[tuple[SavedRow, float, float]]) -> None:
        """Compare what estimators read of a group: the order of its samples, and on which side of its mean each is."""
        saved, new = _levels([old for _, old, _ in pairs]), _levels([new for _, _, new in pairs])
        self.groups += 1
        if saved.order != new.order:
            first = pairs[0][0]
            self.reordered.append(f"{first.trajectory.prompt.id} ({first.location})")
        self.compared += len(pairs)
        self.agreeing += sum(a == b for a, b in zip(saved.sides, new.sides, strict=True))

    def metrics(self) -> JsonObject:
        """Return all metrics as JSON holds them; null where there is none."""
        changed = sum(round(abs(a - b), SAME) > 0 for a, b in zip(self.saved, self.new, strict=True))
        return {
            "rows": self.rows,
            "failed_conversations": self.failed_conversations,
            "without_columns": self.without_columns,
            "scored": self.scored,
            "compared": len(self.saved),
            "saved": _mean(self.saved),
            "new": _mean(self.new),
            "new_without_saved": _mean(self.unsaved),
            "components": {
                name: {"saved": _mean(saved), "new": _mean(new)}
                for name, (saved, new) in sorted(self.components.items())
            },
            "changed": changed,
            "rank_correlation": _finite(rank_correlation(self.saved, self.new)),
            "groups": self.groups,
            "reordered": len(self.reordered),
            "reordered_groups": self.reordered[:100],
            "agreement": self.agreeing / self.compared if self.compared else None,
            "reference_forms": _by_form(self.reference_forms),
            "answer_forms": _by_form(self.answer_forms),
            "failures": dict(self.failures.most_common(100)),
            "differences": [difference._asdict() for difference in self.most_different()],
        }

    def most_different(self) -> list[Difference]:
        """Return the largest differences, the largest one first."""
        return sorted(self.differences, reverse=True)


def _by_form(counts: Counter[tuple[str, str]]) -> JsonObject:
    """Return the rows of each outcome by form, the most frequent form first; nothing if all failed."""
    if not any(outcome != "failed" for _, outcome in counts):
        return {}
    rows: Counter[str] = Counter()
    for (form, _), count in counts.items():
        rows[form] += count
    return {form: {outcome: counts[form, outcome] for outcome in OUTCOMES} for form, _ in rows.most_common()}


class _Levels(NamedTuple):
    """How the samples of a group compare: their order, and on which side of their mean each is."""

    order: list[int]
    sides: list[int]


def _levels(rewards: Sequence[float]) -> _Levels:
    rounded = [round(reward, SAME) for reward in rewards]
    rank = {value: i for i, value in enumerate(sorted(set(rounded)))}
    distances = [round(value - fmean(rounded), SAME) for value in rounded]
    return _Levels([rank[value] for value in rounded], [(x > 0) - (x < 0) for x in distances])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def report(comparison: RewardComparison, files: int) -> None:
    """Print what changes."""
    metrics = comparison.metrics()
    if comparison.unsaved:
        shown = zip(comparison.unsaved, comparison.unsaved_texts, strict=False)
        show(("reward", "completion"), [(f"{reward:.4f}", text) for reward, text in shown])
        mean = _number(metrics["new_without_saved"])
        echo(f"{len(comparison.unsaved):,} rows without a saved reward earn {mean} on average")
    if comparison.saved or not comparison.unsaved:
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
