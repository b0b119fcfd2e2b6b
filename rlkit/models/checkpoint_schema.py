"""The JSON files of a checkpoint, as types that read them as untrusted data."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, StringConstraints

from rlkit.base.ranges import FiniteFloat, NonNegativeFloat, NonNegativeInt
from rlkit.recipe.credentials import withhold
from rlkit.types import JsonObject

STATE = "state.json"
FORMAT = 2

FileName = Annotated[str, StringConstraints(pattern=r"^(state\.json|rank-[0-9]{5}\.safetensors)$")]
Recipe = Annotated[JsonObject, AfterValidator(lambda tree: withhold(tree))]
"""A recipe without credentials, which earlier versions wrote into checkpoints."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Numbers(BaseModel, strict=True, extra="forbid"):
    """The numbers that the next step depends on, besides tensors, seed and step."""

    version: NonNegativeInt
    kl_coef: FiniteFloat | None = None
    shaper: tuple[NonNegativeFloat, FiniteFloat, NonNegativeFloat] | None = None
    advantage: dict[str, FiniteFloat] = Field(default_factory=dict)


class RunState(BaseModel, strict=True, extra="forbid"):
    """The state of a run in a checkpoint.

    Args:
        step: The last completed step.
        recipe: The run's recipe with all options, without credentials.
        numbers: The run's numbers.
        before: The metrics of the validation before training.
        earlier: The accuracies of each prompt in the first and the last validation, by the prompt's index.
        waited: The best value of `validation.watch`, and the number of validations since.
        best: The best value of `metric` among the checkpoints, and its step.
        metric: The run's `save.keep_best`.
        stalled: The number of consecutive stalled steps up to this one.
        callbacks: The state of callbacks by class name.
        trained: With rollouts that run ahead, the groups that were trained on: all below the first number, and the
            remaining numbers.
    """

    step: NonNegativeInt
    recipe: Recipe
    numbers: Numbers
    before: dict[str, FiniteFloat] | None = None
    earlier: dict[str, dict[str, dict[int, FiniteFloat]]] = Field(default_factory=dict)
    waited: tuple[FiniteFloat, NonNegativeInt] | None = None
    best: tuple[FiniteFloat, NonNegativeInt] | None = None
    metric: str | None = Field(default=None, validation_alias=AliasChoices("metric", "figure"))
    stalled: NonNegativeInt = 0
    callbacks: dict[str, JsonObject] = Field(default_factory=dict)
    trained: list[NonNegativeInt] | None = None


class FormatVersion(BaseModel, strict=True):
    """The format of a checkpoint."""

    format: int = 1


class Manifest(FormatVersion, extra="forbid"):
    """The files of a checkpoint with their checksums."""

    files: dict[FileName, Digest]

    @property
    def tensor_files(self) -> list[str]:
        return sorted(set(self.files) - {STATE})
