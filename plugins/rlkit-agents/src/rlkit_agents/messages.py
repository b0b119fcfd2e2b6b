"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rlkit.types import JsonObject, Message
from rlkit_agents.body import arguments_of, function_schema, of_type, optional, stop_texts, text_of, token_limit
from rlkit_agents.content import content_of
from rlkit_agents.dialect import Dialect, Recall, event, ignored, messages_of, pieces, required, tools_of
from rlkit_agents.request import Answer, Call, ChatRequest, RequestError, assistant, name_results

READ = {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thread"}
PREFIX = "msg_"
FINISH = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
NOISE = "x-anthropic-billing-header"
"""Begins a block of the system prompt that changes from request to request."""


class Messages(Dialect):
    """`POST /v1/messages`."""

    comment = event({"type": "ping"}, "ping")

    def read(self, body: JsonObject, recall: Recall) -> ChatRequest:
        required(body, "max_tokens")
        return self.read_prompt(body, recall)

    def read_prompt(self, body: JsonObject, recall: Recall) -> ChatRequest:
        """Return a body that may lack `max_tokens`, such as one whose tokens are counted.

        Raises:
            RequestError: It is no request.
        """
        messages = messages_of(body)
        tool_choice: JsonObject = optional(body.get("tool_choice"), {}, "tool_choice")
        choice = tool_choice.get("type", "auto")
        new = [part for message in messages for part in _messages(message)]
        start = _continued(body, recall) or ChatRequest(_system(body.get("system")), list(map(_tool, tools_of(body))))
        return ChatRequest(
            name_results(start.messages + new),
            start.tools,
            choice != "none",
            token_limit(body.get("max_tokens"), "max_tokens"),
            stop_texts(body.get("stop_sequences"), "stop_sequences"),
            optional(body.get("stream"), False, "stream"),
            model=of_type(required(body, "model"), str, "model"),
            ignored=ignored(body, READ, choice),
        )

    def write(self, answer: Answer, request: ChatRequest) -> JsonObject:
        content: list[JsonObject] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in answer.calls
        ]
        return {
            "id": f"{PREFIX}{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": FINISH[answer.finish],
            "stop_sequence": answer.stop_text,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        body = self.write(answer, request)
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        started = {**body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=started)
        for index, block in enumerate(body["content"]):
            if block["type"] == "text":
                opened, deltas = {**block, "text": ""}, [("text_delta", "text", p) for p in pieces(block["text"])]
            else:
                opened = {**block, "input": {}}
                arguments = json.dumps(block["input"])
                deltas = [("input_json_delta", "partial_json", piece) for piece in pieces(arguments)]
            yield _event("content_block_start", index=index, content_block=opened)
            for kind, key, piece in deltas:
                yield _event("content_block_delta", index=index, delta={"type": kind, key: piece})
            yield _event("content_block_stop", index=index)
        ending = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield _event("message_delta", delta=ending, usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def error(self, error: RequestError) -> JsonObject:
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def _continued(body: JsonObject, recall: Recall) -> ChatRequest | None:
    """Return the thread that a body continues, with its system prompt and tools; None if it begins one."""
    thread: JsonObject = optional(body.get("thread"), {}, "thread")
    if thread.get("type", "create") == "create":
        return None
    if thread["type"] != "continue":
        raise RequestError(f"thread has the type {thread['type']!r}, expected create or continue")
    previous = of_type(thread.get("previous_message_id"), str, "previous_message_id of thread")
    return recall(previous.removeprefix(PREFIX))


def _system(value: object) -> list[Message]:
    if isinstance(value, list):
        value = [part for part in value if not str(isinstance(part, dict) and part.get("text")).startswith(NOISE)]
    text = text_of(value, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(value: object) -> list[Message]:
    """Return a message as chat templates read it; results of tools are messages of their own, before the text."""
    message = of_type(value, dict, "an element of messages")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"a message has the role {role!r}, expected user or assistant")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": of_type(content, str, "a content")}]
    parts, calls, results = [], [], []
    for element in blocks:
        block = of_type(element, dict, f"a block of the content of role {role!r}")
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            name = of_type(block.get("name"), str, "the name of a tool_use")
            call_id = of_type(block.get("id"), str, "the id of a tool_use")
            calls.append(Call(call_id, name, arguments_of(block.get("input"), f"the input of {name!r}")))
        elif kind == "tool_result" and role == "user":
            call_id = of_type(block.get("tool_use_id"), str, "tool_use_id of a tool_result")
            result = content_of(block.get("content"), "the content of a tool_result")
            results.append({"role": "tool", "content": result, "tool_call_id": call_id})
        elif kind not in ("thinking", "redacted_thinking"):
            parts.append(block)
    if role == "assistant":
        return [assistant(text_of(parts, "the content of role 'assistant'"), calls)]
    return results + ([{"role": "user", "content": content_of(parts, "the content of role 'user'")}] if parts else [])


def _tool(value: object) -> JsonObject:
    tool = of_type(value, dict, "an element of tools")
    if tool.get("type", "custom") != "custom":
        raise RequestError(f"a tool has the type {tool['type']!r}, which the provider runs; expected one of the agent")
    return function_schema(tool.get("name"), tool.get("description"), tool.get("input_schema"))
