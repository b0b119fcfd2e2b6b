"""The service: many LoRA adapters over one base, in this process."""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

import torch
from rlkit_engine_torch.layers import FusedLayers

from rlkit.base.errors import RecipeError, show
from rlkit.distributed.kernels import choose_kernels
from rlkit.models.config import context_length
from rlkit.models.load import load_policy, load_tokenizer, stop_ids
from rlkit.models.packing import masked_attention
from rlkit.models.vision import backbone_of
from rlkit.recipe import Model
from rlkit.types import SampleKey
from rlkit_tinker.bank import AdapterBank
from rlkit_tinker.checkpoints import folder_of, read_pairs
from rlkit_tinker.clients import SamplingClient, TrainingClient
from rlkit_tinker.commands import Scheduler
from rlkit_tinker.passes import BasePasses
from rlkit_tinker.sampling import MixedSampler, make_decoder
from rlkit_tinker.sampling_queue import SamplingQueue
from rlkit_tinker.training import Trainer
from rlkit_tinker.types import RequestFailedError

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class Service:
    """Trains adapters over one base, and samples from them; used from one thread.

    Args:
        model: A recipe's `model:` section, or the path of the base.
        precision: `32-true`, or `bf16-mixed` to compute in bfloat16; adapters and optimizers are float32.
        max_adapters: The most training clients at once.
        max_rank: The largest rank of an adapter.
        alpha: The scale of an adapter is alpha / rank.
        folder: The folder of saved states.
        seed: The seed of samples that have none of their own.
        max_tokens_per_pass: The most tokens of a micro-batch, padding included.
        max_rows: The most sequences that are sampled at once.
        device: The device of the base.

    Raises:
        RecipeError: The model cannot be loaded.
        RequestFailedError: The model cannot be served.
    """

    def __init__(
        self,
        model: Model | str,
        *,
        precision: Literal["32-true", "bf16-mixed"] = "32-true",
        max_adapters: int = 64,
        max_rank: int = 128,
        alpha: float = 32.0,
        folder: Path | str = "tinker",
        seed: int = 0,
        max_tokens_per_pass: int = 16384,
        max_rows: int = 256,
        device: str = "cpu",
    ) -> None:
        self.model = Model(model) if isinstance(model, str) else model
        if self.model.lora is not None:
            raise RecipeError("model.lora is set, but each training client has an adapter of its own; leave it out")
        if self.model.head != "lm":
            raise RecipeError(f"model.head is {show(self.model.head)}, expected lm: a reward model predicts no tokens")
        if precision not in {"32-true", "bf16-mixed"}:
            raise RecipeError(f"precision is {show(precision)}, expected 32-true or bf16-mixed")
        limits = {"max_adapters": max_adapters, "max_rank": max_rank, "max_rows": max_rows}
        for name, number in (limits | {"max_tokens_per_pass": max_tokens_per_pass}).items():
            if type(number) is not int or number < 1:
                raise RecipeError(f"{name} is {show(number)}, expected an integer of at least 1")
        if not 0 < alpha < inf:
            raise RecipeError(f"alpha is {show(alpha)}, expected a positive number")
        choose_kernels()
        self.session_id = uuid4().hex[:12]
        self.tokenizer = load_tokenizer(self.model)
        self._policy = load_policy(self.model, frozen=True).to(device)
        self.folder = Path(folder)
        self.vocabulary = self._policy.get_output_embeddings().out_features
        self.context = context_length(self._policy.config)
        self._seed = seed
        self._clients = self._draws = 0
        autocast = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16-mixed")
        FusedLayers().fuse(self._policy)
        self.bank = AdapterBank(self._policy, max_adapters, max_rank, alpha)
        with autocast():
            check_head(self._policy)
        decoder = make_decoder(self._policy, autocast, self.context)
        passes = BasePasses(self._policy, self.bank, autocast)
        self.scheduler = Scheduler(Trainer(passes, self.vocabulary, self.context, max_tokens_per_pass))
        ends = stop_ids(self.model, self.tokenizer)
        self.samples = SamplingQueue(MixedSampler(decoder, self.bank, self.tokenizer, ends, max_rows), passes)

    def create_training_client(
        self,
        rank: int = 32,
        seed: int = 0,
        *,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
    ) -> TrainingClient:
        """Return a client with a new adapter.

        Args:
            rank: The adapter's rank.
            seed: The seed of its initial weights.
            train_mlp: Whether layers of MLPs are adapted.
            train_attn: Whether layers of attention are adapted.
            train_unembed: Whether the output layer is adapted; the embeddings stay, also where they are tied to it.

        Raises:
            RequestFailedError: An option is wrong, or all slots are in use.
        """
        adapter = self.bank.create(rank, seed, attn=train_attn, mlp=train_mlp, unembed=train_unembed)
        self._clients += 1
        return TrainingClient(self, adapter, f"{self.session_id}:train:{self._clients - 1}")

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """Return a client that samples from the base, or from a saved state.

        Args:
            model_path: The path of the state, from `save_state`; None for the base.

        Raises:
            RequestFailedError: There is no such state, or it does not fit the base.
        """
        folder = None if model_path is None else folder_of(self.folder, model_path)
        return SamplingClient(self, None if folder is None else read_pairs(folder, self.bank))

    def sample_keys(self, seed: int | None, count: int) -> list[int]:
        """Return the keys of the random numbers of samples: those of a seed, or of the next draw of this service."""
        draw = self._draws
        self._draws += seed is None
        key = SampleKey(self._seed, draw, "draw", 0) if seed is None else SampleKey(seed, 0, "seed", 0)
        return [key._replace(sample=index).hash() for index in range(count)]


@torch.no_grad()
def check_head(model: CausalLM) -> None:
    """Check that a model's logits are a plain product of its hidden states.

    Raises:
        RequestFailedError: They are not, as with soft caps and scales.
    """
    head = model.get_output_embeddings()
    tokens = torch.arange(2, 10, device=head.weight.device)[None] % head.out_features
    with masked_attention(model):
        hidden = backbone_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(head(hidden), logits, rtol=1e-4, atol=1e-4):
        raise RequestFailedError(
            f"{type(model).__name__} cannot be served: its logits are no plain product of hidden states, as with soft "
            "caps; choose another model"
        )
