"""The memory that rlkit's code allocates, counted tensor by tensor without a GPU: models of true shapes, fake tensors.

Fake tensors have shapes, types and storages, and no memory, so that a step of a 7B model is counted on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from rlkit_inspect.estimate import Setting
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkit.interfaces.optimizer import WeightGroup
from rlkit.models.config import auto_class_of
from rlkit.models.load import task_of, with_score_head
from rlkit.models.lora import add_lora
from rlkit.models.optimizer_state import materialize_state
from rlkit.models.size import by_kind, find_config
from rlkit.models.vision import freeze_vision, language_model, language_targets
from rlkit.ops.logps import OutputLayer, token_logps
from rlkit.ops.quantization import QuantizedLinear, replace_layers
from rlkit.recipe import Critic, Lora, Recipe, Train


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of the storages of all tensors that operators return, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor)
        return returned

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.bytes += self._sizes[key]
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


def learning_peak(setting: Setting, tokens: int) -> int:
    """Return the most bytes that are allocated while each trained model learns from a micro-batch of `tokens` tokens.

    The models have their gradients and optimizer states, as from the second step on; a reference is there too.
    """
    recipe, is_scored = setting.recipe, setting.recipe.model.scores
    length = min(setting.longest_row, tokens)
    with FakeTensorMode(allow_non_fake_inputs=True), CountedMemory() as counted:
        policy = _allocate(_model(recipe, recipe.model.path, recipe.model.lora, is_scored))
        reference = None
        if recipe.needs_reference and recipe.model.lora is None:
            reference = _allocate(_model(recipe, recipe.model.path, None))
        learners = [(policy, _optimizer(policy, recipe.train), is_scored)]
        if recipe.critic is not None:
            critic = _model(recipe, recipe.critic.path or recipe.model.path, recipe.critic.lora, scores=True)
            learners.append((_allocate(critic), _optimizer(critic, recipe.critic), True))
        for model, optimizer, scores in learners:
            if recipe.train.checkpoint_activations:
                model.gradient_checkpointing_enable()
                model.train()
            _learn(model, optimizer, recipe, torch.zeros(max(1, tokens // length), length, dtype=torch.long), scores)
        del reference
    return counted.peak


def _model(recipe: Recipe, path: str, lora: Lora | None, scores: bool = False) -> Any:
    """Return a model without memory, as rlkit builds it."""
    model_section = recipe.model
    config = find_config(type(model_section)(path))
    config._attn_implementation = "sdpa"
    dtype = getattr(torch, model_section.dtype) if lora is not None else torch.float32
    with torch.device("meta"):
        model: Any = auto_class_of(config).from_config(config, dtype=dtype)
        model = with_score_head(model) if scores else model
        if lora is None:
            return freeze_vision(model)
        if path == model_section.path and model_section.quantization is not None:
            replace_layers(language_model(model), nn.Linear, QuantizedLinear)
        return add_lora(model, language_targets(model, lora, model_section.vision), task=task_of(model))


def _allocate(model: Any) -> Any:
    """Give a model's parameters and buffers fake memory; tied parameters stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    originals = []  # held, so that their ids are not used again
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in parameters:
                originals.append(parameter)
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def _optimizer(model: Any, section: Train | Critic) -> torch.optim.Optimizer:
    kinds = by_kind(model)
    groups = [WeightGroup(kind, weights, 0.0) for kind, weights in kinds.items() if weights]  # type: ignore[arg-type]
    optimizer = section.optimizer.make(groups, 1e-3)
    materialize_state(optimizer, [weight for weights in kinds.values() for weight in weights])
    return optimizer


def _learn(model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe, ids: Tensor, scores: bool) -> None:
    """Run a micro-batch forward and backward where another has left gradients, and an optimizer step."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in recipe.fabric.precision):
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state
        if scores:
            loss = base.score(hidden).float().sum()
        else:
            layer = OutputLayer(base.lm_head.weight)
            loss = token_logps(hidden.flatten(0, 1), layer, ids.flatten()).logps.sum()
    del hidden
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
