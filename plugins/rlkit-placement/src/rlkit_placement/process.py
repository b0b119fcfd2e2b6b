"""A process of a pool: `python -m rlkit_placement RUN POOL CLIENTS FOLDER ADDRESS`.

In the FOLDER of the command, which relative paths in the recipe mean, it loads the models of the pool's roles. Then it
serves the trainer's ranks that connect to ADDRESS, CLIENTS of them, with the key in the variable `KEY`. Of
requests to trained and frozen models it takes one from each of them and computes them together, so that all ranks of
the pool, which share the work, do the same in the same order. Rewards are scored at any time, beside that.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from rlkit_rewards.model import load_classifier

from rlkit.api.policy import fabric_for
from rlkit.api.roles import placed_recipe
from rlkit.base.errors import PoolError, RlkitError, explain
from rlkit.distributed.offload import use_device
from rlkit.interfaces.placement import PoolReply
from rlkit.recipe import Recipe
from rlkit.types import JsonObject
from rlkit_placement.checks import number_of
from rlkit_placement.handshake import ClientListener
from rlkit_placement.models import RoleModels
from rlkit_placement.rows import joined, separated
from rlkit_placement.wire import ANY_TIME, KEY, TOGETHER, receive, send


def main(argv: Sequence[str]) -> int:
    """Load the models and serve until the supervisor ends this process; return the exit status."""
    run, pool, clients, folder, address = argv
    try:
        recipe = _recipe_in(folder, Path(run), pool)
        assert recipe.placement is not None
        roles = set(recipe.placement.roles_of(pool))
        kinds = [TOGETHER] * bool(roles - {"reward"}) + [ANY_TIME] * ("reward" in roles)
        listener = _listener(address, int(clients) * len(kinds))
        size, here = number_of(recipe.fabric.devices), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        fabric = fabric_for(replace(recipe, fabric=replace(recipe.fabric, devices=here, num_nodes=size // here)))
        fabric.launch()
        models = RoleModels(recipe, fabric, roles)
        print(f"pool {pool} serves {', '.join(sorted(roles))}", flush=True)
        _serve(listener, models, fabric)
    except RlkitError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    return 0


def _recipe_in(folder: str, run: Path, pool: str) -> Recipe:
    """Enter the folder of the command; return the recipe of the run, for the pool.

    Raises:
        PoolError: This machine has not these folders.
    """
    try:
        os.chdir(folder)
        return placed_recipe(run, pool)
    except OSError as error:
        raise PoolError(
            f"{socket.gethostname()} cannot read {folder} and {run}, the folders of the command and of the run: "
            f"{explain(error)}; all nodes must share them"
        ) from error


def _listener(address: str, clients: int) -> ClientListener:
    try:
        return ClientListener(address, bytes.fromhex(os.environ.pop(KEY)), clients)
    except OSError as error:
        raise PoolError(f"nothing can listen at {address}: {explain(error)}") from error


def _serve(listener: ClientListener, models: RoleModels, fabric: Fabric) -> None:
    """Accept all clients, and answer them until one has ended; then wait for the supervisor."""
    together: dict[int, Connection] = {}

    def accept(header: JsonObject, connection: Connection) -> None:
        if header["kind"] == TOGETHER:
            together[header["rank"]] = connection
        else:
            threading.Thread(target=_score, args=(fabric, connection), daemon=True).start()

    listener.accept_all(accept)
    while together and _answer(models, [together[rank] for rank in sorted(together)], fabric.device):
        pass
    threading.Event().wait()  # the supervisor ends this process with the first rank, which may still save the policy


def _answer(models: RoleModels, connections: Sequence[Connection], device: torch.device) -> bool:
    """Answer a request of each of the trainer's ranks, all of which ask the same; return whether they go on."""
    try:
        requests = [receive(connection) for connection in connections]
    except (EOFError, OSError):
        return False
    start = time.perf_counter()
    header, parts = requests[0][0], [tensors for _, tensors in requests]
    try:
        batch = [joined(parts, device)] if parts[0] else []
        reply: PoolReply = getattr(models, header["work"])(*batch, **header["options"])
    except Exception as error:
        for connection in connections:
            send(connection, {"error": explain(error)}, {})
        raise
    computed = {name: tensor.cpu() for name, tensor in reply.tensors.items()}
    separate = separated(computed, parts) if batch else [computed, *({} for _ in parts[1:])]
    busy = time.perf_counter() - start
    for number, (connection, tensors) in enumerate(zip(connections, separate, strict=True)):
        send(connection, {"sums": {} if number else reply.sums, "busy": busy}, tensors)
    return True


def _score(fabric: Fabric, connection: Connection) -> None:
    """Answer one rank's requests to reward models, of which the first to each names its weights."""
    use_device(fabric.device)
    classifiers: dict[str, Any] = {}
    while True:
        try:
            header, inputs = receive(connection)
        except (EOFError, OSError):
            return
        start, tensors = time.perf_counter(), {}
        try:
            path, dtype = header["options"]["path"], header["options"]["dtype"]
            if not inputs:
                classifiers[f"{path} {dtype}"] = load_classifier(path, dtype).to(fabric.device)
            elif len(inputs["input_ids"]):
                moved = {name: x.to(fabric.device) for name, x in inputs.items()}
                with torch.no_grad(), fabric.autocast():
                    tensors["outputs"] = classifiers[f"{path} {dtype}"](**moved).logits[:, 0].float()
            send(connection, {"sums": {}, "busy": time.perf_counter() - start}, tensors)
        except Exception as error:
            send(connection, {"error": explain(error)}, {})
