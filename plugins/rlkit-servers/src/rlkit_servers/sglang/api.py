"""SGLang's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlkit.base.errors import EngineError
from rlkit.interfaces.engine import schema_of
from rlkit.interfaces.teacher import TokenSpan, TopTokens
from rlkit.types import JsonObject, Request, Sampling
from rlkit_servers.api import ServerOutput, candidates_of
from rlkit_servers.http import Client, Fault
from rlkit_servers.routes import ARGUMENT as ROUTES
from rlkit_servers.routes import routes_of_bytes
from rlkit_servers.sglang.launch import release
from rlkit_servers.sglang.pictures import FIRST_RELEASE, RequestPictures
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.teacher import TeacherApi

BRACKETS_SINCE = (0, 5, 18)
"""The first release with `begin_weight_update` and `end_weight_update`, whose updates may come in the middle of
requests; in earlier releases requests start over."""

WEIGHTS, CACHE = "weights", "kv_cache"
RETRACT, ABORT = {"mode": "retract"}, {"mode": "abort"}


class SGLangApi(TeacherApi):
    """The calls of an SGLang server.

    Args:
        client: Sends the calls.
        pictures: Writes pictures into requests; None for a model of texts alone.
    """

    product = "SGLang"

    def __init__(self, client: Client, pictures: RequestPictures | None = None) -> None:
        super().__init__(client)
        self._pictures = pictures
        self._brackets = True
        self._released = False
        self._follows_structures = False
        self._requests: set[str] = set()
        """Ids of the requests in flight."""

    async def health(self, deadline: float) -> None:
        await self.client.get("/health", deadline)

    async def inspect(self, started: bool) -> None:
        info = await self.client.get("/server_info", 30.0)
        if started:
            with contextlib.suppress(Fault):
                await self.client.post(
                    "/freeze_gc", {}, 30.0
                )  # or every flush collects garbage among all that is imported
        self.tensor_parallel = int(info.get("tp_size") or 1)
        version = release(str(info.get("version")))
        if self._pictures is not None and version < FIRST_RELEASE:
            first = ".".join(map(str, FIRST_RELEASE))
            raise EngineError(f"{self.client.url} runs SGLang {info['version']}; pictures need {first} or later")
        if self.routers is not None and not info.get("enable_return_routed_experts"):
            raise EngineError(
                f"{self.client.url} does not return the experts of its tokens: start it with {ROUTES}, or set "
                "train.router_replay: false"
            )
        self._brackets = version >= BRACKETS_SINCE
        self._follows_structures = info.get("grammar_backend") == "llguidance" and not info.get("skip_tokenizer_init")
        self._released = False

    async def weight_version(self) -> str:
        info = await self.client.get("/model_info", 10.0)
        return str(info.get("weight_version"))

    async def perform(self, step: UpdateStep, label: str, brackets: bool) -> None:
        brackets = brackets and self._brackets
        if step is UpdateStep.BEGIN and not self._brackets and not self._released:
            await self.client.post("/flush_cache", {}, DEADLINES[step])  # these releases crash if anything is cached
        calls: dict[UpdateStep, tuple[str, JsonObject] | None] = {
            UpdateStep.PAUSE: ("/pause_generation", RETRACT if self._brackets and not self.adapter else ABORT),
            UpdateStep.RESUME_WEIGHTS: ("/resume_memory_occupation", {"tags": [WEIGHTS]}),
            UpdateStep.BEGIN: ("/begin_weight_update", {}) if brackets else None,
            UpdateStep.END: ("/end_weight_update", {}) if brackets else None,
            UpdateStep.RESUME_KV: ("/resume_memory_occupation", {"tags": [CACHE]}),
            UpdateStep.FLUSH: ("/flush_cache", {}),
            UpdateStep.LABEL: ("/update_weight_version", {"new_version": label, "abort_all_requests": False}),
            UpdateStep.CONTINUE: ("/continue_generation", {}),
        }
        call = calls[step]
        if call is not None:
            await self.client.post(*call, DEADLINES[step])
        if step is UpdateStep.RESUME_KV:
            self._released = False

    async def reset(self, deadline: float) -> None:
        for path in ("/end_weight_update", "/continue_generation"):
            try:
                await self.client.post(path, {}, deadline)
            except Fault as fault:
                if fault.status is None:  # a status means that nothing is open
                    raise

    def release(self, deadline: float) -> None:
        self.client.post_now("/pause_generation", RETRACT, deadline)  # SGLang crashes unless it is idle
        self.client.post_now("/release_memory_occupation", {"tags": [WEIGHTS, CACHE]}, deadline)
        self._released = True

    async def generate(self, request: Request) -> ServerOutput:
        sampling = request.sampling
        params: JsonObject = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": request.key.hash(),  # read by servers that run deterministic inference
        }
        if sampling.structure is not None:
            if not self._follows_structures:
                raise EngineError(
                    f"{self.client.url} follows no sampling.structure; start it with --grammar-backend llguidance and "
                    "without --skip-tokenizer-init"
                )
            regex = sampling.structure.regex
            params |= {"json_schema": schema_of(sampling.structure)} if regex is None else {"regex": regex}
        inputs: JsonObject = {"input_ids": list(request.tokens)}
        if request.media is not None:
            if self._pictures is None:
                raise Fault("the request has pictures, but the model reads texts alone", 400)
            inputs = await self._pictures.fields(request.tokens, request.media)
        request_id = uuid.uuid4().hex
        self._requests.add(request_id)
        try:
            seconds = request.deadline or DEADLINES[UpdateStep.CHECK]
            options: JsonObject = {"top_logprobs_num": sampling.top_k} if sampling.top_k else {}
            if self.routers is not None and request.routes_from is not None:
                options |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
            response = await self._sample(params, seconds, **inputs, **options, rid=request_id)
        finally:
            self._requests.discard(request_id)
        output = _read(response, sampling)
        if self.routers is not None and request.routes_from is not None and output.tokens:
            encoded = response["meta_info"].get("routed_experts")
            if encoded is not None or not output.aborted:
                routes = routes_of_bytes(encoded, self.routers, request, len(output.tokens), output.aborted)
                output = replace(output, expert_routes=routes)
        length = response["meta_info"].get("prompt_tokens")
        if request.media is not None and output.tokens and length != len(request.tokens):
            raise Fault(
                f"{self.client.url} reads a prompt with pictures as {length} tokens, expected {len(request.tokens)}: "
                "its processor of images is not the trainer's",
                400,
            )
        return output

    async def abort(self, deadline: float) -> None:
        calls = [self.client.post("/abort_request", {"rid": rid}, deadline) for rid in self._requests]
        await asyncio.gather(*calls)

    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[ServerOutput]:
        greedy = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        responses = await self._sample(greedy, deadline, input_ids=list(map(list, rows)), logprob_start_len=0)
        outputs = []
        for row, response in zip(rows, responses, strict=True):
            meta = response["meta_info"]
            entries = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
            logps = [float("nan") if entry[0] is None else float(entry[0]) for entry in entries]
            outputs.append(ServerOutput([*row[1:], *response["output_ids"]], logps))
        return outputs

    async def score(self, span: TokenSpan, count: int, deadline: float) -> Any:
        options: JsonObject = {"input_ids": span.tokens, "logprob_start_len": span.start - 1}
        options |= {"top_logprobs_num": count} if count else {}
        return await self._sample({"max_new_tokens": 0}, deadline, **options)

    def read_scored(self, response: Any, span: TokenSpan) -> TopTokens:
        return _entries(response["meta_info"]["input_token_logprobs"][1:])

    def read_top(self, response: Any, span: TokenSpan, count: int) -> list[TopTokens]:
        return [_entries(position) for position in response["meta_info"]["input_top_logprobs"][1:]]

    async def _sample(self, sampling: JsonObject, deadline: float, **options: object) -> Any:
        body = {"sampling_params": sampling, "return_logprob": True, "lora_path": self.adapter}
        return await self.client.post("/generate", {**body, **options}, deadline)


def _entries(entries: Sequence[Any]) -> TopTokens:
    """Return the tokens in SGLang's triples of log-prob, id and text."""
    return TopTokens([int(token) for _, token, _ in entries], [float(logp) for logp, *_ in entries])


def _read(response: JsonObject, sampling: Sampling) -> ServerOutput:
    """Return the output in a response.

    An output that was aborted at its last token is complete. One without log-probs was aborted before its first token.

    Raises:
        Fault: The request ended with an error.
    """
    meta = response["meta_info"]
    logps = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    tokens = list(map(int, response["output_ids"]))
    reason = meta["finish_reason"]["type"]
    aborted = reason == "abort" and not meta["finish_reason"].get("status_code")
    if reason not in {"stop", "length"} and not aborted:
        raise Fault(f"the request ended with {meta['finish_reason']}")
    if aborted:
        del tokens[len(logps) :]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    labels = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    stopped = reason == "stop" or (aborted and bool(tokens) and tokens[-1] in sampling.stop_ids)
    complete = stopped or len(tokens) >= sampling.max_tokens
    candidates: list[Sequence[int]] = []
    if sampling.top_k and tokens:
        top = meta["output_top_logprobs"][: len(tokens)]
        ids = [[entry[1] for entry in entries] for entries in top]
        top_logps = [[-math.inf if entry[0] is None else entry[0] for entry in entries] for entries in top]
        try:
            candidates, masses = candidates_of(tokens, ids, top_logps, sampling)
        except ValueError as error:
            raise Fault(f"SGLang sampled otherwise than it was asked to: {error}", 400) from error
        logps = [logp - mass for logp, mass in zip(logps, masses, strict=True)]
    return ServerOutput(tokens, logps, labels[: len(tokens)], stopped, aborted and not complete, candidates)
