"""A request becomes a prompt: the turn that it continues, and the rendered messages after it. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rlkit.base.errors import RecipeError
from rlkit.gateway.forest import Forest, Node
from rlkit.gateway.request import ChatRequest, RequestError
from rlkit.interfaces.parser import ParsedTurn
from rlkit.media import Media, Rendered
from rlkit.types import Completion, JsonObject, Message


class PolicyBackend(Protocol):
    """What a session needs of the policy: rendering, sampling and reading."""

    context: int
    """Tokens of the longest conversation."""

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        """Return messages as the policy reads them, ready for its turn; `after` is the turn before, None at the start.

        It is called in threads, for several sessions at once.

        Raises:
            RecipeError: The chat template cannot render them there, or the policy reads no pictures.
        """

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, label: str, media: Media | None = None
    ) -> Completion:
        """Continue tokens, with the pictures of their placeholders; random numbers derive from the label.

        Raises:
            RolloutError: This request failed.
            EngineError: The engine failed.
        """

    def text(self, tokens: Sequence[int]) -> str:
        """Return a turn as text, with special tokens and without the one that ended it."""

    def read(self, text: str, tools: Sequence[JsonObject], prompt: Sequence[int]) -> ParsedTurn:
        """Return the text of a turn without special tokens, and its calls of tools, if there are any.

        Args:
            text: The turn, as `text` returns it.
            tools: Those that the policy may call.
            prompt: The tokens with which its prompt ends.
        """


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
