"""Open data: fields that a part declares and fills during rollouts, and that others read in training.

A part lists what it fills in `fills`, and the names that it reads in `reads_fields`. Values are by token, by turn of
the policy, or by row, and become tensors of the declared type: `Trajectory.fields` and `Score.fields` hold those of one
conversation, `batch.fields` those of a batch, padded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from rlkit.base.errors import RecipeError, shorten, show
from rlkit.types import Filled

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import RunPart

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
RANGES: Final[Mapping[str, tuple[float, float] | None]] = MappingProxyType(
    {
        "bool": (0, 1), "uint8": (0, 2**8 - 1), "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1),
        "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1),
        "float16": None, "bfloat16": None, "float32": None,
    }
)  # fmt: skip
"""The types of fields by their names in torch, with the smallest and the largest value of integers."""
MOST_NUMBERS = 65_536
"""Numbers of a token, a turn or a row."""


@dataclass(frozen=True)
class Field:
    """The declaration of a field.

    Args:
        name: Lower-case letters, digits and `_`.
        dtype: Type of the tensors, by its name in torch.
        by: What has a value: each token of the conversation, each turn of the policy, or the row.
        shape: Shape of a value; empty for one number.
        padding: The number in place of values that nobody filled, and outside of the conversation.

    Raises:
        RecipeError: An option is none of these; the message names the field.
    """

    name: str
    dtype: str = "float32"
    by: Literal["token", "turn", "row"] = "token"
    shape: tuple[int, ...] = ()
    padding: float = 0

    def __post_init__(self) -> None:
        bounds, sizes = RANGES.get(self.dtype), self.shape if isinstance(self.shape, tuple) else (0,)
        fits_shape = all(isinstance(size, int) and size > 0 for size in sizes) and prod(sizes) <= MOST_NUMBERS
        expected = {
            "name": (NAME.fullmatch(self.name), "up to 64 lower-case letters, digits and _"),
            "dtype": (self.dtype in RANGES, f"one of {', '.join(RANGES)}"),
            "by": (self.by in ("token", "turn", "row"), "token, turn or row"),
            "shape": (fits_shape, f"a tuple of sizes of 1 or more, with at most {MOST_NUMBERS:,} numbers"),
            "padding": (
                bounds is None or (bounds[0] <= self.padding <= bounds[1] and self.padding == int(self.padding)),
                f"a number of {self.dtype}",
            ),
        }
        for option, (fits, values) in expected.items():
            if not fits:
                raise RecipeError(
                    f"the field {show(self.name)} has {option}={getattr(self, option)!r}, expected {values}"
                )

    def full(self, *sizes: int) -> Tensor:
        """Return a tensor [*sizes,*shape] of padding, on the CPU."""
        import torch

        return torch.full((*sizes, *self.shape), self.padding, dtype=getattr(torch, self.dtype))

    def tensor(self, values: object, counts: Collection[int] | None = None) -> Tensor:
        """Return values as a tensor [n,*shape] on the CPU, with memory of its own; one value as [*shape].

        Args:
            values: A tensor, an array, a number or nested lists.
            counts: The numbers of values that are right; None for one value.

        Raises:
            ValueError: They have another number or shape, or are no finite numbers of the type.
        """
        import torch

        try:
            given = torch.as_tensor(values).detach().cpu()
            tensor = given.to(getattr(torch, self.dtype), copy=True, memory_format=torch.contiguous_format)
            fits = tensor.isfinite() if tensor.is_floating_point() else tensor == given
        except Exception as error:  # foreign objects may raise anything
            raise ValueError(f"filled the field {self.name!r} with {show(values)}, expected numbers") from error
        shape = tuple(tensor.shape)
        if counts is None and shape != self.shape:
            expected = f"one of shape {self.shape}"
            raise ValueError(f"filled the field {self.name!r} with a value of shape {shape}, expected {expected}")
        if counts is not None and (not shape or shape[1:] != self.shape or shape[0] not in counts):
            numbers = " or ".join(map(str, sorted({min(counts), max(counts)})))
            expected = f"{numbers} values of shape {self.shape}, one for each {self.by}"
            raise ValueError(f"filled the field {self.name!r} with values of shape {shape}, expected {expected}")
        if not bool(fits.all()):
            odd = given[~fits][0].item()
            raise ValueError(f"filled the field {self.name!r} with {odd}, expected finite numbers of {self.dtype}")
        return tensor


def assemble(declared: Mapping[str, Field], filled: Iterable[Filled], tokens: int, turns: int) -> dict[str, Tensor]:
    """Return the fields of a conversation with so many tokens and turns of the policy.

    A token keeps the first of its values that is not padding, a turn and the row the last.
    """
    fields: dict[str, Tensor] = {}
    for values, token_count, turn_count in filled:
        for name, tensor in values.items():
            spec = declared[name]
            if name not in fields:
                fields[name] = spec.full(*{"token": (tokens,), "turn": (turns,), "row": ()}[spec.by])
            if spec.by == "row":
                fields[name] = tensor
            elif spec.by == "turn":
                fields[name][turn_count - 1] = tensor
            else:
                span = fields[name][token_count - len(tensor) : token_count]
                unset = (span == spec.full(1)) | span.isnan()
                unset = unset.reshape(len(span), prod(spec.shape)).all(-1)
                span[unset] = tensor[unset]
    return fields


def undeclared(part: RunPart, values: object) -> str | None:
    """Return the problem with the names of what a part fills; None if it declares them all."""
    if not isinstance(values, Mapping):
        return f"filled the fields {show(values)}, expected values by name"
    declared = [spec.name for spec in part.fills]
    wrong = next((name for name in values if name not in declared), None)
    if wrong is None:
        return None
    names = shorten(", ".join(declared)) or "nothing"
    return f"filled the field {show(wrong)}, which its `fills` does not declare; it declares: {names}"


def tensors_of(
    part: RunPart,
    values: Mapping[str, object],
    *,
    tokens: Collection[int] = (),
    turns: int | None = None,
    mask: Sequence[bool] = (),
) -> dict[str, Tensor]:
    """Return the values that a part fills as tensors.

    Args:
        part: Which declares the fields.
        values: By name.
        tokens: The numbers of values by token that are right.
        turns: The number of values by turn; None for the value of one turn.
        mask: Of a conversation; there may be values for all of its tokens, or for those under the mask.

    Raises:
        ValueError: The part does not declare a name, or a value is not what its field declares.
    """
    import torch

    problem = undeclared(part, values)
    if problem is not None:
        raise ValueError(problem)
    chosen = torch.tensor(mask, dtype=torch.bool)
    counts = {"token": (sum(mask), len(mask)) if mask else tokens, "turn": None if turns is None else (turns,)}
    declared = {spec.name: spec for spec in part.fills}
    tensors = {}
    for name, value in values.items():
        spec = declared[name]
        tensor = spec.tensor(value, counts.get(spec.by))
        if spec.by == "token" and mask and len(tensor) < len(mask):
            full = spec.full(len(mask))
            full[chosen] = tensor
            tensor = full
        tensors[name] = tensor
    return tensors
