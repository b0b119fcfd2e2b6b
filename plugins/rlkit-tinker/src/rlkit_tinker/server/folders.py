"""The folders of models: whose each is, and the states that were saved under names."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from rlkit.base.errors import show
from rlkit.types import JsonObject
from rlkit_tinker.checkpoints import NAME, folder_of, write_folder
from rlkit_tinker.server.requests import WireRequest
from rlkit_tinker.types import RequestFailedError

RUN, CHECKPOINT, USAGE = "run.json", "checkpoint.json", "usage.json"
KINDS = {"weights": "training", "sampler_weights": "sampler"}


class ModelFolders:
    """The folders of models in that of the server; a model's folder outlives its session.

    Args:
        root: The folder of the server.
        base: The name of the base, as it is written into saved states.
        names: The names under which clients may ask for the base.
        max_bytes: The most bytes of a tenant's states under names.
    """

    def __init__(self, root: Path, base: str, names: Sequence[str], max_bytes: float = inf) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self.base = base
        self.names = tuple(names)

    def check_base(self, name: str) -> None:
        """Check that a client asks for the base that is served.

        Raises:
            RequestFailedError: It asks for another.
        """
        if name not in self.names:
            raise RequestFailedError(
                f"base_model is {show(name)}, but this server has {' and '.join(self.names)}; ask for that, or start "
                "the server with --alias NAME"
            )

    def add(
        self, model: str, tenant: str, base_model: str, lora_config: JsonObject, user_metadata: JsonObject | None
    ) -> None:
        """Write the description of a new model."""
        folder = self._root / model
        folder.mkdir(parents=True, exist_ok=True)
        run = {"tenant": tenant, "base_model": base_model, "lora_config": lora_config, "user_metadata": user_metadata}
        _write_json(folder / RUN, run)

    def read(self, model: str) -> JsonObject:
        """Return the description of a model; empty if there is none of this name."""
        file = self._root / model / RUN
        if not NAME.fullmatch(model) or not os.path.isfile(file):
            return {}
        run: JsonObject = json.loads(file.read_text(encoding="utf-8"))
        return run

    def folder_of(self, path: str, tenant: str) -> Path:
        """Return the folder of a tenant's saved state.

        Raises:
            RequestFailedError: The tenant has no such state; another's is as if it were not there.
        """
        folder = folder_of(self._root, path)
        if self.read(folder.parent.parent.name).get("tenant") != tenant or not os.path.isfile(folder / CHECKPOINT):
            raise RequestFailedError(f"no state is saved at {show(path)}; name one of save_state")
        return folder

    def write(
        self,
        request: WireRequest,
        path: str,
        ttl_seconds: int | None,
        write: Callable[[Path], None],
        overwrite: bool = False,
    ) -> None:
        """Write a state once, also where a kill came between its writing and the record of it.

        A request that runs again leaves the state of a later one, which has overwritten its own.
        """
        folder = folder_of(self._root, path)
        written_by = version_of(folder)
        if written_by is not None and int(written_by.rpartition("/")[2]) >= request.seq:  # a path is of one model
            return
        self._check_space(self.read(request.owner)["tenant"])
        expires = None if ttl_seconds is None else time.time() + ttl_seconds

        def write_all(part: Path) -> None:
            write(part)
            _write_json(part / CHECKPOINT, {"request": request.id, "created": time.time(), "expires": expires})

        write_folder(folder, write_all, overwrite)

    def end(self, model: str) -> None:
        """Remove what a model has saved without a name, and all of a model that has saved nothing else."""
        folder = self._root / model
        shutil.rmtree(folder / "snapshots", ignore_errors=True)
        if not any(os.path.isdir(folder / kind) for kind in KINDS):
            shutil.rmtree(folder, ignore_errors=True)

    def checkpoints(self, model: str) -> list[JsonObject]:
        """Return the fields, as the SDK reads them, of each state that a model has saved under a name."""
        folders = [(kind, folder) for kind in KINDS for folder in sorted((self._root / model / kind).glob("*"))]
        checkpoints = [
            (kind, folder, _read_checkpoint(folder)) for kind, folder in folders if NAME.fullmatch(folder.name)
        ]
        return [
            {
                "checkpoint_id": f"{kind}/{folder.name}",
                "checkpoint_type": KINDS[kind],
                "tinker_path": f"tinker://{model}/{kind}/{folder.name}",
                "time": _time(checkpoint["created"]),
                "expires_at": _time(checkpoint["expires"]),
                "size_bytes": _size(folder),
            }
            for kind, folder, checkpoint in checkpoints
            if checkpoint
        ]

    def _check_space(self, tenant: str) -> None:
        models = [run.parent.name for run in self._root.glob(f"*/{RUN}")]
        own = [model for model in models if self.read(model).get("tenant") == tenant]
        size = sum(_size(self._root / model / kind) for model in own for kind in KINDS)
        if size >= self._max_bytes:
            raise RequestFailedError(
                f"the key's states have {size / 2**30:.3g} GiB, expected less than {self._max_bytes / 2**30:.3g}; "
                "delete some by RestClient.delete_checkpoint, or raise --tenant-gib"
            )

    def write_usage(self, usage: Sequence[JsonObject]) -> None:
        """Write what each tenant has used, for the operator of the server."""
        _write_json(self._root / USAGE, usage)

    def remove_expired(self) -> None:
        """Remove the states whose time is over."""
        for kind in KINDS:
            for folder in self._root.glob(f"*/{kind}/*"):
                expires = _read_checkpoint(folder).get("expires")
                if expires is not None and expires < time.time():
                    shutil.rmtree(folder, ignore_errors=True)


def version_of(folder: Path) -> str | None:
    """Return the request that saved a state under its name; None for what has no name."""
    version: str | None = _read_checkpoint(folder).get("request")
    return version


def _read_checkpoint(folder: Path) -> JsonObject:
    file = folder / CHECKPOINT
    if not os.path.isfile(file):
        return {}
    checkpoint: JsonObject = json.loads(file.read_text(encoding="utf-8"))
    return checkpoint


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if os.path.isfile(file))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _write_json(file: Path, value: JsonObject | Sequence[JsonObject]) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(file)
