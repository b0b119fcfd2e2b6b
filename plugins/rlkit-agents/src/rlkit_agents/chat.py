"""OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rlkit.types import JsonObject, Message
from rlkit_agents.body import arguments_of, function_tool, of_type, optional, stop_texts, text_of, token_limit
from rlkit_agents.content import content_of
from rlkit_agents.dialect import Dialect, Recall, event, ignored, messages_of, pieces, required, tool_choice, tools_of
from rlkit_agents.request import Answer, Call, ChatRequest, RequestError, assistant, name_results

READ = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "n"}
READ |= {"stream_options"}
FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    def read(self, body: JsonObject, recall: Recall) -> ChatRequest:
        messages = messages_of(body)
        if body.get("n") not in (None, 1):
            raise RequestError(f"n is {body['n']!r}, expected 1")
        if body.get("functions") is not None:
            raise RequestError("the body has `functions`, expected `tools`")
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
        options: JsonObject = optional(body.get("stream_options"), {}, "stream_options")
        choice = tool_choice(body)
        return ChatRequest(
            name_results([_message(message) for message in messages]),
            [function_tool(tool, "function") for tool in tools_of(body)],
            choice != "none",
            token_limit(limit, "max_tokens"),
            stop_texts(body.get("stop"), "stop"),
            optional(body.get("stream"), False, "stream"),
            bool(options.get("include_usage")),
            of_type(required(body, "model"), str, "model"),
            ignored(body, READ, choice),
        )

    def write(self, answer: Answer, request: ChatRequest) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": FINISH[answer.finish], "logprobs": None}
        return {**_head(answer, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        head = _head(answer, request, "chat.completion.chunk")

        def chunk(delta: JsonObject, finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        yield chunk({"role": "assistant", "content": ""})
        for piece in pieces(answer.text):
            yield chunk({"content": piece})
        for index, call in enumerate(answer.calls):
            opened = _call(call)
            arguments = opened["function"]["arguments"]
            opened["function"]["arguments"] = ""
            yield chunk({"tool_calls": [{"index": index, **opened}]})
            for piece in pieces(arguments):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, FINISH[answer.finish])
        if request.usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"


def _message(value: object) -> Message:
    message = of_type(value, dict, "an element of messages")
    role = message.get("role")
    what = f"the content of a message of role {role!r}"
    content = content_of(message.get("content"), what) if role in ("user", "tool") else ""
    text = "" if content else text_of(message.get("content"), what)
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    if role == "user":
        return {"role": "user", "content": content}
    if role == "assistant":
        if message.get("function_call") is not None:
            raise RequestError("a message has a `function_call`, expected `tool_calls`")
        calls: list[object] = optional(message.get("tool_calls"), [], "tool_calls")
        return assistant(text, [_read_call(call) for call in calls])
    if role == "tool":
        call_id = of_type(message.get("tool_call_id"), str, "tool_call_id of a message of role 'tool'")
        return {"role": "tool", "content": content, "tool_call_id": call_id}
    raise RequestError(f"a message has the role {role!r}, expected system, developer, user, assistant or tool")


def _read_call(value: object) -> Call:
    call = of_type(value, dict, "an element of tool_calls")
    function = of_type(call.get("function"), dict, "the function of a tool call")
    name = of_type(function.get("name"), str, "the name of a tool call")
    return Call(
        of_type(call.get("id"), str, "the id of a tool call"),
        name,
        arguments_of(function.get("arguments"), f"the arguments of a call of {name!r}"),
    )


def _call(call: Call) -> JsonObject:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
    }


def _head(answer: Answer, request: ChatRequest, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: Answer) -> JsonObject:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
