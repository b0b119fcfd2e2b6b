"""The tokens of rows in one sequence without padding, in which shared prompts stand once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlkit.types import Media, MediaSegment


MIN_BEGINNING, MIN_SAVED = 16, 0.05
"""The tokens that a common beginning must have, and the share of all tokens that it must save."""

Prompt = tuple[tuple[int, ...], tuple[str, ...]]
"""What rows share: tokens, and the keys of their pictures."""


class Packing:
    """The tokens of rows in one sequence: each shared prompt once, followed by the rest of each of its rows.

    The last token of a prompt is repeated at the start of each row's rest, where it predicts the next token. If rows
    have long beginnings in common, such as a system prompt with tools, all of them share that instead of their prompts.

    Args:
        tokens: [B,T] i64.
        mask: [B,T] bool; the first column never counts. A row's prompt ends before its first token under the mask.
        media: [B] the pictures of each row; None without pictures.
        share_prompts: Whether prompts that several rows share, pictures included, are computed once.
    """

    def __init__(
        self, tokens: Tensor, mask: Tensor, media: Sequence[Media | None] | None = None, share_prompts: bool = True
    ) -> None:
        rows = tokens.tolist()
        pictures = [None] * len(rows) if media is None else list(media)
        columns = mask.int()
        firsts = columns.argmax(1).tolist()
        ends = (mask.shape[1] - 1 - columns.flip(1).argmax(1)).tolist()
        rows_by_prompt: dict[Prompt, list[int]] = {}
        for i, has_tokens in enumerate(mask[:, 1:].any(1).tolist()):
            if has_tokens:
                prompt = tuple(rows[i][: max(firsts[i] - 1, 0)])
                rows_by_prompt.setdefault((prompt, _shared_key(pictures[i], len(prompt), i)), []).append(i)
        if media is None and share_prompts:
            rows_by_prompt = _by_beginning(rows_by_prompt, sum(ends))
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []
        """The row of each token; the first row for a shared prompt, -1 for padding."""
        self.segments: list[tuple[int, int]] = []
        """(start, end) of each segment; see `Layout`."""
        self.shared: list[tuple[int, int, int]] = []
        """(start, end, last) of each shared prompt; see `Layout`."""
        self.media: list[MediaSegment] = []
        """The pictures, in the order of their placeholders."""
        next_tokens: list[int] = []  # the flat index of the token that each token predicts, -1 for none
        for (prompt, _), members in rows_by_prompt.items():
            begin = len(self.ids)
            shared_length = len(prompt) if len(members) > 1 and share_prompts else 0
            self._add(members[0], prompt[:shared_length], 0)
            self._add_media(pictures[members[0]], 0, shared_length)
            next_tokens += [-1] * shared_length
            for i in members:
                self._add(i, rows[i][shared_length : ends[i]], shared_length)
                self._add_media(pictures[i], shared_length, ends[i])
                next_tokens += range(i * mask.shape[1] + shared_length + 1, i * mask.shape[1] + ends[i] + 1)
            if shared_length:
                self.shared.append((begin, begin + shared_length, len(self.ids)))
        self.longest = max(ends, default=0)
        """The length of the longest row, up to its last token under the mask."""
        targets = torch.tensor(next_tokens, dtype=torch.long, device=mask.device)
        self.predicts = (targets >= 0) & mask.flatten()[targets.clamp(min=0)]
        """[L] bool: which tokens of the sequence predict a token under the mask."""
        self.indices = targets[self.predicts]
        """[N] i64: the indices of the predicted tokens in the flattened mask."""

    def pad(self, multiple: int) -> None:
        """Add a segment that predicts nothing, so that kernels are compiled for few lengths."""
        padding = -len(self.ids) % multiple
        self._add(-1, [0] * padding, 0)
        self.predicts = torch.nn.functional.pad(self.predicts, (0, padding))

    def _add(self, row: int, tokens: Sequence[int], position: int) -> None:
        if tokens:
            self.segments.append((len(self.ids), len(self.ids) + len(tokens)))
            self.ids += tokens
            self.positions += range(position, position + len(tokens))
            self.rows += [row] * len(tokens)

    def _add_media(self, media: Media | None, start: int, end: int) -> None:
        """Add the pictures of a row whose placeholders end after `start` and up to `end`."""
        if media is not None:
            self.media += [segment for segment in media.segments if start < segment.end <= end]


def _by_beginning(rows_by_prompt: dict[Prompt, list[int]], tokens: int) -> dict[Prompt, list[int]]:
    """Return all rows by the beginning of all prompts if that saves more than to share whole prompts, and enough."""
    columns = zip(*(prompt for prompt, _ in rows_by_prompt), strict=False)
    beginning = tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    rows = list(chain.from_iterable(rows_by_prompt.values()))
    saved = len(beginning) * (len(rows) - 1)
    saved_by_prompts = sum(len(prompt) * (len(members) - 1) for (prompt, _), members in rows_by_prompt.items())
    if len(beginning) < MIN_BEGINNING or saved < max(saved_by_prompts + 1, MIN_SAVED * tokens):
        return rows_by_prompt
    return {(beginning, ()): rows}


def _shared_key(media: Media | None, prompt: int, row: int) -> tuple[str, ...]:
    """Return the key of rows whose prompts may be computed once: their pictures in so many first tokens.

    A row shares nothing if a picture ends with the last token of its prompt, which is not computed with the others.
    """
    if media is None:
        return ()
    if any(segment.end == prompt + 1 for segment in media.segments):
        return (str(row),)
    shared = media.before(prompt)
    return () if shared is None else shared.key
