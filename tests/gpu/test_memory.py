"""Memory that other processes open by CUDA IPC, and the decoder's cache, on a GPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rlkit_engine_torch.probe import why_not
from rlkit_servers.sglang.transports import SGLangTensors
from rlkit_servers.transports import serialize

from rlkit.testing import random_model

pytestmark = pytest.mark.gpu
BUCKETS, TENSORS, SIDE = 40, 30, 1024
READER = """
import base64, pickle, sys, torch
kept = torch.empty(30 * 1024 * 1024, dtype=torch.bfloat16, device="cuda")
for line in sys.stdin:
    start = 0
    for _, tensor in (bucket := pickle.loads(base64.b64decode(line))):
        kept[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        start += tensor.numel()
    del bucket, tensor
    print("taken", flush=True)  # as SGLang, which answers before its copy is done
    torch.cuda.synchronize()
    print(float(kept.min()), float(kept.max()), flush=True)
"""


@pytest.fixture(params=[1, 2, 4])
def readers(request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that open buckets and copy them, as those of a tensor-parallel server do."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    found = [subprocess.Popen((sys.executable, "-c", READER), **pipes) for _ in range(request.param)]  # type: ignore[call-overload]
    yield found
    for process in found:
        process.stdin.close()
        process.wait(30)


def test_every_process_of_a_server_reads_what_was_sent(readers: list[subprocess.Popen[str]]) -> None:
    """The sender's memory is used again as soon as all have answered, and none of it stays lent."""
    transport = SGLangTensors(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated()
    for number in range(BUCKETS):
        value = torch.full((SIDE, SIDE), float(number), dtype=torch.bfloat16, device="cuda")
        parcel = transport.prepare([(f"w{i}", value) for i in range(TENSORS)])
        for process in readers:
            assert process.stdin is not None
            process.stdin.write(serialize(parcel) + "\n")
            process.stdin.flush()
        said = [process.stdout for process in readers if process.stdout is not None]
        assert [out.readline().strip() for out in said] == ["taken"] * len(readers)
        del parcel
        junk = torch.full((TENSORS * SIDE * SIDE,), -1.0, dtype=torch.bfloat16, device="cuda")
        assert [out.readline().split() for out in said] == [[str(float(number))] * 2] * len(readers)
        del junk, value
    transport.end()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2"])
def test_models_are_decoded_with_the_cache(kind: str, dtype: torch.dtype) -> None:
    """With weights as a mixed-precision trainer has them, and as a sharded one gathers them."""
    shape: Any = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "initializer_range": 0.05}
    head = {"head_dim": 64} if kind == "gemma2" else {}
    assert why_not(random_model(kind, **shape, **head).to("cuda", dtype)) is None
