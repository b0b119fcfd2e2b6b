"""Adapters on a real SGLang server: merged into the weights, or by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_servers.sglang.launch import Launch
from rlkit_servers.states import ServerState
from torch import Tensor

from rlkit.base.errors import EngineError, RecipeError
from rlkit.engines import SGLangServer
from rlkit.models.weights import PolicyWeights
from rlkit.testing import random_model
from tests.served import RETRY, Trainer, adapted_policy


class Watched(PolicyWeights):
    """Counts how often the base is read, and may corrupt an adapter."""

    bases, spoilt = 0, False

    def buckets(self, merged: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
        Watched.bases += 1
        return super().buckets(merged)

    def adapter(self) -> Any:
        adapter = super().adapter()
        assert adapter is not None
        if Watched.spoilt:
            Watched.spoilt = False
            adapter[1][0] = (adapter[1][0][0], adapter[1][0][1] + 1)
        return adapter


@pytest.fixture(scope="module", params=[False, True], ids=["as it is", "in 4 bits"])
def adapted(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    trainer = Trainer(adapted_policy(request.param))
    yield trainer
    trainer.runner.close()


def learn(trainer: Trainer, seed: int) -> None:
    """Replace the adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in trainer.policy.named_parameters():
            if "lora_" in name:
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))


def publish(trainer: Trainer, engine: SGLangServer) -> int:
    """Push the weights; return how often the base was read."""
    before = Watched.bases
    trainer.version += 1
    trainer.wait(engine.sync(Watched(trainer.policy), trainer.version))
    return Watched.bases - before


def test_adapters_arrive_merged(adapted: Trainer, engine: SGLangServer, trainer: Trainer) -> None:
    second = SGLangServer(urls=[engine.fleet.owned[0].url], retry=RETRY)
    second.bind(adapted.runtime)
    learn(adapted, 31)
    assert publish(adapted, second) == 1
    assert adapted.is_served_by(second)
    second.close()
    trainer.publish(engine)


def test_adapters_travel_alone_after_the_base(adapted: Trainer, tmp_path: Path) -> None:
    """Through memory and files; the base follows after a restart, and a wrong adapter is named."""
    random_model("qwen2").save_pretrained(tmp_path)
    words = ("--model-path", str(tmp_path), "--load-format", "auto")  # as others start servers
    engine = SGLangServer(retry=RETRY, launch=Launch(adapter_only=True, args=words))
    files = None
    try:
        engine.bind(adapted.runtime)
        for seed, bases in ((32, 1), (33, 0)):
            learn(adapted, seed)
            assert publish(adapted, engine) == bases
            assert adapted.is_served_by(engine)
            assert engine.health()["weight_gap"] < 1e-4
        Watched.spoilt = True
        with pytest.raises(EngineError, match="lessens the gap for: the adapters"):
            publish(adapted, engine)
        engine.fleet.owned[0].state = ServerState.COLD  # as after a restart
        assert publish(adapted, engine) == 1
        assert adapted.is_served_by(engine)
        alone, urls = Launch(adapter_only=True), [engine.fleet.owned[0].url]
        files = SGLangServer(urls=urls, transport="disk", retry=RETRY, launch=alone)
        files.bind(adapted.runtime)
        for seed, bases in ((34, 1), (35, 0)):
            learn(adapted, seed)
            assert publish(adapted, files) == bases
            assert adapted.is_served_by(files)
    finally:
        engine.close()
        if files is not None:
            files.close()


def test_adapters_alone_need_adapters_and_a_way_to_travel(adapted: Trainer, trainer: Trainer) -> None:
    alone = Launch(adapter_only=True)
    with pytest.raises(EngineError, match=r"launch\.adapter_only is true, but there are no adapters"):
        SGLangServer(launch=alone).bind(trainer.runtime)
    with pytest.raises(RecipeError, match=r"launch\.adapter_only is true and transport is disk"):
        SGLangServer(transport="disk", launch=alone)
    with pytest.raises(EngineError, match="process group.*transport: disk"):
        SGLangServer(urls=["http://10.0.0.7:9"], launch=alone).bind(adapted.runtime)
