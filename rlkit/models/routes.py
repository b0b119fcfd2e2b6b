"""Router replay: the routers of a mixture of experts select the experts that were selected before (arXiv:2510.11370).

Weights of the selected experts come from the router as it is, so that it learns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlkit.ops.routes import Routers


class Routing:
    """What the routers select in a pass: recorded, or replayed. It is an argument of the model, `routing`.

    Args:
        grid: [B,T,R,K] the routes to replay; None to record.
    """

    def __init__(self, grid: Tensor | None = None) -> None:
        self.grid = grid
        self.routes: Tensor | None = None
        """[N,R,K] the routes of the pass's tokens, in its order."""
        self.recorded: dict[int, Tensor] = {}
        """[N,K] what each router has selected, by its index."""
        self.differing: Tensor | int = 0
        """How often a router would have selected other experts for a token than those replayed, of `compared`."""
        self.compared: Tensor | int = 0

    def place(self, rows: Tensor, positions: Tensor) -> dict[str, Any]:
        """Set a pass's tokens by their rows [N], -1 for padding, and positions [N]; return the model's option."""
        if self.grid is not None:
            routes = self.grid[rows, positions.clamp(max=self.grid.shape[1] - 1)]
            self.routes = routes.masked_fill_(rows[:, None, None] < 0, 0)
        return {"routing": self}

    def select(self, index: int, live: Tensor) -> Tensor:
        """Return the experts that a router selects, given its own choice [N,K]."""
        selected = live
        if self.routes is not None:
            routes = self.routes[:, index].long().view(live.shape)
            known = (routes > 0).all(-1, keepdim=True)
            selected = torch.where(known, routes - 1, live)
            differs = (selected.sort(-1).values != live.sort(-1).values).any(-1)
            self.differing, self.compared = self.differing + differs.sum(), self.compared + known.sum()
        else:
            self.recorded[index] = selected
        return selected

    def taken(self, routers: Routers) -> Tensor:
        """Return the recorded routes [N,R,K] of a pass."""
        selected = torch.stack([self.recorded[index].flatten(0, -2) for index in range(len(routers.layers))], 1)
        return (selected + 1).to(routers.dtype)


def routers_of(backbone: nn.Module) -> Routers | None:
    """Return the routers of a decoder, which from then on take the argument `routing`; None if it has none.

    A router is a module of a layer that selects by `topk` among scores of all experts.
    """
    if hasattr(backbone, "_routers"):
        return backbone._routers  # type: ignore[no-any-return]
    text: Any = backbone.get_decoder() if hasattr(backbone, "get_decoder") else backbone
    layers: Sequence[nn.Module] = getattr(text, "layers", ())
    found = [(number, module) for number, layer in enumerate(layers) for module in layer.modules() if _size(module)]
    sizes = {_size(module) for _, module in found}
    numbers = tuple(number for number, _ in found)
    routers = None
    if len(sizes) == 1 and len(set(numbers)) == len(numbers):
        experts, top_k = sizes.pop() or (0, 0)
        routers = Routers(numbers, len(layers), experts, top_k)
        for index, (number, module) in enumerate(found):
            module.forward = _Router(module.forward, index, routers)
            layers[number].register_forward_pre_hook(module.forward.begin, with_kwargs=True)
    backbone._routers = routers  # type: ignore[assignment]
    return routers


def _size(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of experts and of those that a router selects; None if a module is no router with a topk."""
    if not type(module).__name__.endswith(("Router", "Gate")):
        return None
    forward: Any = inspect.unwrap(type(module).forward)
    if "topk" not in forward.__code__.co_names:
        return None
    config = getattr(module, "config", None)
    experts = getattr(module, "num_experts", None) or getattr(config, "num_experts", None)
    top_k = getattr(module, "top_k", None) or getattr(config, "top_k_experts", None)
    return (experts, top_k) if isinstance(experts, int) and isinstance(top_k, int) else None


class _Router:
    """The forward pass of a router, which selects as the pass's `routing` says."""

    def __init__(self, forward: Callable[..., Any], index: int, routers: Routers) -> None:
        self._forward = forward
        self._index = index
        self._routers = routers
        self._routing: Routing | None = None

    def begin(self, _: nn.Module, __: object, options: Mapping[str, Any]) -> None:
        """Get the routing from the arguments of the layer, whose recomputation has the same."""
        self._routing = options.get("routing")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._routing is None:
            return self._forward(*args, **options)
        with _Selection(self._routers, partial(self._routing.select, self._index)) as selection:
            output = self._forward(*args, **options)
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

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return output
        scores = args[0]
        if (scores.shape[-1], output.indices.shape[-1]) != self._sizes:
            return output
        self.made = True
        indices = self._select(output.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
