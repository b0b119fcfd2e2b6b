"""What a sync of an SGLang server costs, by the way that weights travel, in the environment of its tests.

    .ci/environment sglang FOLDER
    PYTHONPATH=.:tests/sglang/shim OMP_NUM_THREADS=1 python tests/bench/sync.py

A model of 27M float32 parameters with LoRA of rank 16, on the CPU. Each round syncs once each way, weight
check included; printed are the medians of the seconds.
"""

from __future__ import annotations

import statistics
import time

from rlkit_servers.sglang.launch import Launch
from rlkit_servers.states import ServerState

from rlkit.engines import SGLangServer
from rlkit.models.lora import add_lora
from rlkit.recipe import Lora
from rlkit.testing import random_model
from tests.served import RETRY, Trainer

ROUNDS = 7
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}


def main() -> None:
    policy = add_lora(random_model("qwen2", num_key_value_heads=4, **SIZES), Lora(rank=16, alpha=32))
    trainer, alone = Trainer(policy), Launch(adapter_only=True)
    engines = {"adapters alone": SGLangServer(retry=RETRY, launch=alone)}
    try:
        engines["adapters alone"].bind(trainer.runtime)
        trainer.publish(engines["adapters alone"])
        urls = [engines["adapters alone"].fleet.owned[0].url]
        for transport in ("tensor", "group", "disk"):
            engines[f"merged, {transport}"] = SGLangServer(urls=urls, transport=transport, retry=RETRY)
            engines[f"merged, {transport}"].bind(trainer.runtime)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                engine.fleet.owned[0].state = ServerState.COLD  # another engine has pushed its weights
                trainer.publish(engine)
                start = time.perf_counter()
                trainer.publish(engine, bucket_bytes=256 * 1024 * 1024)
                times[name].append(time.perf_counter() - start)
    finally:
        for engine in reversed(engines.values()):
            engine.close()
    for name, seconds in times.items():
        print(f"{name:16} {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()
