"""The interface of engines: what a class of an engine may not have."""

from __future__ import annotations

import pytest

from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import FORMER, Capability


@pytest.mark.parametrize("name", FORMER)
def test_a_boolean_of_before_capabilities_is_refused_with_the_capability(name: str) -> None:
    remedy = f"add {FORMER[name]} to `capabilities`"
    with pytest.raises(TypeError, match=rf"^Own\.{name} is True, which no engine has; {remedy}$"):
        type("Own", (TorchEngine,), {name: True})
    with pytest.raises(TypeError, match=rf"leave {FORMER[name]} out of `capabilities`$"):
        type("Own", (TorchEngine,), {name: False})


def test_another_attribute_of_such_a_name_is_an_engine_s_own() -> None:
    own = type("Own", (TorchEngine,), {"scores": property(lambda self: [1.0]), "capabilities": Capability.TEACHER})
    assert own().scores == [1.0]  # type: ignore[attr-defined]
