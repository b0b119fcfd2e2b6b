"""Decoding mixtures of experts on a CPU, and what its products would take alone: `python -m tests.bench.experts`.

A step of 16 and of 64 rows in random models of four layers with 16 experts, of which each token takes 4, in process CPU
milliseconds on one thread; the same with experts that do nothing; then the products of these experts by themselves, in
other ways, and beside the least that they could take: all tokens with one expert, and a sum over all weights. The last
line has the step with experts and linear layers in oneDNN's layout for few rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rlkit_engine_torch.blocks import PACKED_ROWS, PackedLinear
from rlkit_engine_torch.decoder import Decoder
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from rlkit.base.garbage import reuse_memory
from rlkit.distributed.kernels import choose_kernels
from rlkit.testing import random_model

VOCABULARY, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 8192, 256, 192, 16, 4, 4
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "num_experts_per_tok": TOP_K, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "shared_expert_intermediate_size": INNER,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": INNER, "sliding_window": 128},
    "qwen3_next": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, **LINEAR},
}
STEPS, ROUNDS = 16, 4


def milliseconds(call: Callable[[], object], count: int) -> float:
    """Return the lower quartile of the CPU time of a call."""
    times = []
    for _ in range(count):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return sorted(times)[count // 4] * 1e3


def step(model: Any, rows: int) -> float:
    """Return what a step takes of rows with four prompts."""
    decoder = Decoder(model)
    prompts = torch.randint(3, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    decoder.admit(prompts, [rows // 4] * 4)
    tokens = torch.arange(rows) + 3
    decoder.step(tokens)
    return milliseconds(lambda: decoder.step(tokens), STEPS)


def experts_of(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if type(layer).__name__.endswith("Experts")]


def packed_layer(weight: Tensor) -> PackedLinear:
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS), None)


def pack(model: Any) -> None:
    """Let the linear layers and the gated experts of a model read packed copies of their weights."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = packed_layer(layer.weight)
    for layer in experts_of(model):
        layer.forward = packed_experts(*([packed_layer(w) for w in x] for x in (layer.gate_up_proj, layer.down_proj)))


def packed_experts(up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        experts, order = indices.flatten().sort()
        counts = torch.bincount(experts, minlength=len(up)).tolist()
        parts = hidden[order // indices.shape[1]].split(counts)
        gates, inner = torch.cat([w(x) for w, x in zip(up, parts, strict=True) if len(x)]).chunk(2, -1)
        products = (silu(gates) * inner * weights.flatten()[order, None]).split(counts)
        outputs = torch.cat([w(x) for w, x in zip(down, products, strict=True) if len(x)])
        return torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(hidden), -1, HIDDEN).sum(1)

    return forward


def products(rows: int) -> dict[str, float]:
    """Return what the products of a step's experts take, in four layers."""
    layers = [(torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)]
    contiguous = [tuple(w.transpose(1, 2).contiguous() for w in layer) for layer in layers]
    packed = [tuple([packed_layer(w) for w in weights] for weights in layer) for layer in layers]
    selected = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).flatten()
    counts = torch.bincount(selected, minlength=EXPERTS)
    ends, inputs = counts.cumsum(0).int(), (torch.randn(len(selected), HIDDEN), torch.randn(len(selected), INNER))
    parts = [x.split(counts.tolist()) for x in inputs]
    ways: dict[str, Callable[[], object]] = {
        "grouped_mm": lambda: [
            grouped_mm(x, w.transpose(1, 2), offs=ends) for layer in layers for x, w in zip(inputs, layer, strict=True)
        ],
        "grouped_mm of weights [E,in,out]": lambda: [
            grouped_mm(x, w, offs=ends) for layer in contiguous for x, w in zip(inputs, layer, strict=True)
        ],
        "packed": lambda: [
            w(x) for layer in packed for weights, xs in zip(layer, parts, strict=True)
            for w, x in zip(weights, xs, strict=True) if len(x)
        ],
        "one expert": lambda: [x @ w[0].T for layer in layers for x, w in zip(inputs, layer, strict=True)],
        "sum of the weights": lambda: [w.sum() for layer in layers for w in layer],
    }  # fmt: skip
    return {name: milliseconds(way, 60) for name, way in ways.items()}


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    choose_kernels()
    reuse_memory()
    for kind, changes in KINDS.items():
        model: Any = random_model(kind, **{**SIZES, **changes})
        for rows in (16, 64):
            steps, without = [], []
            for _ in range(ROUNDS):
                steps.append(step(model, rows))
                for layer in experts_of(model):
                    layer.forward = lambda hidden, *_: hidden
                without.append(step(model, rows))
                for layer in experts_of(model):
                    del layer.forward
            print(f"{kind}, {rows} rows: a step {min(steps):.1f} ms, without experts {min(without):.1f} ms", flush=True)
    for rows in (16, 64):
        print(f"products, {rows} rows:", {name: round(ms, 1) for name, ms in products(rows).items()}, flush=True)
    models: list[Any] = [random_model("qwen3_moe", **{**SIZES, **KINDS["qwen3_moe"]}) for _ in range(2)]
    pack(models[1])
    for rows in (16, 64):
        plain, packed = (min(step(model, rows) for _ in range(ROUNDS)) for model in models)
        print(f"qwen3_moe, {rows} rows: a step {plain:.1f} ms, packed {packed:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
