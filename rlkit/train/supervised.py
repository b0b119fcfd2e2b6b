"""A step of supervised training: recorded completions in place of samples.

It serves supervised fine-tuning, preference losses on recorded pairs, distillation on recorded completions, and reward
models. Nothing is sampled and no reward is scored: rows have the rewards of the data set. From the advantages on, the
step is that of reinforcement learning (`rl.py`).
"""

from __future__ import annotations

from rlkit.interfaces.callback import RolloutsEnd, TrainingBatch
from rlkit.rollout.collate import add_rewards, collate
from rlkit.train.logps import compute_logps
from rlkit.train.metrics import Meter
from rlkit.train.phases import StepResult, compute_advantages, finish_step, learn
from rlkit.train.rollouts import Obtain, log_recorded, record_outcome
from rlkit.train.saved import attach_credit
from rlkit.train.setup import TrainContext
from rlkit.train.teacher import compute_teacher_logps


def supervised_step(context: TrainContext, number: int, obtain: Obtain) -> StepResult:
    """Run one step on recorded completions.

    Args:
        context: Parts of the run on this rank.
        number: Number of the step; the first is 1.
        obtain: Returns the step's recorded completions.
    """
    recipe, data, ranks, models = context.recipe, context.data, context.ranks, context.models
    service, meter = context.service, Meter()
    with meter.timed("sample"):
        rollouts = obtain(data, service, number, meter)
    context.callbacks.emit("on_rollouts", RolloutsEnd(number, rollouts.all))
    trajectories = rollouts.train_on
    recorded = collate(trajectories).to(context.device)
    with meter.timed("logps"):
        compute_logps(data, models, ranks, recorded)
        compute_teacher_logps(data, models, service, recorded, trajectories)
    with meter.timed("score"):
        log_recorded(rollouts, meter)
        record_outcome(data, service, rollouts, meter)
    scored = add_rewards(recorded, trajectories)
    compute_advantages(recipe, ranks, scored, trajectories, meter)
    batch = learn(data, models, service, TrainingBatch(number, scored), meter, callbacks=context.callbacks)
    attach_credit(recipe, ranks, rollouts, trajectories, batch, number=number)
    return finish_step(service, rollouts, batch, meter, {})
