"""Chat templates: how a conversation is rendered turn by turn, so that no token is ever rendered twice."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial

from rlkit.base.errors import RecipeError
from rlkit.interfaces.content import pictures_of
from rlkit.interfaces.model import Tokenizer
from rlkit.rollout.cache import SizedCache
from rlkit.rollout.pictures import PictureReader, tensor_bytes
from rlkit.rollout.rendering import TAIL, Renderer, TokenCodec, TurnEnd, any_of, common_length, find_end, texts_of
from rlkit.types import JsonObject, Message, Rendered, Tools

USER: Message = {"role": "user", "content": "How many apples are left?"}
REPLY = "There are seven."
ANSWER: Message = {"role": "assistant", "content": REPLY}
QUESTION = "pears and plums"
AND: Message = {"role": "user", "content": "And how many plums?"}
CALL_ID = "call00001"  # nine letters and digits, as Mistral's template requires
RESULT: Message = {"role": "tool", "content": "7", "name": "count", "tool_call_id": CALL_ID}
ANEW = (
    "the chat template renders earlier turns anew once others follow, so that the new part cannot be separated; "
    "choose a model whose template only appends"
)
NO_TEXT = (
    "the chat template does not write the text of an assistant's turn, so that the policy cannot learn it; correct the "
    "model's chat_template.jinja, or set model.chat_template to one that does"
)
NO_CALLS = (
    "the chat template does not write an assistant's calls of tools (`tool_calls`), so that the policy cannot learn "
    "them; write the calls into the content"
)

KEPT_BYTES = 2**28
"""Bytes of the tensors of rendered starts of conversations that are kept."""

KEPT_TOKENS = 2**20
"""Tokens of rendered starts of conversations that are kept, at four bytes each."""

KEPT_CHARACTERS = 2**23
"""Characters of renderings that are kept; the messages that they are of have about as many."""


class ChatTemplate:
    """Renders the start of a conversation and, after each of the policy's turns, what comes next, on its own.

    A delta is what the template adds after the end token of an assistant's turn: found by rendering a short stand-in
    conversation with and without the new messages. The policy's own tokens are never rendered, so what a template
    does to them (trim them, strip their thinking) does not matter.

    Args:
        tokenizer: With a chat template.
        stop_ids: The ids that end the policy's turn by the model's files.
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
        self.tools = list(tools)
        self.kwargs = dict(kwargs or {})
        self.reader = reader
        self.render = Renderer(tokenizer, self.tools, self.kwargs)
        if reader is not None and not _takes_texts(self.render):
            self.render = Renderer(tokenizer, self.tools, self.kwargs, typed=True)
        self.files = TokenCodec(tokenizer, stop_ids)
        """Converts as `codec`, with the ids that end the policy's turn by the model's files alone."""
        self._turn_ends: dict[bool, TurnEnd] = {}
        self._opening: str | None = None
        self._pictured = SizedCache(KEPT_BYTES, tensor_bytes)
        self._starts: SizedCache[array[int]] = SizedCache(KEPT_TOKENS, len)
        self._texts: SizedCache[str] = SizedCache(KEPT_CHARACTERS, len)

    def start(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids with which a conversation starts, ready for the policy's turn.

        Args:
            messages: Those before the policy's turn.
            tools: The tools of the conversation, by name or by the schema to show; None for all of the recipe's.

        Raises:
            RecipeError: The template refuses the messages, or a picture cannot be read.
        """
        return self.render_start(messages, tools).tokens

    def render_start(self, messages: Sequence[Message], tools: Tools | None = None) -> Rendered:
        """Return the result of `start` with the pictures of the messages; may be called in any thread.

        Raises:
            RecipeError: The template or the processor refuses the messages, or a text holds a placeholder.
        """
        key, opening = repr((messages, tools)), partial(self.opening, messages, tools)
        self._check_markers(messages)
        if self.reader is None or not pictures_of(messages):
            return Rendered(self._starts.get(key, lambda: array("i", self.codec.encode(opening()))).tolist())
        return self._pictured.get(key, lambda: self.read(opening(), messages))

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
        text = self.text(messages, generate=True, tools=tools)
        if not text:
            raise RecipeError(
                "the chat template renders nothing; correct the model's chat_template.jinja or choose another model"
            )
        return text

    def text(self, messages: Sequence[Message], *, generate: bool, tools: Tools | None) -> str:
        """Return the result of `render`, cached for messages that are measured first and then trained on."""
        key = repr((messages, generate, tools))
        return self._texts.get(key, lambda: self.render(messages, generate=generate, tools=tools))

    @property
    def replaced_end(self) -> str:
        """What the template has in the place of the token that ends a turn once others follow; empty if it stays."""
        try:
            text, end = self._delta_text([AND])
        except RecipeError:
            return ""
        other = self.files.special.match(text)
        return other.group() if end.token and other is not None and other.group() != end.token else ""

    def delta(self, messages: Sequence[Message], after: int | None = None) -> list[int]:
        """Return the ids of new messages after the policy's turn, ready for its next one.

        All results of a turn's calls belong into one delta, since templates merge them; each may carry the `name` and
        `tool_call_id` of its call. If the turn ended otherwise than in the template, or was cut, the template's own end
        comes first.

        Args:
            messages: What the policy reads next.
            after: The last id of the policy's turn; None for the one with which the template ends it.

        Raises:
            RecipeError: The template refuses the messages, or renders them so that nothing can be separated from
                what came before.
        """
        return self.render_delta(messages, after).tokens

    def render_delta(self, messages: Sequence[Message], after: int | None = None) -> Rendered:
        """Return the result of `delta` with the pictures of the messages.

        Raises:
            RecipeError: As `delta`, or the processor refuses the messages.
        """
        text, end = self._delta_text(messages)
        rendered = self.read(text, messages, "" if end.token else REPLY)
        own = self.files.encode(end.token)
        if own and after in (None, own[-1]):  # it is what the text begins with, or was in the place of that
            begun = self.codec.special.match(text) is not None
        else:
            begun = after in self.stop_ids and rendered.tokens[:1] == [after]
        if not begun:
            return rendered
        return Rendered(rendered.tokens[1:], None if rendered.media is None else rendered.media.after(-1))

    def read(self, text: str, messages: Sequence[Message], before: str = "") -> Rendered:
        """Return the ids of the rendering of messages after other text, with their pictures."""
        pictures = pictures_of(messages)
        if self.reader is None or not pictures:
            return Rendered(self.codec.encode(text, before))
        return self.reader.read(text, pictures)

    def _delta_text(self, messages: Sequence[Message]) -> tuple[str, TurnEnd]:
        """Return the text of a delta, which may start with a stop token, and how the turn before it ends."""
        plain = [self.codec.plain(message) for message in messages]
        errors = []
        for turn, last in _stand_ins(plain):
            try:
                return self._addition(turn, last, plain)
            except RecipeError as error:
                errors.append(error)
        raise errors[0]

    def rendered(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Return the text of the template's own rendering of a whole conversation, to compare with that of its ids."""
        return self.codec.decode(self.read(self.render(messages, generate=False, tools=tools), messages).tokens)

    @cached_property
    def codec(self) -> TokenCodec:
        """Converts between texts and token ids."""
        return TokenCodec(self.tokenizer, self.stop_ids)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end the policy's turn: by the model's files, and in its template."""
        return self.files.stop_ids.union(self.ends)

    @property
    def turn_end(self) -> list[int]:
        """The ids that a policy writes at the end of a turn of text: the template's, or else the tokenizer's."""
        return self.end_ids() or [self.tokenizer.eos_token_id]

    @property
    def ends(self) -> list[int]:
        """The ids with which the template itself ends the policy's turns."""
        return sorted({*self.end_ids(), *self.end_ids(calls=True)})

    @cached_property
    def ends_turns(self) -> re.Pattern[str]:
        """Matches the text of a special token that ends a turn."""
        return any_of([t for t in map(self.tokenizer.decode, self.stop_ids) if self.files.special.fullmatch(t)])

    @cached_property
    def prompt_end(self) -> str:
        """The last characters before a turn of the policy."""
        return self.render([USER], generate=True)[-TAIL:]

    @cached_property
    def lead(self) -> str:
        """What the template writes between its generation prompt and the text of a turn, such as an empty thought."""
        opening, rendered = self.render([USER], generate=True), self.render([USER, ANSWER], generate=False)
        return rendered.removeprefix(opening).partition(REPLY)[0] if rendered.startswith(opening) else ""

    def _opening_of(self, rendered: str) -> str:
        """Find the text before a turn that answers `USER`, again once the template writes another date."""
        if self._opening is None or not rendered.startswith(self._opening):
            begun, asked = (self.render([USER], generate=generate) for generate in (False, True))
            self._opening = begun[: common_length(begun, asked, self.files.special)]
        return self._opening

    def end_ids(self, calls: bool = False) -> list[int]:
        """Return the ids with which the template ends a turn of text, or one with `calls`; none if it writes none."""
        try:
            return self.files.encode(self.end(calls).token)
        except RecipeError:  # a template that renders no such turn
            return []

    def end(self, calls: bool = False) -> TurnEnd:
        """Find the end that the template writes after a turn of text, or after one with `calls` of tools.

        Raises:
            RecipeError: It does not render such a turn.
        """
        if calls not in self._turn_ends:
            self._turn_ends[calls] = self._find_end(calls)
        return self._turn_ends[calls]

    def _find_end(self, calls: bool) -> TurnEnd:
        """Return the ends of a stand-in's turn, alone and before other messages, if the template takes these."""
        messages, problem = ([RESULT], NO_CALLS) if calls else ([AND], NO_TEXT)
        turn, last = next(_stand_ins(messages))
        alone = self.render([USER, turn], generate=False)
        try:
            followed = self.render([USER, turn, *messages], generate=True)
        except RecipeError:
            followed = alone
        if last not in alone or last not in followed:
            raise RecipeError(problem)
        alone, followed = alone.partition(last)[2], followed.partition(last)[2]
        return find_end(alone, followed, self.files.special, self.files.stop)

    def closing(self) -> list[int]:
        """Return the ids with which the template ends a conversation after the text of an assistant's turn."""
        rendered = self.render([USER, ANSWER], generate=False)
        return self.codec.encode(rendered.rpartition(REPLY)[2], REPLY)

    def _addition(self, turn: Message, last: str, messages: Sequence[Message]) -> tuple[str, TurnEnd]:
        """Return the text after a stand-in's turn from its end token on, and the end of the turn.

        Args:
            turn: Of the stand-in.
            last: Its last text.
            messages: What follows it.
        """
        rendered = self.render([USER, turn, *messages], generate=True)
        opening = self._opening_of(rendered)
        followed = _past(rendered, opening, last)
        alone = _past(self.render([USER, turn], generate=False), opening, last)
        end = find_end(alone, followed, self.files.special, self.files.stop)
        before = end.before
        if not end.token:
            before = alone.removesuffix(_past(self.render([USER, ANSWER], generate=False), opening, REPLY))
        if not followed.startswith(before):
            raise RecipeError(ANEW)
        return followed[len(before) :], end


def _takes_texts(render: Renderer) -> bool:
    """Whether a template renders contents that are texts, not lists of parts alone."""
    try:
        return str(USER["content"]) in render([USER], generate=False)
    except RecipeError:
        return False


def _past(text: str, opening: str, last: str) -> str:
    """Return the text after the stand-in's last content, in a rendering that keeps its opening."""
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
