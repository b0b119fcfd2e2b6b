"""Lengths of prompts and answers in tokens: measured for many at once, kept for the next run, and shortened."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeVar

import numpy as np

from rlkit.base.errors import RecipeError
from rlkit.base.files import cache_folder
from rlkit.interfaces.content import pictures_of
from rlkit.rollout.recorded import RecordedSpan, require_one, samples_of
from rlkit.rollout.replies import longest_piece
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Message, Prompt

T = TypeVar("T")

ENCODING = 2
"""Which way of encoding texts kept lengths come from; it is raised when the number of their ids changes."""

CHUNK = 1000
"""Prompts that are tokenised at once."""

FEW = 2000
"""So many prompts are rendered for the rollouts too, which need not do it again."""

PARALLEL = "TOKENIZERS_PARALLELISM"
"""The variable in which tokenizers look up whether to use several threads, each time that they are called."""

KEPT = 64
"""Files of lengths that are kept; older ones are removed."""

Measure = Callable[[Sequence[Prompt]], list[int]]
"""Returns a length in tokens for each prompt."""

Side = Literal["left", "right", "middle"]
"""Where a text is cut."""


@dataclass(frozen=True)
class AnswerSizes:
    """Sizes of a data set's recorded answers.

    Args:
        longest: Tokens of the longest one, its prompt included.
        most: Answers of the prompt that has the most.
        tokens: Of an answer without its prompt, on average.
        count: Answers of a prompt, on average.
    """

    longest: int
    most: int
    tokens: float
    count: float

    @classmethod
    def of(cls, answers: Sequence[Sequence[int]], rows: Sequence[int]) -> AnswerSizes:
        """Return those of prompts.

        Args:
            answers: Tokens of each answer of each prompt.
            whole: Tokens of each prompt with its longest answer.
        """
        counts, tokens = [len(sizes) for sizes in answers], [size for sizes in answers for size in sizes]
        if not tokens:
            return cls(0, 0, 0.0, 0.0)
        return cls(max(rows), max(counts), fmean(tokens), fmean(counts))


def measure(template: ChatTemplate, prompts: Sequence[Prompt], show: bool = False) -> list[int]:
    """Return the length of each prompt in tokens, as the rollout will render it.

    The tokenizer uses all CPUs. Lengths of many prompts are kept in the user's cache, under a digest of all that they
    depend on: messages, tools, the chat template, the tokenizer and `ENCODING`.

    Args:
        template: Renders the prompts.
        prompts: Any number.
        show: Whether to show the progress on a terminal.

    Raises:
        RecipeError: The chat template refuses a prompt; the message names it.
    """

    def start_lengths(chunk: Sequence[Prompt]) -> list[int]:
        return [_named(prompt, lambda p: len(template.start(p.messages, p.tools))) for prompt in chunk]

    def text_lengths(chunk: Sequence[Prompt]) -> list[int]:
        return template.codec.lengths([_named(p, lambda p: template.opening(p.messages, p.tools)) for p in chunk])

    with_pictures = any(pictures_of(prompt.messages) for prompt in prompts)
    if len(prompts) <= FEW and not with_pictures:
        return start_lengths(prompts)
    lengths = start_lengths if with_pictures else text_lengths

    path = _cache_file(template, [(prompt.messages, prompt.tools) for prompt in prompts])
    return _stored_or_measured(path, prompts, lengths, "measuring prompts" if show else None)


def measure_answers(
    template: ChatTemplate, prompts: Sequence[Prompt], show: bool = False, answer_loss: str | None = None
) -> list[list[int]]:
    """Return the lengths of each prompt's recorded answers in tokens, without the prompt, as trajectories have them.

    They are kept as those of prompts are. Of an answer with several samples, it is the length of the longest.

    Args:
        template: Renders the conversations.
        prompts: Any number.
        show: Whether to show the progress on a terminal.
        answer_loss: Name of a loss of whole answers, of which each must be one sample; None for a loss of tokens.

    Raises:
        RecipeError: The chat template refuses an answer, or no policy could have written it; the message names the
            prompt.
    """
    single = [replace(prompt, recorded=[answer]) for prompt in prompts for answer in prompt.recorded]

    def lengths(chunk: Sequence[Prompt]) -> list[int]:
        spans_of = [_named(prompt, lambda p: _measured(template, p, answer_loss)) for prompt in chunk]
        read = [s for spans in spans_of for sample in spans for s in sample if not pictures_of(s.messages)]
        sizes = iter(template.codec.lengths([s.text for s in read], [s.before for s in read]))
        return [_length(template, spans, sizes) for spans in spans_of]

    if len(single) <= FEW:
        lengths_of = iter(lengths(single))
    else:
        path = _cache_file(template, [(p.messages, p.tools, p.recorded[0].messages, answer_loss) for p in single])
        lengths_of = iter(_stored_or_measured(path, single, lengths, "measuring answers" if show else None))
    return [list(islice(lengths_of, len(prompt.recorded))) for prompt in prompts]


def _measured(template: ChatTemplate, prompt: Prompt, answer_loss: str | None) -> list[list[RecordedSpan]]:
    """Return the spans of an answer's samples; those of a single one without its prompt."""
    samples = samples_of(template, prompt, prompt.recorded[0])
    if answer_loss is not None:
        require_one(samples, answer_loss)
    return [sample.spans[len(samples) == 1 :] for sample in samples]


def _length(template: ChatTemplate, samples: Sequence[Sequence[RecordedSpan]], sizes: Iterator[int]) -> int:
    """Return the length of the longest of an answer's samples, without the prompt; `sizes` are those of texts."""
    counts = [
        [len(template.read(s.text, s.messages).tokens) if pictures_of(s.messages) else next(sizes) for s in spans]
        for spans in samples
    ]
    return max(map(sum, counts)) - (counts[0][0] if len(counts) > 1 else 0)


def shorten(template: ChatTemplate, prompt: Prompt, limit: int, side: Side) -> Prompt:
    """Return the prompt with its longest texts cut so that all of it is at most `limit` tokens.

    Only texts of messages are cut, never pictures or what the template adds: the beginning of a text with `left`, its
    end with `right`, its middle with `middle`.

    Raises:
        RecipeError: What cannot be cut is longer than the limit.
    """
    messages = list(prompt.messages)
    while True:
        excess = len(template.start(messages, prompt.tools)) - limit
        if excess <= 0:
            return replace(prompt, messages=messages)
        texts = [message.get("content") for message in messages]
        sizes = [template.codec.count(text) if isinstance(text, str) else 0 for text in texts]
        longest = max(range(len(messages)), key=sizes.__getitem__)
        if not sizes[longest]:
            raise RecipeError(
                f"prompt {prompt.id!r} cannot be shortened to {limit} tokens: the chat template, tools, roles and "
                f"pictures alone have {limit + excess}"
            )
        messages[longest] = _cut(template, messages[longest], max(0, sizes[longest] - excess), side)


def _cut(template: ChatTemplate, message: Message, tokens: int, side: Side) -> Message:
    """Return a message whose text has at most `tokens` tokens, and fewer than before."""
    text: str = message["content"]
    ends = {"left": (0, tokens), "right": (tokens, 0), "middle": (tokens - tokens // 2, tokens // 2)}[side]
    start = longest_piece(lambda length: text[:length], len(text) - 1, ends[0], template.codec.count)
    end = longest_piece(lambda length: text[len(text) - length :], len(text) - 1 - start, ends[1], template.codec.count)
    return {**message, "content": text[:start] + text[len(text) - end :]}


@contextmanager
def _all_cpus() -> Iterator[None]:
    """Let the tokenizer run in several threads, which commands switch off: for single texts that only costs."""
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        del os.environ[PARALLEL]
        if before is not None:
            os.environ[PARALLEL] = before


def _named(prompt: Prompt, work: Callable[[Prompt], T]) -> T:
    """Do something with a prompt, whose id the message of an error then has."""
    try:
        return work(prompt)
    except RecipeError as error:
        raise RecipeError(f"prompt {prompt.id!r}: {error}") from error


def _cache_file(template: ChatTemplate, texts: Sequence[object]) -> Path:
    """Return the file of the lengths of texts, under a digest of all that they depend on."""
    tokenizer = template.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.blake2b(digest_size=16)
    settings = (
        backend.to_str() if backend is not None else repr(tokenizer),
        tokenizer.chat_template,
        template.tools,
        template.kwargs,
        sorted(template.stop_ids),
        None if template.reader is None else (str(template.reader.processor), str(template.reader.options)),
    )
    today = time.strftime("%Y-%m-%d") if "strftime" in str(tokenizer.chat_template) else ""
    for what in (ENCODING, *settings, today, *texts):
        digest.update(json.dumps(what, default=str).encode() + b"\n")
    return cache_folder() / "lengths" / f"{digest.hexdigest()}.npy"


def _stored_or_measured(path: Path, prompts: Sequence[Prompt], lengths: Measure, title: str | None) -> list[int]:
    """Return lengths that were kept in a file; else measure in chunks, with progress under a title, and keep them."""
    stored = _read(path, len(prompts))
    if stored is not None:
        return stored
    from rich.console import Console
    from rich.progress import Progress

    measured: list[int] = []
    with _all_cpus(), Progress(console=Console(stderr=True), transient=True, disable=title is None) as bar:
        task = bar.add_task(title or "", total=len(prompts))
        for first in range(0, len(prompts), CHUNK):
            measured += lengths(prompts[first : first + CHUNK])
            bar.update(task, completed=len(measured))
    _write(path, measured)
    return measured


def _read(path: Path, count: int) -> list[int] | None:
    """Return lengths that were kept; None if there are none, or the file is damaged."""
    try:
        stored = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_sound = stored.shape == (count,) and stored.dtype == np.int32 and stored.min() >= 0
    return stored.tolist() if is_sound else None


def _write(path: Path, lengths: Sequence[int]) -> None:
    """Keep lengths; without a place to write them, they are measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.partial")
        with beside.open("wb") as file:
            np.save(file, np.asarray(lengths, dtype=np.int32), allow_pickle=False)
        beside.replace(path)
        for old in sorted(path.parent.glob("*.npy"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return
