"""Host memory that is used again at each rollout, and what is moved to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlkit.distributed import offload
from rlkit.distributed.offload import HostMemory, HostOffload

TYPES = [torch.float32, torch.bfloat16, torch.int64]


def shapes() -> st.SearchStrategy[list[tuple[tuple[int, ...], torch.dtype]]]:
    shape = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    return st.lists(st.tuples(shape, st.sampled_from(TYPES)), max_size=12)


@given(shapes())
def test_copies_never_overlap_and_memory_is_used_again(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    before, offload.CHUNK_BYTES = offload.CHUNK_BYTES, 2048
    try:
        memory = HostMemory(pinned=False)
        pieces = []
        for number in range(2):
            memory.clear()
            tensors = [torch.randint(-9, 9, shape).to(dtype) + number for shape, dtype in wanted]
            copies = [memory.copy(x) for x in tensors]
            assert all(torch.equal(x, copy) and x.dtype == copy.dtype for x, copy in zip(tensors, copies, strict=True))
            pieces.append([copy.data_ptr() for copy in copies])
        assert pieces[0] == pieces[1]
    finally:
        offload.CHUNK_BYTES = before


def test_a_tensor_larger_than_a_piece_has_the_next_power_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,536 bytes for 1,200, in a piece of 2,048; the 512 after it are taken by the third."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1024)
    memory = HostMemory(pinned=False)
    for length in (300, 250, 100):
        memory.copy(torch.zeros(length))
    assert [len(chunk) for chunk in memory.chunks] == [2048, 1024]
    assert memory.used == [2048, 1024]


def without_page_locked_memory(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def refusing(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("out of page-locked memory")
        return empty(*size, **options)

    return refusing


def test_memory_that_cannot_be_page_locked_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():  # where it can be
        monkeypatch.setattr(torch, "empty", without_page_locked_memory(torch.empty))
    memory = HostMemory(pinned=True)
    with pytest.warns(UserWarning, match="offloading is slow: host memory cannot be page-locked"):
        assert memory.copy(torch.ones(3)).tolist() == [1, 1, 1]
    assert memory.copy(torch.ones(2)).tolist() == [1, 1]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Copy to the host what is there already, as if it came from a device, and note it."""
    found: list[Tensor] = []

    def to_host(memory: HostMemory, tensor: Tensor) -> Tensor:
        found.append(memory.copy(tensor))
        return found[-1]

    monkeypatch.setattr(offload, "_to_host", to_host)
    return found


def test_weights_and_states_are_moved_and_stay_what_they_are(moved: list[Tensor]) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    parameters = list(module.parameters())
    resting = HostOffload([module], [optimizer], torch.device("cpu"))
    for _ in range(2):
        with resting.off_device():
            assert resting.away
            with resting.back(module):
                pass
        assert not resting.away
    places = [x.data_ptr() for x in moved]
    state = len(before) + 2 * len(parameters)  # of AdamW: two moments, and a count that is not moved
    assert len(places) == 2 * (state + len(before))
    assert places[: len(places) // 2] == places[len(places) // 2 :]
    assert places[: len(before)] == places[state : state + len(before)]  # what was back has its place again
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert parameters[0].data_ptr() in places
