"""The adapters of several tenants over one base: their matrices, gradients and optimizers, in bounded slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rlkit.base.errors import show
from rlkit.models.vision import language_model
from rlkit_tinker.routing import LoraPair, Pairs, Route
from rlkit_tinker.types import AdamParams, OptimStepResponse, RequestFailedError

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

ATTENTION = ("attn", "attention")
"""Parts of the names of modules with attention; other linear layers of a block are those of MLPs."""


class Adapter:
    """The adapter of one tenant, with its retained gradients and its optimizer.

    Args:
        pairs: Its matrices by the names of the layers, parameters in float32.
        rank: Their rank.
    """

    def __init__(self, pairs: Pairs, rank: int) -> None:
        self.pairs = pairs
        self.rank = rank
        self.optimizer = AdamW(self.parameters, foreach=False)
        self.failure: str | None = None
        """Why a pass since the last step failed: the next step fails too, since a part of its batch is missing."""

    @property
    def parameters(self) -> list[Tensor]:
        """The matrices, in the order of the layers."""
        return [weight for pair in self.pairs.values() for weight in (pair.down, pair.up)]

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients of a pass to those that wait for a step."""
        for weight, gradient in zip(self.parameters, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def drop_gradients(self) -> None:
        """Forget the gradients that wait for a step."""
        self.failure = None
        self.optimizer.zero_grad(set_to_none=True)

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        """Make a step of AdamW with the gradients since the last one, and forget them.

        Raises:
            RequestFailedError: A pass has failed, or gradients are not finite; the weights stay, gradients are dropped.
        """
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        failure = self.failure
        if failure is None and not gradients:
            return OptimStepResponse({"skipped:max": 1.0})
        norm = nn.utils.get_total_norm(gradients)
        if failure is None and not norm.isfinite():
            failure = "its gradient is not finite; lower learning_rate, or clip with grad_clip_norm"
        if failure is not None:
            self.drop_gradients()
            raise RequestFailedError(f"no step was made, and the gradient was dropped: {failure}")
        if params.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, params.grad_clip_norm, norm)
        self.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self.optimizer.step()
        self.drop_gradients()
        return OptimStepResponse({"grad_norm:mean": float(norm)})

    @torch.no_grad()
    def frozen_pairs(self) -> dict[str, LoraPair]:
        """Return a copy of the matrices, which later steps do not change."""
        return {name: LoraPair(p.down.clone(), p.up.clone(), p.scale) for name, p in self.pairs.items()}


class AdapterBank:
    """Holds adapters, and routes the rows of each pass of a model through them.

    Args:
        model: The base, which is frozen; its linear layers call this bank from now on.
        max_adapters: The number of slots.
        max_rank: The largest rank of an adapter.
        alpha: The scale of an adapter is alpha / rank.
    """

    def __init__(self, model: CausalLM, max_adapters: int, max_rank: int, alpha: float) -> None:
        self.max_adapters = max_adapters
        self.max_rank = max_rank
        self.alpha = alpha
        self.head = ""
        """The name of the output layer."""
        self.layers: dict[str, nn.Linear] = {}
        """The layers that may have adapters, by their names in the model."""
        self.names: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
        """The names of the layers of each kind."""
        self._adapters: list[Adapter] = []
        self._route: Route | None = None
        self.device = next(model.parameters()).device
        self._find_layers(model)
        model.requires_grad_(False)

    def create(self, rank: int, seed: int = 0, *, attn: bool = True, mlp: bool = True, unembed: bool = True) -> Adapter:
        """Return a new adapter, which changes nothing yet: A is Kaiming-uniform by the seed, B is 0.

        Args:
            rank: Its rank.
            seed: The seed of A.
            attn: Whether layers of attention are adapted.
            mlp: Whether those of MLPs are.
            unembed: Whether the output layer is; embeddings never are, also where they are tied to it.

        Raises:
            RequestFailedError: The rank is out of range, nothing is adapted, or all slots are in use.
        """
        if type(rank) is not int or not 1 <= rank <= self.max_rank:
            full = "; full fine-tuning is not served" if rank == 0 else ""
            raise RequestFailedError(f"rank is {show(rank)}, expected an integer from 1 to {self.max_rank}{full}")
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise RequestFailedError(f"seed is {show(seed)}, expected an integer from 0 to 2**63 - 1")
        self._check_slots()
        names = {name for kind in self._kinds_to_train(attn, mlp, unembed) for name in self.names[kind]}
        pairs = self.empty_pairs(names, rank)
        generator = torch.Generator().manual_seed(seed)
        for pair in pairs.values():
            down = nn.init.kaiming_uniform_(torch.empty(pair.down.shape), a=sqrt(5), generator=generator)
            pair.down.data.copy_(down)  # drawn on the CPU, alike on every device
        return self.add(pairs)

    def add(self, pairs: Pairs) -> Adapter:
        """Return a new adapter with these matrices.

        Raises:
            RequestFailedError: All slots are in use.
        """
        self._check_slots()
        self._adapters.append(Adapter(pairs, len(next(iter(pairs.values())).down)))
        return self._adapters[-1]

    def empty_pairs(self, names: Set[str], rank: int) -> dict[str, LoraPair]:
        """Return matrices of zeros for layers, in the order of the base: sums over them round alike after a restart."""
        return {
            name: LoraPair(
                self._zeros(rank, layer.in_features), self._zeros(layer.out_features, rank), self.alpha / rank
            )
            for name, layer in self.layers.items()
            if name in names
        }

    def free(self, adapter: Adapter) -> None:
        """Free the slot of an adapter, whose tensors are no longer referenced here."""
        self._adapters.remove(adapter)

    @contextmanager
    def routed(self, owners: Sequence[Pairs | None]) -> Iterator[None]:
        """Let each row of the passes in this context have its adapter."""
        self._route = Route(owners, self.device)
        try:
            yield
        finally:
            self._route = None

    def _find_layers(self, model: CausalLM) -> None:
        """Find the linear layers, and let them call this bank."""
        body, head = language_model(model), model.get_output_embeddings()
        if any(weight.dim() > 2 for weight in body.parameters()):
            raise RequestFailedError(
                f"{type(model).__name__} has weights of more than two dimensions, such as experts, which would have no "
                "adapter; choose a model of linear layers alone"
            )
        inside = {id(module) for module in body.modules()}
        for name, module in model.named_modules():
            is_head = module is head
            if isinstance(module, nn.Linear) and (is_head or id(module) in inside):
                self.layers[name] = module
                self.head = name if is_head else self.head
                self.names["unembed" if is_head else kind_of(name)].append(name)
                module.forward = self._routed_forward(name, module.forward)

    def _routed_forward(self, name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def routed(x: Tensor) -> Tensor:
            y = forward(x)
            return y if self._route is None else self._route.add(name, x, y)

        return routed

    def _check_slots(self) -> None:
        if len(self._adapters) >= self.max_adapters:
            raise RequestFailedError(
                f"all {self.max_adapters} adapters are in use; close a training client, or raise max_adapters"
            )

    def _kinds_to_train(self, attn: bool, mlp: bool, unembed: bool) -> list[str]:
        kinds = [kind for kind, train in (("attn", attn), ("mlp", mlp), ("unembed", unembed)) if train]
        if not kinds:
            raise RequestFailedError("the adapter has no layers; set train_attn, train_mlp or train_unembed to True")
        for kind in kinds:
            if not self.names[kind]:
                raise RequestFailedError(f"the base has no linear layers for train_{kind}=True; set it to False")
        return kinds

    def _zeros(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, device=self.device))


def kind_of(name: str) -> str:
    """Return `attn` or `mlp`, the kind of a linear layer in a block by its name."""
    return "attn" if any(word in part for part in name.split(".") for word in ATTENTION) else "mlp"
