"""The sessions of the server: what the records of its journal add up to."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain

from rlkit_tinker.server.journal import JournalRecord
from rlkit_tinker.server.requests import LOAD, PASS, SAMPLE, WireRequest, WireResult, read_request

ROUND_BYTES = 2**20
"""Of the bodies of passes that run together: 40,000 to 60,000 tokens; a larger one runs alone."""
MAX_RESULTS, MAX_RESULT_BYTES = 4096, 256 * 2**20
"""The most results of a session that stay for a further poll, and their bytes; the oldest go first."""


@dataclass(frozen=True)
class SamplerSource:
    """What a sampling session samples from.

    Args:
        folder: The folder of the weights within that of the server; None for the base.
        model_path: Their path, if they have a name.
        version: The request that saved them there, if they have a name.
    """

    folder: str | None = None
    model_path: str | None = None
    version: str | None = None


@dataclass(eq=False)
class ModelLog:
    """The requests of a model, which run in the order of their numbers, whatever order they come in."""

    next_seq: int = 0
    waiting: dict[int, WireRequest] = field(default_factory=dict)

    def ready(self) -> Iterator[WireRequest]:
        """Yield the requests before which none is missing."""
        seq = self.next_seq
        while seq in self.waiting:
            yield self.waiting[seq]
            seq += 1


@dataclass(eq=False)
class ClientSession:
    """The session of a client.

    Args:
        id: Its id, with which those of its models and requests begin.
        tenant: To whom it belongs.
    """

    id: str
    tenant: str
    models: dict[str, ModelLog] = field(default_factory=dict)
    samplers: dict[str, SamplerSource] = field(default_factory=dict)
    pending: dict[str, WireRequest] = field(default_factory=dict)
    """Requests without a result, by their ids."""
    samples: deque[WireRequest] = field(default_factory=deque)
    """Those for samples that have not started."""
    results: dict[str, WireResult] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Of the contents of requests that are pending or have a result."""
    pending_bytes: int = 0
    """Of the bodies of pending requests."""
    result_bytes: int = 0

    def add_request(self, request: WireRequest) -> None:
        """Add a request that was accepted."""
        self.pending[request.id] = request
        self.pending_bytes += len(request.raw)
        self.digests[request.id] = request.digest
        if request.route == SAMPLE:
            self.samples.append(request)
        else:
            self.models.setdefault(request.owner, ModelLog()).waiting[request.seq] = request

    def start(self, request: WireRequest) -> None:
        """Take the next request of a model, which runs."""
        log = self.models[request.owner]
        del log.waiting[request.seq]
        log.next_seq = request.seq + 1

    def add_result(self, request_id: str, result: WireResult) -> None:
        """Add the result of a request."""
        if request_id in self.pending:
            self.pending_bytes -= len(self.pending.pop(request_id).raw)
        self.results[request_id] = result
        self.result_bytes += len(result.content)
        while len(self.results) > MAX_RESULTS or (self.result_bytes > MAX_RESULT_BYTES and len(self.results) > 1):
            oldest = next(iter(self.results))
            self.result_bytes -= len(self.results.pop(oldest).content)
            del self.digests[oldest]

    def records(self, folders: Mapping[str, str]) -> Iterator[JournalRecord]:
        """Yield the records of the session as it is, with the folders of its models' states."""
        yield JournalRecord({"kind": "session", "id": self.id, "tenant": self.tenant})
        for model, log in self.models.items():
            yield JournalRecord({"kind": "model", "id": model, "next_seq": log.next_seq, "folder": folders.get(model)})
        for sampler, source in self.samplers.items():
            yield sampler_record(sampler, source)
        for request in self.pending.values():
            yield request_record(request)
        for request_id, result in self.results.items():
            yield result_record(request_id, result, self.digests[request_id])


def request_record(request: WireRequest) -> JournalRecord:
    """Return the record that a request was accepted."""
    return JournalRecord({"kind": "request", "route": request.route}, request.raw)


def result_record(request_id: str, result: WireResult, digest: str) -> JournalRecord:
    """Return the record of a result."""
    header = {"kind": "result", "id": request_id, "is_json": result.is_json, "digest": digest}
    return JournalRecord(header, result.content)


def sampler_record(sampler: str, source: SamplerSource) -> JournalRecord:
    """Return the record of a new sampling session."""
    return JournalRecord({"kind": "sampler", "id": sampler, "source": asdict(source)})


def session_of(name: str) -> str:
    """Return the session of the id of a model, a sampling session or a request."""
    return name.partition(":")[0]


class Sessions:
    """The sessions; a record that is applied again, after a restart, has the same effect."""

    def __init__(self) -> None:
        self.sessions: dict[str, ClientSession] = {}
        self._passed: dict[str, int] = {}
        """The bytes of passes that have run, by tenants; from the last time on that a tenant had none that waited."""

    def apply(self, record: JournalRecord) -> None:
        """Apply what has happened."""
        header = record.header
        name = header.get("id", "")
        session = self.sessions.get(session_of(name))
        match header["kind"]:
            case "session":
                self.sessions[name] = ClientSession(name, header["tenant"])
            case "end":
                self.sessions.pop(name, None)
            case "request":
                request = read_request(header["route"], record.payload)
                self.sessions[request.session].add_request(request)
            case "round":
                for request in self.requests(header["ids"]):
                    self.sessions[request.session].start(request)
            case "result" if session is not None:
                session.add_result(name, WireResult(record.payload, header["is_json"]))
                session.digests[name] = header["digest"]
            case "sampler" if session is not None:
                session.samplers[name] = SamplerSource(**header["source"])
            case "forget" if session is not None:
                session.samplers.pop(name, None)
            case "model" if session is not None:
                session.models[name] = ModelLog(header["next_seq"])

    def requests(self, ids: Sequence[str]) -> list[WireRequest]:
        """Return requests by their ids."""
        return [self.sessions[session_of(name)].pending[name] for name in ids]

    def next_round(self) -> list[WireRequest]:
        """Return the next requests to run: the commands of each model before its next pass, then some of these passes.

        They are those of the tenants that have had least, so that nobody waits for more than one pass of each other.
        States are loaded after all commands that save some: what is loaded stays as it is until the states of all
        models are saved, since it is loaded once more after a kill before.
        """
        commands: list[WireRequest] = []
        loads: list[WireRequest] = []
        passes: list[WireRequest] = []
        for log in chain.from_iterable(session.models.values() for session in self.sessions.values()):
            for number, request in enumerate(log.ready()):
                if request.route == PASS:
                    passes.append(request)
                    break
                if request.route == LOAD:
                    loads += [request] if number == 0 else []
                    break
                commands.append(request)
        return commands + loads + self._fair(passes)

    def _fair(self, passes: Sequence[WireRequest]) -> list[WireRequest]:
        """Return the passes that run together, of those that wait, and count their bytes."""
        waiting = {request: self.sessions[request.session].tenant for request in passes}
        least = min((self._passed[tenant] for tenant in waiting.values() if tenant in self._passed), default=0)
        passed = self._passed = {tenant: self._passed.get(tenant, least) for tenant in waiting.values()}
        taken: list[WireRequest] = []
        size = 0
        while waiting:
            request = min(waiting, key=lambda request: (passed[waiting[request]], len(request.raw)))
            size += len(request.raw)
            if taken and size > ROUND_BYTES:
                break
            passed[waiting.pop(request)] += len(request.raw)
            taken.append(request)
        return taken

    def start_samples(self, running: Mapping[str, int], max_running: int) -> list[WireRequest]:
        """Remove and return the requests for samples that start now: so many that each tenant has `max_running`."""
        started: list[WireRequest] = []
        counts = Counter(running)
        for session in self.sessions.values():
            while session.samples and counts[session.tenant] < max_running:
                request = session.samples.popleft()
                if request.id in session.pending:  # after a restart it may have its result
                    started.append(request)
                    counts[session.tenant] += 1
        return started

    def records(self, folders: Mapping[str, str]) -> Iterator[JournalRecord]:
        """Yield the records of everything as it is."""
        for session in self.sessions.values():
            yield from session.records(folders)

    def pending_bytes(self, tenant: str) -> int:
        """Return the bytes of the bodies of a tenant's requests that have no result."""
        return sum(session.pending_bytes for session in self.sessions.values() if session.tenant == tenant)


def sampling_session_of(result: WireResult) -> str | None:
    """Return the sampling session that a result of `save_weights_for_sampler` has made."""
    name: str | None = json.loads(result.content).get("sampling_session_id")
    return name
