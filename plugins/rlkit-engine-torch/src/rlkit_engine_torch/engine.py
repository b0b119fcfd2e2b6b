"""The embedded engine: samples from the trainer's own weights."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

from rlkit.base.errors import EngineError
from rlkit.base.garbage import reuse_memory
from rlkit.base.ranges import Count, PositiveInt
from rlkit.distributed.kernels import choose_kernels
from rlkit.interfaces.engine import COPIES_SHARE, Capability, RolloutEngine, check_followed
from rlkit.ops.quantization import QuantizedLinear
from rlkit.ops.routes import ROUTES
from rlkit.types import Completion, Request, Sampling, StopReason, Structure
from rlkit_engine_torch.batch import Row
from rlkit_engine_torch.loop import DecodeLoop
from rlkit_engine_torch.queue import RequestQueue
from rlkit_engine_torch.samplers import DecoderSampler, GenerateSampler, Sampler
from rlkit_engine_torch.structure import StructureCompiler
from rlkit_engine_torch.worker import Worker

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream
    from rlkit_engine_torch.decoder import AnyDecoder

T = TypeVar("T")

ROWS = 256
"""The largest batch by default."""
ROWS_ON_GPU = 512
"""The same where there is a GPU."""


class TorchEngine(RolloutEngine):
    """Continuous batching over the policy in this process: no server, no second copy, nothing to sync.

    Requests that arrive between two decode steps join the batch. Equal prompts are run once, and of a conversation's
    next turn only what is new: its keys, values and states are kept until the weights change. A sampled token depends
    only on its request's key and its position, whatever else is in the batch (except for floating-point noise).
    Log-probs are those of the full softmax at the request's temperature, even if sampling is truncated. The model runs
    in one worker thread, so that a decode step never blocks the event loop.

    Args:
        max_rows: Largest number of requests in the batch; further requests wait. Null for 256, or 512 where there is
            a GPU.
        max_kv_tokens: Largest size of the key-value cache, as rows times the longest row. Null for 262,144, or on a GPU
            for what 20% of its memory holds. A quarter as much more is kept between turns.
    """

    capabilities = (
        Capability.READS_POLICY | Capability.INTERRUPT | Capability.CANDIDATES | Capability.RESUMES_STRUCTURES
    )

    def __init__(self, max_rows: Count | None = None, max_kv_tokens: PositiveInt | None = None) -> None:
        self.max_rows = max_rows
        self.max_kv_tokens = max_kv_tokens
        self._queue = RequestQueue()
        self._worker: Worker | None = None

    @property
    def capacity(self) -> int:
        return self.max_rows or (ROWS_ON_GPU if torch.cuda.is_available() else ROWS)

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._queue.version

    @version.setter
    def version(self, version: int) -> None:
        self._queue.version = version

    def routes_problem(self, sampling: Sampling, on_gpu: bool, asked: bool) -> str | None:
        return None

    def check_structure(self, structure: Structure) -> None:
        check_followed(structure)

    def bind(self, runtime: Runtime) -> None:
        divided = runtime.tensor_parallel
        if divided > 1:  # and no check of the recipe has said so
            raise EngineError(f"TorchEngine cannot sample from a policy under tensor_parallel={divided}")
        reuse_memory()
        choose_kernels()  # this process may be a server's, without a trainer
        self._runtime = runtime
        self._stop_ids = runtime.stop_ids
        self._structures = StructureCompiler(runtime)
        with runtime.unsharded():
            decoder = _make_decoder(runtime)
        if self.routers is not None and (decoder is None or decoder.routers is None):
            problem = "TorchEngine records no experts of this model"
            if self.requires_routes:
                raise EngineError(f"train.router_replay is true, but {problem}; set it to false or auto")
            warnings.warn(f"experts: not replayed: {problem}", stacklevel=2)
            self.routers, self.fills = None, tuple(spec for spec in self.fills if spec.name != ROUTES)
        self._worker = Worker(runtime.device)
        self._use(decoder)

    def _use(self, decoder: AnyDecoder | None) -> None:
        """Sample with a decoder, or with the policy's own `generate`."""
        assert self._worker is not None
        if decoder is None:
            self._sampler: Sampler = GenerateSampler(self._runtime, self._queue, self.capacity)
        else:
            max_tokens = self.max_kv_tokens or _cache_tokens(self._runtime)
            prefix_bytes = _prefix_bytes(self._runtime, max_tokens) if decoder.continues else 0
            self._sampler = DecoderSampler(
                decoder, self._queue, self._worker, self.capacity, max_tokens, prefix_bytes=prefix_bytes
            )
        self._loop = DecodeLoop(self._runtime.policy, self._runtime.device, self._sampler, self._queue, self._worker)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        assert self._worker is not None
        with self._runtime.unsharded():
            try:
                yield
            finally:  # after an error, a step may be in progress
                self._worker.submit(self._sampler.refresh).result()

    async def generate(self, request: Request) -> Completion:
        room = self._runtime.context - len(request.tokens)
        if room <= 0:
            return Completion([], [], [], StopReason.CONTEXT)
        if not request.tokens:
            raise EngineError("TorchEngine received a request without tokens, expected at least one")
        budget = min(request.sampling.max_tokens, room)
        stop_ids = self._stop_ids.union(request.sampling.stop_ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        row = Row(request, budget, stop_ids, future, request.key.hash())
        if request.sampling.structure is not None:
            row.matcher = self._structures.matcher(request.sampling.structure)
            row.matcher.consume(request.tokens[len(request.tokens) - request.resumed :])
        self._loop.add(row)
        try:
            async with nullcontext() if request.deadline is None else asyncio.timeout(request.deadline):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            self._loop.note_cancelled()
            raise

    def interrupt(self) -> None:
        self._queue.interrupting = self._loop.running

    def follow(self, calm: Callable[[], Awaitable[None]]) -> None:
        self._queue.wait_idle = calm

    async def sync(self, stream: WeightStream, version: int) -> None:
        def use_weights() -> None:
            self.version = version
            self._sampler.refresh()

        await self.between_steps(use_weights)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Call a function in the worker thread before the next decode step; it may write the weights."""
        assert self._worker is not None
        return await asyncio.wrap_future(self._worker.submit(work))

    def health(self) -> dict[str, float]:
        return self._sampler.health()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _make_decoder(runtime: Runtime) -> AnyDecoder | None:
    """Return the fastest decoder that supports the policy, or None for `generate`; warn unless it is the fastest."""
    from rlkit_engine_torch.blocks import why_not_fused
    from rlkit_engine_torch.decoder import Decoder
    from rlkit_engine_torch.fused import FusedDecoder
    from rlkit_engine_torch.graphs import GraphDecoder
    from rlkit_engine_torch.probe import why_not, why_not_continued

    policy, model_class = runtime.policy, type(runtime.policy).__name__
    unfused = why_not_fused(policy)
    if unfused is None and not _has_room(runtime):
        unfused = f"copies of its weights would take more than {COPIES_SHARE:.0%} of the GPU's memory"
    unfused = unfused or why_not(policy, FusedDecoder)
    if unfused is None:
        return (GraphDecoder if runtime.device.type == "cuda" else FusedDecoder)(policy, runtime.autocast)
    unsupported = why_not(policy)
    if unsupported is not None:
        warnings.warn(
            "TorchEngine samples through transformers' generate, prompts of one length at a time, each turn from its "
            f"conversation's beginning, which is slow: its own decoder does not support {model_class}: {unsupported}",
            stacklevel=3,
        )
        return None
    warnings.warn(
        f"TorchEngine decodes through the modules of {model_class}, which is slower than through fused copies of "
        f"its weights: {unfused}",
        stacklevel=3,
    )
    decoder = Decoder(policy, runtime.autocast, runtime.context)
    problem = why_not_continued(policy, decoder)
    if problem is not None:
        warnings.warn(f"TorchEngine runs each turn from the beginning of its conversation: {problem}", stacklevel=3)
        decoder.continues = False
    return decoder


def _has_room(runtime: Runtime) -> bool:
    """Whether copies of the weights take no more than `COPIES_SHARE` of the device's memory, if it is a GPU."""
    memory = _gpu_bytes(runtime)
    if memory is None:
        return True
    half = _half(runtime)
    weights = [weight for weight in runtime.policy.parameters() if weight.is_floating_point()]
    size = sum(weight.numel() * (2 if half else weight.element_size()) for weight in weights)
    for layer in runtime.policy.modules():
        if isinstance(layer, QuantizedLinear):  # copies are dequantized
            size += layer.in_features * layer.out_features * (2 if half else layer.dtype.itemsize)
    return size <= COPIES_SHARE * memory


def _cache_tokens(runtime: Runtime) -> int:
    """Return the default of `max_kv_tokens`."""
    from rlkit.models.size import cache_tokens

    policy = runtime.policy
    width = 2 if _half(runtime) else next(policy.parameters()).element_size()
    return cache_tokens(policy.config.get_text_config(), width, _gpu_bytes(runtime))


def _prefix_bytes(runtime: Runtime, max_kv_tokens: int) -> int:
    """Return the bytes of keys and values that are kept between turns."""
    from rlkit.models.size import PREFIX_SHARE, kv_bytes

    policy = runtime.policy
    width = 2 if _half(runtime) and runtime.device.type != "cpu" else next(policy.parameters()).element_size()
    return int(PREFIX_SHARE * kv_bytes(policy.config.get_text_config(), max_kv_tokens, width))


def _half(runtime: Runtime) -> bool:
    """Whether autocast computes in 16 bits."""
    with runtime.autocast():
        return torch.is_autocast_enabled(runtime.device.type)


def _gpu_bytes(runtime: Runtime) -> int | None:
    """Return the memory of the device if it is a GPU."""
    is_gpu = runtime.device.type == "cuda"
    return int(torch.cuda.get_device_properties(runtime.device).total_memory) if is_gpu else None
