"""Recorded answers as texts: what the chat template renders, cut where the policy writes and where it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from os.path import commonprefix

from rlkit.base.errors import RecipeError
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Message, Prompt, RecordedAnswer

SHOWN = 40
"""Characters that an error shows of each of two texts, from where they differ."""

DIFFERS = (
    "the chat template does not render a recorded turn after its own generation prompt: from character {index}, after "
    "{before!r}, the policy reads {first!r}, but the rendering of the turn has {second!r}; {remedy}"
)
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a turn that templates write as its thought."""
ENDS_OTHERWISE = (
    "the chat template ends a recorded turn with {found!r}, but others with {expected!r}, so that the end of the turn "
    "is unknown; set model.chat_template to a template that ends all turns alike"
)
HOLDS_END = "a recorded turn holds {token!r}, which ends a turn, before its end; remove that from the row"
ANEW = (
    "the chat template renders earlier turns anew once others follow: after {before!r} it has {first!r}, and later "
    "{second!r}. Each turn of the answer is then a sample of its own, which loss {loss} does not take; train on the "
    "last turn alone, with the others in the prompt, or set model.chat_template to a template that only appends"
)


@dataclass
class Span:
    """A part of a conversation that one side writes.

    Args:
        role: `assistant` for the policy, else that of the first message.
        text: As the template renders it.
        messages: What the policy reads in it; none for its own turn.
        trained: Whether a turn of the policy is trained on, which its message's `trained: false` denies.
    """

    role: str
    text: str
    messages: Sequence[Message] = ()
    trained: bool = True


@dataclass
class Sample:
    """Spans that follow each other; the policy's are trained on.

    Args:
        spans: The first is the prompt.
        messages: The conversation up to the last span.
        anew: Where the rendering of the next sample differs from this one; None for the last.
    """

    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    anew: dict[str, str] | None = None

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return sum(span.role == "assistant" for span in self.spans)


def samples_of(template: ChatTemplate, prompt: Prompt, answer: RecordedAnswer) -> list[Sample]:
    """Return the samples of a recorded answer: one, if the template only appends.

    Each turn of the policy follows the rendering of all messages before it, as in inference, and is what the template
    writes there. Where the template then renders it anew, such as without its thinking, the next turn begins another
    sample. An empty thought that a template writes in the last turn only is instead left out of the others.

    Raises:
        RecipeError: No policy could have written the answer, the template refuses it, or it does not render a turn
            after its generation prompt.
    """
    turns = list(turns_of(answer))
    if not prompt.messages and len(turns) == 1:
        end, text = str(template.tokenizer.eos_token), str(answer.messages[0].get("content") or "")
        spans = [Span("user", template.opening([])), Span("assistant", text.removesuffix(end) + end)]
        return [Sample(spans, list(answer.messages))]
    messages = list(prompt.messages)
    samples, rendered, new = [Sample()], "", Span("user", "", prompt.messages)
    for role, written in turns:
        if role != "assistant":
            new = Span(role, "", written)
        else:
            opening = template.opening(messages, prompt.tools)
            kept = _kept(template, samples[-1], rendered, opening)
            if kept is None:
                samples[-1].anew, kept = _difference(rendered, opening), 0
                samples.append(Sample())
                new = Span("user", "", list(messages))
            new.text = opening[kept:]
            turn = _turn(template, [*messages, written[0]], opening, prompt.tools)
            rendered = opening + turn
            turn += "" if template.end(bool(written[0].get("tool_calls"))).token else str(template.tokenizer.eos_token)
            samples[-1].spans += [new, Span("assistant", turn, trained=written[0].get("trained") is not False)]
            samples[-1].messages = [*messages, *written]
        messages += written
    return samples


def require_one(samples: Sequence[Sample], loss: str) -> None:
    """Refuse answers of several samples, for losses of whole answers.

    Raises:
        RecipeError: There are several.
    """
    if len(samples) > 1:
        raise RecipeError(ANEW.format(loss=loss, **(samples[0].anew or {})))


def turns_of(answer: RecordedAnswer) -> Iterator[tuple[str, list[Message]]]:
    """Yield who writes next, and the messages: the template merges those of one turn.

    Raises:
        RecipeError: No policy could have written the answer.
    """
    roles = [message["role"] for message in answer.messages]
    if {*roles[:1], *roles[-1:]} != {"assistant"} or ("assistant", "assistant") in pairwise(roles):
        raise RecipeError(
            f"a recorded answer has the roles {', '.join(roles) or 'of no message'}, expected it to begin and end with "
            "a turn of the assistant, and never two of them in a row"
        )
    for assistant, messages in groupby(answer.messages, lambda message: message["role"] == "assistant"):
        turn = list(messages)
        yield "assistant" if assistant else turn[0]["role"], turn


def _kept(template: ChatTemplate, sample: Sample, rendered: str, opening: str) -> int | None:
    """Return how much of an opening a sample has already; None if it does not continue the sample.

    A sample whose last turn begins with an empty thought that the opening has not got loses it.
    """
    if opening.startswith(rendered):
        return len(rendered)
    if template.lead and sample.spans[-1].text.startswith(template.lead):
        turn = sample.spans[-1].text.removeprefix(template.lead)
        shorter = rendered.removesuffix(sample.spans[-1].text) + turn
        if opening.startswith(shorter):
            sample.spans[-1].text = turn
            return len(shorter)
    return None


def _turn(template: ChatTemplate, messages: Sequence[Message], opening: str, tools: Collection[str] | None) -> str:
    """Return what the template writes for the last message after an opening, up to the token that ends the turn."""
    rest = _written(template.text, messages, tools, opening)
    if rest is None:  # rendering the turn may leave out thoughts of earlier ones that the opening has
        rest = _written(template.text, [*map(_without_thought, messages[:-1]), messages[-1]], tools)
    if rest is None:
        rendered = template.render(messages, generate=False, tools=tools)
        index = len(commonprefix((opening, rendered)))  # noqa: RUF071 (no paths)
        where, remedy = _difference(opening, rendered), _remedy(template, messages, tools)
        raise RecipeError(DIFFERS.format(index=index, remedy=remedy, **where))
    end = template.end(bool(messages[-1].get("tool_calls")))
    turn = end.text_of(rest)
    if turn is None:
        raise RecipeError(ENDS_OTHERWISE.format(found=rest[-SHOWN:], expected=end.tail))
    inside = template.ends_turns.search(turn.removesuffix(end.token))
    if inside is not None:
        raise RecipeError(HOLDS_END.format(token=inside.group()))
    return turn


def _written(
    render: Callable[..., str],
    messages: Sequence[Message],
    tools: Collection[str] | None,
    opening: str | None = None,
) -> str | None:
    """Return what a rendering has for the last message after the opening of those before; None if that differs."""
    if opening is None:
        opening = render(messages[:-1], generate=True, tools=tools)
    rendered = render(messages, generate=False, tools=tools)
    return rendered[len(opening) :] if rendered.startswith(opening) else None


def _without_thought(message: Message) -> Message:
    """Return a message without its thought; in a turn with calls, that may be the content."""
    bare = {key: value for key, value in message.items() if key not in REASONING}
    return {**bare, "content": ""} if message.get("tool_calls") else bare


def _remedy(template: ChatTemplate, messages: Sequence[Message], tools: Collection[str] | None) -> str:
    """Return what to do about a turn that the template does not write after its generation prompt."""
    remedies = [
        f"set model.chat_template_kwargs: {{enable_thinking: {str(value).lower()}}}"
        for value in (False, True)
        if _written(template.render.with_kwargs(enable_thinking=value), messages, tools) is not None
    ]
    thoughtful = {**messages[-1], "reasoning_content": "Let me see."}
    if _written(template.render, [*messages[:-1], thoughtful], tools) is not None:
        remedies.append("record the reasoning of the turn (`reasoning_content`)")
    return ", or ".join([*remedies, "set model.chat_template to a template that writes turns after its prompt"])


def _difference(first: str, second: str) -> dict[str, str]:
    """Return where two texts differ: what they have in common before, and each from there."""
    index = len(commonprefix((first, second)))  # noqa: RUF071 (no paths)
    texts = {"before": first[:index][-SHOWN:], "first": first[index:], "second": second[index:]}
    return {name: text[:SHOWN] for name, text in texts.items()}
