"""Forward passes that compute equal prompts once: answers attend to one copy of their prompt's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

WASTE = 0.1
"""Padding that a pass over answers may have, as a share of its tokens, before the shorter ones get one of their own."""

Backbone = Any
"""A Hugging Face decoder: it returns `last_hidden_state`."""

GAPS = {torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far a probe may be from plain passes, as a share of the standard deviation, by type; 1e-3 for others."""


class Chosen(NamedTuple):
    """Hidden states [N,H] that predict the N tokens under a mask [B,T], and the tokens' places [N] in it, flattened."""

    hidden: Tensor
    places: Tensor


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [B,H,T,D], after those of a prefix if there is one."""

    is_sliding = False

    def __init__(self, prefix: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.prefix = prefix

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.prefix is None:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        keys, values = self.prefix
        return torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_seq_length(self) -> int:
        return 0 if self.prefix is None else self.prefix[0].shape[2]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # what transformers up to 5.12 calls it
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class Prompts(NamedTuple):
    """The distinct prompts of a batch, without their last tokens, and where the rows go on.

    Args:
        tokens: Those of each prompt.
        of_row: [B] The prompt of each row.
        starts: [B] How many tokens of each row are its prompt's.
        lengths: [B] How many tokens after them are read.
    """

    tokens: list[tuple[int, ...]]
    of_row: list[int]
    starts: list[int]
    lengths: list[int]


def find_prompts(tokens: Tensor, mask: Tensor) -> Prompts:
    """Find the distinct prompts of rows [B,T]: what comes before the first token under the mask [B,T], less one."""
    distinct: dict[tuple[int, ...], int] = {}
    found = Prompts([], [], [], [])
    ids, chosen = tokens.tolist(), mask.int()
    firsts, lasts = chosen.argmax(1).tolist(), (mask.shape[1] - 1 - chosen.flip(1).argmax(1)).tolist()
    for row, first, last, some in zip(ids, firsts, lasts, mask.any(1).tolist(), strict=True):
        start = max(first - 1, 0) if some else 0
        prompt = tuple(row[:start])
        found.of_row.append(distinct.setdefault(prompt, len(distinct)))
        found.starts.append(start)
        found.lengths.append(last - start if some else 0)
    found.tokens.extend(distinct)
    return found


class Prefixes:
    """Computes the hidden states that predict the tokens under a mask; prompts that rows share are computed once.

    That is so where a probe at the start shows that it equals plain passes, for models that take a cache of keys and
    values, until `shared` is set to False.

    Args:
        backbone: The decoder that is probed; None for no sharing.
    """

    def __init__(self, backbone: Any | None) -> None:
        self.shared = backbone is not None and _probe(backbone)

    def __call__(self, backbone: Backbone, tokens: Tensor, mask: Tensor) -> Chosen:
        """Return hidden states, in any order.

        Args:
            backbone: Returns hidden states.
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool; the first column never counts.
        """
        prompts = find_prompts(tokens, mask) if self.shared else None
        if prompts is None or len(prompts.tokens) == len(tokens) or not any(prompts.tokens):
            return plain(backbone, tokens, mask)
        passes = _Passes(backbone, tokens, mask, prompts)
        parts = [passes.go_on(rows) for rows in divide(prompts.lengths)]
        return Chosen(*(torch.cat(column) for column in zip(*parts, strict=True)))


def plain(backbone: Backbone, tokens: Tensor, mask: Tensor) -> Chosen:
    """Return the same from one pass over whole rows."""
    chosen = torch.nn.functional.pad(mask[:, 1:], (1, 0))
    hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][chosen[:, 1:]]
    return Chosen(hidden, chosen.flatten().nonzero().squeeze(-1))


@torch.no_grad()
def _probe(backbone: Any) -> bool:
    """Whether shared prompts make no difference: in two rows of one prompt, and one of a longer prompt."""
    weight = next(backbone.parameters())
    if weight.is_meta or backbone.config.get_text_config().is_encoder_decoder:
        return False
    tokens = torch.tensor([[5, 3, 4, 6, 7, 0, 0], [5, 3, 4, 8, 0, 0, 0], [3, 6, 5, 4, 7, 8, 3]], device=weight.device)
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1]], device=weight.device)
    sharing = Prefixes(None)
    sharing.shared = True
    try:
        found, expected = sharing(backbone, tokens, mask.bool()), plain(backbone, tokens, mask.bool())
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return False
    gap = (found.hidden[found.places.argsort()] - expected.hidden).float().square().mean().sqrt()
    return bool(gap <= GAPS.get(weight.dtype, 1e-3) * expected.hidden.float().std())


def divide(lengths: Sequence[int]) -> list[list[int]]:
    """Divide rows into passes of similar length, longest first, with little padding; those of length 0 are left out."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    found: list[list[int]] = []
    used = 0
    for i in order:
        used += lengths[i]
        if found and used >= (1 - WASTE) * lengths[found[-1][0]] * (len(found[-1]) + 1):
            found[-1].append(i)
        else:
            found.append([i])
            used = lengths[i]
    return found


class _Passes:
    """Passes over the rows of a batch, from copies of their prompts' keys and values on."""

    def __init__(self, backbone: Backbone, tokens: Tensor, mask: Tensor, prompts: Prompts) -> None:
        self.backbone, self.tokens, self.mask, self.prompts = backbone, tokens, mask, prompts
        self.config = backbone.config.get_text_config()
        self.width = max(map(len, prompts.tokens))
        self.cache = self._prefill()

    def _prefill(self) -> list[_Layer]:
        """Run the prompts, left-padded; return their keys and values."""
        device, width, prompts = self.tokens.device, self.width, self.prompts.tokens
        tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        before = torch.tensor([width - len(p) for p in prompts], device=device)[:, None]
        columns = torch.arange(width, device=device)
        visible = (columns >= before)[:, None] & (columns[:, None] >= columns)
        layers = [_Layer() for _ in range(self.config.num_hidden_layers)]
        visible = visible | torch.eye(width, dtype=torch.bool, device=device)  # padding sees itself, or all is NaN
        self._run(tokens, visible, (columns - before).clamp(min=0), layers)
        return layers

    def go_on(self, rows: list[int]) -> Chosen:
        """Run some rows from the last token of their prompts on."""
        device, length, last = self.tokens.device, self.prompts.lengths[rows[0]], self.tokens.shape[1] - 1
        index = torch.tensor(rows, device=device)
        starts = torch.tensor([self.prompts.starts[i] for i in rows], device=device)[:, None]
        steps = torch.arange(length, device=device)
        columns = starts + steps  # of the inputs; each predicts the next
        of_prompt = torch.arange(self.width, device=device) >= self.width - starts
        causal = (steps[:, None] >= steps).expand(len(rows), -1, -1)
        visible = torch.cat((of_prompt[:, None].expand(-1, length, -1), causal), 2)
        of_row = torch.tensor([self.prompts.of_row[i] for i in rows], device=device)
        layers = [_Layer((layer.keys[of_row], layer.values[of_row])) for layer in self.cache]
        hidden = self._run(self.tokens[index].gather(1, columns.clamp(max=last)), visible, columns, layers)
        targets = columns + 1
        chosen = self.mask[index].gather(1, targets.clamp(max=last)) & (targets <= last)
        return Chosen(hidden[chosen], (index[:, None] * (last + 1) + targets)[chosen])

    def _run(self, tokens: Tensor, visible: Tensor, positions: Tensor, layers: Sequence[_Layer]) -> Tensor:
        hidden: Tensor = self.backbone(
            input_ids=tokens,
            attention_mask=attention_masks(self.config, visible),
            position_ids=positions,
            past_key_values=Cache(layers=list(layers)),
            use_cache=True,
        ).last_hidden_state
        return hidden


def attention_masks(config: Any, visible: Tensor) -> Any:
    """Turn which columns [B,Q,K] a token sees into what a model's attention reads, for each type of layer it has."""
    device = visible.device
    masks = {"full_attention": visible}
    window = getattr(config, "sliding_window", None)
    if window is not None:
        queries, keys = visible.shape[-2:]
        columns = torch.arange(keys, device=device)
        masks["sliding_attention"] = visible & (columns[keys - queries :, None] - columns < window)
    ready = {kind: _as_read(config, mask[:, None]) for kind, mask in masks.items()}
    if getattr(config, "layer_types", None) is not None:
        return ready
    return ready["full_attention" if window is None else "sliding_attention"]


def _as_read(config: Any, mask: Tensor) -> Tensor:
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
