"""The task that serves requests: it admits waiting rows, lets them be sampled, and resolves those that end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from rlkit.base.errors import EngineError
from rlkit.types import Completion, StopReason
from rlkit_engine_torch.batch import DecodeBatch, Row
from rlkit_engine_torch.queue import RequestQueue
from rlkit_engine_torch.samplers import Sampler
from rlkit_engine_torch.worker import Worker


class DecodeLoop:
    """Serves requests as long as there are any.

    Args:
        policy: The model that is sampled from.
        device: The model's device.
        sampler: Samples rows.
        queue: Holds the waiting rows.
        worker: Runs the sampler.
    """

    def __init__(
        self, policy: nn.Module, device: torch.device, sampler: Sampler, queue: RequestQueue, worker: Worker
    ) -> None:
        self.sampler = sampler
        self.batch = sampler.new_batch(device)
        self._policy = policy
        self._device = device
        self._queue = queue
        self._worker = worker
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether requests are being served."""
        return self._task is not None and not self._task.done()

    def add(self, row: Row) -> None:
        """Queue a row, and serve it from now on."""
        self._queue.waiting.append(row)
        if not self.running:
            self._queue.interrupting = False
            self._task = asyncio.create_task(self._serve())

    def note_cancelled(self) -> None:
        """Let the batch look for rows whose futures were cancelled."""
        self.batch.cancelled = True

    async def _serve(self) -> None:
        """Serve requests until none waits; a failure is raised in all of them."""
        queue = self._queue
        self.batch = batch = self.sampler.new_batch(self._device)
        joined: list[Row] = []
        try:
            await asyncio.sleep(0)  # requests of one moment are admitted together
            with _eval(self._policy):
                while batch.rows or queue.waiting:
                    if queue.wait_idle is not None:
                        await asyncio.sleep(0)  # conversations whose requests have ended are busy from now on
                        await queue.wait_idle()
                        queue.sort()
                    if queue.interrupting:
                        await self._interrupt(batch)
                        continue
                    joined = self.sampler.select(batch.rows)
                    for row in await self._worker.run_steps(partial(self.sampler.run, batch, joined)):
                        row.resolve()
        except Exception as error:
            failure = EngineError(f"TorchEngine failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            for row in (*batch.rows, *joined, *queue.waiting):
                if not row.future.done():
                    row.future.set_exception(failure)
            queue.waiting.clear()
        finally:
            self.batch = self.sampler.new_batch(self._device)  # the old one keeps memory of its recordings
            self.sampler.release()

    async def _interrupt(self, batch: DecodeBatch) -> None:
        """End all requests as they are."""
        self._queue.interrupting = False
        waiting = self._queue.take_all()
        for row in waiting:
            row.completion = Completion([], [], [], StopReason.INTERRUPTED)

        def interrupt() -> list[Row]:
            ended = batch.interrupt()
            self.sampler.compact(batch)
            return ended

        for row in (*await self._worker.run_steps(interrupt), *waiting):
            row.resolve()


@contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    """Disable dropout, whatever mode the trainer left the model in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
