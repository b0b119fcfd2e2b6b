"""Expert parallelism: each rank holds some of a mixture's experts, and tokens travel to the experts of their routes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlkit.base.errors import RecipeError
from rlkit.distributed.tensor_parallel import style_of
from rlkit.ops.routes import EXPERT_COUNTS

DISPATCH, BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"
"""The styles in transformers' plans of experts, and of their parameters, [experts, ...]."""


def expert_plan(config: Any, size: int) -> Mapping[str, str]:
    """Return transformers' plan for the experts of a kind of model: styles by patterns of names, none without a plan.

    Args:
        config: Of a model of transformers.
        size: Ranks that share the experts.

    Raises:
        RecipeError: The number of experts is not divisible, or transformers is too old.
    """
    config = config.get_text_config()
    counts = [name for name in EXPERT_COUNTS if getattr(config, name, None)]
    if not counts:
        return {}
    setting = f"FSDP2 has expert_parallel={size}, but"
    try:
        import transformers.distributed.expert_parallel  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"{setting} transformers {version('transformers')} does not have it: pip install -U transformers"
        ) from error
    complete: Mapping[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    plan = {pattern: style for pattern, style in complete.items() if style in {DISPATCH, BY_EXPERT}}
    if DISPATCH not in plan.values():
        return {}
    if getattr(config, counts[0]) % size:
        raise RecipeError(f"{setting} model.path has {counts[0]}={getattr(config, counts[0])}; choose a divisor of it")
    return plan


def distribute_experts(model: nn.Module, config: object, group: DeviceMesh, alone: DeviceMesh) -> list[nn.Module]:
    """Distribute the experts of each layer over ranks in place, with the exchange of tokens that reaches them.

    A layer's tokens are sent to the ranks of their experts and back by transformers' all-to-all, in which all ranks of
    the group take part in every pass. So the gradients of a rank's experts are those of all these ranks' tokens.

    Args:
        model: The text model, with or without adapters on its linear layers.
        config: Its configuration.
        group: The ranks that share the experts.
        alone: This rank alone: those that have the same tokens.

    Returns:
        The experts of each layer.

    Raises:
        RecipeError: Experts have adapters, or the plan reaches none.
    """
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    plan, layers = expert_plan(config, group.size()), []
    for name, experts in list(model.named_modules()):
        if style_of(plan, name) != DISPATCH:
            continue
        if hasattr(experts, "base_layer"):
            raise RecipeError(
                f"FSDP2 has expert_parallel={group.size()}, which does not distribute adapters of experts; set "
                "expert_parallel: 1, or name the layers in model.lora.targets"
            )
        for key, _ in list(experts.named_parameters(recurse=False)):
            if style_of(plan, f"{name}.{key}") == BY_EXPERT:
                ALL_PARALLEL_STYLES[BY_EXPERT].shard_param(experts, key, group)
        EpDispatchExpertsParallel().install_forward(experts, group, tp_mesh=alone, ep_implementation="all_to_all")
        layers.append(experts)
    if plan and not layers:
        raise RecipeError(
            f"FSDP2 has expert_parallel={group.size()}, but transformers' plan reaches no experts of this model; set "
            "expert_parallel: 1"
        )
    return layers
