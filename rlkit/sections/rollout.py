"""How trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.filter import GroupFilter
from rlkit.ranges import NUMBER, Count, PositiveFloat, PositiveInt, Seconds
from rlkit.types import Sampling


@dataclass
class GroupReplay:
    """Groups that are trained on in several steps, while none of their tokens is older than `rollout.max_staleness`.

    A step trains on `train.prompts_per_step` new groups and on those that are kept: the youngest of the steps before.
    A resumed run begins without any.

    Args:
        size: How many groups are kept at most, over all ranks.
        reuse: How often a group is trained on again, at most.
    """

    size: Count
    reuse: Count = 1


@dataclass
class Rollout:
    """How trajectories are sampled.

    Args:
        engine: The rollout engine.
        group_size: Samples of each prompt.
        sampling: How tokens are sampled in training.
        filter: Which groups to train on; null trains on all.
        oversample: Prompts to start in a step, as a multiple of `train.prompts_per_step`. Once that many groups have
            ended, the slowest are stopped; their prompts come first in the next step, and are then waited for. Steps
            end sooner, but what is trained on leans to short answers: those that were stopped are sampled again.
        max_staleness: How many steps may lie between the weights that sampled a token and those that learn from it; 0
            samples and learns in turn. With more, a step learns from the groups that are whole first, and the others go
            on with its new weights: a step does not wait for the longest answers. It needs a correction, such as
            `correction`: `rlkit docs asynchronous`.
        lead: How far rollouts run ahead normally, in steps; at most, and by default, `max_staleness`. Null is less
            where the engine would hold no more groups at once, and 1 with `replay` or where it samples beside the
            trainer.
        replay: Groups that later steps are trained on again; null for none. It needs `max_staleness`.
        max_gap: The largest mean distance of the engine's log-probs of a few tokens from the trainer's, in the weight
            check before the first rollout; null for 1e-3 in float32 and 0.2 in lower precisions.
        max_prompt_tokens: The most tokens of a prompt, tools and template included; null for what the context holds.
        overlong: What becomes of longer prompts: `error` refuses the run, `drop` leaves them out, and `left`, `right`
            or `middle` is where their longest texts are cut.
        unscorable: What becomes of prompts that the reward cannot score, such as those whose reference `MathReward`
            cannot read: `error` refuses the run, `drop` leaves them out.
        max_conversations: How many conversations run at once on a rank, while others wait for their admission; null
            for as many as the engine can hold. More keep an engine busy whose conversations wait for tools.
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


@dataclass
class ConversationLimits:
    """Limits of conversations of several turns; only with tools, an interaction or an environment.

    Args:
        turns: Maximum turns of the policy.
        tokens: Maximum tokens of all its turns; null for the context's limit. `sampling.max_tokens` limits one turn.
        tool_calls: Maximum number of calls; a turn that exceeds it ends the conversation.
        seconds: Deadline, from its admission; time in the engine and in the queues of tools and workers does not count.
        check: Compare each conversation with the template's own rendering: count differences, or fail it (`strict`).
        max_reply_tokens: A longer reply of a tool, a user or an environment loses its middle; `auto` is a quarter of
            the context, at most 2048; null for no limit.
    """

    turns: Count = 8
    tokens: PositiveInt | None = None
    tool_calls: Count | None = 16
    seconds: Seconds | None = 600.0
    check: Literal["off", "warn", "strict"] = "warn"
    max_reply_tokens: PositiveInt | Literal["auto"] | None = "auto"
