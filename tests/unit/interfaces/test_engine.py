"""The interface of engines: what a class of an engine may not have."""

from __future__ import annotations

import pytest

from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import FORMER, Capability


@pytest.mark.parametrize("name", FORMER)
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_of_before_capabilities_is_refused(name: str, value: bool) -> None:
    with pytest.raises(TypeError, match=rf"^Own has {name}, expected flags of Capability in `capabilities`$"):
        type("Own", (TorchEngine,), {name: value})


def test_another_attribute_of_such_a_name_is_an_engine_s_own() -> None:
    own = type("Own", (TorchEngine,), {"scores": property(lambda self: [1.0]), "capabilities": Capability.TEACHER})
    assert own().scores == [1.0]  # type: ignore[attr-defined]
