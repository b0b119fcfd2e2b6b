"""The routes of tokens through a mixture of experts: which experts of each layer compute a token.

Routes are numbers of experts plus 1, [...,R,K] for R layers with a router, of K experts each. 0 leaves the choice to
the router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROUTES = "expert_routes"
"""The name of the field of trajectories and batches that holds the routes of each token."""

SMALL = 255
"""The largest number of experts whose routes fit into uint8."""


class Routers(NamedTuple):
    """The routers of a mixture of experts.

    Args:
        layers: The numbers of the layers that have one, from 0.
        depth: The number of all layers.
        experts: Experts of each layer.
        top_k: Experts of each token.
    """

    layers: tuple[int, ...]
    depth: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of routes."""
        import torch

        return torch.uint8 if self.experts <= SMALL else torch.int16

    def encode(self, selected: Tensor) -> Tensor:
        """Return routes of the experts [N,L,K] that another program selected in all L layers, dense ones included.

        Where a token has the same expert several times, none was recorded.

        Raises:
            ValueError: They have another shape, or name an expert that does not exist.
        """
        import torch

        shape = tuple(selected.shape)
        if shape[1:] != (self.depth, self.top_k):
            raise ValueError(f"routes have shape {shape}, expected (tokens, {self.depth}, {self.top_k})")
        selected = selected[:, list(self.layers)].long()
        if bool(((selected < 0) | (selected >= self.experts)).any()):
            raise ValueError(f"routes name an expert that is not from 0 to {self.experts - 1}")
        ordered = selected.sort(-1).values
        distinct = (ordered[..., 1:] != ordered[..., :-1]).all(-1, keepdim=True)
        return torch.where(distinct, selected + 1, 0).to(self.dtype)
