"""Real vLLM on the CPU: one server for most tests, with the sizes of the shipped tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rlkit_engine_vllm import VllmLaunch, VllmServer

from rlkit.testing import random_model
from tests.served import RETRY, Trainer, second

__all__ = ["second"]

TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip
"""Sizes of rlkit/models/tiny; vLLM's attention on a CPU needs heads of 32 or more."""


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer(random_model("qwen2", **TINY), **TINY)
    yield trainer
    trainer.runner.close()


@pytest.fixture(scope="session")
def engine(trainer: Trainer) -> Iterator[VllmServer]:
    """A server that rlkit started, with the trainer's weights, and room for adapters; it follows structures."""
    launch = VllmLaunch(structures=True, args=("--enable-lora", "--max-lora-rank", "8"))
    engine = VllmServer(retry=RETRY, launch=launch)
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine)
        yield engine
    finally:
        engine.close()
