"""Tool-call parsers: each form by hand, what is malformed, any text at all, and templates that are recognised."""

from __future__ import annotations

import json
import keyword
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import test_call_forms
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser, parse_after_thinking
from rlkit.parsers import (
    DeepSeekParser,
    HermesParser,
    JsonBlockParser,
    LlamaJsonParser,
    MistralParser,
    PythonicParser,
    QwenCoderParser,
)
from rlkit.parsers.detect import detect
from rlkit.registry import load_plugins

Call = tuple[str, dict[str, Any]]

PARSERS: list[type[ToolParser]] = [part.cls for part in load_plugins(entry_points=False).parts["parsers"].values()]


def deepseek(text: str) -> str:
    """Write `<|tool_sep|>` and the like as DeepSeek does, with bars and blanks of its own."""
    return re.sub(r"<\|(\w+)\|>", lambda m: f"<\uff5c{m[1]}\uff5c>".replace("_", "\u2581"), text)


F1, G = ToolCall("f", {"a": 1}), ToolCall("g")
NESTED = ToolCall("f", {"a": {"b": [{"c": "}]"}]}})

EXAMPLES = [
    (HermesParser, 'See.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ParsedTurn("See.", [F1])),
    (
        HermesParser,
        'A <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call> B',
        ParsedTurn("A \n B", [F1, G]),
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": {"b": [{"c": "}]"}]}}}</tool_call>',
        ParsedTurn("", [NESTED]),
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
        ParsedTurn("", [ToolCall("f", {"a": "</tool_call><tool_call>"})]),
    ),
    # cut off after the JSON, and forgotten between two calls
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n', ParsedTurn("", [F1])),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ParsedTurn("", [F1, G]),
    ),
    (
        QwenCoderParser,
        "See.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ParsedTurn("See.", [F1]),
    ),
    (
        QwenCoderParser,
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ParsedTurn("", [F1, G]),
    ),
    (
        QwenCoderParser,
        "<tool_call>\n<function=f>\n<parameter=a>\n  if x:\n    y()\n\n</parameter>\n"
        '<parameter=b>\nOslo\n</parameter>\n<parameter=c>\n"1"\n</parameter>\n'
        '<parameter=d>\n[1, {"e": null}]\n</parameter>\n<parameter=f>\n\n</parameter>\n'
        "<parameter=g>\n12 NaN\n</parameter>\n</function>\n</tool_call>",
        ParsedTurn(
            "",
            [
                ToolCall(
                    "f",
                    {"a": "  if x:\n    y()\n", "b": "Oslo", "c": "1", "d": [1, {"e": None}], "f": "", "g": "12 NaN"},
                )
            ],
        ),
    ),
    (
        QwenCoderParser,
        "<function=f><parameter=a>\nx </parameter> y </tool_call> </function> z\n</parameter></function></tool_call>",
        ParsedTurn("", [ToolCall("f", {"a": "x </parameter> y </tool_call> </function> z"})]),
    ),
    # no <tool_call>, and cut off before </tool_call>
    (QwenCoderParser, "<function=f><parameter=a>1</parameter></function>", ParsedTurn("", [F1])),
    (LlamaJsonParser, '{"name": "f", "parameters": {"a": 1}}', ParsedTurn("", [F1])),
    (LlamaJsonParser, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ParsedTurn("", [F1])),
    (LlamaJsonParser, '{"type": "function", "name": "f", "arguments": {"a": 1}}', ParsedTurn("", [F1])),
    (
        LlamaJsonParser,
        'Now: {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ParsedTurn("Now:", [F1, G]),
    ),
    (
        LlamaJsonParser,
        '{"name": "f", "parameters": {"a": {"b": [{"c": "}]"}]}}};{"name": "f", "parameters": {"a": "{;\\"{"}}',
        ParsedTurn("", [NESTED, ToolCall("f", {"a": '{;"{'})]),
    ),
    (
        LlamaJsonParser,
        'The set {x} and {"name": "Bob"} and {"list": [{"name": "f", "parameters": {}}]}',
        ParsedTurn('The set {x} and {"name": "Bob"} and {"list": [{"name": "f", "parameters": {}}]}'),
    ),
    (PythonicParser, "[f(a=1)]", ParsedTurn("", [F1])),
    (PythonicParser, "See. [f(a=1), g()]", ParsedTurn("See.", [F1, G])),
    (
        PythonicParser,
        "<|python_start|>[f(a={'b': [{'c': '}]'}]}),\n math.g(x=-1.5, y=true, z=None, t=(1, 2))]<|python_end|>",
        ParsedTurn("", [NESTED, ToolCall("math.g", {"x": -1.5, "y": True, "z": None, "t": [1, 2]})]),
    ),
    (
        PythonicParser,
        """[f(a="it's [g()] \\"here\\"", b='\\n')]""",
        ParsedTurn("", [ToolCall("f", {"a": 'it\'s [g()] "here"', "b": "\n"})]),
    ),
    (PythonicParser, "On [0, 1] and [f(0), f(1)], f(x)=2.", ParsedTurn("On [0, 1] and [f(0), f(1)], f(x)=2.")),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ParsedTurn("", [F1])),
    (
        MistralParser,
        'See.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]',
        ParsedTurn("See.", [F1, G]),
    ),
    (
        MistralParser,
        'See.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ParsedTurn("See.", [F1, G]),
    ),
    (
        MistralParser,
        '[TOOL_CALLS]f[ARGS]{"a": {"b": [{"c": "}]"}]}}[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{"}',
        ParsedTurn("", [NESTED, ToolCall("f", {"a": "[TOOL_CALLS]g[ARGS]{"})]),
    ),
    (
        DeepSeekParser,
        deepseek(
            "See.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n"
            '{"a": 1}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>g\n```json\n'
            "{}\n```<|tool_call_end|><|tool_calls_end|>"
        ),
        ParsedTurn("See.", [F1, G]),
    ),
    (
        DeepSeekParser,
        deepseek(
            '</think><|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|>'
            "<|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
        ),
        ParsedTurn("</think>", [F1, G]),
    ),
    (
        DeepSeekParser,
        deepseek('<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": "```<|tool_call_end|>"}<|tool_call_end|>'),
        ParsedTurn("", [ToolCall("f", {"a": deepseek("```<|tool_call_end|>")})]),
    ),
    # cut off after the JSON
    (
        DeepSeekParser,
        deepseek('<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n{"a": 1}\n```'),
        ParsedTurn("", [F1]),
    ),
    (JsonBlockParser, 'See.\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n', ParsedTurn("See.", [F1])),
    (
        JsonBlockParser,
        '```json\n{"name": "f", "arguments": {"a": {"b": [{"c": "}]"}]}}}\n```\nand\n'
        '```json\n{"name": "f", "arguments": {"a": "```"}}\n```',
        ParsedTurn("and", [NESTED, ToolCall("f", {"a": "```"})]),
    ),
    (JsonBlockParser, 'It is\n```json\n{"name": "Bob"}\n```', ParsedTurn('It is\n```json\n{"name": "Bob"}\n```')),
    *(
        (parser, " Just text: {a}, [b], f(1) < 2; \n", ParsedTurn("Just text: {a}, [b], f(1) < 2;"))
        for parser in PARSERS
    ),
    *((parser, "", ParsedTurn("")) for parser in PARSERS),
]


@pytest.mark.parametrize(("parser", "text", "expected"), EXAMPLES)
def test_examples(parser: type[ToolParser], text: str, expected: ParsedTurn) -> None:
    assert parser().parse(text) == expected


# what the policy wrote, the text that is left, and of each call the name and what its error says (None: a good call)
MALFORMED = [
    (
        HermesParser,
        'A<tool_call>{"name": "f", "arguments": {"a"',
        "A",
        [("f", "Expecting ':' delimiter at character 31")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", "more follows the JSON"), ("g", None)],
    ),
    (HermesParser, "<tool_call>", "", [("", "Expecting value at character 0")]),
    (HermesParser, "<tool_call>f(1)</tool_call> B", "B", [("", "the call 'f(1)': Expecting value")]),
    (HermesParser, "<tool_call>[1]</tool_call>", "", [("", "it is not an object; expected a JSON object")]),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>', "", [("", '"name" is missing or not a string')]),
    (
        HermesParser,
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "",
        [("", '"name" is missing or not a string')],
    ),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', "", [("f", '"arguments" is missing or not an object')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "not an object")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", [("f", "not JSON compliant")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "", [("f", "surrogates")]),
    (HermesParser, "<tool_call>" + "[" * 100_000 + "</tool_call>", "", [("", "nested too deeply")]),
    (QwenCoderParser, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("", "the name is missing")]),
    (QwenCoderParser, "<tool_call><function=></function></tool_call>B", "B", [("", "the name is missing")]),
    (QwenCoderParser, "<tool_call><function=f><parameter=a>1</para", "", [("f", "besides complete parameters")]),
    (QwenCoderParser, "<function=f>a=1</function>", "", [("f", "expected <function=NAME>, then <parameter=KEY>")]),
    (
        QwenCoderParser,
        "<tool_call><function=f><parameter=a>x<parameter=b>y</parameter></function></tool_call>",
        "",
        [("f", "besides complete parameters")],
    ),
    (
        QwenCoderParser,
        "<tool_call><function=f><parameter=a>x</parameter></tool_call>\n"
        "<tool_call><function=g><parameter=a>x</parameter></function></tool_call>",
        "",
        [("f", "besides complete parameters"), ("g", None)],
    ),
    (
        LlamaJsonParser,
        'A {"name": "f", "parameters": {"a": x}}; {"name": "g", "parameters": {}} B',
        "A B",
        [("f", "Expecting value at character 34"), ("g", None)],
    ),
    (
        LlamaJsonParser,
        '{"name": "f", "parameters": {"a": "}',
        "",
        [("f", "Unterminated string starting at character 34")],
    ),
    (LlamaJsonParser, "{'name': 'f', 'parameters': {}}", "", [("", "property name enclosed in double quotes")]),
    (LlamaJsonParser, '{"parameters": {}}', "", [("", '"name" is missing')]),
    (LlamaJsonParser, '{"name": "f", "parameters": []}', "", [("f", '"parameters" is missing or not an object')]),
    (
        LlamaJsonParser,
        '<|python_tag|>g.call(query="x")',
        "",
        [("", 'expected a JSON object {"name": "...", "parameters"')],
    ),
    (LlamaJsonParser, '<|python_tag|>{"name": "f"}', "", [("f", '"parameters" is missing')]),
    (PythonicParser, 'A [f(a="x', "A", [("f", "unterminated string literal")]),
    (PythonicParser, "A [f(a=", "A", [("f", "was never closed")]),
    (PythonicParser, "[f(1), g()]", "", [("f", "an argument has no name"), ("g", None)]),
    (PythonicParser, "[f(a=1, a=2)]", "", [("f", "two have the same")]),
    (PythonicParser, "[f(**{'a': 1})]", "", [("f", "an argument has no name")]),
    (PythonicParser, "[f(a=open('x'))]", "", [("f", "the value of a is not a literal")]),
    (PythonicParser, "[f(a=1e999)]", "", [("f", "the value of a is not a literal")]),
    (PythonicParser, "[f(a={1})]", "", [("f", "the value of a is not a literal")]),
    (PythonicParser, "[f(a=b'x')]", "", [("f", "the value of a is not a literal")]),
    (PythonicParser, "[f(a=1), 3, g()(a=1)]", "", [("f", None), ("", "no call of a name"), ("", "no call of a name")]),
    (PythonicParser, "[f(a=1) for f in g]", "", [("f", "it is not a list")]),
    (PythonicParser, "[f(from=1)]", "", [("f", "expected [NAME(KEY=VALUE, ...), ...]")]),
    (PythonicParser, "[f(a=" + "-" * 90000 + "1)]", "", [("f", "it cannot be read as Python")]),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}', "", [("f", "Expecting ',' delimiter")]),
    (
        MistralParser,
        'A[TOOL_CALLS][{"arguments": {}}, 3]',
        "A",
        [("", '"name" is missing'), ("", "it is not an object")],
    ),
    (MistralParser, "[TOOL_CALLS][]", "", [("", "it is not an object")]),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]g[ARGS]{}', "", [("f", "Expecting value"), ("g", None)]),
    (MistralParser, "[TOOL_CALLS]f[ARGS][1]", "", [("f", "the arguments are no object")]),
    (MistralParser, "[TOOL_CALLS][ARGS]{}", "", [("", "the name is missing")]),
    (MistralParser, "[TOOL_CALLS]f[ARGS]{} and so on", "", [("f", "more follows the JSON")]),
    (MistralParser, "[TOOL_CALLS]f", "", [("", "Expecting value")]),
    (DeepSeekParser, deepseek("A<|tool_calls_begin|>"), "A", [("", "the name is missing")]),
    (
        DeepSeekParser,
        deepseek(
            '<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": <|tool_call_end|>'
            "<|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>B"
        ),
        "B",
        [("f", "Expecting value"), ("g", None)],
    ),
    (DeepSeekParser, deepseek("<|tool_call_begin|>f<|tool_sep|>[]<|tool_call_end|>"), "", [("f", "are no object")]),
    (DeepSeekParser, deepseek("<|tool_call_begin|><|tool_sep|>{}<|tool_call_end|>"), "", [("", "name is missing")]),
    (JsonBlockParser, '```json\n{"name": "f", "arguments": {"a": }}\n```B', "B", [("f", "Expecting value")]),
    (JsonBlockParser, '```json\n{"name": "f", "arguments": {', "", [("f", "Expecting property name")]),
    (JsonBlockParser, '```json\n{"arguments": {}}\n```', "", [("", '"name" is missing or not a string')]),
    (JsonBlockParser, '```json\n{"name": "f", "arguments": 1}\n```', "", [("f", "missing or not an object")]),
]


@pytest.mark.parametrize(("parser", "text", "left", "calls"), [*MALFORMED, *test_call_forms.MALFORMED])
def test_malformed_calls_say_what_is_wrong(
    parser: type[ToolParser], text: str, left: str, calls: list[tuple[str, str | None]]
) -> None:
    turn = parser().parse(text)
    assert turn.text == left
    assert [call.name for call in turn.calls] == [name for name, _ in calls]
    for call, (_, message) in zip(turn.calls, calls, strict=True):
        assert (call.error is None) == (message is None)
        assert (message or "") in (call.error or "")
        assert call.error is None or not call.arguments


def test_an_error_says_what_was_given_and_what_was_expected() -> None:
    [call] = HermesParser().parse('<tool_call>{"name": "f", "arguments": 3}</tool_call>').calls
    assert call.error == (
        """cannot read the call '{"name": "f", "arguments": 3}': "arguments" is missing or not an object; """
        """expected a JSON object {"name": "...", "arguments": {...}}"""
    )
    [long] = HermesParser().parse("<tool_call>" + "x" * 9000).calls
    assert f"'{'x' * 160}...'" in (long.error or "")


def render_deepseek_r1(calls: list[Call]) -> str:
    one = "<|tool_call_begin|>function<|tool_sep|>{}\n```json\n{}\n```<|tool_call_end|>"
    whole = deepseek(f"<|tool_calls_begin|>{chr(10).join([one] * len(calls))}<|tool_calls_end|>")
    return whole.format(*(part for n, a in calls for part in (n, json.dumps(a, ensure_ascii=False))))


def render_pythonic(calls: list[Call]) -> str:
    def arguments(given: dict[str, Any]) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in given.items())

    return f"[{', '.join(f'{n}({arguments(a)})' for n, a in calls)}]"


def objects(calls: list[Call]) -> list[str]:
    return [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]


MARKS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "```json\n",
        "```",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[f(a=",
        "[f(",
        ")]",
    ),
    *map(deepseek, ("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>")),
    *("<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>f", "<|tool_call>call:f{", "a:", '<|"|>'),
    *("<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "a='", "<|start|>assistant", "<|channel|>"),
    *(
        "[f(a=",
        ")]",
        "analysis",
        "commentary",
        " to=functions.f",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<think>",
        "</think>",
    ),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', "1e999", *"{}[]\"'\\;,:\n"),
]
IDENTIFIERS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda n: not keyword.iskeyword(n))
WORDS = st.text(st.characters(exclude_characters="<>[]{}`\n", exclude_categories=("C", "Z")), min_size=1, max_size=8)
STRINGS = st.text(max_size=8) | st.lists(st.sampled_from(MARKS), max_size=4).map("".join)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)

# how calls are written in the forms without a vendor's template, what may name them, and what may name their arguments
FORMS: dict[str, tuple[type[ToolParser], Callable[[list[Call]], str], Any, Any]] = {
    "pythonic": (PythonicParser, render_pythonic, IDENTIFIERS, IDENTIFIERS),
    "mistral_args": (
        MistralParser,
        lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
        WORDS,
        STRINGS,
    ),
    "deepseek_r1": (DeepSeekParser, render_deepseek_r1, WORDS, STRINGS),
    "json_block": (
        JsonBlockParser,
        lambda calls: "\n".join(f"```json\n{o}\n```" for o in objects(calls)),
        STRINGS.filter(bool),
        STRINGS,
    ),
}


def calls_of(form: str) -> st.SearchStrategy[list[Call]]:
    _, _, names, keys = FORMS[form]
    return st.lists(st.tuples(names, st.dictionaries(keys, JSON, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), before=st.sampled_from(["", "Let me see.\n"]))
def test_calls_written_in_the_form_are_read_back(form: str, data: st.DataObject, before: str) -> None:
    parser, render, _, _ = FORMS[form]
    calls = data.draw(calls_of(form))
    text = before + render(calls)
    assert parser().parse(text) == ParsedTurn(before.strip(), [ToolCall(name, arguments) for name, arguments in calls])


def check(parser: type[ToolParser], text: str) -> None:
    """Whatever the text, calls have names and arguments that JSON can hold, or errors and no arguments."""
    turn = parser().parse(text)
    assert turn.text == turn.text.strip()
    for call in turn.calls:
        assert isinstance(call.name, str)
        assert isinstance(call.arguments, dict)
        json.dumps([call.name, call.arguments, call.error], ensure_ascii=False, allow_nan=False).encode()
        assert call.name if call.error is None else not call.arguments
    assert parser().parse(text) == turn


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=12, deadline=None)
@given(text=st.text() | st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=20).map("".join))
def test_any_text_is_parsed(parser: type[ToolParser], text: str) -> None:
    check(parser, text)


def damaged(data: st.DataObject, text: str) -> str:
    """Return a text that is cut off, that has lost a part, or that has a part twice."""
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return data.draw(st.sampled_from([text[:end], text[:start] + text[end:], text[:end] + text[start:]]))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_valid_text_that_was_damaged_is_parsed(form: str, data: st.DataObject) -> None:
    parser, render, _, _ = FORMS[form]
    text = render(data.draw(calls_of(form)))
    check(parser, damaged(data, text))


@pytest.mark.parametrize("parser", PARSERS)
def test_a_turn_that_repeats_itself_takes_no_long_time(parser: type[ToolParser]) -> None:
    for mark in [*MARKS, " ", '{"a":', '{"name":"f","parameters":', "[f(a=1,", "<tool_call><function=f><parameter=a>x"]:
        started = time.process_time()
        check(parser, mark * (16000 // len(mark)))
        parse_after_thinking(parser(), mark * (16000 // len(mark)))
        assert time.process_time() - started < 2


QWEN_CODER = r"""{{- '<tool_call>\n<function=' + call.name + '>\n' }}
{%- for k, v in call["arguments"] | items %}{{- '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{%- endfor %}"""
LLAMA_4 = """{{- '<|header_start|>user<|header_end|>' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
PYTHONIC = """{{- '<|start_header_id|>system<|end_header_id|>' }}
{{- 'Respond in the format [func_name1(params_name1=params_value1, ...), func_name2(params)]' }}"""
MISTRAL_ARGS = """{{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + call['function']['arguments'] }}"""
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN_CODER, QwenCoderParser),
        (LLAMA_4, LlamaJsonParser),
        (PYTHONIC, PythonicParser),
        (MISTRAL_ARGS, MistralParser),
        (CHATML, None),
        ("", None),
    ],
)
def test_a_template_shows_the_form(template: str, parser: type[ToolParser] | None) -> None:
    assert detect(template) is parser
    if parser is not None:
        assert parser.detects(template)


def test_the_more_specific_form_wins() -> None:
    assert HermesParser.detects(QWEN_CODER)
    assert detect(QWEN_CODER) is QwenCoderParser


def test_parsers_are_registered() -> None:
    assert set(load_plugins(entry_points=False).parts["parsers"]) == {parser.__name__ for parser in PARSERS}
