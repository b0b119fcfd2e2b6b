"""The tables of tested models, from what runs ask and say: `python -m tests.contract.model_table` rewrites the page."""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from rlkit_engine_torch.samplers import DecoderSampler
from rlkit_inspect.docs import page
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from rlkit.base.errors import RecipeError
from rlkit.distributed.expert_parallel import expert_plan
from rlkit.distributed.tensor_parallel import MATRICES, plan_of
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora
from rlkit.ops.logps import DEFAULT_READS
from rlkit.recipe import Lora
from rlkit.run.preflight.adapter_check import reach
from rlkit.testing import random_model
from tests.conftest import ROOT
from tests.contract.test_torch_engine import engine_of
from tests.flow.test_architectures import KINDS
from tests.unit.models.test_packing import rows_of

OTHERS: dict[str, dict[str, Any]] = {"gemma2": {"head_dim": 8, "sliding_window": 6}, "granite": {"logits_scaling": 2.0}}
"""Kinds that are tested and not listed."""
COMPUTED, USED = 7, 6
"""The columns of the two tables: how a kind is computed, and what it may be used with."""
ENGINES = {
    "SGLang": ("sglang", "rlkit_servers.sglang", "SGLangEngine"),
    "vLLM": ("vllm", "rlkit_engine_vllm", "VllmEngine"),
}
"""The package of each product, and the class that asks it."""


def rows(columns: int) -> dict[str, list[str]]:
    """Return the cells of a table of the page, after its first column, by that column."""
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page("tested-models").splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == columns}


def refused(problem: str) -> str:
    """Return the cell of a problem that a user is told: the page has its text."""
    texts = {letter: cells[0].split("…") for letter, cells in rows(2).items() if len(letter) == 1}
    letters = [letter for letter, parts in texts.items() if all(part.strip() in problem for part in parts)]
    assert len(letters) == 1, problem
    return f"no ({letters[0]})"


@cache
def actor(kind: str) -> Actor:
    return Actor(random_model(kind, **{**KINDS, **OTHERS}[kind]))


@cache
def decoding(kind: str) -> tuple[str, str, str]:
    """Return how a kind decodes, whether its steps are recorded, and whether later turns run only what is new."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = engine_of(actor(kind).policy)._sampler
    assert isinstance(sampler, DecoderSampler)
    said = {str(warning.message).partition(": ")[0]: str(warning.message) for warning in caught}
    modules, beginning = (
        next((text for start, text in said.items() if start.startswith(words)), None)
        for words in ("TorchEngine decodes through the modules", "TorchEngine runs each turn from the beginning")
    )
    fused = bool(sampler.health()["fused"])
    assert fused == (modules is None)
    assert sampler.decoder.continues == (beginning is None)
    return (
        "fused" if fused else "batched",
        "yes" if modules is None else refused(modules),
        "yes" if beginning is None else refused(beginning),
    )


def division(kind: str) -> str:
    """Return what tensor parallelism over two ranks divides."""
    try:
        plan = plan_of(actor(kind).policy.config, 2)
    except RecipeError as error:
        return refused(str(error))
    return "yes" if any(".experts" not in name and style in MATRICES for name, style in plan.items()) else "experts"


def replay(kind: str) -> str:
    """Return whether routers select the experts that they are told; nothing without experts."""
    module = actor(kind)
    if module.routers is None:
        return ""
    tokens, mask = rows_of([6], [[9]], 0)
    shape = (*tokens.shape, len(module.routers.layers), module.routers.top_k)
    first, last = (torch.zeros(shape) + torch.tensor(experts) for experts in ([1, 2], [3, 4]))
    with torch.no_grad():
        reads = [DEFAULT_READS._replace(expert_routes=routes) for routes in (first, last)]
        logps = [module(tokens, mask, 1.0, read).logps for read in reads]
    return "yes" if (logps[0] - logps[1]).abs().max() > 0.1 else "no"


def computed(kind: str) -> list[str]:
    """Return training, decoding, tensor parallelism, expert parallelism and router replay."""
    reason = actor(kind).passes.reason
    training = "packed" if reason is None else refused(reason).replace("no", "padded")
    distributed = "yes" if expert_plan(actor(kind).policy.config, 2) else ""
    return [training, decoding(kind)[0], division(kind), distributed, replay(kind)]


def adapters(kind: str) -> str:
    """Return what `recipe check` says of adapters of all linear layers, in a model of transformers' default size."""
    with torch.device("meta"):
        policy: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        said = reach(add_lora(policy, Lora(rank=4, alpha=8)))
    return re.sub("adapters reach (.*) of the weights in matrices", r"\1", said)


def served(kind: str, product: str) -> str:
    """Return whether a product has code for a kind: what it says if it is installed, else what the page says."""
    package, module, name = ENGINES[product]
    if find_spec(package) is None:
        return rows(USED)[kind][list(ENGINES).index(product) - len(ENGINES)]
    engine = getattr(import_module(module), name)
    return "yes" if engine.implements(CLASSES[kind]) else refused(f"it does not implement {CLASSES[kind]}")


def rewrite() -> None:
    """Write the tables anew; the page keeps the names of models, and the texts of problems."""
    file = ROOT / "rlkit" / "docs" / "tested-models.md"
    text = file.read_text(encoding="utf-8")
    for kind, (models, *_) in rows(COMPUTED).items():
        if kind in KINDS:
            uses = [adapters(kind), *decoding(kind)[1:], *(served(kind, product) for product in ENGINES)]
            for columns, cells in ((COMPUTED, [models, *computed(kind)]), (USED, uses)):
                line = f"| `{kind}` |{''.join(f' {cell} |' if cell else ' |' for cell in cells)}"
                pattern = rf"^\| `{kind}` (\|[^|\n]*){{{columns - 1}}}\|$"
                text, count = re.subn(pattern, lambda _, line=line: line, text, flags=re.M)
                assert count == 1, (kind, columns)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite())
