"""rlkit's own passes, ready to be counted: prefill, decode step, log-prob pass, update and optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from rlkit_engine_torch.batch import DecodeBatch, Row
from rlkit_engine_torch.fused import FusedDecoder
from torch import Tensor

from rlkit.interfaces.optimizer import WeightGroup, WeightKind
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora, base_model
from rlkit.optimizers import AdamW
from rlkit.recipe import Lora
from rlkit.types import Request, SampleKey, Sampling
from tests.bench.ghost_gpu import GhostGpu
from tests.bench.roofline import Costs

PROMPT, LENGTH, PROMPTS, SAMPLES = 110, 300, 64, 8
MICRO_GROUPS = 6
"""Groups of a micro-batch of 16,384 tokens: each has a prompt and 8 completions."""
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "7B LoRA": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "10M": {
        "vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
Autocast = Callable[[], AbstractContextManager[None]]


def make_model(name: str, layers: int, device: str = "meta") -> Any:
    """Return a model of a shape; on `meta` its weights have no numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPES[name], "num_hidden_layers": layers, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape)).eval()
        return add_lora(model.to(torch.bfloat16), Lora(rank=16)) if "LoRA" in name else model


def tokens(count: int, length: int, device: torch.device) -> Tensor:
    """Return the batch of `count` groups, [count*SAMPLES, PROMPT+length] i64; prompts differ."""
    rows = torch.arange(count * SAMPLES)[:, None]
    columns = torch.arange(PROMPT + length)[None]
    return torch.where(columns < PROMPT, rows // SAMPLES, rows).add(columns).remainder(500).to(device)


def decode(model: Any, autocast: Autocast, prompts: int, own: int) -> dict[str, Callable[[], Any]]:
    """Return a prefill of `prompts` prompts and a decode step of all their rows, with `own` tokens each."""
    decoder = FusedDecoder(base_model(model), autocast)
    texts = [[3 + i, *range(4, PROMPT + 3)] for i in range(prompts)]

    def prefill() -> Any:
        decoder.release()
        return decoder.admit(texts, [SAMPLES] * prompts)

    @torch.inference_mode()
    def step() -> Any:
        decoder.positions()  # indexes the rows, once
        last = torch.arange(decoder.rows, device=decoder.device) * 0 + own - 1
        return decoder._pass(last, last + PROMPT, last, own)

    @torch.inference_mode()
    def sampling() -> Any:
        batch.sample(logits, 0)

    request = Request((3,) * PROMPT, Sampling(max_tokens=PROMPT), SampleKey(0, 0, "", 0), session="")
    batch = DecodeBatch(decoder.device)
    batch.add([Row(request, 10**6, frozenset({7}), None, i) for i in range(prompts * SAMPLES)])  # type: ignore[arg-type]
    logits = decoder.admit(texts[:1], [1]).new_empty(prompts * SAMPLES, model.config.vocab_size)  # copies the weights
    return {"prefill": prefill, "decode step": step, "sampling": sampling}


def learn(model: Any, autocast: Autocast, groups: int, length: int = LENGTH) -> dict[str, Callable[[], Any]]:
    """Return passes over groups of answers: log-probs, with gradients, with gradients added; and an optimizer step."""
    actor = Actor(model)
    device = next(actor.parameters()).device
    batch = tokens(groups, length, device)
    mask = torch.arange(PROMPT + length, device=device).expand_as(batch) >= PROMPT
    trained = [weight for weight in actor.parameters() if weight.requires_grad]
    optimizer = AdamW().make([WeightGroup(WeightKind.MATRIX, trained, 0.0)], 1e-6)

    def loss_of(_: list[int]) -> Tensor:
        with autocast():
            logps = actor(batch, mask).logps
        return -((logps - logps.detach()).exp() * mask).sum()

    def logps() -> None:
        with torch.no_grad():
            loss_of([0])

    def update() -> None:
        optimizer.zero_grad()
        add()

    def add() -> None:
        loss_of([0]).backward()

    def optimize() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()

    return {"log-prob pass": logps, "update": update, "further update": add, "optimizer step": optimize}


def measure(work: Callable[[], Any], gpu: GhostGpu) -> Costs:
    """Return what the second run of some work costs; the first one makes what stays."""
    work()
    before = copy(gpu.clock.total)
    start = before.seconds = max(before.seconds, gpu.clock.ready)
    gpu.clock.total.seconds = start
    work()
    done = gpu.clock.total.plus(before, -1)
    return replace(done, seconds=max(gpu.clock.total.seconds, gpu.clock.ready) - start)


def predict(name: str, make: Callable[[Any, Autocast], dict[str, Callable[[], Any]]]) -> dict[str, Costs]:
    """Return the costs of a model's passes: those with one layer, and for each further layer what the second adds."""
    ends = []
    for layers in (1, 2):
        gpu, model = GhostGpu(), make_model(name, layers)
        with gpu.running():
            ends.append({key: measure(work, gpu) for key, work in make(model, gpu.autocast).items()})
    more = SHAPES[name]["num_hidden_layers"] - 1
    return {key: one.plus(ends[1][key].plus(one, -1), more) for key, one in ends[0].items()}
