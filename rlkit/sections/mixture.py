"""A further stream of tokens that a step trains on besides its rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.base.ranges import Count, NonNegativeFloat
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.task import Task


@dataclass
class Mixture:
    """A further stream in each step: weight * its loss, divided by its own tokens, is added to the loss.

    With a task, the stream is recorded completions, as in supervised training: pre-training texts (Ouyang et al. 2022,
    arXiv:2203.02155, equation 2), or old data against forgetting. Without a task, it is the replies of tools, users and
    environments in the step's own conversations, after the policy's first turn (Shrivastava et al. 2026,
    arXiv:2605.24517). Log-probs are at temperature 1.

    Args:
        weight: The factor of its loss; 0 only measures it.
        task: The source of the completions; null for the replies to the policy in this step.
        loss: The loss of these tokens; null for `CrossEntropy`. It reads neither advantages nor old log-probs.
        prompts_per_step: Prompts of the task in a step, over all ranks; null for `train.prompts_per_step`.
    """

    weight: NonNegativeFloat
    task: Task | None = None
    loss: PolicyLoss | None = None
    prompts_per_step: Count | None = None
