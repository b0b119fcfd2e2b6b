"""Checks of the fields and the metrics that parts fill, and batches with the fields that they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from rlkit.base.errors import PartError
from rlkit.interfaces import outputs
from rlkit.interfaces.fields import Field, declaration_problem, tensors_of
from rlkit.interfaces.runtime import RunPart
from rlkit.types import Batch


def check_filled(
    part: RunPart,
    method: str,
    values: Mapping[str, object],
    *,
    tokens: Collection[int] = (),
    turns: int | None = None,
    mask: Sequence[bool] = (),
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Check what a part fills, and its declarations; see `rlkit.interfaces.fields.tensors_of`.

    Raises:
        AssertionError: The run would refuse a declaration, a value or a metric.
    """
    problems = [declaration_problem(part, field) for field in part.fills]
    if metrics is not None:
        problems.append(outputs.of_metrics(metrics))
    try:
        tensors_of(part, method, values, tokens=tokens, turns=turns, mask=mask)
    except (PartError, ValueError) as error:
        problems.append(str(error))
    for problem in filter(None, problems):
        raise AssertionError(f"{type(part).__name__}.{method}: {problem}")


def with_fields(part: RunPart, batch: Batch, fields: Sequence[Field]) -> Batch:
    """Return a batch with fields whose values under the mask, of a turn of each row, and of rows are 1.

    Raises:
        AssertionError: The part reads a field that is not among them.
    """
    declared = {field.name: field for field in fields}
    for name in part.reads_fields:
        if name not in declared:
            raise AssertionError(f"{type(part).__name__} reads the field {name!r}; pass its declaration in `fields`")
    rows, width = batch.mask.shape
    batch.declared, tensors = declared, {}
    for name, field in declared.items():
        tensors[name] = field.full(rows, *field.sizes(width, 1))
        tensors[name][batch.mask if field.by == "token" else torch.ones(rows, dtype=torch.bool)] = 1
    batch.fields = tensors
    return batch
