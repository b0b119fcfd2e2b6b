"""Checks a chat template: whether turns are only appended, and what the policy is trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.base.errors import RecipeError
from rlkit.rollout.template import ANSWER, CALL_ID, REPLY, USER, ChatTemplate


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
    _check_end(template, report)
    for what, messages in (("user", [USER]), ("tool", [{"role": "tool", "content": "7", "tool_call_id": CALL_ID}])):
        try:
            template.delta(messages)
            report.facts.append(f"a {what} turn is appended to what came before")
        except RecipeError as error:
            report.warnings.append(str(error))
    thought = [USER, {"role": "assistant", "content": f"<think>\nA thought.\n</think>\n\n{REPLY}"}]
    alone = template.render(thought, generate=False).rpartition(REPLY)[0]
    if not template.render([*thought, USER], generate=True).startswith(alone):
        report.warnings.append(
            "the template strips thinking from earlier turns; training keeps it, as the policy saw it"
        )
    return report


def _check_end(template: ChatTemplate, report: TemplateCheck) -> None:
    opened = template.render([USER], generate=True)
    closed = template.render([USER, ANSWER], generate=False)
    before, reply, after = closed.rpartition(REPLY)
    if not reply:
        report.warnings.append("the template does not render an assistant's turn as it was written")
        return
    if opened != before:
        report.warnings.append(
            f"the generation prompt ends with {opened[-40:]!r}, but an assistant's turn is rendered after "
            f"{before[-40:]!r}; the policy is trained on the former"
        )
    if template.codec.stop.match(after):
        report.facts.append(f"an assistant's turn ends with {after.strip()!r}, on which the policy is trained")
    else:
        ends = [template.codec.decode([i]) for i in sorted(template.stop_ids)]
        report.warnings.append(
            f"the template continues with {after[:40]!r} after an assistant's turn, but a turn ends with one of "
            f"{ends}; if that is wrong, set eos_token_id in the model's generation_config.json"
        )
