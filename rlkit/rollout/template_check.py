"""Checks a chat template: the end of turns, whether they are only appended, and which parser reads calls."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from rlkit.base.errors import RecipeError, explain, shorten
from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser, opened_thinking, parse_after_thinking
from rlkit.registry import load_plugins
from rlkit.rollout.template import ANSWER, CALL_ID, QUESTION, REPLY, RESULT, USER, ChatTemplate
from rlkit.types import JsonObject

ARGUMENTS: JsonObject = {"what": QUESTION, "most": 7}


@dataclass
class TemplateCheck:
    """What a template was seen to do.

    Args:
        facts: What is as it should be.
        warnings: What harms the training.
    """

    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_template(template: ChatTemplate) -> TemplateCheck:
    """Check whether turns are only appended, and whether the policy is trained on the token that ends its own."""
    report = TemplateCheck()
    _check_start(template, report)
    _check_end(template, report)
    for what, messages in (("user", [USER]), ("tool", [RESULT])):
        try:
            template.delta(messages)
            report.facts.append(f"a {what} turn is appended to what came before")
        except RecipeError as error:
            report.warnings.append(str(error))
    thought = [USER, {"role": "assistant", "content": f"<think>\nA thought.\n</think>\n\n{REPLY}"}]
    alone = template.render(thought, generate=False).rpartition(REPLY)[0]
    if not template.render([*thought, USER], generate=True).startswith(alone):
        report.warnings.append(
            "the template strips thinking from earlier turns; rollouts keep it, as the policy saw it, and recorded "
            "turns with thinking are each trained in the context that the template renders"
        )
    return report


def _check_start(template: ChatTemplate, report: TemplateCheck) -> None:
    opened = template.render([USER], generate=True)
    before, reply, _ = template.render([USER, ANSWER], generate=False).rpartition(REPLY)
    if not reply:
        report.warnings.append("the template does not render an assistant's turn as it was written")
    elif not before.startswith(opened):
        report.warnings.append(
            f"the generation prompt ends with {opened[-40:]!r}, but an assistant's turn is rendered after "
            f"{before[-40:]!r}; rollouts are trained on the former, and recorded turns like that are refused"
        )
    elif template.lead:
        report.facts.append(f"a recorded turn of text is trained with {template.lead!r} before it, as the template has")


def _check_end(template: ChatTemplate, report: TemplateCheck) -> None:
    for calls, what in ((False, "an assistant's turn"), (True, "a turn with calls of tools")):
        try:
            end = template.end(calls)
        except RecipeError:
            if calls:
                report.facts.append("recorded `tool_calls` are refused: the template does not write them")
            continue
        if not end.token:
            report.warnings.append(
                f"the template continues with {end.tail[:40]!r} after {what}, without a special token that ends it; "
                f"the policy is trained to end it with {template.codec.decode(template.turn_end)!r}; if that is wrong, "
                "set model.chat_template to a template that ends turns"
            )
            continue
        whose = ", with which the next message begins" if end.opens_next else ""
        report.facts.append(f"{what} ends with {end.token!r}{whose}, on which the policy is trained")
        if template.files.stop_ids.isdisjoint(template.end_ids(calls)):
            report.facts.append(
                f"the model's files end no turn with {end.token!r}: rollouts stop at it, and so does the saved model"
            )
    if template.replaced_end:
        report.warnings.append(
            f"once others follow, the template has {template.replaced_end!r} in the place of "
            f"{template.end().token!r}; rollouts keep the latter, as the policy wrote it, and recorded turns are each "
            "trained in the context that the template renders"
        )


class WrittenCall(NamedTuple):
    """A turn with one call of a tool, as a chat template writes it.

    Args:
        text: The turn, without the token that ends it.
        opened: What the prompt has begun the turn's thinking with, if it has.
        call: The call.
    """

    text: str
    opened: str
    call: ToolCall

    def read(self, parser: ToolParser) -> ParsedTurn:
        """Return the calls and the text that a parser reads in the turn."""
        return parse_after_thinking(parser, self.text, self.opened)[1]


def written_call(template: ChatTemplate) -> WrittenCall | None:
    """Return a call as the template writes it; None if it writes none."""
    name = template.tools[0]["function"]["name"] if template.tools else "count"
    before = [template.render([USER], generate=generate, tools=None) for generate in (True, False)]
    for content, arguments in product(("", None), (ARGUMENTS, json.dumps(ARGUMENTS))):
        function = {"name": name, "arguments": arguments}
        turn = {"role": "assistant", "content": content}
        with suppress(RecipeError):  # a template may take arguments as text alone, or calls without content alone
            rendered = template.render(
                [USER, {**turn, "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}],
                generate=False,
                tools=None,
            )
            opening = next((text for text in before if rendered.startswith(text)), "")
            text = rendered.removeprefix(opening)
            if QUESTION in text:
                end = template.codec.stop.search(text)
                opened = opened_thinking(opening)
                return WrittenCall(text[: end.start()] if end else text, opened, ToolCall(name, ARGUMENTS))
    return None


def missing_parser(template: ChatTemplate, model: str) -> str:
    """Return the remedy for a template without a detected parser."""
    call_form = written_call(template)
    if call_form is None:
        return (
            f"the chat template of {model!r} does not show how the model writes tool calls; set parser: HermesParser, "
            "or another, and show its form in the prompts"
        )
    shown = f"the chat template of {model!r} writes calls as {shorten(call_form.text)!r}"
    return f"{shown}, from which no parser is detected; {_remedy(call_form)}"


def misreading(parser: ToolParser, template: ChatTemplate, model: str) -> str | None:
    """Return the problem of a parser with the template's calls, and the remedy; None if it reads them."""
    call_form = written_call(template)
    if call_form is None:
        return None
    try:
        calls = call_form.read(parser).calls
    except Exception as error:  # foreign code may raise anything
        read = f"raises {explain(error)}"
    else:
        if calls == [call_form.call]:
            return None
        read = f"reads {'; '.join(map(_show, calls)) or 'no call'}"
    return (
        f"the chat template of {model!r} writes {_show(call_form.call)} as {shorten(call_form.text)!r}, of which "
        f"{type(parser).__name__} {read}; {_remedy(call_form)}"
    )


def _show(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f"the call {call.name} {arguments}" if call.error is None else f"a malformed call: {call.error}"


def _remedy(call_form: WrittenCall) -> str:
    """Return the parsers that read a call best: those that leave the least of its text."""
    remaining: dict[str, int] = {}
    for name, part in load_plugins().parts["parsers"].items():
        with suppress(Exception):  # one that needs arguments, or is broken, does not read it
            turn = call_form.read(part.cls())
            if turn.calls == [call_form.call]:
                remaining[name] = len(turn.text)
    readers = [name for name, length in remaining.items() if length == min(remaining.values())]
    if readers:
        return f"set parser: {', or '.join(readers)}, which reads it"
    return "no installed parser reads it: write one (rlkit docs plugins/parser) and set parser: to its name"
