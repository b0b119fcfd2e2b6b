"""Trajectories of recorded completions, with the tokens that an engine would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.loss import Inputs, PolicyLoss
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Message, Prompt, RecordedAnswer, Score, StopReason, Trajectory

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
    does.

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
        return [_trajectory(template, answer, Conversation(prompt, group, limits)) for answer in prompt.recorded]
    except RecipeError as error:
        raise RecipeError(f"prompt {prompt.id!r}: {error}") from error


def _trajectory(template: ChatTemplate, answer: RecordedAnswer, conversation: Conversation) -> Trajectory:
    prompt = conversation.prompt
    conversation.begin(*template.render_start(prompt.messages, prompt.tools))
    for role, messages in turns_of(answer):
        if conversation.over:
            break
        if role == "assistant":
            tokens = template.turn(messages[0])
            fitting = tokens[: conversation.budget(len(tokens))]
            stop = StopReason.STOP if len(fitting) == len(tokens) else StopReason.CONTEXT
            conversation.sampled(Completion(fitting, [0.0] * len(fitting), [NOT_SAMPLED] * len(fitting), stop))
            if messages[0].get("trained") is False:
                conversation.mask[-len(fitting) :] = [False] * len(fitting)
        else:
            conversation.interact()
            conversation.observed(role, *template.render_delta(messages))
    if not conversation.over:
        conversation.complete(StopReason.STOP)
    last = answer.messages[-1].get("content") or ""
    trajectory = conversation.trajectory(last, [*prompt.messages, *answer.messages])
    if True not in trajectory.mask:
        trajectory.error = f"prompt {prompt.id!r}: the context ends before the first turn that is trained"
    turns = len(conversation.rewards)  # the context may have left out others
    trajectory.score = Score(answer.reward, turn_rewards=answer.turn_rewards[:turns] or None)
    return trajectory


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
