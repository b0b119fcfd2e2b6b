"""The ranges of numbers, stated once in their types: the command line shows them and refuses what is outside.

NaN, infinities and null are in none of them; an option that may be null says `PositiveFloat | None`.
"""

from __future__ import annotations

from math import inf
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

LARGEST = 2**31 - 1
"""The largest whole number that an option takes."""

PositiveInt = Annotated[int, Ge(1), Le(LARGEST)]
NonNegativeInt = Annotated[int, Ge(0), Le(LARGEST)]
PositiveFloat = Annotated[float, Gt(0), Lt(inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(inf)]
FiniteFloat = Annotated[float, Gt(-inf), Lt(inf)]
Share = Annotated[float, Ge(0), Le(1)]
"""A part of a whole."""
PositiveShare = Annotated[float, Gt(0), Le(1)]
