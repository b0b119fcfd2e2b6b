"""Checks a chat template: whether turns are only appended, and what the policy is trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.base.errors import RecipeError
from rlkit.rollout.template import ANSWER, REPLY, RESULT, USER, ChatTemplate


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
        if template.stop_ids_of_files.isdisjoint(template.end_ids(calls)):
            report.facts.append(
                f"the model's files end no turn with {end.token!r}: rollouts stop at it, and so does the saved model"
            )
    if template.replaced_end:
        report.warnings.append(
            f"once others follow, the template has {template.replaced_end!r} in the place of "
            f"{template.end().token!r}; rollouts keep the latter, as the policy wrote it, and recorded turns are each "
            "trained in the context that the template renders"
        )
