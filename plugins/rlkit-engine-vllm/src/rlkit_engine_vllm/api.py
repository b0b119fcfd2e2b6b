"""vLLM's endpoints."""

from __future__ import annotations

import asyncio
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import replace

from rlkit_servers.api import ServerOutput, candidates_of
from rlkit_servers.http import Client, Fault
from rlkit_servers.routes import ARGUMENT as ROUTES
from rlkit_servers.routes import routes_of_npy
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.teacher import TeacherApi

from rlkit.base.errors import EngineError
from rlkit.interfaces.engine import schema_of
from rlkit.interfaces.teacher import TokenSpan, TopTokens
from rlkit.types import JsonObject, Request, Sampling
from rlkit_engine_vllm.launch import SECOND_RUNNER, STRUCTURES, check_release

GENERATE = "/inference/v1/generate"
LARGEST_SEED = (1 << 63) - 1


class VllmApi(TeacherApi):
    """The calls of a vLLM server.

    Args:
        client: Sends the calls.
        structures: Whether the server must follow `sampling.structure`.
    """

    product = "vLLM"

    def __init__(self, client: Client, structures: bool = False) -> None:
        super().__init__(client)
        self._structures = structures
        self._requests: set[str] = set()
        """Ids of the requests in flight."""

    async def health(self, deadline: float) -> None:
        await self.client.get("/health", deadline)

    async def inspect(self, started: bool) -> None:
        info = await self.client.get("/version", 30.0)
        check_release(str(info.get("version")))
        if not started and (self._structures or self.routers is not None):
            await self._check_switches()
        try:
            await self.client.post("/init_weight_transfer_engine", {"init_info": {}}, 30.0)
        except Fault as fault:
            if fault.status is None:
                raise
            raise EngineError(
                f"vLLM server {self.client.url} takes no weights from rlkit ({fault}); start it as the README of "
                "rlkit-engine-vllm says"
            ) from fault

    async def _check_switches(self) -> None:
        """Refuse a server whose configuration says that it does not follow structures, or returns no experts.

        Raises:
            EngineError: It does not do what the recipe needs.
        """
        try:
            info = await self.client.get("/server_info?config_format=json", 60.0)
        except Fault as fault:
            if fault.status is None or self._structures:
                raise
            return  # outside of the development mode; the first response tells
        config = info["vllm_config"]
        if self._structures:
            reads_no_text = config["model_config"]["skip_tokenizer_init"]
            if reads_no_text or config["structured_outputs_config"]["backend"] != "guidance":
                raise EngineError(
                    f"launch.structures is true, but vLLM server {self.client.url} does not follow structures by "
                    f"llguidance; start it with {shlex.join(STRUCTURES)} and without --tokens-only"
                )
        returns_routes = (config.get("aux_output_config") or {}).get("enable_return_routed_experts")
        has_second_runner = (info.get("vllm_env") or {}).get(SECOND_RUNNER) not in (False, "0")
        if self.routers is not None and not (returns_routes and has_second_runner):
            raise self._no_routes()

    def _no_routes(self) -> EngineError:
        return EngineError(
            f"vLLM server {self.client.url} returns no experts of its tokens: start it with {ROUTES} and "
            f"{SECOND_RUNNER}=1, or set train.router_replay: false"
        )

    async def weight_version(self) -> str:
        info = await self.client.get("/weight_info", 10.0)
        return str(info.get("weight_version"))

    async def perform(self, step: UpdateStep, label: str, brackets: bool) -> None:
        calls: dict[UpdateStep, tuple[str, JsonObject]] = {
            UpdateStep.PAUSE: ("/pause?mode=keep", {}),
            UpdateStep.RESUME_WEIGHTS: ("/wake_up?tags=weights", {}),
            UpdateStep.BEGIN: ("/start_weight_update", {}),
            UpdateStep.END: ("/finish_weight_update", {}),
            UpdateStep.RESUME_KV: ("/wake_up?tags=kv_cache", {}),
            UpdateStep.FLUSH: ("/reset_prefix_cache?reset_running_requests=true", {}),
            UpdateStep.LABEL: ("/update_weight_version", {"new_version": label}),
            UpdateStep.CONTINUE: ("/resume", {}),
        }
        await self.client.post(*calls[step], DEADLINES[step])

    async def reset(self, deadline: float) -> None:
        try:
            await self.client.post("/finish_weight_update", {}, deadline)
        except Fault as fault:
            if fault.status is None:
                raise
            await self.client.finish()  # no update was open; vLLM closes a connection after an error of its workers
        await self.client.post("/resume", {}, deadline)

    def release(self, deadline: float) -> None:
        self.client.post_now("/sleep?level=2&mode=abort", {}, deadline)

    async def generate(self, request: Request) -> ServerOutput:
        sampling = request.sampling
        params: JsonObject = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "logprobs": sampling.top_k,
            "stop_token_ids": list(sampling.stop_ids),
            # by position: vLLM draws the noise of each request anew from its seed
            "seed": (request.key.hash() + len(request.tokens)) & LARGEST_SEED,
        }
        if sampling.structure is not None:
            regex = sampling.structure.regex
            form = {"json": schema_of(sampling.structure)} if regex is None else {"regex": regex}
            params["structured_outputs"] = form
        if self.routers is not None and request.routes_from is not None:
            if sampling.truncates:
                raise EngineError(
                    "vLLM returns the experts of tokens by its second model runner, whose log-probs are not those of "
                    "the full softmax where sampling truncates; set train.router_replay: false, or top_p: 1, top_k: 0, "
                    "min_p: 0 and no structure"
                )
            params["routed_experts_prompt_start"] = request.routes_from
        request_id = uuid.uuid4().hex
        self._requests.add(request_id)
        try:
            seconds = request.deadline or DEADLINES[UpdateStep.CHECK]
            response = await self._sample(request.tokens, params, seconds, request_id)
        except Fault as fault:
            if sampling.top_k and "greater than max allowed" in str(fault):
                raise EngineError(f"{fault}; start vLLM server {self.client.url} with --max-logprobs -1") from fault
            raise
        finally:
            self._requests.discard(request_id)
        output = _read(response, sampling)
        if self.routers is None or request.routes_from is None or not output.tokens:
            return output
        encoded = response["choices"][0].get("routed_experts")
        if encoded is None and output.aborted:
            return output
        if encoded is None:
            raise self._no_routes()
        routes = routes_of_npy(encoded, self.routers, request, len(output.tokens), output.aborted)
        return replace(output, expert_routes=routes)

    async def abort(self, deadline: float) -> None:
        ids = [f"generate-tokens-{request_id}" for request_id in self._requests]
        if ids:
            await self.client.post("/abort_requests", {"request_ids": ids}, deadline)

    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[ServerOutput]:
        params = {"temperature": 0.0, "max_tokens": count, "prompt_logprobs": 0}
        responses = await asyncio.gather(*(self._sample(row, params, deadline) for row in rows))
        outputs = []
        for row, response in zip(rows, responses, strict=True):
            tokens, logps = _sampled(response)
            scored = self.read_scored(response, TokenSpan(list(row), 1))
            outputs.append(ServerOutput([*scored.ids, *tokens], [*scored.logps, *logps]))
        return outputs

    async def score(self, span: TokenSpan, count: int, deadline: float) -> JsonObject:
        return await self._sample(span.tokens, {"max_tokens": 1, "prompt_logprobs": count}, deadline)

    def read_scored(self, response: JsonObject, span: TokenSpan) -> TopTokens:
        positions = list(zip(span.tokens, response["prompt_logprobs"], strict=True))[span.start :]
        logps = [float(candidates[str(token)]["logprob"]) for token, candidates in positions]
        return TopTokens(span.tokens[span.start :], logps)

    def read_top(self, response: JsonObject, span: TokenSpan, count: int) -> list[TopTokens]:
        top = []
        for candidates in response["prompt_logprobs"][span.start :]:
            ranked = sorted(candidates.items(), key=lambda item: int(item[1]["rank"]))[:count]
            top.append(TopTokens([int(token) for token, _ in ranked], [float(x["logprob"]) for _, x in ranked]))
        return top

    async def _sample(
        self, tokens: Sequence[int], params: JsonObject, deadline: float, request_id: str | None = None
    ) -> JsonObject:
        body: JsonObject = {
            "request_id": request_id or uuid.uuid4().hex,
            "token_ids": list(tokens),
            "sampling_params": {"logprobs": 0, "detokenize": False, "ignore_eos": True, **params},
        }
        if self.adapter is not None:
            body["model"] = self.adapter
        response: JsonObject = await self.client.post(GENERATE, body, deadline)
        return response


def _sampled(response: JsonObject) -> tuple[list[int], list[float]]:
    """Return the tokens that a response has sampled, and their log-probs."""
    [choice] = response["choices"]
    tokens = [int(token) for token in choice["token_ids"] or ()]
    content = (choice["logprobs"] or {}).get("content") or ()
    return tokens, [float(entry["logprob"]) for entry in content]


def _read(response: JsonObject, sampling: Sampling) -> ServerOutput:
    """Return the output in a response.

    Raises:
        Fault: The request ended with an error.
    """
    tokens, logps = _sampled(response)
    [choice] = response["choices"]
    reason = choice["finish_reason"]
    if reason not in {"stop", "length", "abort"}:
        raise Fault(f"the request ended with {reason}")
    spans = choice["weight_versions"] or ()
    labels = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    stopped = bool(tokens) and tokens[-1] in sampling.stop_ids
    complete = stopped or len(tokens) >= sampling.max_tokens
    candidates: list[Sequence[int]] = []
    if sampling.top_k and tokens:
        top = [sorted(entry["top_logprobs"], key=lambda x: -x["logprob"]) for entry in choice["logprobs"]["content"]]
        ids = [[entry["token_id"] for entry in entries] for entries in top]
        top_logps = [[entry["logprob"] for entry in entries] for entries in top]
        try:
            candidates, masses = candidates_of(tokens, ids, top_logps, sampling)
        except ValueError as error:
            raise Fault(f"vLLM sampled otherwise than it was asked to: {error}", 400) from error
        logps = [logp - mass for logp, mass in zip(logps, masses, strict=True)]
    return ServerOutput(tokens, logps, labels, stopped, reason == "abort" and not complete, candidates)
