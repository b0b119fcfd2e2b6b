"""A step of reinforcement learning: sample, score, estimate, update, sync.

    obtain                 completions of the step's prompts             sampling.py; ahead/ where sampling runs ahead
    compute_logps          old and reference log-probs, values           logps.py
    compute_teacher_logps  a teacher's log-probs of the same tokens      teacher.py; after the scores with `attempts`
    await_scores           rewards, scored since each completion ended   rollouts.py
    shape_rewards          mismatch correction, shaping, KL penalty      phases.py, credit.py
    compute_advantages     the estimator's, and a teacher's share        phases.py, credit.py
    learn                  optimizer steps, then weights to the engine   phases.py, update.py
    attach_credit          what the run folder keeps of trajectories     saved.py

The session (`rlkit.run.session`) calls a step, then validates, logs and saves. All ranks run a step together, each on
rows of its own. The engine samples and the rewards score on the event loop of `context.service`, in another thread, for
which `obtain` and `await_scores` wait. Training on recorded completions is in `supervised.py`.
"""

from __future__ import annotations

from rlkit.interfaces.callback import RolloutsEnd, TrainingBatch
from rlkit.rollout.collate import collate
from rlkit.train.logps import compute_logps, log_mismatch
from rlkit.train.metrics import Meter, phase_range
from rlkit.train.phases import StepResult, compute_advantages, finish_step, learn, shape_rewards
from rlkit.train.rollouts import Obtain, await_scores, record_outcome, select_scored, with_branches
from rlkit.train.saved import attach_credit
from rlkit.train.setup import TrainContext
from rlkit.train.teacher import compute_teacher_logps


def rl_step(context: TrainContext, number: int, obtain: Obtain) -> StepResult:
    """Run one step of reinforcement learning.

    Args:
        context: Parts of the run on this rank.
        number: Number of the step; the first is 1.
        obtain: Returns the step's rollouts. Their rewards may still be being scored.
    """
    recipe, data, ranks, models = context.recipe, context.data, context.ranks, context.models
    service, meter = context.service, Meter()
    reads_scores = recipe.teacher is not None and recipe.teacher.attempts is not None
    with meter.timed("sample"):
        rollouts = obtain(data, service, number, meter)
    context.callbacks.emit("on_rollouts", RolloutsEnd(number, rollouts.all))
    trajectories = with_branches(rollouts.train_on)
    rollout_batch = collate(trajectories, [*recipe.sampled_fields.values()]).to(context.device)
    with meter.timed("logps"):
        compute_logps(data, models, ranks, rollout_batch)
        if not reads_scores:
            compute_teacher_logps(data, models, service, rollout_batch, trajectories)
    with meter.timed("score"):
        scored_rows = await_scores(service, rollouts, meter)
        record_outcome(data, service, rollouts, meter)
    scored, trajectories = select_scored(rollouts, rollout_batch, scored_rows, [*recipe.scored_fields.values()])
    if reads_scores:
        with meter.timed("logps"):
            compute_teacher_logps(data, models, service, scored, trajectories)
    with phase_range("advantages"):
        shape_rewards(recipe, context.transforms, ranks, scored, meter)
        compute_advantages(recipe, ranks, scored, trajectories, meter)
    version = service.version
    batch = learn(data, models, service, TrainingBatch(number, scored), meter, callbacks=context.callbacks)
    attach_credit(recipe, ranks, rollouts, trajectories, batch, number=number)
    log_mismatch(batch, version, ranks.all_reduce_sum, meter)
    return finish_step(service, rollouts, batch, meter, tokens_of={"sample": "rollout/tokens"})
