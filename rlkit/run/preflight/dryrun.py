"""A step at a learning rate of 0, to measure the memory of the longest rows."""

from __future__ import annotations

from rlkit.data.data import Data
from rlkit.interfaces.callback import TrainingBatch
from rlkit.interfaces.loss import Inputs
from rlkit.rollout.collate import add_rewards, collate
from rlkit.run.method import procedure_of
from rlkit.run.preflight import memory
from rlkit.train.logps import compute_logps
from rlkit.train.metrics import Meter
from rlkit.train.optim import set_learning_rate
from rlkit.train.rollouts import await_scores
from rlkit.train.setup import TrainContext
from rlkit.train.update import update_models
from rlkit.types import Score, StopReason, Trajectory


def dry_run(context: TrainContext) -> dict[str, float]:
    """Sample the first step and train on rows of maximum length, at a learning rate of 0.

    Returns:
        The peak memory in MiB after each phase: of the device, or of this process on a machine without one.
    """
    measured: dict[str, float] = {}

    def note(phase: str) -> None:
        metrics = memory.metrics(context.device)
        measured[phase] = metrics.get("memory/peak_device_mb", metrics["memory/peak_rss_mb"])

    note("models loaded")
    context.service.sync_weights()
    rollouts = procedure_of(context.recipe).obtain(context.data, context.service, 1, Meter())
    await_scores(context.service, rollouts, Meter())
    note("sampling")
    longest = _longest(context.data)
    sampled = collate(longest, [*context.recipe.sampled_fields.values()]).to(context.device)
    compute_logps(context.data, context.models, context.ranks, sampled)
    note("log-probs")
    batch = add_rewards(sampled, longest, [*context.recipe.scored_fields.values()])
    batch.advantages = batch.mask.float()
    batch.returns = batch.mask.float()
    for module in context.models.trained.values():
        set_learning_rate(module.optimizer, 0.0)
    update_models(context.data, context.models, context.service, TrainingBatch(1, batch), Meter())
    note("learning")
    return measured


def _longest(data: Data) -> list[Trajectory]:
    """Return as many rows of maximum length as a micro-batch holds, in complete groups if the loss reads groups.

    Rows differ in tokens and rewards: a comparison of equal rows has no gradient.
    """
    recipe = data.recipe
    length = max(source.longest_row for source in (data, *data.mixtures.values()))
    prompts = recipe.train.prompts_per_step
    group_size = data.largest_group if Inputs.GROUPS in recipe.loss.inputs else 1
    rows = min(max(1, data.token_limit // length // group_size) * group_size, prompts * data.largest_group)
    mask = [False] + [True] * (length - 1)
    [prompt] = data.examples(1)
    return [
        Trajectory(
            prompt=prompt,
            group=i // group_size % prompts,
            tokens=[3 + (t + i) % 100 for t in range(length)],
            mask=mask,
            logps=[-1.0 * chosen for chosen in mask],
            versions=[0 if chosen else -1 for chosen in mask],
            stop=StopReason.LENGTH,
            score=Score(float(i % group_size)),
        )
        for i in range(rows)
    ]
