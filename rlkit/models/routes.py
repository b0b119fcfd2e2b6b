"""Router replay: the routers of a mixture of experts select the experts that were selected before (arXiv:2510.11370).

Weights of the selected experts come from the router as it is, so that it learns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlkit.distributed.fsdp2 import blocks
from rlkit.ops.routes import Routers


class Routing:
    """What the routers select in a pass: recorded, or replayed. It is an argument of the model, `routing`.

    Args:
        grid: [B,T,R,K] the routes to replay; None to record.
        counts: Takes for each router how often it would have selected others, and of how many selections, [2].
    """

    def __init__(self, grid: Tensor | None = None, counts: list[Tensor] | None = None) -> None:
        self._grid = grid
        self._counts = [] if counts is None else counts
        self._routes: Tensor | None = None
        self._recorded: dict[int, Tensor] = {}

    def arrange(self, rows: Tensor, positions: Tensor) -> dict[str, Routing]:
        """Set a pass's tokens by their rows [N], -1 for padding, and positions [N]; return the model's option."""
        if self._grid is not None:
            routes = self._grid[rows, positions.clamp(max=self._grid.shape[1] - 1)]
            self._routes = routes.masked_fill_(rows[:, None, None] < 0, 0)
        return {"routing": self}

    def select(self, index: int, live: Tensor) -> Tensor:
        """Return the experts that a router selects, given its own choice [...,N,K]."""
        if self._routes is None:
            self._recorded[index] = live
            return live
        routes = self._routes[:, index].long().view(live.shape)
        is_replayed = (routes > 0).all(-1)
        selected = torch.where(is_replayed[..., None], routes - 1, live)
        differs = (selected.sort(-1).values != live.sort(-1).values).any(-1)
        self._counts.append(torch.stack((differs.sum(), is_replayed.sum())))
        return selected

    def recorded(self, routers: Routers) -> Tensor:
        """Return the recorded routes [N,R,K] of a pass."""
        selected = torch.stack([self._recorded[index].flatten(0, -2) for index in range(len(routers.layers))], 1)
        return (selected + 1).to(routers.dtype)


def routers_of(backbone: nn.Module) -> Routers | None:
    """Return the routers of a decoder, which from then on take the argument `routing`; None if it has none.

    A router is a module of a layer that selects by `topk` among scores of all experts.
    """
    layers = blocks(backbone)
    modules = [(number, module) for number, layer in enumerate(layers) for module in layer.modules()]
    placed = [(number, module, size) for number, module in modules if (size := _size(module))]
    numbers, sizes = tuple(number for number, _, _ in placed), {size for _, _, size in placed}
    if len(sizes) != 1 or len(set(numbers)) < len(numbers):
        return None
    routers = Routers(numbers, len(layers), *sizes.pop())
    for index, (number, module, _) in enumerate(placed):
        if not isinstance(module.forward, _Router):
            module.forward = _Router(module.forward, index, routers)
            layers[number].register_forward_pre_hook(module.forward.begin, with_kwargs=True)
    return routers


def _size(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of experts and of those that a router selects; None if a module is no router with a topk."""
    if not type(module).__name__.endswith(("Router", "Gate")):
        return None
    if "topk" not in inspect.unwrap(type(module).forward).__code__.co_names:
        return None
    config = getattr(module, "config", None)
    experts = getattr(module, "num_experts", None) or getattr(config, "num_experts", None)
    top_k = getattr(module, "top_k", None) or getattr(config, "top_k_experts", None)
    return (experts, top_k) if isinstance(experts, int) and isinstance(top_k, int) else None


class _Router:
    """The forward pass of a router, which selects as the pass's `routing` says."""

    def __init__(self, forward: Callable[..., object], index: int, routers: Routers) -> None:
        self._forward = forward
        self._index = index
        self._routers = routers
        self._routing: Routing | None = None

    def begin(self, _: nn.Module, __: object, options: Mapping[str, object]) -> None:
        """Get the routing from the arguments of the layer, whose recomputation has the same."""
        routing = options.get("routing")
        self._routing = routing if isinstance(routing, Routing) else None

    def __call__(self, *inputs: object, **options: object) -> object:
        if self._routing is None:
            return self._forward(*inputs, **options)
        with _Selection(self._routers, partial(self._routing.select, self._index)) as selection:
            output = self._forward(*inputs, **options)
        if not selection.made:
            raise ValueError("a router selects no experts by topk")
        return output


class _Selection(TorchFunctionMode):
    """Replaces the indices of each topk among the scores of all experts, and its values by those at the indices."""

    def __init__(self, routers: Routers, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._sizes = (routers.experts, routers.top_k)
        self._select = select
        self.made = False

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = function(*args, **(kwargs or {}))
        if not isinstance(output, torch.return_types.topk):
            return output
        scores = args[0]
        if not isinstance(scores, Tensor) or (scores.shape[-1], output.indices.shape[-1]) != self._sizes:
            return output
        self.made = True
        indices = self._select(output.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
