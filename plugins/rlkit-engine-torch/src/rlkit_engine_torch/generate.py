"""Decoding through the model's own `generate`: for layers and caches that `Decoder` does not support."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlkit.models.vision import RowMedia, backbone_of, media_inputs

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From logits [N,V] to tokens [N] i64, and whether each row has finished, [N] bool."""


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens, by leaving `generate` no other."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.finished: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, self.finished = self.choose(scores)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


class _Finished(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, chooser: _Chooser) -> None:
        self.chooser = chooser

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        assert self.chooser.finished is not None
        return self.chooser.finished


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Choose,
    budget: int,
    autocast: AbstractContextManager[None],
    *,
    media: RowMedia = (),
) -> None:
    """Continue prompts of equal length, with their pictures, until `choose` has finished all of them.

    Of the checkpoint's generation config, which may truncate, penalise or force tokens, nothing counts.
    """
    chooser = _Chooser(choose)
    tokens = torch.tensor(prompts, device=next(model.parameters()).device)
    segments = [segment for row in media if row is not None for segment in row.segments]
    inputs = media_inputs(backbone_of(model), tokens, segments)
    neutral = copy.copy(model)  # `generate` takes what a config leaves open from the model's own
    neutral.generation_config = GenerationConfig(max_new_tokens=budget, do_sample=False, use_cache=True)
    with autocast:
        neutral.generate(
            tokens,
            **inputs,
            attention_mask=torch.ones_like(tokens),
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([_Finished(chooser)]),
        )
