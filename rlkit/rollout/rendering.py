"""Messages as text and token ids: a model's chat template in limits of time and memory, and its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import groupby, zip_longest
from os.path import commonprefix
from typing import Any, NamedTuple, TypeVar, cast

from rlkit.base.errors import RecipeError
from rlkit.base.limits import OverdueError, memory_limit, time_limit
from rlkit.interfaces.model import Tokenizer
from rlkit.interfaces.parser import MARKS, opened_thinking
from rlkit.types import JsonObject, Message, Tools

V = TypeVar("V")

OPENING_TOKENS = 32
"""Tokens at the end of a prompt that may begin the thinking of the policy's turn."""
TAIL = 64
"""Characters at the end of a text that tell how a tokenizer goes on after it: more than a special token has."""
CALLING: list[Message] = [
    {"role": "user", "content": "How many are left?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "count", "arguments": {"what": "plums"}}}
        ],
    },
]
"""A conversation with a call, by which a template shows in which form it takes arguments."""

RENDER_SECONDS, RENDER_BYTES = 10, 2**30
"""What rendering a conversation may take; a template is a program that comes with the model."""


class TokenCodec:
    """Converts between texts and token ids.

    Args:
        tokenizer: The policy's.
        stop_ids: The ids that end the policy's turn.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        """The tokenizer in Rust; None for one in Python."""
        self.stop_ids = frozenset(stop_ids)
        added = tokenizer.added_tokens_decoder.items()
        self.stop = any_of([tokenizer.decode([i]) for i in self.stop_ids])
        """Matches the text of a stop id."""
        self.special = any_of([str(token) for i, token in added if token.special or i in self.stop_ids])
        """Matches the text of a special token, or of one that ends a turn."""
        self._marks = frozenset(i for i, token in added if token.special and str(token) in MARKS)

    def encode(self, text: str, before: str = "") -> list[int]:
        """Return the ids of a text, which may be longer than the context; in Rust, other threads go on.

        Args:
            text: A text of its own or, after `before`, its continuation, whose ids are those that it has there.
            before: The end of what precedes it, whose own ids stay as they are.
        """
        if before and self._spaced:
            # a special token may take the whitespace after it, as Phi-3's do
            special = [before[m.start() :] for m in self.special.finditer(before) if not before[m.end() :].strip()]
            for anchor in (*special, "\n", "a"):
                first, ids = self.encode(anchor), self.encode(anchor + text)
                if ids[: len(first)] == first:  # else the text's beginning joins with it
                    return ids[len(first) :]
        if self._backend is not None:
            return list(self._encode_batch([text])[0].ids)
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    @cached_property
    def _spaced(self) -> bool:
        """Whether the tokenizer writes a space before what begins a text, as SentencePiece does."""
        return all(self.encode(f"\n{x}") != self.encode("\n") + self.encode(x) for x in "aZ7")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each id of a tokenizer in Rust completes, special tokens included.

        A piece is empty if the next id continues its character. Bytes that are no text become replacement characters.
        """
        from tokenizers.decoders import DecodeStream

        stream, pieces = DecodeStream(skip_special_tokens=False), list[str]()
        try:
            for token_id in ids:
                pieces.append(stream.step(self._backend, token_id) or "")
        except Exception:  # tokenizers raises no other type for bytes that are no text
            pieces += [""] * (len(ids) - len(pieces))
        complete = max((index + 1 for index, piece in enumerate(pieces) if piece), default=0)
        if complete < len(ids):
            pieces[-1] = self.decode(ids[complete:])
        return pieces

    def turn(self, ids: Sequence[int], special: bool) -> str:
        """Return the text of a turn of the policy, without the token that ended it.

        Special tokens that begin or end thinking are kept, and with `special` all others, too.
        """
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        if special or self._marks.isdisjoint(body):
            return self.tokenizer.decode(body, skip_special_tokens=not special)
        runs = groupby(body, self._marks.__contains__)
        return "".join(self.tokenizer.decode(list(run), skip_special_tokens=not marks) for marks, run in runs)

    def opened_thinking(self, prompt: Sequence[int]) -> str:
        """Return the opening of a turn's thinking with which a prompt ends; empty if there is none."""
        return opened_thinking(self.decode(prompt[-OPENING_TOKENS:]))

    def lengths(self, texts: Sequence[str], before: Sequence[str] = ()) -> list[int]:
        """Return the number of ids of each text, or continuation; a tokenizer in Rust uses all CPUs."""
        if self._backend is None or (any(before) and self._spaced):
            return [len(self.encode(*pair)) for pair in zip_longest(texts, before, fillvalue="")]
        return [len(encoded) for encoded in self._encode_batch(texts)]

    def _encode_batch(self, texts: Sequence[str]) -> list[Any]:
        if self._backend.truncation or self._backend.padding:  # its file may ask for that; a change waits for threads
            self._backend.no_truncation()
            self._backend.no_padding()
        return list(self._backend.encode_batch_fast(list(texts), add_special_tokens=False))

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
        while self.special.search(text):  # what remains may join to another one
            text = self.special.sub("", text)
        return text


class Renderer:
    """Renders messages as text with a model's chat template: a Jinja program, which has limits of memory and time.

    Args:
        tokenizer: With a chat template.
        tools: JSON schemas that the template shows to the policy.
        kwargs: What the template reads besides.
        typed: Whether contents that are texts are rendered as lists of one typed part, as some templates of
            vision-language models require.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[JsonObject],
        kwargs: Mapping[str, object],
        typed: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._kwargs = kwargs
        self._typed = typed
        self._has_rendered = False

    def with_kwargs(self, **kwargs: object) -> Renderer:
        """Return one that renders with other values of what the template reads besides."""
        return Renderer(self._tokenizer, self._tools, {**self._kwargs, **kwargs}, self._typed)

    def __call__(self, messages: Sequence[Message], *, generate: bool, tools: Tools | None = ()) -> str:
        """Render messages.

        Args:
            messages: Those of a conversation.
            generate: Whether to add the generation prompt.
            tools: The tools to describe, by name or by the schema to show; None for all.

        Raises:
            RecipeError: The template refuses the messages, or does not end.
        """
        takes_text = any(message.get("tool_calls") for message in messages) and self._takes_text
        forms = [_rendered_form(message, self._typed, takes_text) for message in messages]
        schemas = [schema for schema in self._tools if tools is None or schema["function"]["name"] in tools]
        schemas += [tool for tool in tools or () if not isinstance(tool, str)]  # a row's own come last
        return self._render(forms, generate, schemas)

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments of calls that are JSON text, not objects, as DeepSeek's does.

        It does if it refuses an object, or writes it as Python does, and writes a text.
        """
        return not self._writes_arguments(as_text=False) and self._writes_arguments(as_text=True)

    def _writes_arguments(self, *, as_text: bool) -> bool:
        """Whether the template writes the arguments of a call in one of the two forms."""
        try:
            text = self._render([_rendered_form(message, self._typed, as_text) for message in CALLING], False, [])
        except RecipeError:
            return False
        return "plums" in text and "{'what'" not in text

    def _render(self, messages: list[Message], generate: bool, schemas: list[JsonObject]) -> str:
        try:
            # the first time within limits of memory, and in the main thread within those of time
            with time_limit(RENDER_SECONDS), nullcontext() if self._has_rendered else memory_limit(RENDER_BYTES):
                text = self._tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=generate,
                    tools=schemas or None,
                    tokenize=False,
                    **self._kwargs,
                )
            self._has_rendered = True
        except (OverdueError, MemoryError) as error:
            raise RecipeError(
                f"the chat template does not end within {RENDER_SECONDS} s and {RENDER_BYTES >> 20} MiB; correct the "
                "model's chat_template.jinja or choose another model"
            ) from error
        except Exception as error:  # Jinja code may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RecipeError(
                f"the chat template cannot render the roles {roles}: {error}; use messages that it allows, or choose "
                "another model"
            ) from error
        return cast(str, text)


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's content."""
    content = message.get("content")
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return [text for text in texts if isinstance(text, str)]


def _rendered_form(message: Message, typed: bool, takes_text: bool = False) -> Message:
    """Return a message as a template reads it.

    Pictures are parts without a value, and texts may be parts; the mark `trained` is left out. Arguments of calls are
    objects, or JSON texts if the template `takes_text`.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    form = {key: value for key, value in message.items() if key != "trained"}
    if isinstance(content, list):
        form["content"] = [{"type": "image"} if part.get("type") == "image" else part for part in content]
    elif typed and isinstance(content, str):
        form["content"] = [{"type": "text", "text": content}]
    if takes_text and isinstance(calls, list):
        form["tool_calls"] = []
        for call in calls:
            function, arguments = call["function"], call["function"].get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            form["tool_calls"].append({**call, "function": {**function, "arguments": text}})
    return form


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of some texts, the longest first; it matches nothing if there are none."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class TurnEnd(NamedTuple):
    """The token that ends a turn of the policy, and what a template writes around it.

    Args:
        token: Its text; empty if the template writes no special token after a turn.
        before: What stands between the turn's last text and the token.
        tail: What a rendering that ends with the turn has after the turn's own text.
        ending: What the policy writes in its place, up to the token.
    """

    token: str
    before: str
    tail: str
    ending: str

    @property
    def opens_next(self) -> bool:
        """Whether the token belongs to what follows, such as the next role's marker."""
        return bool(self.token) and self.token not in self.tail

    def text_of(self, rendered: str) -> str | None:
        """Return a turn with its end, from what a rendering that ends with the turn has; None if it ends otherwise."""
        if not rendered.endswith(self.tail):
            return None
        return rendered[: len(rendered) - len(self.tail)] + self.ending


def find_end(alone: str, followed: str, special: re.Pattern[str], stop: re.Pattern[str]) -> TurnEnd:
    """Derive the end of a turn from the text after its last content in two renderings.

    Of the special tokens with which both renderings go on, it is the first that ends turns by the model's files, or
    else the last (`<|im_end|>`). Without one in common, it is the first that `alone` has (`<|return|>`, in whose place
    another is once messages follow), or else the first of `followed`: the marker of the next role.

    Args:
        alone: In a rendering that ends with the turn.
        followed: In one in which others follow, as they do in a conversation.
        special: Matches the text of a special token.
        stop: Matches the text of a token that ends a turn by the model's own files.
    """
    common = common_length(alone, followed, special)
    shared = list(special.finditer(alone[:common]))
    by_files = next((match for match in shared if stop.fullmatch(match.group())), None)
    end = by_files or (shared[-1] if shared else special.search(alone, common))
    marker = special.search(followed, common)
    if marker is not None and not (alone[common:] + followed[common : marker.start()]).strip():
        before = followed[: marker.start()]
        in_its_place = end is None and before == before.rstrip()  # nothing stands between the turn and the marker
        if in_its_place or (by_files is None and stop.fullmatch(marker.group())):
            return TurnEnd(marker.group(), before, alone[common:], followed[common : marker.end()])
    if end is None:
        return TurnEnd("", "", alone, "")
    return TurnEnd(end.group(), alone[: end.start()], alone[end.start() :], end.group())


def common_length(first: str, second: str, special: re.Pattern[str]) -> int:
    """Return the length of what two texts have in common, without the beginning of a special token."""
    length = len(commonprefix((first, second)))  # noqa: RUF071 (no paths)
    cuts = [m.start() for text in (first, second) for m in special.finditer(text) if m.start() < length < m.end()]
    return min((length, *cuts))
