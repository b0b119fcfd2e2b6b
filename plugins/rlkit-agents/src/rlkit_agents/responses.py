"""OpenAI's responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

from rlkit.types import JsonObject, Message
from rlkit_agents.body import arguments_of, function_tool, of_type, optional, text_of, token_limit
from rlkit_agents.content import content_of
from rlkit_agents.dialect import Dialect, Recall, event, ignored, pieces, required, tool_choice, tools_of
from rlkit_agents.request import Answer, Call, ChatRequest, RequestError, assistant, name_results

READ = {"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id", "stream"}
PREFIX = "resp_"


class Responses(Dialect):
    """`POST /v1/responses`."""

    def read(self, body: JsonObject, recall: Recall) -> ChatRequest:
        previous = optional(body.get("previous_response_id"), "", "previous_response_id")
        messages = recall(previous.removeprefix(PREFIX)).messages if previous else []
        instructions = optional(body.get("instructions"), "", "instructions")
        if instructions:  # they replace those of earlier responses
            messages = [{"role": "system", "content": instructions}, *_without_system(messages)]
        items, choice = required(body, "input"), tool_choice(body)
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for item in of_type(items, (list, str), "input"):
            _append(messages, of_type(item, dict, "an element of input"))
        if not messages:
            raise RequestError("input is empty, expected at least one message")
        return ChatRequest(
            name_results(messages),
            [function_tool(tool) for tool in tools_of(body)],
            choice != "none",
            token_limit(body.get("max_output_tokens"), "max_output_tokens"),
            stream=optional(body.get("stream"), False, "stream"),
            model=of_type(required(body, "model"), str, "model"),
            ignored=ignored(body, READ, choice),
        )

    def write(self, answer: Answer, request: ChatRequest) -> JsonObject:
        output = [_message_item(answer)] if answer.text or not answer.calls else []
        return _response(answer, request, [*output, *(_call_item(call) for call in answer.calls)])

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        body, numbers = self.write(answer, request), count()

        def send(kind: str, **fields: object) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        started = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield send("response.created", response=started)
        yield send("response.in_progress", response=started)
        for index, item in enumerate(body["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            empty: JsonObject = {"content": []} if item["type"] == "message" else {"arguments": ""}
            opening = {**item, "status": "in_progress", **empty}
            yield send("response.output_item.added", output_index=index, item=opening)
            if item["type"] == "message":
                part = item["content"][0]
                at["content_index"] = 0
                yield send("response.content_part.added", **at, part={**part, "text": ""})
                for piece in pieces(part["text"]):
                    yield send("response.output_text.delta", **at, delta=piece, logprobs=[])
                yield send("response.output_text.done", **at, text=part["text"], logprobs=[])
                yield send("response.content_part.done", **at, part=part)
            else:
                arguments = item["arguments"]
                for piece in pieces(arguments):
                    yield send("response.function_call_arguments.delta", **at, delta=piece)
                yield send("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
            yield send("response.output_item.done", output_index=index, item=item)
        yield send("response.incomplete" if body["status"] == "incomplete" else "response.completed", response=body)

    def error_event(self, error: RequestError) -> bytes:
        fields = {"code": error.code or error.kind, "message": str(error), "param": None, "sequence_number": 0}
        return event({"type": "error", **fields}, "error")


def _without_system(messages: list[Message]) -> list[Message]:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _append(messages: list[Message], item: JsonObject) -> None:
    """Append an item; a text and the calls after it are one turn of the policy."""
    kind, role = item.get("type", "message"), item.get("role")
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if kind == "function_call":
        name = of_type(item.get("name"), str, "the name of a function_call")
        call_id = of_type(item.get("call_id"), str, "call_id of a function_call")
        call = Call(call_id, name, arguments_of(item.get("arguments"), f"the arguments of {name!r}"))
        turn = messages.pop() if continues else assistant("")
        joined = turn.get("tool_calls", []) + assistant("", [call])["tool_calls"]
        messages.append({**turn, "tool_calls": joined})
    elif kind == "function_call_output":
        call_id = of_type(item.get("call_id"), str, "call_id of a function_call_output")
        content = content_of(item.get("output"), "the output of a function_call_output")
        messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    elif kind == "message" and role in ("system", "developer", "user", "assistant"):
        read = content_of if role == "user" else text_of
        content = read(item.get("content"), f"the content of role {role!r}")
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind != "reasoning":
        raise RequestError(
            f"an item of input has the type {kind!r} and the role {role!r}, which the policy cannot read"
        )


def _message_item(answer: Answer) -> JsonObject:
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    item = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def _call_item(call: Call) -> JsonObject:
    item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
    return {**item, "arguments": json.dumps(call.arguments), "status": "completed"}


def _response(answer: Answer, request: ChatRequest, output: list[JsonObject]) -> JsonObject:
    cut = answer.finish == "length"
    return {
        "id": f"{PREFIX}{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto" if request.calls else "none",
        "tools": [],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
