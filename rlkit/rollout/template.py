"""Chat templates: how a conversation is rendered turn by turn, so that no token is ever rendered twice."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TypeVar, cast

from rlkit.base.errors import RecipeError
from rlkit.base.limits import OverdueError, memory_limit, time_limit
from rlkit.interfaces.model import Tokenizer
from rlkit.types import JsonObject, Message

V = TypeVar("V")

USER: Message = {"role": "user", "content": "How many apples are left?"}
REPLY = "There are seven."
ANSWER: Message = {"role": "assistant", "content": REPLY}
QUESTION = "pears and plums"
CALL_ID = "call00001"  # nine letters and digits, as Mistral's template requires
ANEW = (
    "the chat template renders earlier turns anew once others follow, so that the new part cannot be separated; "
    "choose a model whose template only appends"
)


RENDER_SECONDS, RENDER_BYTES = 10, 2**30
"""What rendering a conversation may take; a template is a program that comes with the model."""

KEPT_TOKENS = 2**20
"""Tokens of rendered starts of conversations that are kept, at four bytes each."""


class TokenCodec:
    """Converts between texts and token ids.

    Args:
        tokenizer: The policy's.
        stop_ids: The ids that end the policy's turn.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        added = tokenizer.added_tokens_decoder.items()
        self.stop = _any_of([tokenizer.decode([i]) for i in self.stop_ids])
        """Matches the text of a stop id."""
        self._special = _any_of([str(token) for i, token in added if token.special or i in self.stop_ids])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which may be longer than the context."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def encode_after_stop(self, text: str) -> list[int]:
        """Return the ids of a text without the stop id that it starts with, if it does."""
        ids = self.encode(text)
        return ids[1:] if ids and ids[0] in self.stop_ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def turn(self, ids: Sequence[int], special: bool) -> str:
        """Return the text of a turn of the policy, without the token that ended it; `special` keeps special tokens."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(body, skip_special_tokens=not special)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of ids of each text; a tokenizer in Rust uses all CPUs."""
        if not texts:
            return []
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()  # its file may ask for that
            backend.no_padding()
            return [len(encoded) for encoded in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text that the policy reads, by itself."""
        return len(self.encode(self.plain(text)))

    def plain(self, value: V) -> V:
        """Return a message, or any value in one, without the texts of special tokens, which would end a turn.

        Halves of surrogate pairs, which no tokenizer reads, become question marks.
        """
        return cast(V, self._plain(value))

    def _plain(self, value: object) -> object:
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if not isinstance(value, str):
            return value
        text = value.encode("utf-8", "replace").decode()
        while self._special.search(text):  # what remains may join to another one
            text = self._special.sub("", text)
        return text


class Renderer:
    """Renders messages as text with a model's chat template: a Jinja program, which has limits of memory and time.

    Args:
        tokenizer: With a chat template.
        tools: JSON schemas that the template shows to the policy.
        kwargs: What the template reads besides.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[JsonObject], kwargs: Mapping[str, object]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._kwargs = kwargs
        self._has_rendered = False

    def __call__(self, messages: Sequence[Message], *, generate: bool, tools: Collection[str] | None = ()) -> str:
        """Render messages.

        Args:
            messages: Those of a conversation.
            generate: Whether to add the generation prompt.
            tools: The names of the tools to describe; None for all.

        Raises:
            RecipeError: The template refuses the messages, or does not end.
        """
        schemas = [schema for schema in self._tools if tools is None or schema["function"]["name"] in tools]
        try:
            # the first time within limits of memory, and in the main thread within those of time
            with time_limit(RENDER_SECONDS), nullcontext() if self._has_rendered else memory_limit(RENDER_BYTES):
                text = self._tokenizer.apply_chat_template(
                    list(messages),
                    add_generation_prompt=generate,
                    tools=schemas or None,
                    tokenize=False,
                    **self._kwargs,
                )
            self._has_rendered = True
        except (OverdueError, MemoryError) as error:
            limit = f"{RENDER_SECONDS} s and {RENDER_BYTES >> 20} MiB"
            raise RecipeError(
                f"the chat template does not end within {limit}; correct the model's chat_template.jinja or choose "
                "another model"
            ) from error
        except Exception as error:  # Jinja code may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError(
                f"the chat template cannot render the roles {roles}: {error}; use messages that it allows, or choose "
                "another model"
            ) from error
        return cast(str, text)


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
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        tools: Sequence[JsonObject] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.tools = list(tools)
        self.kwargs = dict(kwargs or {})
        self.codec = TokenCodec(tokenizer, stop_ids)
        self.render = Renderer(tokenizer, self.tools, self.kwargs)
        self._starts: dict[str, array[int]] = {}
        self._cached_tokens = 0

    def start(self, messages: Sequence[Message], tools: Collection[str] | None = None) -> list[int]:
        """Return the ids with which a conversation starts, ready for the policy's turn.

        Args:
            messages: Those before the policy's turn.
            tools: The names of the tools that the conversation has; None for all.

        Raises:
            RecipeError: The template refuses the messages.
        """
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

    def opening(self, messages: Sequence[Message], tools: Collection[str] | None = None) -> str:
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

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of new messages after the policy's end token, ready for its next turn.

        All results of a turn's calls belong into one delta, since templates merge them; each may carry the `name` and
        `tool_call_id` of its call. Where the template ends a turn with none of `stop_ids`, its own end comes first.

        Raises:
            RecipeError: The template refuses the messages, or renders them so that nothing can be separated from
                what came before.
        """
        plain = [self.codec.plain(message) for message in messages]
        errors = []
        for turn, last in _stand_ins(plain):
            try:
                return self.codec.encode_after_stop(self._addition(turn, last, plain))
            except RecipeError as error:
                errors.append(error)
        raise errors[0]

    def closing(self) -> list[int]:
        """Return the ids with which the template ends a conversation after the text of an assistant's turn."""
        rendered = self.render([USER, ANSWER], generate=False)
        return self.codec.encode(rendered.rpartition(REPLY)[2])

    def rendered(self, messages: Sequence[Message], tools: Collection[str] | None = None) -> str:
        """Return the text of the template's own rendering of a whole conversation, to compare with that of its ids."""
        return self.codec.decode(self.codec.encode(self.render(messages, generate=False, tools=tools)))

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


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
