"""The pools of `placement:`: their GPUs, and their memory, estimated from the models' shapes. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlkit_placement.checks import number_of, reward_models

from rlkit.models.activations import activation_bytes, frozen_bytes
from rlkit.models.config import naming
from rlkit.models.size import Size, find_config, size_of
from rlkit.ops.logps import chunk_bytes
from rlkit.recipe import FSDP2
from rlkit_inspect.estimate import Setting, critic_size
from rlkit_inspect.footprint import (
    CONTEXT_MB,
    STATES,
    MemoryTable,
    activation_peak,
    device_of,
    in_units,
    micro_batch_tokens,
    trained_bytes,
)

COMPUTING = "computing, besides"


@dataclass(frozen=True)
class PoolMemory:
    """The estimated memory of a rank of a pool.

    Args:
        name: The pool's.
        roles: Those whose models it has.
        setting: The trainer's, with the pool's ranks and precision.
        weights: MiB of weights, with the optimizer of a critic, by role.
        computing: MiB at the peak of what is computed with them, one role after another.
    """

    name: str
    roles: list[str]
    setting: Setting
    weights: Mapping[str, float]
    computing: float

    @property
    def peak(self) -> float:
        """MiB at the peak, without CUDA."""
        return sum(self.weights.values()) + self.computing

    def table(self) -> MemoryTable:
        """Return the memory by role, its peak, and what that is compared with."""
        device, device_mb, is_gpu = device_of(self.setting)
        sizes = {f"{role}: {STATES if role == 'critic' else 'weights'}": size for role, size in self.weights.items()}
        sizes[COMPUTING] = self.computing
        sizes |= {"CUDA": CONTEXT_MB} if is_gpu else {}
        sizes["at the peak"] = self.peak + CONTEXT_MB * is_gpu
        return in_units(sizes | {f"memory of {device}": device_mb}, self.peak)

    def misfit(self) -> str | None:
        """Return the memory that the chosen GPU lacks, and what would make the pool fit; None if it fits."""
        gpu = self.setting.gpu
        if gpu is None:
            return None
        excess_mb = self.peak + CONTEXT_MB - gpu.memory / 2**20
        if excess_mb <= 0:
            return None
        key = f"placement.pools.{self.name}"
        remedies = {
            f"{key}.strategy: fsdp2 on more GPUs": self.setting.shards == 1 and "reward" not in self.roles,
            f"{key}.devices: more": self.setting.shards > 1,
            "a pool for each role": len(self.roles) > 1,
            "critic.lora": "critic" in self.roles and not self.setting.policy.lora,
        }
        helpful = ", ".join(remedy for remedy, helps in remedies.items() if helps) or "a smaller model"
        return (
            f"pool {self.name} does not fit {gpu.name}: {excess_mb / 2**10:.1f} GiB too much; to make it fit: {helpful}"
        )


def process_counts(setting: Setting) -> dict[str, int]:
    """Return the numbers of processes of the trainer and of each pool; for a planned GPU, of those that have one."""
    recipe = setting.recipe
    pools = {} if recipe.placement is None else recipe.placement.pools
    have_gpu = {name: pool for name, pool in pools.items() if setting.gpu is None or pool.accelerator != "cpu"}
    counts = {f"pool {name}": number_of(pool.devices) for name, pool in have_gpu.items()}
    return {"the trainer": setting.ranks * recipe.fabric.sequence_parallel} | counts


def memory_of_pools(setting: Setting) -> Iterator[PoolMemory]:
    """Estimate the memory of a rank of each pool.

    Args:
        setting: The trainer's.

    Raises:
        RecipeError: The configuration of a model cannot be loaded; UnavailableError if the hub cannot be reached.
    """
    recipe = setting.recipe
    if recipe.placement is None:
        return
    for name, pool in recipe.placement.pools.items():
        count = number_of(pool.devices)
        replicate = pool.strategy.replicate if isinstance(pool.strategy, FSDP2) else 1
        shards = count // replicate if pool.shards else 1
        gpu = None if pool.accelerator == "cpu" else setting.gpu
        own = replace(setting, recipe=replace(recipe, fabric=pool), critic=None, ranks=count, shards=shards, gpu=gpu)
        weights, computing = {}, [0.0]
        roles = recipe.placement.roles_of(name)
        tokens = micro_batch_tokens(own)
        for role in roles:
            if role == "critic" and recipe.critic is not None:
                size = critic_size(recipe, recipe.critic)
                trained = trained_bytes(own, size, recipe.critic)
                weights[role] = trained.states / shards
                computing.append((trained.gradients + trained.casts) / shards + activation_peak(own, size, tokens))
                continue
            models = list(_frozen(own, role))
            weights[role] = sum(width * size.base for size, width in models) / (1 if role == "reward" else shards)
            computing += [_forward(own, size, tokens) for size, _ in models]
        yield PoolMemory(name, roles, own, {r: x / 2**20 for r, x in weights.items()}, max(computing) / 2**20)


def _frozen(setting: Setting, role: str) -> Iterator[tuple[Size, int]]:
    """Yield the shape of each frozen model of a role, and the bytes of one of its weights."""
    recipe = setting.recipe
    if role == "reference":
        yield setting.policy, setting.frozen_weight_bytes
    elif role == "teacher" and recipe.teacher is not None:
        for path, option in {path: option for option, path in recipe.teacher.paths().items()}.items():
            model = replace(recipe.model.at(path), dtype=recipe.teacher.dtype)
            with naming(option):
                yield size_of(find_config(model)), frozen_bytes(model, recipe.fabric)
    elif role == "reward":
        for path, dtype in {(part.path, part.dtype) for part in reward_models(recipe)}:
            yield size_of(find_config(recipe.model.at(path)), scores=True), 2 if dtype == "bfloat16" else 4


def _forward(setting: Setting, model: Size, tokens: int) -> float:
    """Return the bytes of a forward pass that keeps nothing for a backward one: a layer, and a chunk of logits."""
    layer, _ = activation_bytes(model.config, setting.precision, False, False)
    return float(tokens * layer + min(4 * tokens * model.outputs, chunk_bytes(setting.gpu_bytes)))
