"""Completions as a teacher with another tokenizer reads them, aligned with the policy's tokens by their text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.rollout.rendering import TokenCodec
from rlkit.rollout.template import ChatTemplate

NO_TEXT = "\ufffd"
"""What decoding returns for bytes that are no text."""


class Span(NamedTuple):
    """The fewest tokens of a completion that have the same text for the policy and for a teacher.

    Args:
        start: Index of the policy's first token in the completion.
        end: Index after its last.
        teacher_start: Index of the teacher's first token.
        teacher_end: Index after its last.
    """

    start: int
    end: int
    teacher_start: int
    teacher_end: int


class Vocabularies(NamedTuple):
    """Which tokens the policy and a teacher share: those of the same name, and those that end a turn.

    Args:
        shared: [S] i64, the policy's ids of these tokens.
        others: Its other ids.
        teacher_shared: [S] i64, the teacher's ids of the same tokens.
        teacher_others: Its other ids.
    """

    shared: Tensor
    others: Tensor
    teacher_shared: Tensor
    teacher_others: Tensor

    @classmethod
    def of(cls, policy: ChatTemplate, teacher: ChatTemplate, columns: int, teacher_columns: int) -> Vocabularies:
        """Compare the vocabularies of two models, whose output layers have these numbers of columns."""
        vocabulary, teacher_vocabulary = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
        end, teacher_end = (template.turn_end[-1] for template in (policy, teacher))
        tokens = vocabulary.keys() & teacher_vocabulary.keys()
        pairs = [(vocabulary[token], teacher_vocabulary[token]) for token in tokens]
        pairs = [(a, b) for a, b in pairs if a != end and b != teacher_end] + [(end, teacher_end)]
        pairs = sorted((a, b) for a, b in pairs if a < columns and b < teacher_columns)
        shared, teacher_shared = [a for a, _ in pairs], [b for _, b in pairs]
        others = sorted(set(range(columns)).difference(shared))
        teacher_others = sorted(set(range(teacher_columns)).difference(teacher_shared))
        ids = (shared, others, teacher_shared, teacher_others)
        return cls(*(torch.tensor(part, dtype=torch.long) for part in ids))

    def to(self, device: torch.device) -> Vocabularies:
        """Return the ids on a device."""
        return Vocabularies(*(ids.to(device) for ids in self))

    def own(self, ids: Tensor) -> Tensor:
        """Return the policy's ids of shared tokens, from the teacher's."""
        table = self.shared.new_zeros(int(self.teacher_shared.max()) + 1)
        table[self.teacher_shared] = self.shared
        return table[ids]


def retokenize(ids: Sequence[int], codec: TokenCodec, teacher: ChatTemplate) -> tuple[list[int], list[Span]]:
    """Return the teacher's ids of a completion, and its spans; what ends the policy's turn ends the teacher's.

    Args:
        ids: The policy's.
        codec: Of the policy's tokenizer.
        teacher: The teacher's chat template, with its tokenizer.
    """
    ended = bool(ids) and ids[-1] in codec.stop_ids
    pieces = codec.pieces(ids[:-1] if ended else ids)
    text = "".join(pieces)
    teacher_ids = teacher.codec.encode(text, teacher.prompt_end)
    teacher_pieces = teacher.codec.pieces(teacher_ids)
    if teacher_pieces and text == " " + "".join(teacher_pieces):  # SentencePiece's decoders leave out a first space
        teacher_pieces[0] = " " + teacher_pieces[0]
    spans = align(pieces, teacher_pieces)
    if ended:
        end = teacher.turn_end
        spans.append(Span(len(pieces), len(ids), len(teacher_ids), len(teacher_ids) + len(end)))
        teacher_ids = teacher_ids + end
    return teacher_ids, spans


def align(pieces: Sequence[str], teacher_pieces: Sequence[str]) -> list[Span]:
    """Return the spans of two lists of pieces of a text, up to the first character that differs.

    Spans with bytes that are no text are left out.

    Args:
        pieces: What each of the policy's tokens completes of the text; see `TokenCodec.pieces`.
        teacher_pieces: What each of the teacher's tokens completes.
    """
    text = commonprefix(("".join(pieces), "".join(teacher_pieces)))  # noqa: RUF071 (no paths)
    ends, teacher_ends = _ends(pieces), _ends(teacher_pieces)
    common = sorted(end for end in ends.keys() & teacher_ends.keys() if end <= len(text))
    return [
        Span(ends[start], ends[end], teacher_ends[start], teacher_ends[end])
        for start, end in pairwise(common)
        if NO_TEXT not in text[start:end]
    ]


def _ends(pieces: Sequence[str]) -> dict[int, int]:
    """Return the number of pieces up to each length of the text at which one ends."""
    ends, length = {0: 0}, 0
    for index, piece in enumerate(pieces):
        if piece:
            length += len(piece)
            ends[length] = index + 1
    return ends
