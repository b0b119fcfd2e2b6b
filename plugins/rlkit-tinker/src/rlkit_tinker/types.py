"""The data of requests and results, under the names of Tinker's SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite, prod
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rlkit.base.errors import RlkitError, show

DTYPES = {"int64": np.int64, "float32": np.float32}


class RequestFailedError(RlkitError):
    """A request cannot be served; the message has what was given, what was expected, and what to do."""


class TensorData:
    """An array of int64 or float32, of one or two dimensions.

    Args:
        data: Numbers, flat or nested; a numpy array or a tensor.
        dtype: `int64` or `float32`; None for that of the numbers.
        shape: The shape of flat data; None for its own.
    """

    def __init__(
        self,
        data: ArrayLike | Tensor,
        dtype: Literal["int64", "float32"] | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        if isinstance(data, Tensor):
            tensor = data.detach().cpu()
            data = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise RequestFailedError(f"tensor data are {show(data)}, expected rows of equal length") from error
        if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and dtype == "int64"):
            raise RequestFailedError(f"tensor data are {show(data)}, expected {dtype or 'integers or floats'}")
        name = dtype or ("float32" if array.dtype.kind == "f" else "int64")
        if name not in DTYPES:
            raise RequestFailedError(f"the dtype of tensor data is {show(dtype)}, expected int64 or float32")
        array = array.astype(DTYPES[name])
        if shape is not None and array.size != prod(shape):
            raise RequestFailedError(f"tensor data have {array.size} numbers, expected those of shape {list(shape)}")
        self._array: NDArray[np.int64 | np.float32] = array if shape is None else array.reshape(tuple(shape))
        self._array.flags.writeable = False

    @classmethod
    def from_numpy(cls, array: ArrayLike) -> TensorData:
        """Return the data of a numpy array."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: Tensor) -> TensorData:
        """Return the data of a tensor."""
        return cls(tensor)

    @property
    def data(self) -> list[int] | list[float]:
        """The numbers, flat."""
        numbers: list[int] | list[float] = self._array.ravel().tolist()
        return numbers

    @property
    def dtype(self) -> str:
        """`int64` or `float32`."""
        return str(self._array.dtype)

    @property
    def shape(self) -> list[int]:
        """The sizes of the dimensions."""
        return list(self._array.shape)

    def to_numpy(self) -> NDArray[np.int64 | np.float32]:
        """Return the array, which is read-only."""
        return self._array

    def to_torch(self) -> Tensor:
        """Return a copy as a tensor."""
        return torch.from_numpy(self._array.copy())

    def tolist(self) -> list[int] | list[float]:
        """Return the numbers, flat."""
        return self.data

    def __repr__(self) -> str:
        return f"TensorData(dtype={self.dtype!r}, shape={self.shape})"


@dataclass(frozen=True)
class ModelInput:
    """What a model reads.

    Args:
        tokens: The ids.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        ids = tuple(self.tokens)
        wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)), None)
        if wrong is not None:
            raise RequestFailedError(f"a model's input has the token {show(wrong)}, expected an integer")
        object.__setattr__(self, "tokens", tuple(map(int, ids)))

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """Return the input of token ids."""
        return cls(tuple(tokens))

    def to_ints(self) -> list[int]:
        """Return the token ids."""
        return list(self.tokens)

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class Datum:
    """A sequence to learn from.

    Args:
        model_input: The tokens [N] that the model reads.
        loss_fn_inputs: What the loss reads of each token: `target_tokens` [N], the token after each (or [N,K], several
            with weights), and the arrays of the loss, such as `weights`, `logprobs` and `advantages`.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData | ArrayLike | Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = {k: x if isinstance(x, TensorData) else TensorData(x) for k, x in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", inputs)


def check_numbers(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check that the fields of a dataclass are finite numbers within their ranges.

    Raises:
        RequestFailedError: One is not.
    """
    for name, (low, high) in ranges.items():
        number = getattr(options, name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not isfinite(number) or not low <= number <= high:
            expected = f"at least {low:g}" if high == inf else f"between {low:g} and {high:g}"
            raise RequestFailedError(f"{type(options).__name__}.{name} is {show(number)}, expected a number {expected}")


@dataclass(frozen=True)
class AdamParams:
    """The options of one step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); none is kept for the next.

    Args:
        learning_rate: The learning rate.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        eps: Added to the root of the mean square.
        weight_decay: Decoupled weight decay.
        grad_clip_norm: The norm to which the adapter's gradient is clipped; 0 for no clipping.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        below_1 = 1 - 2**-53
        ranges = {field.name: (0.0, inf) for field in fields(self)}
        check_numbers(self, ranges | {"beta1": (0.0, below_1), "beta2": (0.0, below_1)})


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled.

    Args:
        max_tokens: Most tokens of a sequence; None for what the model's context leaves.
        seed: Equal seeds of equal requests sample equal tokens, whatever else is sampled; None for other tokens each
            time, which depend on the service's own seed.
        stop: Texts, or token ids, that end a sequence, and stay in it. None ends at the model's own end of a turn,
            and an empty list at `max_tokens` only.
        temperature: Divides the logits; 0 chooses the most likely token.
        top_k: The k most likely tokens; -1 for all.
        top_p: The smallest set of tokens with this probability mass.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1, 2**31)})
        for name, low in (("max_tokens", 1), ("seed", -inf), ("top_k", -1)):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < low):
                raise RequestFailedError(f"SamplingParams.{name} is {show(number)}, expected an integer, or none")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        is_list = isinstance(stops, Sequence) and "" not in stops
        if not is_list or not any(all(type(stop) is kind for stop in stops) for kind in (str, int)):
            raise RequestFailedError(f"SamplingParams.stop is {show(self.stop)}, expected texts, token ids, or none")

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end a sequence."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return [stop for stop in stops if isinstance(stop, str)]

    @property
    def stop_ids(self) -> list[int]:
        """The token ids that end a sequence."""
        return [stop for stop in self.stop or () if isinstance(stop, int)]


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The result of a pass.

    Args:
        loss_fn_outputs: For each datum `logprobs` of its targets, in their shape.
        metrics: `loss:sum` and the numbers of tokens and of datums.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class OptimStepResponse:
    """The result of a step of the optimizer.

    Args:
        metrics: `grad_norm:mean` before clipping; or `skipped:max` 1 if there was no gradient, and nothing changed.
    """

    metrics: dict[str, float]


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence.

    Args:
        tokens: Its ids, the one that ended it included.
        logprobs: Of each token at the temperature; at temperature 0 those at 1.
        stop_reason: `length` if `max_tokens` or the context ended it.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SampleResponse:
    """The result of sampling from a prompt.

    Args:
        sequences: The samples.
        prompt_logprobs: Of each token of the prompt, None for the first; None if they were not requested.
        topk_prompt_logprobs: Likewise the most likely tokens with their log-probs.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
