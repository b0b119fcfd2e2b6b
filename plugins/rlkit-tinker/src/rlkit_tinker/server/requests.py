"""Requests that have a future: the model or sampler of each, its number in their order, and its result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, ValidationError

from rlkit.base.errors import shorten, show
from rlkit.types import JsonObject
from rlkit_tinker.server.codec import read_pass
from rlkit_tinker.types import RequestFailedError

B = TypeVar("B", bound=BaseModel)

PASS, SAMPLE, CREATE, LOAD = "forward_backward", "asample", "create_model", "load_weights"
STEP, SAVE, SAVE_SAMPLER = "optim_step", "save_weights", "save_weights_for_sampler"
MAX_SEQ = 2**63 - 1


@dataclass(frozen=True, eq=False)
class WireRequest:
    """A request that has a future.

    Args:
        route: The last part of its path.
        owner: The model, or the sampling session, that orders it.
        seq: Its number in their order.
        raw: The body as it came.
        body: The body as it was read.
    """

    route: str
    owner: str
    seq: int
    raw: bytes
    body: JsonObject | Message

    @property
    def id(self) -> str:
        """The name of its future: equal for each time that it is sent."""
        return f"{self.owner}/{self.seq}"

    @property
    def session(self) -> str:
        """The session that it belongs to."""
        return self.owner.partition(":")[0]

    @property
    def digest(self) -> str:
        """The digest of its content, without what the SDK changes when it sends it once more."""
        if isinstance(self.body, Message):
            content = self.body.SerializeToString(deterministic=True)
        else:
            same = {key: value for key, value in self.body.items() if key != "sampling_session_seq_id"}
            content = json.dumps(same, sort_keys=True).encode()
        return blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class WireResult:
    """What a future answers.

    Args:
        content: A protobuf message, or JSON.
        is_json: Whether it is JSON.
        tokens: How many tokens were trained on or sampled; 0 for a result of an earlier process.
        has_failed: Whether the request has failed.
    """

    content: bytes
    is_json: bool = True
    tokens: int = 0
    has_failed: bool = False

    @classmethod
    def of(cls, value: JsonObject) -> WireResult:
        """Return the result that is a JSON object."""
        return cls(json.dumps(value).encode())

    @classmethod
    def failed(cls, message: str, category: str = "user") -> WireResult:
        """Return the failure of a request, as the SDK raises it."""
        return cls(json.dumps({"error": message, "category": category}).encode(), has_failed=True)


def read_json(raw: bytes) -> JsonObject:
    """Return the JSON object in a body.

    Raises:
        RequestFailedError: It has none.
    """
    try:
        value = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestFailedError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestFailedError(f"the body is {show(value)}, expected a JSON object")
    return value


def read_request(route: str, raw: bytes) -> WireRequest:
    """Return the request of a body; its other fields are checked when it runs, so that its number is used up.

    Raises:
        RequestFailedError: It names no model or sampling session, or has no number.
    """
    if route == PASS:
        message: Any = read_pass(raw)
        return WireRequest(route, message.model_id, _number("seq_id", message.seq_id, 1), raw, message)
    body = read_json(raw)
    if route == SAMPLE:
        owner, seq = _text(body, "sampling_session_id"), _number("seq_id", body.get("seq_id"), 0)
    elif route == CREATE or (route == LOAD and "model_id" not in body):
        number = _number("model_seq_id", body.get("model_seq_id"), 0)
        owner, seq = f"{_text(body, 'session_id')}:train:{number}", 0
    else:
        owner, seq = _text(body, "model_id"), _number("seq_id", body.get("seq_id"), 1)
    return WireRequest(route, owner, seq, raw, body)


def _text(body: JsonObject, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.isprintable():
        raise RequestFailedError(f"{name} is {show(value)}, expected a text")
    return value


def _number(name: str, value: object, low: int) -> int:
    if type(value) is not int or not low <= value <= MAX_SEQ:
        raise RequestFailedError(f"{name} is {show(value)}, expected an integer of at least {low}")
    return value


class Body(BaseModel):
    """A body, whose other fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True)


class ExactBody(Body):
    """A part of a body in which an unknown field would change numbers, and is refused."""

    model_config = ConfigDict(extra="forbid")


def read_body(kind: type[B], body: object) -> B:
    """Return a JSON object as a checked body.

    Raises:
        RequestFailedError: A field is missing, unknown, or of another type.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"])) or "the body"
        raise RequestFailedError(shorten(f"{name} is {show(problem['input'])}: {problem['msg']}")) from error
