"""The loss of recorded completions that no step trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlkit.data.data import Data
from rlkit.rollout.service import RolloutService
from rlkit.train.metrics import Meter
from rlkit.train.mixtures import recorded_rows
from rlkit.train.models import Models
from rlkit.train.objective import Objective, count_tokens
from rlkit.train.update import MiniBatch, policy_term
from rlkit.types import Prompt


@torch.no_grad()
def held_out_losses(data: Data, models: Models, service: RolloutService, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the recipe's loss, as `loss`, and its metrics on the recorded completions of held-out prompts.

    They are those of a step, `policy/loss` among them, with the weights as they are, over all prompts that record
    completions: as many as a step has are computed at a time, and means are weighted as the aggregation weights them.
    All ranks must call this.
    """
    meter, size, objective = Meter(), data.recipe.train.prompts_per_step, Objective.of(data.recipe)
    answered = [prompt for prompt in prompts if prompt.recorded]
    for start in range(0, len(answered), size):  # agreed: all ranks have all prompts
        batch = recorded_rows(data, models, service, list(enumerate(answered[start : start + size])))
        rows = MiniBatch(batch, list(range(len(batch))), record=bool(batch.trainer_logps.isnan().all()))
        term = policy_term(data, models.policy, service, rows, meter, prefix="validation")
        if term is None:  # agreed: on all ranks alike
            continue
        counts = count_tokens(objective.denominator(batch), service.ranks.all_reduce_sum)
        weight = counts.tokens if objective.aggregation == "token_mean" else counts.sequences
        loss = sum(term.loss_of(micro).item() for micro in term.micros)
        meter.mean("validation/loss", loss * service.ranks.count, weight=float(weight))
    models.actor.passes.take_counts()  # those of a step are its own
    metrics = meter.result(service.ranks)
    return {name.removeprefix("validation/"): x for name, x in metrics.items() if name.startswith("validation/")}
