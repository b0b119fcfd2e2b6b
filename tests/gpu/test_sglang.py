"""Real SGLang on a GPU: weights by CUDA IPC, memory released and resumed; run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from rlkit_authors.models import build_tokenizer
from rlkit_servers.sglang.engine import SGLangEngine
from rlkit_servers.sglang.launch import Launch
from rlkit_servers.states import ServerState

from rlkit.models.weights import PolicyWeights
from rlkit.testing import random_model, save_random_model
from rlkit.types import Request, SampleKey, Sampling
from tests.conftest import FAST, read_jsonl, rlkit

pytestmark = pytest.mark.gpu
SIZES: Any = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}  # heads of 64, as kernels want


@pytest.fixture(scope="module")
def bound() -> Iterator[tuple[SGLangEngine, Any, asyncio.Runner]]:
    policy, tokenizer = random_model("qwen2", **SIZES).cuda(), build_tokenizer()
    runtime: Any = SimpleNamespace(
        policy=policy,
        tokenizer=tokenizer,
        device=torch.device("cuda", 0),
        context=510,
        stop_ids=frozenset({tokenizer.eos_token_id}),
        unsharded=nullcontext,
        tensor_parallel=1,
        autocast=lambda: torch.autocast("cuda", torch.bfloat16),
        reduce=lambda x: x,
        gather=lambda x: x,
        gather_world=lambda x: [x],
        broadcast_tp=lambda x: x,
        logits=lambda tokens: policy(input_ids=tokens, use_cache=False).logits,
    )
    engine, runner = SGLangEngine(Launch(memory_fraction=0.3, release_memory=True)), asyncio.Runner()
    try:
        engine.bind(runtime)
        yield engine, policy, runner
    finally:
        engine.close()
        runner.close()


def test_engine_and_trainer_agree_across_syncs_and_sleep(
    bound: tuple[SGLangEngine, Any, asyncio.Runner],
) -> None:
    engine, policy, runner = bound
    for version in range(3):
        policy.load_state_dict(random_model("qwen2", version, **SIZES).state_dict())
        runner.run(engine.sync(PolicyWeights(policy), version))
        with engine.on_device():
            request = Request(tuple(range(3, 40)), Sampling(max_tokens=64), SampleKey(0, version, "p", 0), "s")
            answer = runner.run(engine.generate(request))
        assert engine.fleet.owned[0].state is ServerState.OFFLOADED
        assert set(answer.versions) == {version}
        tokens = torch.tensor([[*request.tokens, *answer.tokens]], device="cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logps = torch.log_softmax(policy(input_ids=tokens).logits[0].float(), -1)
        start = len(request.tokens) - 1
        found = logps[torch.arange(start, tokens.shape[1] - 1), tokens[0, start + 1 :]].cpu()
        assert (found - torch.tensor(answer.logps)).abs().mean() < 0.05


@pytest.mark.parametrize(
    "options",
    [
        ("--rollout.engine.launch.release_memory=true", "--train.offload_during_rollout=true"),
        ("--rollout.engine.launch.adapter_only=true", "--model.lora.rank=8"),
    ],
)
def test_fit(options: tuple[str, ...], tmp_path: Path) -> None:
    save_random_model(tmp_path / "model", **SIZES)
    words = ("--recipe=quickstart", f"--model.path={tmp_path / 'model'}", "--rollout.engine=SGLangEngine", *FAST)
    half = ("--fabric.accelerator=gpu", "--fabric.precision=bf16-mixed", "--rollout.engine.launch.memory_fraction=0.3")
    done = rlkit("fit", *words, *half, *options, "--out=out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["mismatch/mean"] < 0.05
        assert row["rollout/failed"] == 0
