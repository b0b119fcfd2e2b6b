"""The forms of GLM, Gemma 4, gpt-oss and LFM2 by hand: what they hold, what is malformed, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser, opened_thinking, parse_after_thinking
from rlkit.parsers import (
    GemmaParser,
    GlmParser,
    HarmonyParser,
    HermesParser,
    LfmParser,
    PythonicParser,
    QwenCoderParser,
)
from rlkit.parsers.arguments import with_types

G = ToolCall("g")
Q = '<|"|>'
COMMENTARY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
REASONING = "<|channel|>analysis<|message|>Hm.<|end|>"


def f(**arguments: Any) -> ToolCall:
    return ToolCall("f", arguments)


EXAMPLES = [
    (
        GlmParser,
        "See.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value> one\n</arg_value>\n</tool_call>",
        ParsedTurn("See.", [f(a=1, b=" one\n")]),
    ),
    (
        GlmParser,
        "<tool_call>f<arg_key>a</arg_key><arg_value>[1, null]</arg_value></tool_call><tool_call>g\n</tool_call>",
        ParsedTurn("", [f(a=[1, None]), G]),
    ),
    (
        GlmParser,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x </arg_value> y </tool_call> z <tool_call></arg_value>\n"
        '<arg_key>b</arg_key>\n<arg_value>{"c": "</arg_value>\\n</tool_call>"}</arg_value>\n</tool_call>'
        "<tool_call>g</tool_call>",
        ParsedTurn("", [f(a="x </arg_value> y </tool_call> z <tool_call>", b={"c": "</arg_value>\n</tool_call>"}), G]),
    ),
    (
        GemmaParser,
        f"See.<|tool_call>call:f{{a:{Q}Oslo, {{1}}{Q},b:[1,-2.5,{Q}x{Q}],c:{{d e:true,f:None}}}}<tool_call|>"
        "<|tool_call>call:g{}<tool_call|>",
        ParsedTurn("See.", [f(a="Oslo, {1}", b=[1, -2.5, "x"], c={"d e": True, "f": None}), G]),
    ),
    (
        GemmaParser,
        f"<|tool_call>call:f{{a:{Q}<tool_call|><|tool_call>call:g{{}}{Q}}}<tool_call|><|tool_call>call:g{{}}",
        ParsedTurn("", [f(a="<tool_call|><|tool_call>call:g{}"), G]),
    ),
    (HarmonyParser, f'{COMMENTARY}{{"a": 1}}<|call|>', ParsedTurn("", [f(a=1)])),
    (HarmonyParser, f'{COMMENTARY}{{"a": 1}}', ParsedTurn("", [f(a=1)])),
    (
        HarmonyParser,
        f'{REASONING}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"a": "<|call|>"}}<|call|>',
        ParsedTurn("", [f(a="<|call|>")]),
    ),
    (HarmonyParser, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ParsedTurn("", [f(a=1)])),
    (
        HarmonyParser,
        f"{REASONING}<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        f"<|start|>assistant{COMMENTARY}{{}}<|call|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        ParsedTurn("I ask.\n\nFour.", [f()]),
    ),
    (HarmonyParser, f"{REASONING}<|start|>assistant<|channel|>final<|message|>Four.", ParsedTurn("Four.")),
    (HarmonyParser, '<|channel|>analysis to=functions.f<|message|>{"a": 1}<|call|>', ParsedTurn("")),
    (HarmonyParser, '<|channel|>analysis<|message|>Call to=functions.f with {"a": 1}', ParsedTurn("")),
    (
        LfmParser,
        "<|tool_call_start|>[f(a='x', b=[1, true], c={\"d\": null}), g()]<|tool_call_end|>Now.",
        ParsedTurn("Now.", [f(a="x", b=[1, True], c={"d": None}), G]),
    ),
    (
        LfmParser,
        "<|tool_call_start|>[f(a='<|tool_call_end|>', b=\"[g()]\")]<|tool_call_end|><|tool_call_start|>[g()]",
        ParsedTurn("", [f(a="<|tool_call_end|>", b="[g()]"), G]),
    ),
    (
        LfmParser,
        "<|tool_call_start|>[f(a='it's 'so', (or)\nnot', b=-1.5, c='it\\'s')]<|tool_call_end|>",
        ParsedTurn("", [f(a="it's 'so', (or)\nnot", b=-1.5, c="it's")]),
    ),
    (
        LfmParser,
        "<|tool_call_start|>[fly.to(from='Oslo', class=2, trip-id=None,)]<|tool_call_end|>",
        ParsedTurn("", [ToolCall("fly.to", {"from": "Oslo", "class": 2, "trip-id": None})]),
    ),
    (
        LfmParser,
        '<|tool_call_start|>[{"name": "f", "arguments": {"a": "<|tool_call_end|>"}}]<|tool_call_end|>',
        ParsedTurn("", [f(a="<|tool_call_end|>")]),
    ),
    (LfmParser, "In [f(a=1)] there is no call.", ParsedTurn("In [f(a=1)] there is no call.")),
    # cases of vLLM's issues 45167 and 48353
    (
        HermesParser,
        '<tool_call>\n{"name": "f", "arguments": {"a": "close with </tool_call> please", "n": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ParsedTurn("", [f(a="close with </tool_call> please", n=1), G]),
    ),
    (
        HermesParser,
        '<tool_call>\n{"name": "f", "arguments": {"a": "open <tool_call> here"}}\n</tool_call>',
        ParsedTurn("", [f(a="open <tool_call> here")]),
    ),
]


@pytest.mark.parametrize(("parser", "text", "expected"), EXAMPLES)
def test_examples(parser: type[ToolParser], text: str, expected: ParsedTurn) -> None:
    assert parser().parse(text) == expected
    assert parse_after_thinking(parser(), text)[1] == expected


# for the test of malformed calls in test_parsers
MALFORMED = [
    (GlmParser, "<tool_call></tool_call>B", "B", [("", "the name is missing")]),
    (GlmParser, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1", "", [("f", "besides complete arguments")]),
    (
        GlmParser,
        "<tool_call>f<arg_key>a</arg_key></tool_call><tool_call>g</tool_call>",
        "",
        [("f", "complete"), ("g", None)],
    ),
    (
        GlmParser,
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        "",
        [("f", "besides complete arguments")],
    ),
    (GemmaParser, "A<|tool_call>call:f{a:1", "A", [("f", "Expecting ',' delimiter")]),
    (GemmaParser, "<|tool_call>call:f{a:Oslo}<tool_call|>B", "B", [("f", "Expecting value")]),
    (GemmaParser, "<|tool_call>call:f{a:nan}<tool_call|>", "", [("f", "Expecting value")]),
    (GemmaParser, "<|tool_call>call:f{a:1,a:2}<tool_call|>", "", [("f", "the key 'a' comes twice")]),
    (GemmaParser, "<|tool_call>call:f{} B<tool_call|>", "", [("f", "more follows the arguments")]),
    (
        GemmaParser,
        "<|tool_call>{}<tool_call|><|tool_call>call:g{}<tool_call|>",
        "",
        [("", "name is missing"), ("g", None)],
    ),
    (HarmonyParser, f'{COMMENTARY}{{"a": 1<|call|>', "", [("f", "Expecting ',' delimiter")]),
    (HarmonyParser, f"{COMMENTARY}[1]<|call|>", "", [("f", "the arguments are no object")]),
    (HarmonyParser, f'{COMMENTARY}{{"a": 1e999}}', "", [("f", "not JSON compliant")]),
    (HarmonyParser, f'{COMMENTARY}{{"a": 1, "a": 2}}', "", [("f", "the key 'a' comes twice")]),
    (HarmonyParser, f'{COMMENTARY}{{"a": "\\ud800"}}', "", [("f", "surrogates")]),
    (HarmonyParser, f'{COMMENTARY}{{"a": {"1" * 5000}}}', "", [("f", "4300 digits")]),
    (LfmParser, "A<|tool_call_start|>[f(1)]<|tool_call_end|>B", "AB", [("f", "an argument has no name")]),
    (LfmParser, "<|tool_call_start|>[f(a=1, a=2)]<|tool_call_end|>", "", [("f", "two arguments have the name a")]),
    (LfmParser, "<|tool_call_start|>[f(a=b)]<|tool_call_end|>", "", [("f", "the value of a is not a literal")]),
    (LfmParser, "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>", "", [("f", "the value of a is not a literal")]),
    (LfmParser, "<|tool_call_start|>[f(a=[1, 2)", "", [("f", "the value of a is not a literal")]),
    (LfmParser, "<|tool_call_start|>f(a=1)<|tool_call_end|>", "", [("", "it is not a list")]),
    (LfmParser, "<|tool_call_start|>[]<|tool_call_start|>[g()]", "", [("", "no call of a name"), ("g", None)]),
]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ('"1"', {"type": "string"}, '"1"'),
        ('{"b": 1}', {"type": "string"}, '{"b": 1}'),
        ("None", {"type": "string"}, "None"),
        ("1", {"type": "integer"}, 1),
        ("1", {"type": ["string", "integer"]}, 1),
        ("1", {"anyOf": [{"type": "null"}, {"type": "string"}]}, "1"),
        ("None", {"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ("True", {"type": "boolean"}, True),
        ('"Oslo"', {"enum": ["Oslo"]}, "Oslo"),
        ("x", {"$ref": "#/$defs/text"}, "x"),
        ("1", {"$ref": "#/$defs/text"}, "1"),
        ("NaN", {"type": "number"}, "NaN"),
        ("one", {"type": "integer"}, "one"),
        ("1", {"type": 3}, 1),
        ("1", None, 1),
    ],
)
@pytest.mark.parametrize(
    ("parser", "form"),
    [
        (GlmParser, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (QwenCoderParser, "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_the_schema_says_what_a_value_is(
    parser: type[ToolParser], form: str, text: str, schema: dict[str, Any] | None, value: Any
) -> None:
    [call] = parser().parse(form.replace("{}", text)).calls
    parameters = {
        "type": "object",
        "properties": {} if schema is None else {"a": schema},
        "$defs": {"text": {"type": "string"}},
    }
    typed = with_types(call, parameters).arguments["a"]
    assert (typed, type(typed)) == (value, type(value))


FORMS: list[tuple[type[ToolParser], str]] = [
    (GlmParser, "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
    (GemmaParser, f"<|tool_call>call:f{{a:{Q}{{}}{Q}}}<tool_call|>"),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "{}"}}</tool_call>'),
    (LfmParser, "<|tool_call_start|>[f(a='{}')]<|tool_call_end|>"),
    (PythonicParser, "[f(a='{}')]"),
    (QwenCoderParser, "<tool_call><function=f><parameter=a>{}</parameter></function></tool_call>"),
]


@pytest.mark.parametrize(("parser", "form"), FORMS)
@pytest.mark.parametrize(
    ("begin", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")]
)
def test_a_call_in_thinking_is_text(parser: type[ToolParser], form: str, begin: str, end: str) -> None:
    def call(value: str) -> str:
        return form.replace("{}", value)

    def read(text: str, opened: str = "") -> list[Any]:
        thinking, turn = parse_after_thinking(parser(), text, opened)
        assert (thinking + turn.text).count("quoted") == text.count("quoted")
        return [c.arguments.get("a", c.error) for c in turn.calls]

    quoted = call("quoted")
    assert read(f"{begin}{quoted}{end}{call('x')}") == ["x"]
    assert read(f"\n{begin}{quoted}") == []
    assert read(f"{quoted}{end}{call('x')}", begin) == ["x"]
    assert read(quoted, begin) == []
    assert read(f"{begin}{begin}{quoted}{end}{call('x')}") == ["x"]
    assert read(f"See.{begin}{quoted}{end} {call('x')} {begin}{quoted}{end} {call('y')} {begin}{quoted}") == ["x", "y"]
    for value in (begin, end, begin + end, end + begin):
        assert read(f"{call(value)} and {call('x')}") == [value, "x"]
        assert read(f"{begin}Hm.{end}{call(value)} and {call('x')}") == [value, "x"]


def test_a_thought_stays_where_it_was() -> None:
    text = f"A <think>{{}}</think> B <tool_call>{json.dumps({'name': 'f', 'arguments': {}})}</tool_call> \ue0000\ue000"
    assert parse_after_thinking(HermesParser(), text)[1] == ParsedTurn("A <think>{}</think> B  \ue0000\ue000", [f()])


def test_a_call_in_a_thought_after_a_malformed_call_is_text() -> None:
    quoted = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    _, turn = parse_after_thinking(HermesParser(), f'<tool_call>{{"name": "f" <think>{quoted}</think>')
    assert [(c.name, c.error is None) for c in turn.calls] == [("f", False)]
    assert "\ue000" not in (turn.calls[0].error or "")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|turn>model\n<|channel>thought\n", "<|channel>thought"),
        ("<|im_start|>assistant\n", ""),
        ("", ""),
    ],
)
def test_a_prompt_may_begin_the_thinking(prompt: str, opened: str) -> None:
    assert opened_thinking(prompt) == opened
