"""Teachers' log-probs of the policy's own tokens, or of those that they find most likely in their places."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import nan
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.data.data import Data
from rlkit.data.retokenize import retokenize
from rlkit.data.teacher import NO_TEXTS, TeacherPrompts, attempt_texts
from rlkit.engines import connect_teacher
from rlkit.interfaces.teacher import ServedTeacher, TokenSpan
from rlkit.ops.logps import MIN_PROB
from rlkit.ops.masked import masked_sum, span_sums
from rlkit.recipe import Teacher
from rlkit.records.sources import source_of
from rlkit.rollout.collate import collate
from rlkit.rollout.rendering import TokenCodec
from rlkit.rollout.service import RolloutService
from rlkit.train.logps import begin_logps, columns_of, frozen_top
from rlkit.train.metrics import Meter
from rlkit.train.models import Models
from rlkit.types import Batch, Media, Reads, Rendered, RolloutBatch, Trajectory


@dataclass(frozen=True)
class TeacherRows:
    """A batch as a teacher reads it.

    Args:
        batch: [B,T'] Its rows, with all tokens after the first prompt as the policy has them.
        mask: [B,T] bool, the policy's tokens in the policy's own rows.
        read: [B,T] bool, those of them that are in `batch`, in the same order; the others are beyond the teacher's
            context.
    """

    batch: RolloutBatch
    mask: Tensor
    read: Tensor

    def restore(self, computed: Tensor) -> Tensor:
        """Map results on the teacher's tokens [B,T',...] to the policy's positions [B,T,...].

        It is 0 outside the mask, and where the teacher has not read a token NaN; 0 for integers.
        """
        restored = computed.new_zeros((*self.mask.shape, *computed.shape[2:]))
        if restored.is_floating_point():
            restored[self.mask] = nan
        restored[self.read] = computed[self.batch.mask]
        return restored


def teacher_rows(
    batch: RolloutBatch, trajectories: Sequence[Trajectory], starts: Sequence[Rendered | None], context: int
) -> TeacherRows:
    """Return a batch with another start of each row, in place of all before the policy's first token.

    Args:
        batch: Of these trajectories.
        trajectories: In its order.
        starts: The ids, with pictures, with which the teacher's rows start; None for rows that it does not read.
        context: Tokens of the longest row that the teacher reads; others lose their end.
    """
    rows, ends = [], []
    for trajectory, rendered in zip(trajectories, starts, strict=True):
        start, start_media = Rendered([]) if rendered is None else rendered
        first = trajectory.mask.index(True) if True in trajectory.mask else len(trajectory.mask)
        end = first if rendered is None else first + max(context - len(start), 0)
        tokens = [*start, *trajectory.tokens[first:end]]
        mask = [False] * len(start) + trajectory.mask[first:end]
        count = len(tokens)
        segments = [] if trajectory.media is None else trajectory.media.segments
        later = [segment.after(len(start) - first) for segment in segments if segment.end > first]
        own = [*([] if start_media is None else [start_media]), *later]
        media = Media.of([segment for segment in own if segment.end <= count])
        row = replace(trajectory, tokens=tokens, mask=mask, logps=[0.0] * count, versions=[0] * count, media=media)
        rows.append(row)
        ends.append(end)
    positions, limits = torch.arange(batch.mask.shape[1]), torch.tensor(ends, dtype=torch.long)
    read = batch.mask & (positions < limits[:, None]).to(batch.mask.device)
    return TeacherRows(collate(rows).to(batch.tokens.device), batch.mask, read)


@dataclass(frozen=True)
class RetokenizedRows(TeacherRows):
    """A batch whose completions a teacher reads as tokens of its own.

    Args:
        starts: [B,T] i64, where the span of each of the policy's tokens begins.
        teacher_starts: [B,T'] i64, where the span of each token under `batch.mask` begins in the policy's row.
    """

    starts: Tensor
    teacher_starts: Tensor

    def restore(self, computed: Tensor) -> Tensor:
        """Return the sums over spans of the teacher's log-probs [B,T'], at each of the policy's tokens [B,T]."""
        sums = computed.new_zeros(self.mask.shape)
        sums.scatter_add_(1, self.teacher_starts, torch.where(self.batch.mask, computed, 0.0))
        return torch.where(self.read, sums.gather(1, self.starts), torch.where(self.mask, nan, 0.0))

    def restore_single(self, computed: Tensor) -> Tensor:
        """Map results on the teacher's tokens [B,T',K] to the policy's [B,T,K], as `TeacherRows.restore`.

        What is computed in spans of several tokens, of either model, is left out.
        """
        counts = torch.zeros_like(self.starts).scatter_add(1, self.teacher_starts, self.batch.mask.long())
        single = self.read & (span_sums(self.read.long(), self.starts) == 1) & (counts == 1)
        teacher_single = self.batch.mask & single.gather(1, self.teacher_starts)
        return TeacherRows(replace(self.batch, mask=teacher_single), self.mask, single).restore(computed)


def retokenized_rows(
    batch: RolloutBatch,
    trajectories: Sequence[Trajectory],
    starts: Sequence[Rendered | None],
    codec: TokenCodec,
    prompts: TeacherPrompts,
) -> RetokenizedRows:
    """Return a batch as a teacher with its own tokenizer reads it, up to the end of each row's first turn.

    Args:
        batch: Of these trajectories.
        trajectories: In its order.
        starts: The ids with which the teacher's rows start; None for rows that it does not read.
        codec: Of the policy's tokenizer.
        prompts: With the teacher's template; what exceeds their context is not read.
    """
    assert prompts.template is not None
    rows, row_starts = [], []
    read, span_starts = torch.zeros_like(batch.mask, device="cpu"), torch.arange(batch.mask.shape[1])
    span_starts = span_starts.repeat(len(batch), 1)
    for index, (trajectory, rendered) in enumerate(zip(trajectories, starts, strict=True)):
        first = trajectory.mask.index(True) if True in trajectory.mask else len(trajectory.mask)
        start = [] if rendered is None else rendered.tokens
        turn = first + sum(1 for _ in takewhile(bool, trajectory.mask[first:]))
        completion = [] if rendered is None else trajectory.tokens[first:turn]
        ids, spans = retokenize(completion, codec, prompts.template)
        tokens = [*start, *ids][: prompts.context]
        mask, begins = [False] * len(tokens), [0] * len(tokens)
        for span in spans:
            own = slice(len(start) + span.teacher_start, len(start) + span.teacher_end)
            if own.stop <= len(tokens):
                count = own.stop - own.start
                mask[own], begins[own] = [True] * count, [first + span.start] * count
                read[index, first + span.start : first + span.end] = True
                span_starts[index, first + span.start : first + span.end] = first + span.start
        zeros = [0] * len(tokens)
        rows.append(replace(trajectory, tokens=tokens, mask=mask, logps=[0.0] * len(tokens), versions=zeros))
        row_starts.append(torch.tensor(begins, dtype=torch.long))
    own_batch = collate(rows)
    teacher_starts = torch.zeros_like(own_batch.tokens)
    teacher_starts[own_batch.attention] = torch.cat([*row_starts, torch.zeros(0, dtype=torch.long)])
    device = batch.tokens.device
    return RetokenizedRows(
        own_batch.to(device), batch.mask, read.to(device), span_starts.to(device), teacher_starts.to(device)
    )


T = TypeVar("T")


def logps_on_servers(service: RolloutService, batch: RolloutBatch) -> Tensor:
    """Return the teacher's log-probs [B,T] f32, 0 outside the mask."""
    rows, spans = _spans(batch)
    teacher_logps = torch.zeros(batch.mask.shape)
    answers = _answers(service, lambda teacher: teacher.logps(spans))
    for row, span, logps in zip(rows, spans, answers, strict=True):
        teacher_logps[row, span.start : span.start + len(logps)] = torch.tensor(logps)
    return teacher_logps.to(batch.mask.device) * batch.mask


def top_on_servers(service: RolloutService, batch: RolloutBatch, count: int) -> list[Tensor]:
    """Return the most likely tokens [B,T,K] i64 and their log-probs [B,T,K+1] f32, 0 outside the mask.

    Log-probs are NaN where the policy has no such token. The last is what the others leave of 1.
    """
    rows, spans = _spans(batch)
    ids = torch.zeros(*batch.mask.shape, count, dtype=torch.long)
    logps = torch.zeros(*batch.mask.shape, count + 1)
    answers = _answers(service, lambda teacher: teacher.top_logps(spans, count))
    for row, span, positions in zip(rows, spans, answers, strict=True):
        scored = slice(span.start, span.start + len(positions))
        ids[row, scored] = torch.tensor([top_ids for top_ids, _ in positions])
        logps[row, scored, :-1] = torch.tensor([top_logps for _, top_logps in positions])
    logps[..., -1] = (1 - logps[..., :-1].exp().sum(-1)).clamp(min=MIN_PROB).log()
    unknown = (ids >= columns_of(service.actor)).any(-1, keepdim=True)
    ids, logps = ids.masked_fill(unknown, 0), logps.masked_fill(unknown, nan)
    device, mask = batch.mask.device, batch.mask[..., None]
    return [ids.to(device) * mask, torch.where(mask, logps.to(device), 0.0)]


def _answers(service: RolloutService, ask: Callable[[ServedTeacher], Coroutine[object, None, list[T]]]) -> list[T]:
    """Ask the teacher's servers, once for the ranks with the same rows."""
    section, ranks = service.recipe.teacher, service.ranks
    assert section is not None
    assert section.urls is not None
    teacher = connect_teacher(section.urls, section.engine)
    return ranks.broadcast_tp(service.wait(ask(teacher)) if ranks.lead else [])


def _spans(batch: RolloutBatch) -> tuple[list[int], list[TokenSpan]]:
    """Return the rows that have tokens under the mask, and what is scored of each: from the first of these on."""
    mask, tokens = batch.mask.cpu(), batch.tokens.tolist()
    rows = mask.any(-1).nonzero().flatten().tolist()
    starts, lengths = mask.int().argmax(-1).tolist() if rows else [], batch.attention.sum(-1).tolist()
    return rows, [TokenSpan(tokens[row][: lengths[row]], starts[row]) for row in rows]


def compute_teacher_logps(
    data: Data, models: Models, service: RolloutService, batch: RolloutBatch, trajectories: Sequence[Trajectory]
) -> None:
    """Fill `batch.teacher_logps`, or what a loss with `forward.teacher_top` reads instead, if the recipe has a teacher.

    Each row is read by the teacher of its source. All ranks must call this.

    Args:
        data: Makes the prompts that teachers read.
        models: With the teachers that are loaded here.
        service: Waits for the teachers that servers have.
        batch: Of these trajectories, with the policy's own tokens.
        trajectories: In its order.

    Raises:
        EngineError: The teacher's servers do not answer.
    """
    recipe, ranks = service.recipe, service.ranks
    section, prompts, vocabularies = recipe.teacher, data.teacher_prompts, data.vocabularies
    if section is None:
        return
    rows = read_rows(data, batch, trajectories)
    tensors: list[Tensor] = []
    is_read = rows.read.any(-1).tolist()
    paths = [section.path_of(t.prompt.source_name) for t in trajectories]
    count = recipe.loss.forward.teacher_top
    if prompts is not None:
        count = min(count, prompts.columns)
    if vocabularies is not None:
        vocabularies = vocabularies.to(batch.tokens.device)
    split = None if vocabularies is None else vocabularies[2:]
    for path, teacher in models.teachers.items():
        indices = torch.tensor(
            [i for i, row_path in enumerate(paths) if row_path == path and is_read[i]], device=batch.tokens.device
        ).long()
        part = rows.batch.rows(indices)
        if teacher is None:
            pieces = top_on_servers(service, part, count) if count else [logps_on_servers(service, part)]
        elif count:
            reads = Reads(entropy=False, top=count, columns=columns_of(models.actor), split=split)
            pieces = frozen_top(data, teacher, ranks, part, reads)
        else:
            pieces = [begin_logps(data, teacher, ranks, part)()]
        shape = rows.batch.tokens.shape  # rows that are not read yet are NaN, or 0 for integers
        tensors = tensors or [p.new_full((*shape, *p.shape[2:]), nan if p.is_floating_point() else 0) for p in pieces]
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor[indices, : piece.shape[1]] = piece
    if isinstance(rows, RetokenizedRows):
        batch.teacher_logps, batch.teacher_spans = rows.restore(tensors[-1]), rows.starts
        if vocabularies is not None:
            ids, batch.teacher_top_logps = map(rows.restore_single, tensors[:2])
            batch.teacher_top_ids = vocabularies.own(ids[..., : min(count, len(vocabularies.shared))])
    elif count:
        batch.teacher_top_ids, batch.teacher_top_logps = map(rows.restore, tensors)
    else:
        [batch.teacher_logps] = map(rows.restore, tensors)


def log_by_teacher(section: Teacher, batch: Batch, trajectories: Sequence[Trajectory], meter: Meter) -> None:
    """Log what teachers read of attempts, and the KL to the teachers of sources, over the tokens of their prompts."""
    for texts in attempt_texts(section.attempts, trajectories) if section.attempts is not None else ():
        meter.mean("teacher/solutions", float(texts.solution is not None))
        meter.mean("teacher/feedback", float(texts.feedback is not None))
    if batch.teacher_logps is None or not section.sources:  # the loss reads distributions instead, or one teacher
        return
    gap = batch.required("trainer_logps") - batch.teacher_logps
    is_read = batch.mask & ~gap.isnan()
    totals, counts = masked_sum(gap, is_read, dim=-1).tolist(), is_read.sum(-1).tolist()
    for trajectory, total, count in zip(trajectories, totals, counts, strict=True):
        if trajectory.prompt.source_name in section.sources:
            meter.mean(f"teacher/kl/{source_of(trajectory.prompt)}", total / max(count, 1), weight=count)


def check_servers(data: Data, service: RolloutService) -> None:
    """Have each of the teacher's servers score a prompt, before anything is spent.

    Raises:
        EngineError: One does not.
    """
    section = service.recipe.teacher
    if section is None or section.urls is None or data.teacher_prompts is None or not service.ranks.lead:
        return
    if data.dialogue.reader is not None:
        raise RecipeError(
            "teacher.urls is set, but servers score texts alone, and model.path reads pictures; set teacher.urls: "
            "null, so that the teacher is loaded here"
        )
    prompt = data.teacher_prompts.prompt(data.prompt(data.order.rows[0]))
    template = data.teacher_prompts.template or data.dialogue.template
    span = TokenSpan(template.start(prompt.messages, prompt.tools), 1)
    for url in section.urls:
        service.wait(connect_teacher([url], section.engine).logps([span]))


def read_rows(data: Data, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> TeacherRows:
    """Return a batch as the recipe's teachers read it."""
    prompts = data.teacher_prompts
    if prompts is None or not (prompts.changed or batch.tokens.shape[1] > prompts.context):
        return TeacherRows(batch, batch.mask, batch.mask)
    if prompts.attempts is None:
        texts = [NO_TEXTS] * len(trajectories)
    else:
        texts = attempt_texts(prompts.attempts, trajectories)
    starts = [
        None if prompts.attempts is not None and text == NO_TEXTS else prompts.start(data.dialogue.template, row, text)
        for row, text in zip(trajectories, texts, strict=True)
    ]
    if prompts.template is not None:
        return retokenized_rows(batch, trajectories, starts, data.dialogue.template.codec, prompts)
    return teacher_rows(batch, trajectories, starts, prompts.context)
