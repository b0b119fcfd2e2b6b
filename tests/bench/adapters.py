"""What mixed batches cost: `PYTHONPATH=plugins/rlkit-tinker/src python -m tests.bench.adapters`, on a CPU.

CPU seconds of a forward and backward pass over 64 rows of 64 tokens of the model `tiny`: of one adapter of rank 8, of
64 adapters in one mixed pass, and of these one by one. The least of three.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rlkit_tinker import Datum, ModelInput, Service, TrainingClient

ROWS, TOKENS, RANK, REPEATS = 64, 64, 8, 3


def datum(seed: int) -> Datum:
    tokens = torch.randint(3, 250, (TOKENS + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Datum(ModelInput(tuple(tokens[:-1])), {"target_tokens": tokens[1:], "weights": [1.0] * TOKENS})


def seconds(calls: Sequence[tuple[TrainingClient, list[Datum]]], together: bool) -> float:
    """Return the CPU seconds of passes, submitted together or one by one."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        futures = []
        for client, data in calls:
            futures.append(client.forward_backward(data, "cross_entropy"))
            if not together:
                futures[-1].result()
        for future in futures:
            future.result()
        times.append(time.process_time() - start)
        for client, _ in calls:
            client.adapter.drop_gradients()
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    service = Service("tiny", max_adapters=ROWS)
    clients = [service.create_training_client(rank=RANK, seed=i) for i in range(ROWS)]
    data = [datum(i) for i in range(ROWS)]
    each = [(client, [row]) for client, row in zip(clients, data, strict=True)]
    alone = seconds([(clients[0], data)], together=True)
    mixed = seconds(each, together=True)
    in_turn = seconds(each, together=False)
    print(
        f"one adapter {alone:.3f} s, {ROWS} in a mixed pass {mixed:.3f} s ({mixed / alone:.2f} times), "
        f"one by one {in_turn:.3f} s ({in_turn / alone:.2f} times)"
    )


if __name__ == "__main__":
    main()
