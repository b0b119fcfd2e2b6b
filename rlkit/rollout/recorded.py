"""Trajectories of recorded completions, with the tokens that an engine would have."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.loss import Inputs, PolicyLoss
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.recorded_text import Sample, samples_of
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Prompt, RecordedAnswer, Score, StopReason, Trajectory

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
    does. Where the template renders earlier turns anew, a trajectory is the last sample of its answer, and the earlier
    ones are its branches.

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
    trajectory.branches = branches
    return trajectory


def _of_sample(template: ChatTemplate, sample: Sample, conversation: Conversation) -> Trajectory:
    first, *spans = sample.spans
    conversation.begin(*template.render_start(first.messages, conversation.prompt.tools))
    for span in spans:
        if conversation.over:
            break
        if span.role == "assistant":
            tokens = template.codec.encode(span.text)
            fitting = tokens[: conversation.budget(len(tokens))]
            stop = StopReason.STOP if len(fitting) == len(tokens) else StopReason.CONTEXT
            start = len(conversation.mask)
            conversation.sampled(Completion(fitting, [0.0] * len(fitting), [NOT_SAMPLED] * len(fitting), stop))
            if not span.trained:
                conversation.mask[start:] = [False] * (len(conversation.mask) - start)
        else:
            conversation.interact()
            conversation.observed(span.role, *template.read(span.text, span.messages))
    if not conversation.over:
        conversation.complete(StopReason.STOP)
    return conversation.trajectory(sample.messages[-1].get("content") or "", sample.messages)
