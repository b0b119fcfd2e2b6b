"""What `rlkit data show` and `rlkit data stats` print: prompts as the policy reads them, and counts of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from math import ceil
from operator import itemgetter
from statistics import fmean, median

from rich.console import Console
from rich.progress import track
from rich.text import Text

from rlkit.api.policy import ChatTemplate
from rlkit.api.prompts import Data, recorded_answers
from rlkit.base.errors import shorten
from rlkit.base.terminal import echo, printable
from rlkit.base.terminal import show as show_table
from rlkit.recipe.unscorable import unscorable_training, unscorable_validation
from rlkit.types import JsonObject, Prompt, Trajectory

EXAMPLES = 3
"""Training prompts that are shown: from all over the rows, since files often have one source after another."""

LONGEST_META = 2000
"""Characters of a prompt's meta that are shown."""


CONTEXT, TRAINED = "cyan", "bold green"
"""Styles of what a policy reads, and of what it is trained to write."""

COUNTED_ROWS = 10_000
"""Rows in which it is counted what was normalised."""


def show(data: Data, as_json: bool) -> None:
    """Print training prompts, special tokens and the tools' schemas included, as the policy reads them.

    Recorded answers follow, with the text that is trained in another colour, and what was normalised in how many rows.
    """
    count = min(EXAMPLES, data.row_count)
    rows = [example(data, i * data.row_count // count) for i in range(count)]
    normalised = count_normalised(data)
    if as_json:
        print(json.dumps({"rows": rows, "normalised": normalised}, default=str))
        return
    for row in rows:
        _show_row(row)
    if normalised["changes"]:
        counted_rows = (
            f"{normalised['rows']:,} rows"
            if normalised["rows"] == data.row_count
            else (f"the first {normalised['rows']:,} of {data.row_count:,} rows")
        )
        listed = ", ".join(f"{change} in {times:,}" for change, times in normalised["changes"].items())
        echo(f"normalised, of {counted_rows}: {listed}")


def _show_row(row: JsonObject) -> None:
    echo(f"--- row {row['row']}: {row['id']}, {row['tokens']} tokens" + ", shortened" * row["shortened"])
    _echo_spans([{"trained": False, "text": row["text"]}])
    for number, answer in enumerate(row["answers"], 1):
        echo(
            f"--- answer {number} of {len(row['answers'])}: reward {answer['reward']:g}, {answer['tokens']} tokens, of "
            f"which {answer['trained']} are trained"
        )
        _echo_spans(answer["spans"])
    echo("---")
    for name in ("source", "tools", "answer"):
        if row[name] not in (None, []):
            echo(f"{name}: {', '.join(row[name]) if name == 'tools' else row[name]}")
    if row["unscorable"] is not None:
        echo(f"the reward cannot score it: {row['unscorable']}")
    if row["meta"]:
        echo(f"meta: {shorten(json.dumps(row['meta'], ensure_ascii=False, default=str), LONGEST_META)}")
    echo("")


def example(data: Data, index: int) -> JsonObject:
    """Return a training prompt as JSON holds it, with its text as the policy reads it, and its recorded answers."""
    prompt, template = data.prompt(index), data.dialogue.template
    ids = template.start(prompt.messages, prompt.tools)
    recorded = not data.recipe.method.samples and bool(prompt.recorded)
    answers = recorded_answers(data, prompt) if recorded else []
    return {
        "row": index,
        "id": prompt.id,
        "tokens": len(ids),
        "shortened": prompt.messages != data.complete_prompt(index).messages,
        "text": template.codec.decode(ids),
        "answers": [_answer(template, trajectory) for trajectory in answers],
        "source": prompt.source or prompt.meta.get("data_source"),
        "tools": list(data.recipe.tools or ()) if prompt.tools is None else prompt.tool_names,
        "answer": prompt.answer,
        "unscorable": unscorable_training(data.recipe, [prompt]).get(0),
        "meta": dict(prompt.meta),
    }


def _answer(template: ChatTemplate, trajectory: Trajectory) -> JsonObject:
    """Return a recorded answer, with its text in spans that are trained or context."""
    start, spans = trajectory.turns[0].end, []
    for trained, tokens in groupby(zip(trajectory.mask[start:], trajectory.tokens[start:], strict=True), itemgetter(0)):
        spans.append({"trained": trained, "text": template.codec.decode([token for _, token in tokens])})
    return {
        "reward": trajectory.reward,
        "tokens": len(trajectory.tokens) - start,
        "trained": trajectory.response_length,
        "spans": spans,
    }


def count_normalised(data: Data) -> JsonObject:
    """Return in how many of the first rows the task normalised what."""
    rows = range(min(data.row_count, COUNTED_ROWS))
    changes = Counter(change for row in rows for change in data.complete_prompt(row).normalised)
    return {"rows": len(rows), "changes": {str(change): times for change, times in sorted(changes.items())}}


BINS, WIDEST = 12, 40
"""Bins of the histogram at most, and the characters of its longest bar."""

SHOWN = (
    ("rows", "rows", 0), ("mean", "tokens, mean", 1), ("median", "tokens, median", 1), ("p95", "tokens, 95%", 0),
    ("max", "tokens, longest", 0), ("too_long", "too long", 0), ("answers_cut", "answers cut", 0),
    ("without_answer", "without answer", 0), ("unscorable", "cannot be scored", 0),
)  # fmt: skip
"""The metrics of a split in the table: their names, their labels, and the digits after the point."""

NAMED = 5
"""Examples of rows that are named, and sources that are shown in the text."""


def stats(data: Data, as_json: bool) -> None:
    """Print metrics of all training and validation prompts."""
    rows = range(data.row_count)
    console = Console(stderr=True, quiet=not data.show)
    train = [data.complete_prompt(row) for row in track(rows, "reading rows", console=console)]
    splits = {"train": train} | ({"validation": data.held_out} if data.held_out else {})
    lengths = {name: data.lengths.measure(prompts) for name, prompts in splits.items()}
    statistics = {name: _split(data, prompts, lengths[name]) for name, prompts in splits.items()}
    statistics["train"] |= _unscorable(unscorable_training(data.recipe, train))
    if data.held_out:
        statistics["validation"] |= _unscorable(unscorable_validation(data.recipe, data.held_out))
    report: JsonObject = {
        "limit": data.lengths.limit,
        "context": data.dialogue.context,
        "max_tokens": data.recipe.rollout.sampling.max_tokens,
        "overlong": data.recipe.rollout.overlong,
        "splits": statistics,
        "duplicates": _duplicates(train),
        "overlap": _overlap(train, data.held_out),
        "histogram": {name: histogram(of_split) for name, of_split in lengths.items()},
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


def _split(data: Data, prompts: Sequence[Prompt], lengths: Sequence[int]) -> JsonObject:
    """Return the metrics of one split."""
    room = data.dialogue.context - data.recipe.rollout.sampling.max_tokens
    sources = Counter(str(p.source or p.meta.get("data_source") or "") for p in prompts)
    missing = [prompt.id for prompt in prompts if not prompt.answer]
    ordered = sorted(lengths)
    return {
        "rows": len(prompts),
        "sources": dict(sources.most_common()),
        "mean": fmean(ordered),
        "median": median(ordered),
        "p95": ordered[ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
        "too_long": sum(length > data.lengths.limit for length in ordered),
        "answers_cut": sum(room < length <= data.lengths.limit for length in ordered),
        "without_answer": len(missing),
        "without_answer_ids": missing[:NAMED],
    }


def _unscorable(reasons: Mapping[int, str]) -> JsonObject:
    """Count the prompts that the reward cannot score, by reason."""
    rows = [f"row {index} {reason}" for index, reason in islice(reasons.items(), NAMED)]
    return {"unscorable": len(reasons), "unscorable_rows": rows}


def _digest(prompt: Prompt) -> bytes:
    """Return the key by which prompts with the same messages and tools are equal."""
    text = json.dumps([prompt.messages, prompt.tools], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _duplicates(prompts: Sequence[Prompt]) -> JsonObject:
    """Count the prompts with the messages of an earlier one."""
    first: dict[bytes, str] = {}
    pairs = []
    for prompt in prompts:
        digest = _digest(prompt)
        if digest in first:
            pairs.append((first[digest], prompt.id))
        else:
            first[digest] = prompt.id
    return {"count": len(pairs), "pairs": pairs[:NAMED]}


def _overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> JsonObject:
    """Count the validation prompts with the messages of a training prompt."""
    training_digests = {_digest(prompt) for prompt in train} if held_out else set()
    shared = [prompt.id for prompt in held_out if _digest(prompt) in training_digests]
    return {"count": len(shared), "ids": shared[:NAMED]}


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return bins (first length, last length, count) of one round width, from that of the shortest to the longest."""
    low, high = min(lengths), max(lengths)
    width = next(w for e in range(12) for w in (10**e, 2 * 10**e, 5 * 10**e) if high // w - low // w < BINS)
    counts = Counter(length // width for length in lengths)
    return [(i * width, (i + 1) * width - 1, counts[i]) for i in range(low // width, high // width + 1)]


def _print(report: JsonObject) -> None:
    splits = report["splits"].values()
    rows = [[label, *(f"{split[key]:,.{digits}f}" for split in splits)] for key, label, digits in SHOWN]
    show_table(("prompts", *report["splits"]), rows)
    for line in _lines(report):
        echo(line)


def _lines(report: JsonObject) -> Iterator[str]:
    """Yield what stands below the table."""
    for name, bins in report["histogram"].items():
        yield f"\ntokens of {name} prompts, tools and template included:"
        highest, digits = max(count for *_, count in bins), len(str(bins[-1][1]))
        for first, last, count in bins:
            bar = "#" * ceil(WIDEST * count / highest)
            span = f"{first:>{digits}}" if first == last else f"{first:>{digits}}-{last:<{digits}}"
            yield f"  {span}  {bar} {count:,}"
    yield ""
    for name, split in report["splits"].items():
        sources = split["sources"]
        if len(sources) > 1:
            listed = ", ".join(f"{source or 'none'} {n:,}" for source, n in list(sources.items())[:NAMED])
            yield f"{name} sources ({len(sources)}): {listed}" + ", ..." * (len(sources) > NAMED)
        if split["too_long"]:
            yield (
                f"{split['too_long']:,} {name} prompts have more than {report['limit']} tokens: rollout.overlong is "
                f"{report['overlong']}"
            )
        if split["answers_cut"]:
            yield (
                f"after {split['answers_cut']:,} {name} prompts the context of {report['context']} ends before "
                f"{report['max_tokens']} tokens of an answer"
            )
        if split["without_answer"]:
            names = ", ".join(split["without_answer_ids"])
            yield f"{split['without_answer']:,} {name} prompts have no reference answer, such as {names}"
        if split["unscorable"]:
            yield f"the reward cannot score {split['unscorable']:,} {name} prompts:"
            yield from (f"  {reason}" for reason in split["unscorable_rows"])
    yield from _repeated(report)


def _repeated(report: JsonObject) -> Iterator[str]:
    duplicates, overlap = report["duplicates"], report["overlap"]
    examples = ", ".join(f"{second} (of {first})" for first, second in duplicates["pairs"])
    yield f"duplicates in training: {duplicates['count']:,}" + (examples and f", such as {examples}")
    if "validation" in report["splits"]:
        names = ", ".join(overlap["ids"])
        yield f"validation prompts that are in training too: {overlap['count']:,}" + (names and f", such as {names}")


def _echo_spans(spans: Iterable[JsonObject]) -> None:
    """Print spans of a text that are trained or context in two colours; without colours, trained ones in ⟦brackets⟧."""
    console, line = Console(highlight=False), Text()
    for span in spans:
        text = printable(span["text"])
        in_brackets = span["trained"] and console.color_system is None
        line.append(f"⟦{text}⟧" if in_brackets else text, TRAINED if span["trained"] else CONTEXT)
    console.print(line, soft_wrap=True)
