"""Run by test_sequence.py: what a policy, its reference and a critic compute of fixed rows, and their gradients.

usage: torchrun ... sequence.py OUT MODEL FABRIC   where FABRIC is `rank=value` pairs such as sequence_parallel=2
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.distributed import activations
from rlkit.distributed.fsdp2 import full_tensor
from rlkit.engines import TorchEngine
from rlkit.losses import CrossEntropy
from rlkit.models.lora import base_model
from rlkit.train import setup
from rlkit.train.logps import columns_of, frozen_top, policy_logps
from rlkit.train.metrics import Meter
from rlkit.train.models import TrainableModule
from rlkit.train.setup import TrainContext, fabric_for, prepare_training
from rlkit.train.update import MiniBatch, embedding_noise
from rlkit.types import Reads, TrainBatch
from tests.flow.ddp_gradients import LENGTHS, LOSSES, example
from tests.unit.phases import compute_logps, update_critic, update_policy

CASES = {"ClipLoss": LOSSES["ClipLoss"], "Distillation": LOSSES["Distillation"], "Noise": CrossEntropy(0.1, 50.0)}
READS = Reads(squares=True, mean=True, top=3)


def make_run(model: str, *options: str) -> TrainContext:
    """Make a run whose weights stay as they are, with a reference and a critic."""
    parsed = parse(
        "fit",
        [
            "--recipe=quick_ppo", f"--model.path={model}", "--kl_loss.coef=0.1", "--train.entropy_coef=0.01",
            "--train.lr=1e-30", "--critic.lr=1e-30", "--train.max_grad_norm=1e9", "--critic.max_grad_norm=1e9",
            "--train.max_tokens_per_micro_batch=64", "--rollout.sampling.temperature=0.7", *options,
        ],
    )  # fmt: skip
    fabric = fabric_for(parsed.recipe)
    fabric.launch()
    context = prepare_training(parsed.recipe, load_data(parsed.recipe), fabric)
    critic = context.models.critic
    assert critic is not None
    for module in (critic.inner, context.models.actor):  # unlike the reference, and a critic that is not 0
        for i, parameter in enumerate(module.parameters()):
            with torch.no_grad():
                parameter.add_(0.01 * (1 + i % 3)) if parameter.ndim > 1 else None
    return context


def gradient_of(module: TrainableModule[Any], update: Any) -> Tensor:
    """Return the full gradient that the optimizer sees in an update, all parameters in one vector."""
    seen: list[Tensor] = []

    def look(*_: object) -> None:
        seen.append(
            torch.cat([full_tensor(p.grad).flatten().clone() for p in module.inner.parameters() if p.grad is not None])
        )

    handle = module.optimizer.optimizer.register_step_pre_hook(look)
    update()
    handle.remove()
    return seen[0]


def measure(run: TrainContext, packed: bool) -> dict[str, Tensor | float]:
    """Return all that training reads of the rows of this rank, gathered over all of them, and full gradients."""
    ranks, critic = run.ranks, run.models.critic
    assert critic is not None
    assert run.models.reference is not None
    for passes in (run.models.actor.passes, critic.inner.passes, run.models.reference.passes):
        assert not packed or passes.reason is None, passes.reason
        passes.packed = packed
    mine = [row for row in range(len(LENGTHS)) if row // 2 % ranks.count == ranks.index]
    batch = example(mine)
    compute_logps(run, batch)
    statistics = policy_logps(run.data, run.models.actor, ranks, batch, READS)
    names = ("logps", "entropy", "squares", "mean", "top ids", "top")
    found: dict[str, Any] = dict(zip(names, statistics, strict=True))
    reads = Reads(entropy=False, top=3, columns=columns_of(run.models.actor))
    found["teacher ids"], found["teacher"] = frozen_top(run.data, run.models.reference, ranks, batch, reads)
    found |= {"reference": batch.ref_logps, "values": batch.values}
    results: dict[str, Tensor | float] = {}
    for name, value in found.items():
        results[name] = value.new_zeros(len(LENGTHS), max(LENGTHS), *value.shape[2:])
        for indices, part in ranks.gather_dp((mine, value.detach())):
            results[name][indices, : part.shape[1]] = part
    rows = TrainBatch.of(batch)
    rows.returns = rows.advantages + 0.5
    rows.old_logps = rows.old_logps + 0.05 * rows.mask
    for name, loss in CASES.items():
        run.recipe.loss, meter = loss, Meter()
        noise = embedding_noise(rows, run.recipe, "1/0")
        mini_batch = MiniBatch(rows, list(range(len(rows))), noise=noise)
        gradient = gradient_of(run.models.policy, lambda m=mini_batch, t=meter: update_policy(run, m, t))
        results |= {f"{name} {key}": value for key, value in meter.result(ranks).items() if "time" not in key}
        results[f"{name} gradient"] = gradient
    meter = Meter()
    results["critic gradient"] = gradient_of(critic, lambda: update_critic(run, rows, list(range(len(rows))), meter))
    return results | meter.result(ranks)


def count_embedded(run: TrainContext) -> list[int]:
    """Return a list that gets the number of tokens of each pass over the policy's blocks."""
    counts: list[int] = []
    embeddings: Any = base_model(run.models.actor.policy).get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, output: counts.append(output.shape[:-1].numel()))
    return counts


if __name__ == "__main__":
    out, model, *options = sys.argv[1:]
    if "--train.offload_activations=true" in options:  # this machine has no GPU
        activations.MIN_BYTES, setup.require_device_memory = 0, lambda _: None
    TorchEngine.bind = lambda *_: None  # type: ignore[method-assign] # nothing is sampled, also under tensor_parallel
    run = make_run(model, *options)
    counts = count_embedded(run)
    results = [measure(run, packed) for packed in ((True, False) if run.models.actor.chunked else (False,))]
    embedded = run.ranks.gather_world(counts)
    if run.ranks.fabric.is_global_zero:
        torch.save((results, embedded), out)
    run.service.close()
