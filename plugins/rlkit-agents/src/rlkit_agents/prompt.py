"""A request becomes a prompt: the turn that it continues, and the rendered messages after it. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from rlkit.base.errors import RecipeError
from rlkit.interfaces.gateway import PolicyBackend
from rlkit.types import Message, Rendered
from rlkit_agents.forest import Forest, Node
from rlkit_agents.request import ChatRequest, RequestError


class Prepared(NamedTuple):
    """A request that has its prompt.

    Args:
        request: The request.
        parent: The turn that it continues.
        messages: Its messages after that turn.
        context: Their ids and pictures.
        before: Digest of its conversation.
        fingerprint: Digest of the request.
        rerendered: Whether a turn that it could have continued is rendered again.
        retokenized: Sampled tokens that are rendered again.
    """

    request: ChatRequest
    parent: Node | None
    messages: list[Message]
    context: Rendered
    before: str
    fingerprint: str
    rerendered: bool
    retokenized: int


def prepare(request: ChatRequest, forest: Forest, backend: PolicyBackend) -> Prepared:
    """Return a request with its prompt, as it continues a forest; may be called in any thread.

    Raises:
        RequestError: It has no prompt, or a longer one than the policy reads.
    """
    if not request.messages:
        raise RequestError("the body has no messages")
    if request.messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's, expected one that the policy answers")
    history = request.history()
    parent, length = forest.attach(history)
    rerendered = False
    try:
        context = render(backend, request, length, parent)
    except RequestError:
        if parent is None:
            raise
        parent, length, rerendered = None, 0, True
        context = render(backend, request)
    used = len(forest.ids(parent)) + len(context.tokens)
    if used >= backend.context:
        raise RequestError(
            f"the conversation has {used} tokens, but the policy reads {backend.context - 1}",
            code="context_length_exceeded",
        )
    retokenized = forest.rendered_again(history[length + 1 :])
    fingerprint = request.fingerprint(history[-1])
    return Prepared(
        request, parent, request.messages[length:], context, history[-1], fingerprint, rerendered, retokenized
    )


def render(backend: PolicyBackend, request: ChatRequest, start: int = 0, after: Node | None = None) -> Rendered:
    """Return a request's messages from `start` on as the policy reads them, which follow a turn if there is one.

    Raises:
        RequestError: The chat template refuses them there.
    """
    completion = None if after is None else after.completion
    try:
        return backend.render(request.messages[start:], request.tools, completion)
    except RecipeError as error:
        raise RequestError(str(error)) from error
