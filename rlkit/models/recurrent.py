"""Recurrent layers (linear attention, state-space layers, short convolutions) in packed passes, and their states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from rlkit.ops.attention import Layout, Span, divide_by_length, token_indices

States = dict[int, Tensor | None]
"""States [R,...] of one kind of a layer, most often one; None before the first token."""


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The states of one recurrent layer, which transformers' layers read and replace."""

    conv_states: States
    recurrent_states: States

    def __init__(self, number_of_states: int = 1) -> None:
        """Set the fields as transformers does since 5.13; before, a layer had one state, in no dictionary."""
        super().__init__()
        indices = range(number_of_states)
        self.number_of_states = number_of_states
        self.conv_states, self.recurrent_states, self.conv_kernel_size = (dict.fromkeys(indices) for _ in range(3))
        self.is_conv_states_initialized = dict.fromkeys(indices, False)
        self.is_recurrent_states_initialized = dict.fromkeys(indices, False)
        self.has_previous_state = dict.fromkeys(indices, False)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None: ...

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Append inputs [R,C,T] of a convolution; return them after those that its first outputs need."""
        size = conv_kernel_size or conv_states.shape[-1]
        before = self.conv_states[state_idx]
        if before is None:
            inputs = pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            inputs = torch.cat((before, conv_states), -1)
        self.conv_states[state_idx] = inputs[..., -size:]
        self.has_previous_state[state_idx] = True
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.has_previous_state[state_idx] = True
        return recurrent_states

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the states of these rows [K] i64."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({i: state[rows] for i, state in states.items() if state is not None})

    def add_rows(self, other: StateLayer, rows: Tensor) -> None:
        """Append the states of rows [K] i64 of another layer."""
        for states, added in ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)):
            for i, state in added.items():
                before = states[i]
                if state is not None:
                    states[i] = state[rows] if before is None else torch.cat((before, state[rows]))
        self.has_previous_state |= other.has_previous_state


class _Rows(NamedTuple):
    """Segments of a packed sequence that a recurrent layer computes at once.

    Args:
        indices: [B,T] i64, of their tokens; arbitrary after the end of a segment.
        valid: [B,T] bool, which of them are a segment's.
        prompts: [B] i64, the shared prompts that they follow, in the order of batches; None if they begin rows.
        are_prompts: Whether they are shared prompts, all of one length.
    """

    indices: Tensor
    valid: Tensor
    prompts: Tensor | None
    are_prompts: bool


def _recurrent_rows(layout: Layout) -> list[_Rows]:
    """Return the segments of a layout in batches: shared prompts by length, then others of similar length."""
    by_length: dict[int, list[Span]] = {}
    for start, end, _ in layout.shared:
        by_length.setdefault(end - start, []).append((start, end))
    prompt_index = {span: i for i, span in enumerate(chain.from_iterable(by_length.values()))}
    batches = [_rows_of(spans, layout, None, True) for spans in by_length.values()]
    members = [i for i, span in enumerate(layout.segments) if span not in prompt_index]
    for follows in (False, True):
        rows = [i for i in members if (layout.prompts[i] in prompt_index) == follows]
        spans = [layout.segments[i] for i in rows]
        for batch in divide_by_length([end - start for start, end in spans]):
            prompts = [prompt_index[layout.prompts[rows[i]]] for i in batch] if follows else None
            batches.append(_rows_of([spans[i] for i in batch], layout, prompts, False))
    return batches


def _rows_of(spans: Sequence[Span], layout: Layout, prompts: Sequence[int] | None, are_prompts: bool) -> _Rows:
    indices, valid = token_indices(spans, layout.device)
    if prompts is not None and indices.shape[1] == 1:  # for a single token, layers take the path of decoding
        indices, valid = indices.repeat(1, 2), pad(valid, (0, 1))
    return _Rows(indices, valid, None if prompts is None else torch.tensor(prompts, device=layout.device), are_prompts)


def pack_recurrent_layers(backbone: nn.Module) -> None:
    """Let the recurrent layers of a model read packed sequences: those with a convolution over tokens and a cache."""
    for mixer in backbone.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in mixer.children())
        has_cache = has_convolution and cache_name(mixer.forward) in inspect.signature(mixer.forward).parameters
        if has_cache and not isinstance(mixer.forward, _PackedMixer):
            mixer.forward = _PackedMixer(mixer)


class _PackedMixer:
    """The forward pass of a recurrent layer, in which segments begin with the state after their shared prompt."""

    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward
        self._layer_index: int = getattr(mixer, "layer_idx", 0)
        self._states = getattr(getattr(mixer, "config", None), "number_of_conv_states", 1)
        self._cache_name = cache_name(mixer.forward)

    def __call__(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        layout: Layout | None = options.pop("layout", None)
        if layout is None:
            output: Tensor = self._forward(hidden_states, *arguments, **options)
            return output
        outputs, indices, prompt_states = [], [], StateLayer(self._states)
        for rows in layout.derived(_recurrent_rows):
            states = StateLayer(self._states)
            if rows.prompts is not None:
                states.add_rows(prompt_states, rows.prompts)
            options |= {self._cache_name: Cache(layers=[states] * (self._layer_index + 1)), "attention_mask": None}
            output = self._forward(hidden_states[0][rows.indices], **options)
            if rows.are_prompts:
                prompt_states.add_rows(states, torch.arange(len(output), device=output.device))
            outputs.append(output[rows.valid])
            indices.append(rows.indices[rows.valid])
        return torch.cat(outputs)[torch.cat(indices).argsort()][None]


def cache_name(forward: Callable[..., object]) -> str:
    """Return the name of a layer's or model's argument for a cache: `cache` since transformers 5.24."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), "cache_params")
