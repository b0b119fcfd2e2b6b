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
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlkit.base.errors import PartError, RecipeError, explain, show, with_definition
from rlkit.base.text import part_name

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import RunPart

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
"""The types of fields, by their names in torch."""
BY = ("token", "turn", "row")


@dataclass(frozen=True)
class Field:
    """The declaration of a field.

    Args:
        name: Up to 64 lower-case letters, digits and `_`.
        dtype: Type of the tensors, by its name in torch: one of `DTYPES`.
        by: What has a value: each token of the conversation, each turn of the policy, or the row.
        shape: Shape of a value; empty for one number.
        padding: The number in place of values that nobody filled, and outside of the conversation.
    """

    name: str
    dtype: str = "float32"
    by: Literal["token", "turn", "row"] = "token"
    shape: tuple[int, ...] = ()
    padding: float = 0

    def __post_init__(self) -> None:
        """Refuse a declaration that no run can use; make a tuple of a shape.

        Raises:
            RecipeError: The name, the type or `by` is not what it must be.
        """
        if not NAME.fullmatch(self.name) or self.dtype not in DTYPES or self.by not in BY:
            expected = f"a name of lower-case letters, digits and _, a dtype among {', '.join(DTYPES)}"
            raise RecipeError(f"a part declares {show(self)}, expected {expected}, and by token, turn or row")
        object.__setattr__(self, "shape", tuple(self.shape))  # a list would not add to other shapes

    def sizes(self, tokens: int, turns: int) -> tuple[int, ...]:
        """Return the number of values in a conversation of so many tokens and turns of the policy; () by row."""
        return {"token": (tokens,), "turn": (turns,), "row": ()}[self.by]

    def full(self, *sizes: int) -> Tensor:
        """Return a tensor [*sizes,*shape] of padding, on the CPU."""
        import torch

        return torch.full((*sizes, *self.shape), float(self.padding), dtype=getattr(torch, self.dtype))

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
            source = torch.as_tensor(values).detach().cpu()
            tensor = source.to(getattr(torch, self.dtype), copy=True, memory_format=torch.contiguous_format)
            fits = tensor.isfinite() if tensor.is_floating_point() else tensor == source
        except Exception as error:  # foreign objects may raise anything
            raise ValueError(f"filled the field {self.name!r} with {show(values)}, expected numbers") from error
        shape = tuple(tensor.shape)
        size = shape[: counts is not None]
        if shape != (*size, *self.shape) or (counts is not None and (not size or size[0] not in counts)):
            numbers = "one" if counts is None else " or ".join(map(str, sorted({min(counts), max(counts)})))
            expected = f"{numbers} of shape {self.shape} by {self.by}"
            raise ValueError(f"filled the field {self.name!r} with shape {shape}, expected {expected}")
        if not bool(fits.all()):
            odd = source[~fits][0].item()
            raise ValueError(f"filled the field {self.name!r} with {odd}, expected finite numbers of {self.dtype}")
        return tensor


def declaration_problem(part: RunPart, field: Field) -> str | None:
    """Return the problem with a declaration in a part's `fills`; None if the part may fill such a field."""
    if not isinstance(field, Field):
        return f"declares {show(field)}, expected a rlkit.interfaces.fields.Field"
    try:
        if field.full(1).flatten()[:1].tolist() not in ([], [field.padding]) and "float" not in field.dtype:
            return f"declares {field}, whose padding is no {field.dtype}"
    except Exception as error:  # a plugin may declare anything
        return f"declares {field}: {explain(error)}"
    if field.by not in part.may_fill:
        ways = f"fills fields by {' or '.join(part.may_fill)}" if part.may_fill else "fills no fields"
        return f"declares {field}, but such a part {ways}"
    return None


class Filled(NamedTuple):
    """Values of fields that were filled at one moment of a conversation, as tensors by name.

    Args:
        values: Of the last tokens, of the policy's last turn, or of the row.
        tokens: Number of tokens then.
        turns: Number of the policy's turns then.
    """

    values: Mapping[str, Tensor]
    tokens: int = 0
    turns: int = 0

    def after(self, tokens: int) -> Filled:
        """Return the same values after further tokens."""
        return self._replace(tokens=self.tokens + tokens)

    def until(self, count: int) -> Filled:
        """Return the values by token of the first tokens."""
        cut = max(0, self.tokens - count)
        values = {name: tensor[: max(0, len(tensor) - cut)] for name, tensor in self.values.items()}
        return Filled(values, self.tokens - cut)


def assemble(declared: Mapping[str, Field], filled: Iterable[Filled], tokens: int, turns: int = 0) -> dict[str, Tensor]:
    """Return the fields of a conversation with so many tokens and turns of the policy.

    A token keeps the first of its values that is not padding, a turn and the row the last.
    """
    fields: dict[str, Tensor] = {}
    for values, token_count, turn_count in filled:
        for name, tensor in values.items():
            spec = declared[name]
            if name not in fields:
                fields[name] = spec.full(*spec.sizes(tokens, turns))
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


def tensors_of(
    part: RunPart,
    method: str,
    values: Mapping[str, object],
    *,
    tokens: Collection[int] = (),
    turns: int | None = None,
    mask: Sequence[bool] = (),
) -> dict[str, Tensor]:
    """Return the values that a part fills as tensors.

    Args:
        part: Which declares the fields.
        method: Which returned them.
        values: By name.
        tokens: The numbers of values by token that are right.
        turns: The number of values by turn; None for the value of one turn.
        mask: Of a conversation; there may be values for all of its tokens, or for those under the mask.

    Raises:
        PartError: The part does not declare a name.
        ValueError: A value is not what its field declares, or there are no values by name.
    """
    import torch

    if not isinstance(values, Mapping):
        raise ValueError(f"filled the fields {show(values)}, expected values by name")
    chosen = torch.tensor(mask, dtype=torch.bool)
    counts = {"token": (sum(mask), len(mask)) if mask else tokens, "turn": None if turns is None else (turns,)}
    declared = {spec.name: spec for spec in part.fills}
    tensors = {}
    for name, value in values.items():
        if name not in declared:
            problem = f"filled the field {show(name)}, expected one of its `fills`: {', '.join(declared) or 'none'}"
            raise PartError(with_definition(f"{part_name(part)}: `{method}` {problem}", part, method))
        spec = declared[name]
        tensors[name] = tensor = spec.tensor(value, counts.get(spec.by))
        if spec.by == "token" and len(tensor) < len(mask):
            tensors[name] = spec.full(len(mask))
            tensors[name][chosen] = tensor
    return tensors
