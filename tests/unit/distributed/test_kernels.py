"""Which kernels a process may use once it trains or samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.kernels import choose_kernels
from rlkit.recipe import Fabric


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """What a container or another library may have set."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("high")
    yield
    choose_kernels()


@pytest.mark.parametrize("start", [choose_kernels, lambda: make_fabric(Fabric("cpu", 1))])
def test_attention_is_not_cudnns_and_products_are_float32(start: Callable[[], object]) -> None:
    start()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
