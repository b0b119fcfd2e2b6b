"""Parsers against the vendors' own chat templates: a call that a template writes is read back as it was."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_authors.models import build_tokenizer
from test_parsers import check, damaged

from rlkit.interfaces.parser import ToolCall, ToolParser, opened_thinking, parse_after_thinking
from rlkit.parsers import (
    DeepSeekParser,
    GemmaParser,
    GlmParser,
    HarmonyParser,
    HermesParser,
    LfmParser,
    LlamaJsonParser,
    MistralParser,
    QwenCoderParser,
)
from rlkit.parsers.arguments import with_types
from rlkit.parsers.detect import detect
from tests.vendors import template_text

PARSERS: dict[str, type[ToolParser]] = {
    "deepseekv3": DeepSeekParser,
    "gemma4": GemmaParser,
    "gemma4_v5": GemmaParser,
    "glm4moe": GlmParser,
    "gptoss": HarmonyParser,
    "lfm2_v2": LfmParser,
    "lfm2_2_5_v2": LfmParser,
    "llama3_1": LlamaJsonParser,
    "mistral": MistralParser,
    "qwen2_5": HermesParser,
    "qwen3": HermesParser,
    "qwen3_5_think": QwenCoderParser,
}
USER = {"role": "user", "content": "How many?"}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
ONE_CALL = ("gptoss", "llama3_1")
WITHOUT_TEXT = ("llama3_1", "mistral", "gptoss", "gemma4", "gemma4_v5")
"""Templates that write no text before a call, or write it as something else."""


@cache
def tokenizer_of(name: str) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = template_text(name)
    return tokenizer


def render(name: str, *messages: dict[str, Any], generate: bool = False) -> str:
    return str(tokenizer_of(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))


def written(name: str, calls: list[ToolCall], text: str = "") -> tuple[str, str]:
    """Return a turn with calls as the template writes it, and how the prompt has begun its thinking."""
    functions = [
        {"name": c.name, "arguments": json.dumps(c.arguments) if name == "deepseekv3" else c.arguments} for c in calls
    ]
    tool_calls = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    rendered = render(name, USER, {"role": "assistant", "content": text, "tool_calls": tool_calls})
    for prompt in (render(name, USER, generate=True), render(name, USER)):
        if rendered.startswith(prompt):
            text = rendered.removeprefix(prompt).removesuffix("<|im_end|>")
            return text, opened_thinking(prompt)
    raise AssertionError(f"{name}: {rendered!r} does not follow its prompt")


def schema(arguments: dict[str, Any]) -> dict[str, Any]:
    types = {key: {"type": TYPES.get(type(value), "object")} for key, value in arguments.items()}
    return {"type": "object", "properties": types}


def read(name: str, text: str, opened: str, calls: list[ToolCall]) -> list[ToolCall]:
    schemas = {call.name: schema(call.arguments) for call in calls}
    turn = parse_after_thinking(PARSERS[name](), text, opened)[1]
    return [with_types(call, schemas.get(call.name)) for call in turn.calls]


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
MARKUP = [
    *("</tool_call>", "<tool_call>", "<|tool_call_end|>", "<tool_call|>", "<|call|>", "<|end|>", "</parameter>"),
    *("</arg_value>", "[TOOL_CALLS]", "<think>", "</think>", "'", '"', "\\", "\n", ", a=", ")]", "}}", "é", "1"),
]
STRINGS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=6) | st.lists(
    st.sampled_from(MARKUP), max_size=4
).map("".join)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


def writable(name: str, value: Any) -> bool:
    """Whether a form can write a value at all: strings without quotes or escapes cannot hold their own end.

    A string that ends the call and opens thinking reads as just that.
    """
    if isinstance(value, dict):
        return all(writable(name, item) for item in value.values())
    if isinstance(value, list):
        return all(writable(name, item) for item in value)
    if not isinstance(value, str):
        return True
    unwritable = {
        "glm4moe": ("</arg_value>", "<arg_key>"),
        "qwen3_5_think": ("</parameter>", "<parameter=", "\\n"),
        "lfm2_2_5_v2": ("'", "\\\\", "\\n"),
    }
    thinks = re.search(r"(</tool_call>|<\|tool_call_end\|>|<tool_call\|>|<\|call\|>).*<think>", value, re.DOTALL)
    return not thinks and not any(text in value for text in unwritable.get(name, ('<|"|>',)))


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_calls_that_a_template_writes_are_read_back(name: str, data: st.DataObject) -> None:
    values = JSON.filter(lambda value: writable(name, value))
    drawn = st.tuples(NAMES, st.dictionaries(NAMES, values, max_size=3))
    calls = [
        ToolCall(*call)
        for call in data.draw(
            st.lists(drawn, min_size=1, max_size=1 if name in ONE_CALL else 3, unique_by=lambda call: call[0])
        )
    ]
    text = data.draw(st.sampled_from(["", "Let me see."])) if name not in WITHOUT_TEXT else ""
    assert read(name, *written(name, calls, text), calls) == calls


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_written_turn_that_was_damaged_is_parsed(name: str, data: st.DataObject) -> None:
    call = ToolCall(*data.draw(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=3))))
    text, _ = written(name, [call])
    check(PARSERS[name], damaged(data, text))


@pytest.mark.parametrize("name", PARSERS)
def test_a_template_shows_its_parser(name: str) -> None:
    assert detect(tokenizer_of(name).chat_template) is PARSERS[name]
