"""A step of supervised training: recorded completions in place of samples.

It serves supervised fine-tuning, preference losses on recorded pairs, distillation on recorded completions, and reward
models. Nothing is sampled and no reward is scored: rows have the rewards of the data set. From the advantages on, the
step is that of reinforcement learning (`rl.py`).
"""

from __future__ import annotations

from rlkit.interfaces.callback import RolloutsEnd
from rlkit.rollout.collate import add_rewards, collate
from rlkit.train.logps import compute_logps
from rlkit.train.metrics import Meter
from rlkit.train.phases import StepResult, attach_credit, compute_advantages, finish_step, learn
from rlkit.train.rollouts import Obtain, log_recorded, record_outcome
from rlkit.train.setup import TrainContext
from rlkit.train.teacher import compute_teacher_logps


def supervised_step(context: TrainContext, number: int, obtain: Obtain) -> StepResult:
    """Run one step on recorded completions.

    Args:
        context: Parts of the run on this rank.
        number: Number of the step; the first is 1.
        obtain: Returns the step's recorded completions.
    """
    recipe, ranks, meter = context.recipe, context.ranks, Meter()
    with meter.timed("sample"):
        rollouts = obtain(context.data, context.rollouts, number, meter)
    context.callbacks.emit("on_rollouts", RolloutsEnd(number, rollouts.all))
    recorded = collate(rollouts.train_on).to(context.device)
    with meter.timed("logps"):
        compute_logps(context, recorded)
        compute_teacher_logps(context, recorded, rollouts.train_on)
    with meter.timed("score"):
        log_recorded(rollouts, meter)
        record_outcome(context.data, context.rollouts, rollouts, meter)
    scored = add_rewards(recorded, rollouts.train_on)
    compute_advantages(recipe, ranks, scored, rollouts.train_on, meter)
    batch = learn(context, scored, number, meter)
    attach_credit(context, rollouts, rollouts.train_on, batch, number)
    return finish_step(context.rollouts, rollouts, batch, meter, {})
