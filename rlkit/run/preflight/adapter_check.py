"""A trial of the adapters before the first step: saved, read back, merged, and loaded by peft.

The trial takes a random model of the same configuration, cut to a layer of each kind, narrow feed-forward layers, few
experts and few tokens: for 7B parameters 0.1 GB in float32, twice, and a few seconds.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rlkit.base.errors import RecipeError, show
from rlkit.distributed.fsdp2 import blocks
from rlkit.models.config import auto_class_of
from rlkit.models.load import require_quantizable, task_of, with_score_head
from rlkit.models.lora import (
    adapters_by_weight,
    add_lora,
    base_model,
    load_adapter,
    load_by_peft,
    merge_adapters,
    plain_name,
    score_head,
)
from rlkit.models.size import find_config
from rlkit.models.source import ADAPTER_WEIGHTS, base_name, locate, source_of
from rlkit.models.vision import language_targets
from rlkit.recipe import Lora, Model
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, ModelConfig

TOLERANCE = 1e-5
"""The largest difference of logits, as a share of the largest logit or of 1."""

SMALL = 10_000_000
"""Weights up to which a model is tried as it is."""

LARGEST_COPY = 400_000_000
"""Weights up to which a shallow copy is tried: 1.6 GB in float32, twice."""

WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "vocab_size",
)  # fmt: skip
"""Sizes in configurations of transformers that no other size depends on."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NARROW = 64
"""The most that a copy has of `WIDTHS`."""

NAMED = 4
"""Kinds of weights that are named in a line."""


def check_adapters(model: Model) -> Iterator[str]:
    """Yield the share of weights that adapters reach, and try the adapters, if the recipe has any.

    Raises:
        RecipeError: They cannot be saved, read, merged, or loaded by peft with the same logits, or the base cannot be
            quantized.
    """
    if model.lora is None:
        return
    config = find_config(model)
    with torch.device("meta"):
        base = _random(config, model)
        require_quantizable(base, model.quantization)
        full = _adapted(base, model, model.lora)
    yield reach(full)
    size = sum(weight.numel() for weight in full.parameters())
    kinds = _layer_kinds(full)
    for copy in [config] if size <= SMALL else _copies(config, kinds):
        runnable = _runnable(copy, model, set(kinds))
        if runnable is not None:
            _Trial(runnable, model).require()
            return
    yield f"adapters: not tried before the run, since no shallow copy of {show(model.path)} is small enough and runs"


def reach(policy: CausalLM) -> str:
    """Return the share of the weights in matrices that have adapters, and what has none, by kind."""
    base = base_model(policy)
    reached, sizes, missed = adapters_by_weight(base).keys(), 0, Counter[str]()
    for name, weight in base.named_parameters():
        if weight.dim() < 2 or "lora_" in name or "modules_to_save" in name or "original_module" in name:
            continue
        plain = plain_name(name)
        sizes += weight.numel()
        if plain not in reached:
            parts = [part for part in plain.split(".") if not part.isdigit() and part not in {"model", "weight"}]
            missed[".".join(parts[-2:])] += weight.numel()
    shares = [f"{kind} ({size / sizes:.1%})" for kind, size in missed.most_common(NAMED)]
    shares += [f"{len(missed) - NAMED} more"] if len(missed) > NAMED else []
    without = f"; not: {', '.join(shares)}" if shares else ""
    return f"adapters reach {1 - missed.total() / sizes:.0%} of the weights in matrices{without}"


def _random(config: ModelConfig, model: Model) -> CausalLM:
    """Return a random model in float32, always the same for a configuration."""
    options: dict[str, object] = {"dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy: CausalLM = auto_class_of(config).from_config(deepcopy(config), **options).eval()
        if model.scores:
            policy = with_score_head(policy)
            nn.init.normal_(score_head(policy).weight)  # type: ignore[union-attr]
    return policy


def _runnable(config: ModelConfig, model: Model, kinds: set[tuple[str, ...]]) -> CausalLM | None:
    """Return a random model; None if it is too large, lacks a kind of layer, or does not run, as one that was cut."""
    try:
        with torch.device("meta"):
            empty = _random(config, model)
        if sum(weight.numel() for weight in empty.parameters()) > LARGEST_COPY or set(_layer_kinds(empty)) != kinds:
            return None
        policy = _random(config, model)
        return policy if _logits(policy).isfinite().all() else None
    except Exception:  # whatever transformers raises of sizes that do not fit
        return None


def _adapted(policy: CausalLM, model: Model, lora: Lora, patterns: JsonObject | None = None) -> CausalLM:
    base = base_name(source_of(model).model)
    return add_lora(policy, language_targets(policy, lora, model.vision), 0, base, task_of(policy), patterns=patterns)


def _layer_kinds(policy: CausalLM) -> list[tuple[str, ...]]:
    """Return the kind of each layer: the names and dimensions of its weights without adapters."""
    return [
        tuple(f"{plain_name(name)} {weight.dim()}" for name, weight in block.named_parameters() if "lora_" not in name)
        for block in blocks(base_model(policy))
    ]


def _copies(config: ModelConfig, kinds: Sequence[object]) -> Iterator[ModelConfig]:
    """Yield configurations of fewer layers: narrow ones of one layer a kind, or of the first ones, then as they are."""
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    prefix = list(range(firsts[-1] + 1))
    for layers, is_narrow in ((firsts, True), (prefix, True), (prefix, False)):
        copy = deepcopy(config)
        text: Any = copy.get_text_config()
        for name, value in list(vars(text).items()):
            if "layer" in name and isinstance(value, list) and len(value) == len(kinds):
                setattr(text, name, [value[index] for index in layers])
        if text.num_hidden_layers != len(layers):
            text.num_hidden_layers = len(layers)
        if layers is firsts and getattr(text, "first_k_dense_replace", None):
            text.first_k_dense_replace = 1
        if is_narrow:
            _narrow(text)
            text.pad_token_id = copy.pad_token_id = 0
        yield copy


def _narrow(config: Any) -> None:
    """Narrow a configuration's feed-forward layers, vocabulary and experts, in place."""
    for name in WIDTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), NARROW))
    groups = getattr(config, "n_group", None) or 1
    needed = 2 * max(groups, getattr(config, "num_experts_per_tok", None) or 1)
    for name in EXPERTS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), math.ceil(needed / groups) * groups))


@dataclass
class _Trial:
    """Adapters of a random model.

    Args:
        base: Without adapters.
        model: The recipe's `model:`, with adapters.
        only: The kind of layer whose adapters change the model; None for all.
    """

    base: CausalLM
    model: Model
    only: str | None = None

    def require(self) -> None:
        """Refuse adapters that cannot be used.

        Raises:
            RecipeError: They cannot be, with the kinds of layers to which that is due.
        """
        problem, kinds = self._problem()
        if problem is None:
            return
        causes = [kind for kind in kinds if replace(self, only=kind)._problem()[0] is not None]
        lora: Any = self.model.lora
        if not causes or len(causes) == len(kinds):
            remedy = "choose other model.lora.targets, or leave out model.lora"
        else:
            remedy = f"leave out of model.lora.targets: {', '.join(causes)}"
        raise RecipeError(f"model.lora.targets is {show(lora.targets)}: {problem}; {remedy}")

    def _problem(self) -> tuple[str | None, list[str]]:
        """Explain why the adapters cannot be used, None if they can; and the kinds of layers that have adapters."""
        kinds: list[str] = []
        step = "adding them"
        try:
            with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                policy = _adapted(deepcopy(self.base), self.model, cast("Lora", self.model.lora))
                kinds = sorted({_kind(weight) for weight in adapters_by_weight(base_model(policy))})
                self._change(policy)
                expected = _logits(policy)
                step = "saving them"
                policy.save_pretrained(Path(name), save_embedding_layers=False)
                for step, logits in self._uses(Path(name)):
                    difference = 0.0 if logits is None else _difference(logits, expected)
                    if not difference <= TOLERANCE:
                        return f"{step} changes logits by {difference:.2g}", kinds
        except Exception as error:  # whatever peft raises, in any step
            return f"{step} fails: {error}", kinds
        return None, kinds

    def _uses(self, folder: Path) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each use of saved adapters before it begins, and again with the logits that it gives."""
        yield "reading them", None
        source = locate(str(folder))
        policy = _adapted(deepcopy(self.base), self.model, cast("Lora", source.lora), source.patterns)
        load_adapter(policy, folder / ADAPTER_WEIGHTS)
        yield "reading them", _logits(policy)
        yield "merging them", None
        yield "merging them", _logits(merge_adapters(policy))
        yield "loading them with peft", None
        theirs: Any = load_by_peft(deepcopy(self.base), folder)
        yield "loading them with peft", _logits(theirs)
        yield "merging them with peft", None
        yield "merging them with peft", _logits(theirs.merge_and_unload())

    @torch.no_grad()
    def _change(self, policy: CausalLM) -> None:
        """Change new adapters, whose products start as 0."""
        generator = torch.Generator().manual_seed(1)
        for weight, layer in adapters_by_weight(base_model(policy)).items():
            for name, matrix in layer.named_parameters():
                if name.startswith("lora_") and self.only in {None, _kind(weight)}:
                    matrix.add_(torch.randn(matrix.shape, generator=generator), alpha=0.05)


@torch.no_grad()
def _logits(policy: CausalLM) -> Tensor:
    """Return the logits of a few rows of random tokens."""
    vocabulary = base_model(policy).config.get_text_config().vocab_size
    tokens = torch.randint(1, vocabulary, (3, 8), generator=torch.Generator().manual_seed(2))
    logits: Tensor = policy(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    return logits


def _difference(logits: Tensor, expected: Tensor) -> float:
    """Return the median over rows of the largest difference: in one row, rounding may have chosen other experts."""
    differences = (logits - expected).abs().flatten(1).amax(1)
    return float(differences.median() / expected.abs().max().clamp(min=1))


def _kind(weight: str) -> str:
    """Return the name of a layer within its block, for that of its weight; experts' names have their parameter's."""
    parts = weight.removesuffix(".weight").split(".")
    return ".".join(parts[-2:]) if parts[-2:-1] == ["experts"] else parts[-1]
