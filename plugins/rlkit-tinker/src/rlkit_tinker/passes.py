"""Passes of the base over sequences of several adapters, and the log-probs of any targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlkit.models.packing import MULTIPLE, PackedPasses, PlainInputs, packed_pass, plain_pass
from rlkit.models.vision import backbone_of
from rlkit.ops.logps import CHUNK_BYTES
from rlkit.ops.packing import Packing
from rlkit_tinker.bank import AdapterBank
from rlkit_tinker.routing import LoraPair, Pairs

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class TokenRow(NamedTuple):
    """A sequence with the tokens whose log-probs are read.

    Args:
        tokens: [N], what the model reads.
        targets: [N] or [N,K] i64, for each token those that may follow it.
        pairs: The adapter; None for the base.
    """

    tokens: Sequence[int]
    targets: Tensor
    pairs: Pairs | None


class RowLogps(NamedTuple):
    """Log-probs of a row.

    Args:
        targets: [N] or [N,K] f32, those of the targets; differentiable by the adapter.
        top: [N,k] f32, those of the most likely tokens.
        top_ids: [N,k] i64, these tokens.
    """

    targets: Tensor
    top: Tensor
    top_ids: Tensor


class BasePasses:
    """Computes log-probs with a frozen base and the adapters of a bank.

    Rows share no prompts: with equal tokens and other adapters, other hidden states follow.

    Args:
        model: The base.
        bank: Its adapters.
        autocast: Returns the precision context of a pass.
    """

    def __init__(
        self, model: CausalLM, bank: AdapterBank, autocast: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._model = model
        self._backbone = backbone_of(model)
        self._bank = bank
        self._autocast = autocast
        self._device = next(model.parameters()).device
        with autocast():
            self._passes = PackedPasses(self._backbone)
        self._window = getattr(model.config.get_text_config(), "sliding_window", None)

    def logps(self, rows: Sequence[TokenRow], top: int = 0) -> list[RowLogps]:
        """Return the log-probs of the targets of each row, and of the `top` most likely tokens."""
        groups: dict[tuple[int, Sequence[int]], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((id(row.pairs), row.targets.shape[1:]), []).append(index)
        results: dict[int, RowLogps] = {}
        with self._autocast():
            hidden = self._hidden(rows)
            for indices in groups.values():
                states = torch.cat([hidden[i] for i in indices])
                targets = torch.cat([rows[i].targets for i in indices])
                logps = self._head_logps(states, targets, rows[indices[0]].pairs, top)
                parts = zip(*(x.split([len(rows[i].tokens) for i in indices]) for x in logps), strict=True)
                results |= {i: RowLogps(*part) for i, part in zip(indices, parts, strict=True)}
        return [results[i] for i in range(len(rows))]

    def _hidden(self, rows: Sequence[TokenRow]) -> Sequence[Tensor]:
        """Return the final hidden states [N,H] of each row."""
        first: dict[int, int] = {}
        for i, row in enumerate(rows):
            first.setdefault(id(row.pairs), i)
        order = sorted(range(len(rows)), key=lambda i: first[id(rows[i].pairs)])  # an adapter's beside each other
        tokens = [torch.tensor([*rows[i].tokens, 0], device=self._device) for i in order]
        lengths = [len(row) - 1 for row in tokens]
        owners = [rows[i].pairs for i in order]
        batch = pad_sequence(tokens, batch_first=True)  # [B,T], where the last token of each row is not read
        columns = torch.arange(batch.shape[1], device=self._device)
        mask = (columns > 0) & (columns <= torch.tensor(lengths, device=self._device)[:, None])
        if self._passes.packed and (self._window is None or max(lengths) <= self._window):
            packing = Packing(batch, mask, share_prompts=False)
            token_owners = [owners[row] for row in packing.rows]
            packing.pad(MULTIPLE if len(packing.ids) > MULTIPLE else 1)
            token_owners += [None] * (len(packing.ids) - len(token_owners))
            with self._bank.routed(token_owners):
                states = packed_pass(self._backbone, packing).hidden
        else:
            with self._bank.routed(owners):
                states = plain_pass(self._backbone, PlainInputs.of(self._backbone, batch, mask)).hidden
        by_row = dict(zip(order, states.split(lengths), strict=True))
        return [by_row[i] for i in range(len(rows))]

    def _head_logps(self, hidden: Tensor, targets: Tensor, pairs: Pairs | None, top: int) -> RowLogps:
        """Return log-probs from states [N,H] of one adapter: logits that exceed `CHUNK_BYTES` are computed twice."""
        head = self._model.get_output_embeddings()
        pair = None if pairs is None else pairs.get(self._bank.head)

        def read(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits = head(hidden) if pair is None else head(hidden) + _update(pair, hidden)
            logps = logits.float().log_softmax(-1)
            ids = targets if targets.dim() == 2 else targets[:, None]
            likely = logps.detach().topk(min(top, logps.shape[-1]), -1)
            return logps.gather(-1, ids).view(targets.shape), *likely

        size = max(1, CHUNK_BYTES // (4 * head.out_features))
        chunks = list(zip(hidden.split(size), targets.to(self._device).split(size), strict=True))
        if len(chunks) > 1 and torch.is_grad_enabled():
            read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
        return RowLogps(*map(torch.cat, zip(*(read(*chunk) for chunk in chunks), strict=True)))


def _update(pair: LoraPair, hidden: Tensor) -> Tensor:
    projected = linear(hidden, pair.down.to(hidden.dtype))
    return linear(projected, pair.up.to(hidden.dtype)) * pair.scale
