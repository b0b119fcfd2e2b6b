"""The rollout of a predicted step: rlkit's scheduler, row by row, with passes that have a price."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from rlkit_engine_torch import batch as batch_module
from rlkit_engine_torch.batch import DecodeBatch, Row
from rlkit_engine_torch.blocks import Attend
from rlkit_engine_torch.engine import ROWS_ON_GPU
from rlkit_engine_torch.graphs import GraphDecoder
from rlkit_engine_torch.loop import DecodeLoop
from rlkit_engine_torch.queue import RequestQueue
from rlkit_engine_torch.samplers import DecoderSampler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlkit.types import Request, SampleKey, Sampling
from tests.bench.ghost_gpu import READS, record
from tests.bench.predict_passes import PROMPT, SAMPLES, SHAPES, decode, make_model, predict
from tests.bench.roofline import H100, Clock, Costs, Rates

MAX_TOKENS = 1024
Prices = dict[tuple[int, int], dict[str, Costs]]


class PricedDecoder(GraphDecoder):
    """Keeps rows, caches and recordings as `GraphDecoder` does; passes through the model have a price, and no numbers.

    Args:
        clock: The device's.
        prices: By rows and the tokens of each: see `decode_prices`.
    """

    def __init__(self, clock: Clock, prices: Prices) -> None:
        super().__init__(make_model("tiny", 1, "cpu"), record=self._tape)
        self._clock = clock
        self._prices = prices

    def _tape(self, run: Callable[[], Tensor], before: Any) -> Callable[[], Tensor]:
        return record(self._clock, run)

    def _model(self) -> Any:
        return self

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend) -> Tensor:
        self._clock.add(self.price("prefill", len(tokens) / PROMPT * SAMPLES, 64))
        count, hidden = len(tokens), self.config.hidden_size
        attend(0, torch.zeros(count, 1, hidden), torch.zeros(count, 2, 1, hidden))
        return torch.zeros(len(tokens), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.arange(self.config.vocab_size).float().repeat(len(hidden), 1)

    def _pass(self, tokens: Tensor, positions: Tensor, last: Tensor | None, width: int) -> Tensor:
        self._clock.add(self.price("decode step", self.rows, width))
        return self.logits(tokens)

    def price(self, part: str, rows: float, width: float) -> Costs:
        """Return what a part costs, from the straight lines through the measured ones."""
        at, along = (rows - 64) / 192, (width - 64) / 448
        by_rows = []
        for count in (64, 256):
            narrow, wide = (self._prices[count, own][part] for own in (64, 512))
            by_rows.append(narrow.plus(wide.plus(narrow, -1), along))
        few, many = by_rows
        return few.plus(many.plus(few, -1), at)


def decode_prices(name: str) -> Prices:
    """Return the costs of a prefill, a decode step and sampling, by rows and the tokens of each."""
    corners = [(rows, own) for rows in (64, 256) for own in (64, 512)]
    return {
        (rows, own): predict(name, lambda model, cast, n=rows, own=own: decode(model, cast, n // SAMPLES, own))
        for rows, own in corners
    }


class InlineWorker:
    """Runs decode steps in the thread of the event loop."""

    has_calls = False

    async def run_steps(self, steps: Callable[[], Any]) -> Any:
        return steps()


class Waits(TorchFunctionMode):
    """Lets the host wait where it would for a GPU: all tensors are on it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_there = func is torch.tensor and (kwargs or {}).get("device") is not None
        if made_there or getattr(func, "__name__", "") in {"tolist", "nonzero", *READS}:
            self.clock.sync()
        return func(*args, **(kwargs or {}))


def completion_lengths(count: int) -> list[int]:
    """Return ragged lengths, 300 tokens on average and 1,024 at most."""
    draw = random.Random(0)
    return [max(20, min(MAX_TOKENS, round(draw.lognormvariate(5.6, 0.45)))) for _ in range(count)]


def trace(prices: Prices, lengths: Sequence[int], max_kv_tokens: int) -> dict[str, float]:
    """Sample completions of these lengths with rlkit's scheduler; return what it took.

    A row's key is the position of its last token, where it samples a stop id.
    """
    clock, device, stop = Clock(H100), torch.device("cpu"), 7
    choose, append, recorded = batch_module.choose, DecodeBatch._append, False

    def billed(batch: DecodeBatch, part: dict[str, Tensor], logits: Tensor, ends: Tensor) -> Tensor:
        if not recorded:
            clock.add(decoder.price("sampling", len(logits), 64))
        return append(batch, part, logits, ends)

    def record_sampling(run: Callable[[], Tensor], before: Any) -> Callable[[], Tensor]:
        """Record the price alone: sampling is run, since it changes rows."""
        pay = record(clock, lambda: clock.add(decoder.price("sampling", decoder.rows, 64)))  # type: ignore[arg-type, func-returns-value]

        def replay() -> Tensor:
            nonlocal recorded
            pay()
            recorded = True
            ends = run()
            recorded = False
            return ends

        return replay

    def end(logits: Tensor, ends: Tensor, *args: Any, **options: Any) -> Any:
        sampled = choose(logits, torch.full(ends.shape, 0.5, dtype=torch.float64), *args, **options)
        return sampled._replace(tokens=torch.where(ends, stop, 0))

    async def serve() -> None:
        loop = DecodeLoop(torch.nn.Module(), device, sampler, queue, worker)  # type: ignore[arg-type]
        futures = []
        for i, length in enumerate(lengths):
            prompt = (3 + i // SAMPLES, *range(4, PROMPT + 3))
            request = Request(prompt, Sampling(max_tokens=MAX_TOKENS), SampleKey(0, 0, str(i), 0), session="")
            futures.append(asyncio.get_running_loop().create_future())
            loop.add(Row(request, MAX_TOKENS, frozenset({stop}), futures[-1], PROMPT + length))
        completions = await asyncio.gather(*futures)
        assert [len(c.tokens) for c in completions] == list(lengths)

    decoder, queue, worker = PricedDecoder(clock, prices), RequestQueue(), InlineWorker()
    sampler = DecoderSampler(decoder, queue, worker, ROWS_ON_GPU, max_kv_tokens)  # type: ignore[arg-type]
    with (
        patch.object(DecodeBatch, "_append", billed),
        patch.object(DecoderSampler, "new_batch", lambda _, device: DecodeBatch(device, record_sampling)),
        patch.object(batch_module, "uniform", lambda keys, positions: positions + 1 >= keys),
        patch.object(batch_module, "choose", end),
        Waits(clock),
    ):
        asyncio.run(serve())
    steps, total = decoder._steps, clock.total
    return {
        "steps": steps,
        "replayed": decoder.health()["recorded"],
        "syncs a token": total.syncs / sum(lengths),
        "syncs a step": total.syncs / steps,
        "rows a step": sum(lengths) / steps,
        "seconds": total.seconds,
        "device": total.device,
    }


def server_rollout(name: str, lengths: Sequence[int], rates: Rates = H100) -> float:
    """Return the least seconds of a rollout by a server that holds all rows, and reads each weight and key once a step.

    A layer takes 9 kernels, in a graph; the scheduler hides behind them. Prefill and the push of weights are included.
    """
    model = make_model(name, SHAPES[name]["num_hidden_layers"])
    config = model.config
    weights = sum(w.numel() for n, w in model.named_parameters() if "lora" not in n) * 2
    products = weights - (0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size)
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    cached = 4 * heads * config.num_hidden_layers
    kernels = (9 * config.num_hidden_layers + 10) * rates.kernel
    seconds = len(lengths) / SAMPLES * PROMPT * products / rates.half + weights / rates.bandwidth
    for step in range(max(lengths)):
        rows = sum(length > step for length in lengths)
        moved = products + rows * (step + PROMPT) * cached + rows * config.vocab_size * 6
        seconds += max(moved / rates.bandwidth + kernels, rows * products / rates.half)
    return seconds
