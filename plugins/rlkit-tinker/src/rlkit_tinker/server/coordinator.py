"""The order of work: requests are accepted into the journal, run in rounds, and answered from it."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from rlkit.base.errors import RlkitError, show
from rlkit_tinker.server.executor import ServiceExecutor, snapshot_folder
from rlkit_tinker.server.journal import Journal, JournalRecord
from rlkit_tinker.server.requests import CREATE, LOAD, PASS, SAMPLE, SAVE_SAMPLER, STEP, WireRequest, WireResult
from rlkit_tinker.server.state import (
    ClientSession,
    SamplerSource,
    Sessions,
    request_record,
    result_record,
    sampler_record,
    sampling_session_of,
    session_of,
)
from rlkit_tinker.server.usage import Usage

T = TypeVar("T")

GATHER_SECONDS = 0.003
"""In which requests that come together are gathered into one round."""
MAX_SAMPLING = 128
"""The most requests for samples of a tenant that run at once."""
MAX_SNAPSHOTS = 64
"""The most sampling sessions of a session; the one that was used longest ago goes first."""
MAX_PENDING = 8192
"""The most requests of a session without a result."""
MAX_AHEAD = 4096
"""How far the number of a model's request may be ahead of the next to run."""
COMPACT_BYTES = 64 * 2**20
"""How much a journal grows before it is compacted."""
COMPACT_PASSES = 256
"""How many passes would run again after a kill before states are saved."""
STATES = "states-"
"""The beginning of the names of folders with the states of models."""


class RefusedError(RlkitError):
    """A request that is answered by an HTTP status; it has no future.

    Args:
        message: What was sent, and what was expected.
        status: The status: the SDK sends a request again after 408, 409, 429 and 5xx.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Coordinator:
    """Accepts requests and runs them; used on one event loop.

    Args:
        journal: Where everything that happens is written before it shows.
        executor: Runs requests.
        folder: The folder of the server.
    """

    def __init__(self, journal: Journal, executor: ServiceExecutor, folder: Path) -> None:
        self.state = Sessions()
        self.usage = Usage()
        self._journal = journal
        self._executor = executor
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlkit-tinker")
        self.round = asyncio.Lock()
        """Held by a round until it need not run again after a kill; states that it may load are removed between."""
        self._wake = asyncio.Event()
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._sampling: dict[str, str] = {}
        """The tenants of the requests for samples that run."""
        self._passes = 0
        """Since states were saved."""
        self._compacted_size = 0

    def recover(self) -> None:
        """Restore everything from the journal; passes and steps since states were saved run again."""
        records, self._journal.records = self._journal.records, []
        answered = {record.header["id"] for record in records if record.header["kind"] == "result"}
        new_results: dict[str, WireResult] = {}
        for record in records:
            header = record.header
            if header["kind"] == "round":
                requests = [r for r in self.state.requests(header["ids"]) if _trains(r) or r.id not in answered]
                results = self._executor.run_round(requests, self._tenants(requests))
                self._passes += len(requests)
                for request, result in zip(requests, results, strict=True):
                    if request.id not in answered:
                        new_results[request.id] = result
            elif header["kind"] == "model":
                folder = header["folder"]
                self._executor.restore(header["id"], None if folder is None else self._folder / folder)
            elif header["kind"] == "end":
                self._free(self.state.sessions[header["id"]])
            elif header["kind"] == "forget":
                self._executor.forget(self.state.sessions[session_of(header["id"])].samplers[header["id"]])
            self.state.apply(record)
        for request_id, result in new_results.items():
            self._add_result(request_id, result)

    def open_session(self, session: str, tenant: str) -> None:
        """Open a session."""
        self._commit(JournalRecord({"kind": "session", "id": session, "tenant": tenant}))

    def session(self, name: str, tenant: str, status: int = 404) -> ClientSession:
        """Return a tenant's session by its id, or by that of anything in it.

        Raises:
            RefusedError: The tenant has no such session; another's is as if it were not there.
        """
        session = self.state.sessions.get(session_of(name))
        if session is None or session.tenant != tenant:
            raise RefusedError(f"there is no session of {show(name, 80)}, or it has ended; create another", status)
        return session

    async def end_session(self, session: ClientSession) -> None:
        """End a session, unless it has ended: its models' slots are free after the round that runs."""
        if self.state.sessions.get(session.id) is not session:
            return
        self._commit(JournalRecord({"kind": "end", "id": session.id}))
        for request_id in session.pending:
            self._notify(request_id)
        await self._in_thread(lambda: self._free(session))

    async def submit(self, request: WireRequest, tenant: str) -> None:
        """Accept a request, unless it was accepted before.

        Raises:
            RefusedError: It belongs to no model or sampling session of the tenant, or its number was used otherwise.
        """
        session = self.session(request.owner, tenant)
        if request.id in session.digests:
            if session.digests[request.id] != request.digest:
                raise RefusedError(f"the request {request.id} was sent before with another content", 400)
        else:
            self._check_new(session, request)
            self._commit(request_record(request))
            self._wake.set()
        await self._journal.sync()

    def _check_new(self, session: ClientSession, request: WireRequest) -> None:
        owner, log = request.owner, session.models.get(request.owner)
        if request.route == SAMPLE and owner not in session.samplers:
            raise RefusedError(f"there is no sampling session {show(owner, 80)}; create another", 404)
        if request.route not in (SAMPLE, CREATE, LOAD) and log is None:
            raise RefusedError(f"there is no model {show(owner, 80)}; create another", 404)
        next_seq = 0 if log is None else log.next_seq
        if request.route != SAMPLE and not next_seq <= request.seq <= next_seq + MAX_AHEAD:
            raise RefusedError(f"seq_id is {request.seq}, expected {next_seq} to {next_seq + MAX_AHEAD}", 400)
        if len(session.pending) >= MAX_PENDING:
            raise RefusedError(f"the session has {MAX_PENDING} requests without a result; wait for some", 429)

    async def add_sampler(self, name: str, source: SamplerSource, session: ClientSession) -> None:
        """Open a sampling session, unless it is open.

        Raises:
            RefusedError: The name was used for another source.
            RequestFailedError: The source cannot be loaded.
        """
        if session.samplers.get(name, source) != source:
            raise RefusedError(f"the sampling session {name} was created before with another model", 400)
        if name not in session.samplers:
            await self._in_thread(lambda: self._executor.check_source(source))
            self._commit(sampler_record(name, source))
            await self._journal.sync()

    async def retrieve(self, request_id: str, session: ClientSession, seconds: float) -> WireResult | None:
        """Return the result of a request; None if there is none within some seconds.

        Raises:
            RefusedError: The session has no such request.
        """
        if request_id in session.pending:
            arrival = self._arrivals.setdefault(request_id, asyncio.get_running_loop().create_future())
            await asyncio.wait((arrival,), timeout=seconds)
        if request_id in session.results:
            return session.results[request_id]
        if request_id in session.pending and session.id in self.state.sessions:
            return None
        raise RefusedError(f"there is no result of {show(request_id, 80)} any more; send the request again", 410)

    async def run(self) -> None:
        """Run what was accepted, for ever.

        Raises:
            JournalError: Nothing can be written any more.
        """
        if self._passes:  # they ran again
            await self.compact()
        while True:
            self._wake.clear()
            requests = self.state.next_round()
            if requests:
                await self._run_round(requests)
            await self._advance_samples()
            if not requests and not self._sampling:
                await self._wake.wait()
                await asyncio.sleep(GATHER_SECONDS)
            if self._passes >= COMPACT_PASSES or self._journal.size > 2 * self._compacted_size + COMPACT_BYTES:
                await self.compact()

    async def _run_round(self, requests: Sequence[WireRequest]) -> None:
        async with self.round:
            self._commit(JournalRecord({"kind": "round", "ids": [request.id for request in requests]}))
            tenants = self._tenants(requests)
            await self._answer(requests, partial(self._executor.run_round, requests, tenants))
            if any(request.route == LOAD for request in requests):  # what was loaded may be removed from now on
                await self.compact()

    async def _advance_samples(self) -> None:
        """Start the next requests for samples, and answer those that are finished after some tokens of each."""
        samples = self.state.start_samples(Counter(self._sampling.values()), MAX_SAMPLING)
        sources = [self._use_sampler(request) for request in samples]
        tenants = self._tenants(samples)
        self._sampling |= {request.id: tenant for request, tenant in zip(samples, tenants, strict=True)}
        if not self._sampling:
            return
        results = await self._in_thread(partial(self._executor.advance_samples, samples, tenants, sources))
        for request_id, result in results.items():
            del self._sampling[request_id]
            self._add_result(request_id, result)
            self._notify(request_id)

    async def compact(self) -> None:
        """Save the states of all models, and replace the journal by the records of what there is now."""
        earlier = list(self._folder.glob(f"{STATES}*"))
        folder = self._folder / f"{STATES}{uuid4().hex[:12]}"
        folders = await self._in_thread(lambda: self._executor.save_models(folder))
        await self._journal.replace(self.state.records(folders))
        self._passes, self._compacted_size = 0, self._journal.size
        for states in earlier:
            shutil.rmtree(states, ignore_errors=True)

    async def close(self) -> None:
        """Wait for the round that runs, and close the journal."""
        await asyncio.to_thread(self._thread.shutdown)
        self._journal.close()

    async def _answer(self, requests: Sequence[WireRequest], run: Callable[[], list[WireResult]]) -> None:
        """Run requests, and let their results show once they are written."""
        results = await self._in_thread(run)
        self._passes += sum(request.route == PASS for request in requests)
        for request, result in zip(requests, results, strict=True):
            self._add_result(request.id, result)
        for request in requests:
            self._notify(request.id)

    def _add_result(self, request_id: str, result: WireResult) -> None:
        session = self.state.sessions.get(session_of(request_id))
        if session is None:  # it has ended meanwhile
            return
        request = session.pending[request_id]
        self.usage.count(session.tenant, request, result)
        sampler = sampling_session_of(result) if request.route == SAVE_SAMPLER else None
        if sampler is not None:
            self._forget_oldest(session)
            self._commit(sampler_record(sampler, SamplerSource(snapshot_folder(request))))
        self._commit(result_record(request_id, result, session.digests[request_id]))

    def _use_sampler(self, request: WireRequest) -> SamplerSource | None:
        samplers = self.state.sessions[request.session].samplers
        source = samplers.pop(request.owner, None)
        if source is not None:
            samplers[request.owner] = source  # the youngest now
        return source

    def _forget_oldest(self, session: ClientSession) -> None:
        snapshots = [name for name, source in session.samplers.items() if source.model_path is None and source.folder]
        for name in snapshots[: max(0, len(snapshots) - MAX_SNAPSHOTS + 1)]:
            source = session.samplers[name]
            self._commit(JournalRecord({"kind": "forget", "id": name}))
            self._thread.submit(self._executor.forget, source)

    def _tenants(self, requests: Sequence[WireRequest]) -> list[str]:
        return [self.state.sessions[request.session].tenant for request in requests]

    def _free(self, session: ClientSession) -> None:
        self._executor.cancel_samples(session.id)
        for model in session.models:
            self._executor.free(model)

    def _commit(self, record: JournalRecord) -> None:
        self._journal.append(record)
        self.state.apply(record)

    def _notify(self, request_id: str) -> None:
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            arrival.set_result(None)

    def _in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


def _trains(request: WireRequest) -> bool:
    """Whether a request changes the state of a model."""
    if request.route == PASS:
        return not request.body.forward_only
    return request.route in (CREATE, LOAD, STEP)
