"""Trajectories of recorded completions, with the tokens that an engine would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from os.path import commonprefix

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.loss import Inputs, PolicyLoss
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.rendering import TAIL
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Message, Prompt, RecordedAnswer, Score, StopReason, Tools, Trajectory

NO_ANSWER = (
    "prompt {prompt!r} has no recorded answer; rows need a column `completion`, `messages` or `text`, or `chosen` and "
    "`rejected`, with rewards that are numbers, or a task that sets Prompt.recorded"
)

NO_PAIR = (
    "loss {loss} compares the answers to a prompt, but no prompt has two with unequal rewards; rows need the columns "
    "`chosen` and `rejected`, or `completions` and `rewards`"
)

NO_TURNS = (
    "loss {loss} reads a reward from 0 to 1 of each turn, but an answer to prompt {prompt!r} has {rewards}; rows need "
    "the column `turn_rewards`, and no other reward"
)

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

NOT_SAMPLED = -1
"""The version of tokens that no engine has sampled; their log-probs are 0."""


def check_recorded(prompts: Sequence[Prompt], loss: PolicyLoss) -> None:
    """Check that there is something to train on.

    Raises:
        RecipeError: A prompt has no answer; the loss compares answers and no prompt has two of unequal rewards; or it
            reads rewards of turns, and one is missing.
    """
    missing = next((prompt for prompt in prompts if not prompt.recorded), None)
    if missing is not None:
        raise RecipeError(NO_ANSWER.format(prompt=missing.id))
    if Inputs.GROUPS in loss.inputs and not any(len({answer.reward for answer in p.recorded}) > 1 for p in prompts):
        raise RecipeError(NO_PAIR.format(loss=type(loss).__name__))
    if Inputs.TURN_REWARDS in loss.inputs:
        for prompt in prompts:
            for answer in prompt.recorded:
                if answer.reward or not answer.turn_rewards or not all(0 <= x <= 1 for x in answer.turn_rewards):
                    rewards = f"the reward {answer.reward:g} and the turn_rewards {show(answer.turn_rewards)}"
                    raise RecipeError(NO_TURNS.format(loss=type(loss).__name__, prompt=prompt.id, rewards=rewards))


def recorded_group(template: ChatTemplate, prompt: Prompt, group: int, context: int) -> list[Trajectory]:
    """Return the trajectories of a prompt's recorded answers, scored as they are recorded.

    The policy's tokens are those of its own turns, each with the token that ends it. An answer ends where the context
    does. Where the template renders earlier turns otherwise once others follow, a trajectory is the last sample of its
    answer, and the earlier ones are its branches.

    Args:
        template: Renders the conversation.
        prompt: With its answers.
        group: Their number in the step.
        context: Tokens of the longest trajectory.

    Raises:
        RecipeError: There is no answer, or the template refuses one; the message names the prompt.
    """
    if not prompt.recorded:
        raise RecipeError(NO_ANSWER.format(prompt=prompt.id))
    limits = Limits(turns=sum(len(answer.messages) for answer in prompt.recorded), context=context)
    try:
        return [_trajectory(template, prompt, answer, group, limits) for answer in prompt.recorded]
    except RecipeError as error:
        raise RecipeError(f"prompt {prompt.id!r}: {error}") from error


def _trajectory(
    template: ChatTemplate, prompt: Prompt, answer: RecordedAnswer, group: int, limits: Limits
) -> Trajectory:
    """Return the trajectory of an answer; if it has several samples, the last one, with the others as branches."""
    rows, turns = [], 0
    for sample in samples_of(template, prompt, answer):
        row = _of_sample(template, sample, Conversation(prompt, group, limits))
        # the context may have left out turns
        row.score = Score(answer.reward, turn_rewards=answer.turn_rewards[turns:][: len(row.turn_rewards)] or None)
        turns += sample.turns
        rows.append(row)
    *branches, trajectory = [row for row in rows if any(row.mask)] or rows[-1:]
    trajectory.span.branches = branches
    if not any(trajectory.mask):
        trajectory.error = f"prompt {prompt.id!r}: the context ends before the first turn that is trained"
    return trajectory


def _of_sample(template: ChatTemplate, sample: RecordedSample, conversation: Conversation) -> Trajectory:
    first, *spans = sample.spans
    conversation.begin(*template.render_start(first.messages, conversation.prompt.tools))
    for span in spans:
        if conversation.over:
            break
        if span.role == "assistant":
            tokens = template.codec.encode(span.text, span.before)
            fitting = tokens[: conversation.budget(len(tokens))]
            stop = StopReason.STOP if len(fitting) == len(tokens) else StopReason.CONTEXT
            start = len(conversation.mask)
            conversation.sampled(Completion(fitting, [0.0] * len(fitting), [NOT_SAMPLED] * len(fitting), stop))
            if not span.trained:
                conversation.mask[start:] = [False] * (len(conversation.mask) - start)
        else:
            conversation.interact()
            conversation.observed(span.role, *template.read(span.text, span.messages, span.before))
    if not conversation.over:
        conversation.complete(StopReason.STOP)
    return conversation.trajectory(sample.messages[-1].get("content") or "", sample.messages)


@dataclass
class RecordedSpan:
    """A part of a conversation that one side writes.

    Args:
        role: `assistant` for the policy, else that of the first message.
        text: As the template renders it.
        messages: What the policy reads in it; none for its own turn.
        trained: Whether a turn of the policy is trained on, which its message's `trained: false` denies.
        before: The end of what precedes it; empty where nothing does.
    """

    role: str
    text: str
    messages: Sequence[Message] = ()
    trained: bool = True
    before: str = ""


@dataclass
class RecordedSample:
    """Spans that follow each other; the policy's are trained on.

    Args:
        spans: The first is the prompt.
        messages: The conversation up to the last span.
        differs: Where the rendering of the next sample differs from this one; None for the last.
    """

    spans: list[RecordedSpan] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    differs: dict[str, str] | None = None

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return sum(span.role == "assistant" for span in self.spans)


def samples_of(template: ChatTemplate, prompt: Prompt, answer: RecordedAnswer) -> list[RecordedSample]:
    """Return the samples of a recorded answer: one, if the template only appends.

    Each turn of the policy follows the rendering of all messages before it, as in inference, and is what the template
    writes there. Where the template later renders it otherwise, such as without its thinking, the next turn begins
    another sample. An empty thought that a template writes in the last turn only is left out of the others.

    Raises:
        RecipeError: No policy could have written the answer, the template refuses it, or it does not render a turn
            after its generation prompt.
    """
    turns = list(turns_of(answer))
    if not prompt.messages and len(turns) == 1:
        end, text = str(template.tokenizer.eos_token), str(answer.messages[0].get("content") or "")
        spans = [RecordedSpan("user", template.opening([])), RecordedSpan("assistant", text.removesuffix(end) + end)]
        return [RecordedSample(spans, list(answer.messages))]
    messages = list(prompt.messages)
    samples, rendered, new = [RecordedSample()], "", RecordedSpan("user", "", prompt.messages)
    for role, turn_messages in turns:
        if role != "assistant":
            new = RecordedSpan(role, "", turn_messages)
        else:
            opening = template.opening(messages, prompt.tools)
            shared_length = _continued_length(template, samples[-1], rendered, opening)
            if shared_length is None:
                samples[-1].differs, shared_length = _difference(rendered, opening), 0
                samples.append(RecordedSample())
                new = RecordedSpan("user", "", list(messages))
            new.text, new.before = opening[shared_length:], opening[:shared_length][-TAIL:]
            [message] = turn_messages
            turn = _turn(template, [*messages, message], opening, prompt.tools)
            rendered = opening + turn
            turn += "" if template.end(bool(message.get("tool_calls"))).token else str(template.tokenizer.eos_token)
            is_trained = message.get("trained") is not False
            samples[-1].spans += [new, RecordedSpan("assistant", turn, (), is_trained, opening[-TAIL:])]
            samples[-1].messages = [*messages, *turn_messages]
        messages += turn_messages
    return samples


def require_one(samples: Sequence[RecordedSample], loss: str) -> None:
    """Refuse answers of several samples, for losses of whole answers.

    Raises:
        RecipeError: There are several.
    """
    if len(samples) > 1:
        raise RecipeError(ANEW.format(loss=loss, **(samples[0].differs or {})))


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


def _continued_length(template: ChatTemplate, sample: RecordedSample, rendered: str, opening: str) -> int | None:
    """Return the length of an opening that a sample already has; None if it does not continue the sample.

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


def _turn(template: ChatTemplate, messages: Sequence[Message], opening: str, tools: Tools | None) -> str:
    """Render the last message after an opening, up to the token that ends the turn."""
    continuation = _continuation(template.text, messages, tools, opening)
    if continuation is None:  # rendering the turn may leave out thoughts of earlier ones that the opening has
        continuation = _continuation(template.text, [*map(_without_thought, messages[:-1]), messages[-1]], tools)
    if continuation is None:
        rendered = template.render(messages, generate=False, tools=tools)
        remedy = _remedy(template, messages, tools)
        raise RecipeError(DIFFERS.format(remedy=remedy, **_difference(opening, rendered)))
    end = template.end(bool(messages[-1].get("tool_calls")))
    turn = end.text_of(continuation)
    if turn is None:
        raise RecipeError(ENDS_OTHERWISE.format(found=continuation[-SHOWN:], expected=end.tail))
    inside = template.ends_turns.search(turn.removesuffix(end.token))
    if inside is not None:
        raise RecipeError(HOLDS_END.format(token=inside.group()))
    return turn


def _continuation(
    render: Callable[..., str],
    messages: Sequence[Message],
    tools: Tools | None,
    opening: str | None = None,
) -> str | None:
    """Return the last message of a rendering, after the opening of those before; None if the opening differs."""
    if opening is None:
        opening = render(messages[:-1], generate=True, tools=tools)
    rendered = render(messages, generate=False, tools=tools)
    return rendered[len(opening) :] if rendered.startswith(opening) else None


def _without_thought(message: Message) -> Message:
    """Return a message without its thought; in a turn with calls, that may be the content."""
    bare = {key: value for key, value in message.items() if key not in REASONING}
    return {**bare, "content": ""} if message.get("tool_calls") else bare


def _remedy(template: ChatTemplate, messages: Sequence[Message], tools: Tools | None) -> str:
    """Return the remedy for a turn that the template does not write after its generation prompt."""
    remedies = [
        f"set model.chat_template_kwargs: {{enable_thinking: {str(value).lower()}}}"
        for value in (False, True)
        if _continuation(template.render.with_kwargs(enable_thinking=value), messages, tools) is not None
    ]
    thoughtful = {**messages[-1], "reasoning_content": "Let me see."}
    if _continuation(template.render, [*messages[:-1], thoughtful], tools) is not None:
        remedies.append("record the reasoning of the turn (`reasoning_content`)")
    return ", or ".join([*remedies, "set model.chat_template to a template that writes turns after its prompt"])


def _difference(first: str, second: str) -> dict[str, str]:
    """Split two texts at their first difference: the common beginning, and the rest of each."""
    index = len(commonprefix((first, second)))  # noqa: RUF071 (no paths)
    before, first_rest, second_rest = first[:index][-SHOWN:], first[index:][:SHOWN], second[index:][:SHOWN]
    return {"index": str(index), "before": before, "first": first_rest, "second": second_rest}
