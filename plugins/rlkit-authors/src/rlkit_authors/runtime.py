"""A runtime for tests: one process, and the model that rlkit ships."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import OneProcess
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.recipe import Model
from rlkit.types import Score, Trajectory

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer


R = TypeVar("R")
T = TypeVar("T")


class ExampleRuntime(OneProcess):
    """A `Runtime` to `bind` parts to in tests; model and tokenizer are loaded on first use."""

    device = torch.device("cpu")
    context = 4096

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(Model(path="tiny"))

    @cached_property
    def policy(self) -> CausalLM:
        return load_policy(Model(path="tiny")).eval()

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({int(self.tokenizer.eos_token_id)})

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.policy(input_ids=tokens, use_cache=False).logits
        return logits

    async def work(self, function: Callable[[T], R], argument: T, timeout: float) -> R:
        """Call a function in this process, without a deadline; it may return data only, as in a worker."""
        data: R = json.loads(json.dumps(function(argument)))
        return data

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Call a reward in this process, without a deadline."""
        return await reward.score(trajectories)
