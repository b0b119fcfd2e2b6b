"""The experts that a server selected, as its responses say."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.ops.routes import Routers
from rlkit.types import Request
from rlkit_servers.http import Fault

ARGUMENT = "--enable-return-routed-experts"
"""With which servers return the experts of each token."""


def problem_at(urls: Sequence[str], asked: bool) -> str | None:
    """Explain why servers at addresses, if there are any, may return no routes; None if the recipe asks for them."""
    if urls and not asked:
        return f"servers at urls may not return them; start them with {ARGUMENT}, and set train.router_replay: true"
    return None


def routes_of_npy(encoded: object, routers: Routers, request: Request, sampled: int, aborted: bool = False) -> Tensor:
    """Return the routes in a .npy file of unsigned bytes or shorts [tokens,layers,K], in base64: see `_routes`.

    Only the header is left to numpy, which would reserve the memory that it asks for.
    """
    file = io.BytesIO(_decoded(encoded))
    try:
        version = numpy.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"they are a .npy file of version {version}, expected (1, 0)")
        shape, by_columns, dtype = numpy.lib.format.read_array_header_1_0(file)
        if dtype not in (numpy.uint8, numpy.uint16) or by_columns:
            raise ValueError(f"they are of type {dtype}, expected uint8 or uint16 by rows")
        numbers = numpy.frombuffer(file.read(), dtype).reshape(shape)
    except Exception as error:  # its parser raises TypeError, TokenError, RecursionError and others on a hostile header
        raise _fault(error) from error
    return _routes(numbers, routers, request, sampled, aborted)


def routes_of_bytes(encoded: object, routers: Routers, request: Request, sampled: int, aborted: bool = False) -> Tensor:
    """Return the routes in int32 numbers [tokens,layers,K], in base64: see `_routes`."""
    content = _decoded(encoded)
    try:
        numbers = numpy.frombuffer(content, dtype="<i4").reshape(-1, routers.depth, routers.top_k)
    except ValueError as error:
        raise _fault(error) from error
    return _routes(numbers, routers, request, sampled, aborted)


def _routes(numbers: numpy.ndarray, routers: Routers, request: Request, sampled: int, aborted: bool) -> Tensor:
    """Return routes [n,R,K] of a request's tokens from `routes_from` on and of the sampled ones.

    Dense layers are left out. The last token has no route, since it was not run; one that has an expert several times
    was not recorded: it has zeros. Where a token has a single expert, expert 0 is left to the router for that reason.
    After an abortion, other tokens may lack theirs or be left over.

    Raises:
        Fault: They are not those of the request's tokens.
    """
    total = len(request.tokens) + sampled - (request.routes_from or 0)
    if numbers.ndim != 3 or numbers.shape[1:] != (routers.depth, routers.top_k):
        raise _fault(f"they have shape {numbers.shape}, expected (tokens, {routers.depth}, {routers.top_k})")
    if len(numbers) != total - 1 and not aborted:
        raise _fault(f"they are of {len(numbers)} tokens, expected {total - 1}")
    selected = torch.from_numpy(numbers[: total - 1, list(routers.layers)].astype(numpy.int64))
    if bool(((selected < 0) | (selected >= routers.experts)).any()):
        raise _fault(f"they name an expert that is not from 0 to {routers.experts - 1}")
    ordered = selected.sort(-1).values
    is_recorded = selected > 0
    if routers.top_k > 1:
        is_recorded = (ordered[..., 1:] != ordered[..., :-1]).all(-1, keepdim=True)
    routes = torch.where(is_recorded, selected + 1, 0).to(routers.dtype)
    return torch.cat((routes, routes.new_zeros(total - len(routes), *routes.shape[1:])))


def _decoded(encoded: object) -> bytes:
    if not isinstance(encoded, str):
        raise EngineError(
            f"a server returned no experts of its tokens: start it with {ARGUMENT}, or set train.router_replay: false"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _fault(error) from error


def _fault(problem: object) -> Fault:
    return Fault(f"the server's routes of experts cannot be read: {problem}", 400)
