"""SGLang's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from itertools import chain
from math import isfinite
from typing import Any

from rlkit.engines.server.api import Answer, ServerApi
from rlkit.engines.server.http import SHOWN, UNREADABLE, Client, Fault
from rlkit.engines.server.states import DEADLINES, Step
from rlkit.engines.sglang.launch import release
from rlkit.types import Request, Sampling

BRACKETS_SINCE = (0, 5, 18)
"""From here on an update stands between `begin_weight_update` and `end_weight_update`, and may come in the middle of
requests; before, those start over."""

WEIGHTS, CACHE = "weights", "kv_cache"
RETRACT, ABORT = {"mode": "retract"}, {"mode": "abort"}


class SGLangApi(ServerApi):
    """The calls of an SGLang server."""

    product = "SGLang"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._brackets = True
        self._released = False
        self._requests: set[str] = set()
        """The ids of those that are under way."""

    async def health(self, deadline: float) -> None:
        await self.client.get("/health", deadline)

    async def inspect(self, started: bool) -> None:
        info = await self.client.get("/server_info", 30.0)
        if started:
            with contextlib.suppress(Fault):
                await self.client.post("/freeze_gc", {}, 30.0)  # or it walks all that it has imported at every flush
        self.tensor_parallel = int(info.get("tp_size") or 1)
        self._brackets = release(str(info.get("version"))) >= BRACKETS_SINCE
        self._released = False

    async def weight_version(self) -> str:
        info = await self.client.get("/model_info", 10.0)
        return str(info.get("weight_version"))

    async def perform(self, step: Step, label: str, brackets: bool) -> None:
        brackets = brackets and self._brackets
        if step is Step.BEGIN and not self._brackets and not self._released:
            await self.client.post("/flush_cache", {}, DEADLINES[step])  # such releases crash if anything is cached
        calls: dict[Step, tuple[str, dict[str, Any]] | None] = {
            Step.PAUSE: ("/pause_generation", RETRACT if self._brackets and not self.adapter else ABORT),
            Step.RESUME_WEIGHTS: ("/resume_memory_occupation", {"tags": [WEIGHTS]}),
            Step.BEGIN: ("/begin_weight_update", {}) if brackets else None,
            Step.END: ("/end_weight_update", {}) if brackets else None,
            Step.RESUME_KV: ("/resume_memory_occupation", {"tags": [CACHE]}),
            Step.FLUSH: ("/flush_cache", {}),
            Step.LABEL: ("/update_weight_version", {"new_version": label, "abort_all_requests": False}),
            Step.CONTINUE: ("/continue_generation", {}),
        }
        if (call := calls[step]) is not None:
            await self.client.post(*call, DEADLINES[step])
        if step is Step.RESUME_KV:
            self._released = False

    async def reset(self, deadline: float) -> None:
        for path in ("/end_weight_update", "/continue_generation"):
            try:
                await self.client.post(path, {}, deadline)
            except Fault as fault:
                if fault.status is None:  # with one, it has nothing open
                    raise

    def release(self, deadline: float) -> None:
        self.client.post_now("/pause_generation", RETRACT, deadline)  # SGLang crashes if it is not idle
        self.client.post_now("/release_memory_occupation", {"tags": [WEIGHTS, CACHE]}, deadline)
        self._released = True

    async def generate(self, request: Request) -> Answer:
        sampling = request.sampling
        wanted = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": request.key.hash(),  # read by servers that run deterministic inference
        }
        name = uuid.uuid4().hex
        self._requests.add(name)
        try:
            seconds = request.deadline or DEADLINES[Step.CHECK]
            answer = await self._sample(list(request.tokens), wanted, seconds, rid=name)
        finally:
            self._requests.discard(name)
        return _read(answer, sampling)

    async def abort(self, deadline: float) -> None:
        names = list(self._requests)
        await asyncio.gather(*(self.client.post("/abort_request", {"rid": name}, deadline) for name in names))

    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[Answer]:
        greedy = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        answers = await self._sample(list(map(list, rows)), greedy, deadline, logprob_start_len=0)
        found = []
        for row, answer in zip(rows, answers, strict=True):
            meta = answer["meta_info"]
            scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
            logps = [float("nan") if entry[0] is None else float(entry[0]) for entry in scored]
            found.append(Answer([*row[1:], *answer["output_ids"]], logps))
        return found

    async def logps(self, tokens: list[int], start: int, deadline: float) -> list[float]:
        """Return the log-probs of the tokens from a place on, which is at least 1, at temperature 1."""
        answer = await self._sample(tokens, {"max_new_tokens": 0}, deadline, logprob_start_len=start - 1)
        try:
            scored = answer["meta_info"]["input_token_logprobs"][1:]
            found = [float(logp) for logp, token, _ in scored]
            read = [token for _, token, _ in scored]
        except UNREADABLE as error:
            raise Fault(f"{self.client.url} answered {str(answer)[:SHOWN]}, expected log-probs of the input") from error
        if read != tokens[start:] or not all(map(isfinite, found)):
            raise Fault(f"{self.client.url} has scored other tokens than it was sent, or not all of them", 400)
        return found

    async def top_logps(
        self, tokens: list[int], start: int, count: int, deadline: float
    ) -> list[tuple[list[int], list[float]]]:
        """Return the most likely tokens and their log-probs, `count` in each place from one on, at temperature 1."""
        options = {"logprob_start_len": start - 1, "top_logprobs_num": count}
        answer = await self._sample(tokens, {"max_new_tokens": 0}, deadline, **options)
        try:
            scored = answer["meta_info"]["input_top_logprobs"][1:]
            found = [([int(token) for _, token, _ in some], [float(logp) for logp, *_ in some]) for some in scored]
        except UNREADABLE as error:
            raise Fault(f"{self.client.url} answered {str(answer)[:SHOWN]}, expected the most likely tokens") from error
        whole = len(found) == len(tokens) - start and all(len(set(ids)) == count for ids, _ in found)
        if not whole or not all(map(isfinite, chain.from_iterable(logps for _, logps in found))):
            raise Fault(f"{self.client.url} has returned others than the {count} most likely tokens in each place", 400)
        return found

    async def _sample(self, ids: list[Any], sampling: dict[str, Any], deadline: float, **options: int | str) -> Any:
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "lora_path": self.adapter}
        return await self.client.post("/generate", {**body, **options}, deadline)


def _read(answer: Any, sampling: Sampling) -> Answer:
    """Read an answer.

    One that was aborted in the moment of its last token is whole. One without log-probs was aborted before its first.

    Raises:
        Fault: It ended with an error.
    """
    meta = answer["meta_info"]
    logps = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    tokens = list(map(int, answer["output_ids"]))
    reason = meta["finish_reason"]["type"]
    aborted = reason == "abort" and not meta["finish_reason"].get("status_code")
    if reason not in {"stop", "length"} and not aborted:
        raise Fault(f"the request ended with {meta['finish_reason']}")
    if aborted:
        del tokens[len(logps) :]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    labels = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    stopped = reason == "stop" or (aborted and bool(tokens) and tokens[-1] in sampling.stop_ids)
    whole = stopped or len(tokens) >= sampling.max_tokens
    return Answer(tokens, logps, labels[: len(tokens)], stopped, aborted and not whole)
