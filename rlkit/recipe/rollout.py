"""Rollouts: how trajectories are sampled, and the limits of conversations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rlkit.base.errors import show
from rlkit.base.ranges import NUMBER, Count, PositiveFloat, PositiveInt, Seconds
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.filter import GroupFilter
from rlkit.types import Sampling


@dataclass
class GroupReplay:
    """Groups that later steps train on again, while no token is older than `rollout.max_staleness`.

    A step trains on `train.prompts_per_step` new groups and on the buffered ones: the youngest of the previous steps.
    A resumed run starts with an empty buffer.

    Args:
        size: The maximum number of buffered groups, over all ranks.
        reuse: The maximum number of times that a group is trained on again.
    """

    size: Count
    reuse: Count = 1


@dataclass
class Rollout:
    """How trajectories are sampled.

    Args:
        engine: The rollout engine; by default `TorchEngine`, or on GPUs the fastest that is installed and fits:
            `rlkit docs servers`.
        group_size: Samples of each prompt.
        sampling: How tokens are sampled in training.
        filter: The filter that selects groups to train on; null trains on all.
        oversample: Prompts to start in a step, as a multiple of `train.prompts_per_step`. Once that many groups are
            complete, the slowest are stopped; their prompts come first in the next step, which waits for them. Steps
            end sooner, but training is biased towards short completions: stopped ones are sampled again.
        max_staleness: The maximum number of steps between the weights that sampled a token and those that train on it;
            0 alternates sampling and training. With more, a step trains on the first groups to complete, and the others
            continue with its new weights: no step waits for the longest completions. It needs a correction, such as
            `correction`: `rlkit docs asynchronous`.
        lead: How far rollouts usually run ahead, in steps; at most, and by default, `max_staleness`. Null is less if
            the engine cannot hold more groups at once, and 1 with `replay` or if it samples beside the trainer.
        replay: Groups that later steps train on again; null for none. It needs `max_staleness`.
        max_gap: The largest mean distance between the log-probs of engine and trainer in the weight check before the
            first rollout; null for 1e-3 in float32 and 0.2 in lower precisions.
        max_prompt_tokens: The maximum tokens of a prompt, tools and template included; null for the context's limit.
        overlong: The treatment of longer prompts: `error` refuses the run, `drop` leaves them out, and `left`, `right`
            or `middle` cuts their longest texts there.
        unscorable: The treatment of prompts that the reward cannot score, as `MathReward` if it cannot read the
            reference answer: `error` refuses the run, `drop` leaves them out.
        max_conversations: The maximum number of conversations that run at once on a rank, while others wait; null for
            as many as the engine can hold. More keep the engine busy while conversations wait for tools.
        sampling_column: The column with a row's own `max_tokens`, which only lowers those of `sampling`, and `stop`,
            more texts that end its turns; null for none.
    """

    engine: RolloutEngine = None  # type: ignore[assignment]  # until a recipe is composed, which names TorchEngine
    group_size: Count = 8
    sampling: Sampling = field(default_factory=Sampling)
    filter: GroupFilter | None = None
    oversample: Annotated[float, Ge(1), Le(2), NUMBER] = 1.0
    max_staleness: Annotated[int, Ge(0), Le(64), NUMBER] = 0
    lead: Annotated[float, Ge(0), Le(64), NUMBER] | None = None
    replay: GroupReplay | None = None
    max_gap: PositiveFloat | None = None
    max_prompt_tokens: PositiveInt | None = None
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error"
    unscorable: Literal["error", "drop"] = "error"
    max_conversations: Count | None = None
    sampling_column: str | None = None


@dataclass
class ConversationLimits:
    """Limits of multi-turn conversations; only with tools, an interaction or an environment.

    Args:
        turns: Maximum turns of the policy. At this limit and the next, a conversation ends with the stop reason `turns`
            after a turn of the policy, which is scored and trained on as any other: a call in it is made and a user
            replies to it for their rewards, but the policy reads neither.
        user_turns: Maximum replies of the user or the environment, not counting those of tools; the policy answers the
            last one. Null for no limit but `turns`.
        tokens: Maximum tokens of all its turns; null for the context's limit. `sampling.max_tokens` limits one turn.
        tool_calls: Maximum number of calls; a turn that exceeds it ends the conversation.
        seconds: Deadline from admission, without time in the engine and in the queues of tools and workers.
        check: Whether to compare each conversation with the template's own rendering: differences are counted, or
            fail it (`strict`).
        max_reply_tokens: The length beyond which a reply of a tool, a user or an environment loses its middle; `auto`
            is a quarter of the context, at most 2048; null for no limit.
    """

    turns: Count = 8
    user_turns: Count | None = None
    tokens: PositiveInt | None = None
    tool_calls: Count | None = 16
    seconds: Seconds | None = 600.0
    check: Literal["off", "warn", "strict"] = "warn"
    max_reply_tokens: PositiveInt | Literal["auto"] | None = "auto"


def sampling_of_row(sampling: Sampling, options: object) -> Sampling:
    """Return options of sampling with those of a row: `max_tokens` if they are fewer, and more texts under `stop`.

    Raises:
        ValueError: The row has others.
    """
    if options is None:
        return sampling
    if not isinstance(options, dict) or not options.keys() <= {"max_tokens", "stop"}:
        raise ValueError(f"the row's sampling is {show(options)}, expected an object with max_tokens, stop or both")
    tokens, stop = options.get("max_tokens"), options.get("stop")
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"the row's sampling.stop is {show(stop)}, expected texts that are not empty")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"the row's sampling.max_tokens is {show(tokens)}, expected a whole number from 1")
    limit = sampling.max_tokens if tokens is None else min(tokens, sampling.max_tokens)
    return replace(sampling, max_tokens=limit, stop=tuple(dict.fromkeys((*sampling.stop, *texts))))
