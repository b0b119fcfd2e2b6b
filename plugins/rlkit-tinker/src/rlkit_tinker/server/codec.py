"""From messages to the data of passes, and from results to messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import nan, prod
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from rlkit.base.errors import show
from rlkit_tinker.server.messages import CLASSES
from rlkit_tinker.types import Datum, ForwardBackwardOutput, ModelInput, RequestFailedError, SampleResponse, TensorData

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

FLOAT32, INT64 = 1, 2
"""The numbers of the types of arrays."""
MAX_NUMBERS = 1 << 24
"""The most numbers of an array that a message describes sparsely."""
STOP_REASONS = {"stop": 0, "length": 1}
NO_LOGPROB = -99999.0
"""The log-prob where there is no token, as the SDK expects it."""


def read_pass(body: bytes) -> Message:
    """Return the message of a pass.

    Raises:
        RequestFailedError: The body is none, or has no text as the model's id.
    """
    try:
        message = CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise RequestFailedError(f"the body is no protobuf message ForwardBackwardRequest: {error}") from error
    for name in ("model_id", "loss_fn"):
        if not isinstance(getattr(message, name), str):
            raise RequestFailedError(f"{name} is {show(getattr(message, name))}, expected UTF-8")
    return message


def data_of(message: Message) -> list[Datum]:
    """Return the data of a pass.

    Raises:
        RequestFailedError: A datum has no plain tokens, or an array that is damaged.
    """
    data = []
    for index, datum in enumerate(message.data):
        try:
            tokens = [token for chunk in datum.model_input for token in _tokens(chunk)]
            inputs = {str(name): _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
            data.append(Datum(ModelInput.from_ints(tokens), inputs))
        except RequestFailedError as error:
            raise RequestFailedError(f"datum {index}: {error}") from error
    return data


def config_of(message: Message) -> dict[str, float]:
    """Return the options of the loss; those of the newer field hold.

    Raises:
        RequestFailedError: One is a text.
    """
    for name, value in message.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise RequestFailedError(f"loss_fn_config has {show(name)}={show(value.text)}, expected a number")
    return {**message.loss_fn_config, **{name: value.number for name, value in message.loss_fn_config_v2.items()}}


def _tokens(chunk: Message) -> list[int]:
    kinds = [name for name in ("encoded_text", "image", "dmel") if chunk.HasField(name)]
    if kinds != ["encoded_text"]:
        held = " and ".join(kinds) or "nothing"
        raise RequestFailedError(f"a chunk of its input holds {held}, expected encoded_text; only tokens are served")
    tokens: list[int] = _numbers("a chunk's tokens", chunk.encoded_text.tokens, "<i4").tolist()
    return tokens


def _array(name: object, tensor: Message) -> TensorData:
    if tensor.dtype not in (FLOAT32, INT64):
        raise RequestFailedError(f"{show(name)} has the dtype {tensor.dtype}, expected 1 (float32) or 2 (int64)")
    dtype = "<f4" if tensor.dtype == FLOAT32 else "<i8"
    shape = list(tensor.shape)
    if any(size < 0 for size in shape):
        raise RequestFailedError(f"{show(name)} has the shape {show(shape)}, expected sizes of at least 0")
    if tensor.HasField("sparse_csr"):
        return TensorData(_dense(name, tensor.sparse_csr, shape, dtype))
    return TensorData(_numbers(name, tensor.dense, dtype), shape=shape or None)


def _dense(name: object, sparse: Message, shape: Sequence[int], dtype: str) -> NDArray[np.generic]:
    """Return the matrix of a compressed one, whose other numbers are 0."""
    rows, columns = (_numbers(name, x, "<i8") for x in (sparse.crow_indices, sparse.col_indices))
    values = _numbers(name, sparse.values, dtype)
    if len(shape) != 2 or prod(shape) > MAX_NUMBERS:
        raise RequestFailedError(f"{show(name)} has the shape {show(shape)}, expected [N, K] of at most {MAX_NUMBERS}")
    counts = np.diff(rows)
    is_complete = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == len(values)
    if not is_complete or (counts < 0).any() or not ((columns >= 0) & (columns < shape[1])).all():
        raise RequestFailedError(f"{show(name)} has row or column indices that do not fit its shape {shape}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _numbers(name: object, data: bytes, dtype: DTypeLike) -> NDArray[np.generic]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise RequestFailedError(f"{show(name)} has {len(data)} bytes, expected a multiple of {size}")
    return np.frombuffer(data, dtype)


def encode_pass(output: ForwardBackwardOutput) -> bytes:
    """Return the message of a pass's result: data beside each other whose arrays have equal widths are one record."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    arrays = [fields["logprobs"].to_numpy() for fields in output.loss_fn_outputs]
    for widths, group in groupby(arrays, lambda array: array.shape[1:]):
        members = [array.astype("<f4").tobytes() for array in group]
        field = message.loss_fn_outputs.add(num_datums=len(members)).fields["logprobs"]
        field.data, field.dtype = b"".join(members), FLOAT32
        field.offsets = np.cumsum([0, *map(len, members)]).astype("<i8").tobytes()
        field.trailing_shape.extend(widths)
    for name, value in output.metrics.items():
        message.metrics[name] = value
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def encode_samples(response: SampleResponse, top: int) -> bytes:
    """Return the message of samples.

    Args:
        response: The samples.
        top: How many of the most likely tokens were requested at each token of the prompt.
    """
    message = CLASSES["SampleResponse"]()
    for sequence in response.sequences:
        message.sequences.add(
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=np.array(sequence.tokens, "<i4").tobytes(),
            logprobs=np.array(sequence.logprobs, "<f4").tobytes(),
        )
    if response.prompt_logprobs is not None:
        logps = [nan if logp is None else logp for logp in response.prompt_logprobs]
        message.prompt_logprobs = np.array(logps, "<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        cells = [[*(row or ()), *[(0, NO_LOGPROB)] * top][:top] for row in response.topk_prompt_logprobs]
        likely = message.topk_prompt_logprobs
        likely.token_ids = np.array([[token for token, _ in row] for row in cells], "<i4").tobytes()
        likely.logprobs = np.array([[logp for _, logp in row] for row in cells], "<f4").tobytes()
        likely.k, likely.length = top, len(cells)
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded
