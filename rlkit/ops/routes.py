"""The routes of tokens through a mixture of experts: which experts of each layer compute a token.

Routes are numbers of experts plus 1, [...,R,K] for R layers with a router, of K experts each. 0 leaves the choice to
the router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ROUTES = "expert_routes"
"""The name of the field of trajectories and batches that holds the routes of each token."""

EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")
"""Options of transformers' configurations that count experts; a second name of one comes later."""

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

    def check(self, routes: torch.Tensor) -> None:
        """Check that routes name experts of the model.

        Raises:
            ValueError: They name others.
        """
        beyond = routes[(routes < 0) | (routes > self.experts)]
        if len(beyond):
            raise ValueError(f"filled the field {ROUTES!r} with {int(beyond[0])}, expected 0 to {self.experts}")
