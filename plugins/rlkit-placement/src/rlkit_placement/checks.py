"""What can be wrong with `placement:`, known before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from rlkit_rewards.model import ModelReward

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.launcher import Launcher
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe import FSDP2, Fabric, Recipe
from rlkit.recipe.placement import Role


def number_of(devices: Literal["auto"] | int | Sequence[int]) -> int:
    """Return the number of a pool's devices; 0 if it does not say."""
    if isinstance(devices, str):
        return 0
    return devices if isinstance(devices, int) else len(devices)


def find_problems(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section."""
    placement = recipe.placement
    assert placement is not None
    names = ", ".join(placement.pools) or "none"
    for role, pool in placement.roles.items():
        if pool not in placement.pools:
            yield f"placement.roles.{role} is {show(pool)}, expected a pool of placement.pools: {names}"
        if role not in get_args(Role):
            yield f"placement.roles has {role!r}, expected {', '.join(get_args(Role))}"
        yield from _role_problems(recipe, role)
    for pool in placement.pools:
        if pool not in placement.roles.values():
            yield f"placement.pools.{pool} has no role; name it in placement.roles, or remove it"
        yield from _pool_problems(recipe, pool)
    yield from _trainer_problems(recipe.fabric, recipe)
    yield from _gpu_problems(recipe)


def refuse_pictures(recipe: Recipe) -> None:
    """Check that the policy reads texts alone, by its configuration.

    Raises:
        RecipeError: It reads pictures, or has no configuration; UnavailableError if the hub cannot be reached.
    """
    from rlkit.models.size import find_config
    from rlkit.models.vision import reads_pictures

    if reads_pictures(find_config(recipe.model)):
        raise RecipeError(
            f"model.path is {show(recipe.model.path)}, which reads pictures, but `placement:` carries texts alone; "
            "remove `placement:`"
        )


def _role_problems(recipe: Recipe, role: str) -> Iterator[str]:
    key, teacher = f"placement.roles.{role}", recipe.teacher
    if role == "critic" and recipe.critic is None:
        yield f"{key} is set, but the recipe has no `critic:`; remove it"
    if role == "reference" and not recipe.needs_reference:
        yield f"{key} is set, but nothing reads a reference; remove it, or add `kl_loss:` or `kl_reward:`"
    elif role == "reference" and recipe.model.lora is not None:
        yield f"{key} is set, but with model.lora the reference is the policy without adapters; remove it"
    elif role == "reference" and recipe.reference is not None:
        yield f"{key} is set, but `reference:` updates it from the policy, whose weights no pool gets; remove one"
    if role == "reward" and not reward_models(recipe):
        yield f"{key} is set, but the recipe has no ModelReward; remove it"
    if role == "teacher" and (teacher is None or teacher.urls is not None or not teacher.paths()):
        yield f"{key} is set, but no teacher is loaded from a path; set teacher.path without teacher.urls, or remove it"
    elif role == "teacher" and teacher is not None and teacher.retokenize and recipe.loss.forward.teacher_top:
        loss = type(recipe.loss).__name__
        yield f"{key} is set, but {loss} with teacher.retokenize needs the teacher in the trainer's process; remove it"


def reward_models(recipe: Recipe) -> list[ModelReward]:
    """Return the reward models of a recipe, also those inside other rewards."""
    return [part for part in _rewards(recipe.reward) if isinstance(part, ModelReward)]


def _rewards(reward: object) -> Iterator[object]:
    """Yield a reward and those inside it."""
    if isinstance(reward, RewardManager):
        yield reward
        for value in vars(reward).values():
            for inner in value.values() if isinstance(value, dict) else [value]:
                yield from _rewards(inner)


def _pool_problems(recipe: Recipe, name: str) -> Iterator[str]:
    assert recipe.placement is not None
    key, pool, own = f"placement.pools.{name}", recipe.placement.pools[name], recipe.placement.roles_of(name)
    size, ranks = number_of(pool.devices), number_of(recipe.fabric.devices) * recipe.fabric.num_nodes
    if not size:
        yield f"{key}.devices is {show(pool.devices)}, expected a number of devices or their indices"
    elif not isinstance(pool.devices, int) and recipe.launcher is not None:
        yield f"{key}.devices is {show(pool.devices)}, but the launcher chooses devices; set it to their number, {size}"
    elif ranks and max(size, ranks) % min(size, ranks):
        yield f"{key}.devices has {size}, and the trainer {ranks} ranks, expected one to be a multiple of the other"
    if pool.num_nodes != 1 or pool.plugins is not None:
        yield f"{key} has num_nodes or plugins, but `devices` says how large a pool is, wherever they are; remove them"
    if pool.precision == "auto":
        yield f"{key}.precision is 'auto', expected that of the pool, such as {recipe.fabric.precision}"
    strategy = pool.strategy
    if isinstance(strategy, FSDP2):
        for option in ("tensor_parallel", "sequence_parallel", "expert_parallel"):
            if getattr(strategy, option) > 1:
                yield f"{key}.strategy has {option}={getattr(strategy, option)}, expected 1: ranks of a pool share rows"
    if pool.shards and "reward" in own:
        yield f"{key}.strategy is fsdp2, but reward models are not sharded; choose ddp, or another pool"
    optimizer = None if recipe.critic is None or "critic" not in own else recipe.critic.optimizer
    if optimizer is not None and pool.shards and not optimizer.takes_shards:
        yield f"{key}.strategy shards weights, but critic.optimizer {optimizer.explain()} needs full ones; choose ddp"
    if optimizer is not None and pool.precision == "bf16-true" and not optimizer.trains_bfloat16:
        yield (
            f"{key}.precision is 'bf16-true', in which most small updates of {type(optimizer).__name__} round to zero; "
            "set critic.optimizer: AdamW8bit, or bf16-mixed"
        )


def _trainer_problems(fabric: Fabric, recipe: Recipe) -> Iterator[str]:
    launcher = recipe.launcher
    if launcher is None and fabric.num_nodes != 1:
        yield "`placement:` starts pools on one machine without a launcher; set fabric.num_nodes: 1, or launcher: Ray"
    if launcher is not None and type(launcher).host_server is Launcher.host_server:
        name = type(launcher).__name__
        yield f"`placement:` needs devices beside those of the ranks, which {name} does not start; set launcher: Ray"
    strategy = fabric.strategy
    if isinstance(strategy, FSDP2) and strategy.tensor_parallel * strategy.sequence_parallel > 1:
        yield (
            "`placement:` takes rows of its own from each rank, but with tensor_parallel or sequence_parallel of "
            "fabric.strategy ranks share rows; remove it, or set both to 1"
        )


def _takes_gpus(fabric: Fabric) -> bool:
    import torch

    return fabric.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def _gpus(recipe: Recipe) -> dict[str, list[int]]:
    """Return the indices of the GPUs of each pool that has some."""
    import torch

    assert recipe.placement is not None
    devices = recipe.fabric.devices
    used_gpus = [] if not _takes_gpus(recipe.fabric) else devices if isinstance(devices, list) else None
    if used_gpus is None:
        used_gpus = [*range(torch.cuda.device_count() if devices == "auto" else number_of(devices))]
    chosen = {}
    for name, pool in recipe.placement.pools.items():
        if _takes_gpus(pool):
            start = max(used_gpus, default=-1) + 1
            count = number_of(pool.devices)
            chosen[name] = pool.devices if isinstance(pool.devices, list) else [*range(start, start + count)]
            used_gpus = [*used_gpus, *chosen[name]]
    return chosen


def _gpu_problems(recipe: Recipe) -> Iterator[str]:
    import torch

    if recipe.launcher is not None:  # it knows what its cluster has
        return
    for name, indices in _gpus(recipe).items():
        if indices and max(indices) >= torch.cuda.device_count():
            yield (
                f"placement.pools.{name} would have the GPUs {indices}, but this machine has "
                f"{torch.cuda.device_count()}; set fabric.devices and placement.pools.{name}.devices to fewer"
            )


def visible_devices(recipe: Recipe, pool: str) -> dict[str, str]:
    """Return the environment variable with a pool's GPUs, by which its processes see no others."""
    indices = _gpus(recipe).get(pool)
    if indices is None:
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[i] if visible else str(i) for i in indices)}
