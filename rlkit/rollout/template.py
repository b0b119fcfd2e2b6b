"""Chat templates: how a conversation is rendered turn by turn, so that no token is ever rendered twice."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from rlkit.base.errors import RecipeError
from rlkit.interfaces.model import Tokenizer
from rlkit.media import Rendered
from rlkit.rollout.pictures import PictureReader, RenderedCache
from rlkit.rollout.rendering import Renderer, TokenCodec, pictures_of, texts_of
from rlkit.types import JsonObject, Message, Tools

USER: Message = {"role": "user", "content": "How many apples are left?"}
REPLY = "There are seven."
ANSWER: Message = {"role": "assistant", "content": REPLY}
QUESTION = "pears and plums"
CALL_ID = "call00001"  # nine letters and digits, as Mistral's template requires
ANEW = (
    "the chat template renders earlier turns anew once others follow, so that the new part cannot be separated; "
    "choose a model whose template only appends"
)


KEPT_TOKENS = 2**20
"""Tokens of rendered starts of conversations that are kept, at four bytes each."""


class ChatTemplate:
    """Renders the start of a conversation and, after each of the policy's turns, what comes next, on its own.

    A delta is what the template adds after the end token of an assistant's turn: found by rendering a short stand-in
    conversation with and without the new messages. The policy's own tokens are never rendered, so what a template
    does to them (trim them, strip their thinking) does not matter.

    Args:
        tokenizer: With a chat template.
        stop_ids: The ids that end the policy's turn.
        tools: JSON schemas that the template shows to the policy.
        kwargs: What the template reads besides.
        reader: Reads pictures; None for a model of texts alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        tools: Sequence[JsonObject] = (),
        kwargs: Mapping[str, object] | None = None,
        reader: PictureReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.tools = list(tools)
        self.kwargs = dict(kwargs or {})
        self.codec = TokenCodec(tokenizer, stop_ids)
        self.reader = reader
        self.render = Renderer(tokenizer, self.tools, self.kwargs)
        if reader is not None and not _takes_texts(self.render):
            self.render = Renderer(tokenizer, self.tools, self.kwargs, typed=True)
        self._renderings = RenderedCache()
        self._starts: dict[str, array[int]] = {}
        self._cached_tokens = 0

    def start(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids with which a conversation starts, ready for the policy's turn.

        Args:
            messages: Those before the policy's turn.
            tools: The tools of the conversation, by name or by the schema to show; None for all of the recipe's.

        Raises:
            RecipeError: The template refuses the messages, or a picture cannot be read.
        """
        return self.render_start(messages, tools).tokens

    def _start_of_texts(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        key = repr((messages, tools))
        start = self._starts.get(key)
        if start is None:  # all samples of a prompt start alike, and its length was measured before
            start = array("i", self.codec.encode(self.opening(messages, tools)))
            self._cached_tokens += len(start)
            if self._cached_tokens > KEPT_TOKENS:
                self._starts.clear()
                self._cached_tokens = len(start)
            self._starts[key] = start
        return start.tolist()

    def render_start(self, messages: Sequence[Message], tools: Tools | None = None) -> Rendered:
        """Return what `start` returns, with the pictures of the messages; may be called in any thread.

        Raises:
            RecipeError: The template or the processor refuses the messages, or a text holds a placeholder.
        """
        pictures = [] if self.reader is None else pictures_of(messages)
        if self.reader is None or not pictures:
            self._check_markers(messages)
            return Rendered(self._start_of_texts(messages, tools))
        reader = self.reader

        def render() -> Rendered:
            self._check_markers(messages)
            return reader.read(self.opening(messages, tools), pictures)

        return self._renderings.get(repr((messages, tools)), render)

    def _check_markers(self, messages: Sequence[Message]) -> None:
        """Check that no text holds what stands for a picture.

        Raises:
            RecipeError: One does.
        """
        for marker in self.reader.markers if self.reader is not None else ():
            if any(marker in text for message in messages for text in texts_of(message)):
                raise RecipeError(
                    f"a text of the messages holds {marker!r}, which stands for a picture; remove it, or add the "
                    "picture to a column `images` of the row and write <image>"
                )

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Return the text of `start`; before a plain text, without messages, that is one special token."""
        if not messages:
            return str(self.tokenizer.bos_token or self.tokenizer.eos_token)
        text = self.render(messages, generate=True, tools=tools)
        if not text:
            raise RecipeError(
                "the chat template renders nothing; correct the model's chat_template.jinja or choose another model"
            )
        return text

    def turn(self, message: Message) -> list[int]:
        """Return the ids of `turn_text`.

        Raises:
            RecipeError: The template refuses the message, or does not write it after the start of a turn.
        """
        return self.codec.encode(self.turn_text(message))

    def turn_text(self, message: Message) -> str:
        """Return a recorded turn of the policy as text, including the token that ends it.

        A text is as it is. With more than that, such as calls of tools, it is what the template writes.

        Raises:
            RecipeError: The template refuses the message, or does not write it after the start of a turn.
        """
        before, stop = self._around
        text = message.get("content")
        if set(message) - {"role", "content"}:
            rendered = self.render([USER, message], generate=False, tools=None)
            openings = (before, self.render([USER], generate=True, tools=None))
            opening = next((candidate for candidate in openings if rendered.startswith(candidate)), None)
            if opening is None:
                raise RecipeError(
                    "the chat template does not write a turn with calls of tools after its generation prompt, so that "
                    "the policy cannot learn it; write the calls into the content"
                )
            text = rendered.removeprefix(opening)
            ending = self.codec.stop.search(text)
            text = text[: ending.start()] if ending else text
        return f"{text}{stop}"

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What the template writes before a turn of the policy that answers one question, and the text of its end."""
        before, _, after = self.render([USER, ANSWER], generate=False, tools=None).rpartition(REPLY)
        end = self.codec.stop.match(after)
        return before, self.tokenizer.eos_token if end is None else end.group()

    def delta(self, messages: Sequence[Message], ended: bool = True) -> list[int]:
        """Return the ids of new messages after the policy's end token, ready for its next turn.

        All results of a turn's calls belong into one delta, since templates merge them; each may carry the `name` and
        `tool_call_id` of its call. Where the template ends a turn with none of `stop_ids`, its own end comes first, and
        so does that of a turn that has not `ended`, since it was cut before its end token.

        Raises:
            RecipeError: The template refuses the messages, or renders them so that nothing can be separated from
                what came before.
        """
        return self.render_delta(messages, ended).tokens

    def _delta_text(self, messages: Sequence[Message]) -> str:
        """Return the text of a delta, which may start with a stop token."""
        plain = [self.codec.plain(message) for message in messages]
        errors = []
        for turn, last in _stand_ins(plain):
            try:
                return self._addition(turn, last, plain)
            except RecipeError as error:
                errors.append(error)
        raise errors[0]

    def render_delta(self, messages: Sequence[Message], ended: bool = True) -> Rendered:
        """Return what `delta` returns, with the pictures of the messages.

        Raises:
            RecipeError: As `delta`, or the processor refuses the messages.
        """
        pictures = pictures_of(messages)
        if self.reader is None or not pictures:
            encode = self.codec.encode_after_stop if ended else self.codec.encode
            return Rendered(encode(self._delta_text(messages)))
        tokens, media = self.reader.read(self._delta_text(messages), pictures)
        assert media is not None
        after_stop = ended and tokens[:1] and tokens[0] in self.stop_ids
        return Rendered(tokens[1:], media.after(-1)) if after_stop else Rendered(tokens, media)

    def closing(self) -> list[int]:
        """Return the ids with which the template ends a conversation after the text of an assistant's turn."""
        rendered = self.render([USER, ANSWER], generate=False)
        return self.codec.encode(rendered.rpartition(REPLY)[2])

    def rendered(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Return the text of the template's own rendering of a whole conversation, to compare with that of its ids."""
        text, pictures = self.render(messages, generate=False, tools=tools), pictures_of(messages)
        has_pictures = self.reader is not None and bool(pictures)
        ids = self.reader.read(text, pictures).tokens if self.reader and has_pictures else self.codec.encode(text)
        return self.codec.decode(ids)

    def _addition(self, turn: Message, last: str, messages: Sequence[Message]) -> str:
        """Return what the template adds to a stand-in's turn, from its end token on; `last` is the turn's last text."""
        rendered = self.render([USER, turn, *messages], generate=True)
        opening = self.render([USER], generate=False)
        alone = _past(self.render([USER, turn], generate=False), opening, last)
        followed = _past(rendered, opening, last)
        stop = self.codec.stop.search(alone)
        if stop:
            own = alone[: stop.start()]
        else:
            closed = self.render([USER, ANSWER], generate=False)
            own = alone.removesuffix(_past(closed, opening, REPLY))
        if not followed.startswith(own):
            raise RecipeError(ANEW)
        return followed[len(own) :]


def _takes_texts(render: Renderer) -> bool:
    """Whether a template renders contents that are texts, not lists of parts alone."""
    try:
        return str(USER["content"]) in render([USER], generate=False)
    except RecipeError:
        return False


def _past(text: str, opening: str, last: str) -> str:
    """Return what follows the stand-in's last text, in a rendering that keeps its opening."""
    _, separator, following = text.removeprefix(opening).partition(last)
    if not text.startswith(opening) or not separator:
        raise RecipeError(ANEW)
    return following


def _stand_ins(messages: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """Return turns that the messages may follow, each with its last text; the likeliest first.

    Plain texts come last also before results, for templates that render no calls, not these, or not so many.
    """
    results = [message for message in messages if message["role"] in ("tool", "ipython")]
    if results:
        asked = [""] * (len(results) - 1) + [QUESTION]
        calls = [_call(result, what) for result, what in zip(results, asked, strict=True)]
        yield {"role": "assistant", "content": "", "tool_calls": calls}, QUESTION
    yield ANSWER, REPLY


def _call(result: Message, what: str) -> JsonObject:
    function = {"name": result.get("name", "count"), "arguments": {"what": what}}
    return {"id": result.get("tool_call_id", CALL_ID), "type": "function", "function": function}
