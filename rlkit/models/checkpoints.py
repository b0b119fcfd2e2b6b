"""Finding, verifying and loading checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlkit.base.errors import CheckpointError
from rlkit.distributed.ranks import Ranks
from rlkit.distributed.tensor_store import TensorFilesError, load_tensors, load_tensors_alone
from rlkit.models.checkpoint_schema import RunState
from rlkit.models.store import Store
from rlkit.models.tensor_files import TensorReader, first_problem
from rlkit.recipe import Model
from rlkit.recipe.credentials import expand


@dataclass
class CheckpointRef:
    """A verified checkpoint."""

    store: Store
    name: str
    state: RunState

    @property
    def location(self) -> str:
        """The path or URL of the checkpoint."""
        return f"{self.store.url}/{self.name}"

    def model(self) -> Model:
        """Return the recipe's `model:`; `trust_remote_code` in a checkpoint is ignored.

        Raises:
            CheckpointError: The recipe has no such section, or it does not fit the tensors.
            RecipeError: A credential of its path is not in the environment.
        """
        try:
            model = TypeAdapter(Model).validate_python(expand(self.state.recipe.get("model"), "model"))
        except ValidationError as error:
            raise CheckpointError(
                f"{self.location} is damaged: its recipe has no valid model: {first_problem(error)}"
            ) from error
        model.trust_remote_code = False
        extents = {extent for shape in tensor_shapes(self.store, self.name).values() for extent in shape}
        if model.lora is not None and model.lora.rank not in extents:
            raise CheckpointError(f"{self.location} is damaged: it has no tensors of model.lora.rank {model.lora.rank}")
        return model


def open_checkpoint(location: str, ranks: Ranks | None = None) -> CheckpointRef:
    """Open a checkpoint by its own path, or the newest one of a run folder or a folder of checkpoints.

    Its files are compared with their checksums, and its state is read as data of known types. `ranks` share the work;
    all must call this.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the message then names an intact one.
    """
    location = location.rstrip("/")
    for url in (f"{location}/checkpoints", location):
        store = Store(url)
        names = _names(store, ranks)
        if names:
            return _open_or_suggest(store, names[0], ranks)
    parent, _, name = location.rpartition("/")
    store = Store(parent or ".")
    if name in _names(store, ranks):
        return _open_or_suggest(store, name, ranks)
    if os.path.isfile(f"{location}/recipe.yaml"):
        raise CheckpointError(
            f"the run in {location!r} ended before its first complete checkpoint (save.every); begin it again in a new "
            "folder"
        )
    raise CheckpointError(f"there is no complete checkpoint at {location!r}; expected a run folder or a checkpoint")


def newest_intact(store: Store, ranks: Ranks | None = None) -> tuple[CheckpointRef | None, list[str]]:
    """Return the newest intact checkpoint, and the problems of newer ones."""
    problems: list[str] = []
    for name in _names(store, ranks):
        try:
            return _open(store, name, ranks), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def verify(store: Store, name: str, ranks: Ranks | None = None) -> None:
    """Check every file of a checkpoint against the manifest, and read the JSON and the headers; `ranks` share the work.

    Raises:
        CheckpointError: A file is missing, truncated, changed or malformed; the message names it.
    """
    rank, world_size = (0, 1) if ranks is None else (ranks.fabric.global_rank, ranks.fabric.world_size)
    problems = []
    try:
        digests = store.manifest(name).files
        for file in sorted(digests)[rank::world_size]:
            if store.digest(name, file) != digests[file]:
                problems.append(f"{store.url}/{name} is damaged: {file} does not match its checksum")
        if not problems:
            store.state(name)
            _open_tensors(store, name)
    except CheckpointError as error:
        problems.append(str(error))
    problems_by_rank = [problems] if ranks is None else ranks.gather_world(problems)
    distinct = dict.fromkeys(problem for rank_problems in problems_by_rank for problem in rank_problems)
    if distinct:
        raise CheckpointError("; ".join(distinct))


def load_checkpoint(store: Store, name: str, into: dict[str, Tensor]) -> None:
    """Load a checkpoint's tensors in place, resharded if the ranks have changed; all ranks must call this.

    Raises:
        CheckpointError: The checkpoint is of another model, or damaged.
    """
    reader = _matching_reader(store, name, into)
    try:
        load_tensors(into, reader)
    except TensorFilesError as error:
        raise _unloadable(store, name, error) from error


def load_checkpoint_alone(store: Store, name: str, into: dict[str, Tensor]) -> None:
    """Load a checkpoint's full tensors in place, on this rank alone.

    Raises:
        CheckpointError: The checkpoint is of another model, or damaged.
    """
    reader = _matching_reader(store, name, into)
    try:
        load_tensors_alone(into, reader)
    except TensorFilesError as error:
        raise _unloadable(store, name, error) from error


def _unloadable(store: Store, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {store.url}/{name} cannot be loaded: {error}")


def _matching_reader(store: Store, name: str, into: dict[str, Tensor]) -> TensorReader:
    """Return a reader of a checkpoint's tensors, after a check of their shapes and types.

    Raises:
        CheckpointError: The checkpoint is of another model, or damaged.
    """
    reader, saved_tensors = _open_tensors(store, name)
    for key in sorted(into):
        saved = saved_tensors.get(key)
        target = into[key]
        if saved is None or (saved.size, saved.properties.dtype) != (target.shape, target.dtype):
            saved_type = "none" if saved is None else f"{_dtype_name(saved.properties.dtype)}{[*saved.size]}"
            raise CheckpointError(
                f"checkpoint {store.url}/{name} is of another model: {key} is "
                f"{_dtype_name(target.dtype)}{[*target.shape]} here, and there {saved_type}"
            )
    return reader


def read_tensors(store: Store, name: str, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return full tensors of a checkpoint by their names in it.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    saved = _open_tensors(store, name)[1]
    tensors = {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype) for key in keys}
    load_checkpoint_alone(store, name, tensors)
    return tensors


def tensor_shapes(store: Store, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by name.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    return {key: tuple(metadata.size) for key, metadata in _open_tensors(store, name)[1].items()}


def _open_tensors(store: Store, name: str) -> tuple[TensorReader, dict[str, TensorStorageMetadata]]:
    files = store.manifest(name).tensor_files
    for file in files:
        with store.open(name, file):
            pass
    reader = TensorReader(store.fs, store.path(name), files)
    metadata = reader.read_metadata().state_dict_metadata
    return reader, {key: part for key, part in metadata.items() if isinstance(part, TensorStorageMetadata)}


def _names(store: Store, ranks: Ranks | None) -> list[str]:
    """Return the first rank's list of a store's checkpoints, since ranks may see different states of the folder."""
    return store.names() if ranks is None else ranks.from_first(store.names)


def _open(store: Store, name: str, ranks: Ranks | None) -> CheckpointRef:
    verify(store, name, ranks)
    state = store.state(name) if ranks is None else ranks.from_first(lambda: store.state(name))
    return CheckpointRef(store, name, state)


def _open_or_suggest(store: Store, name: str, ranks: Ranks | None) -> CheckpointRef:
    """Open a checkpoint; if it is damaged, the error names the newest intact one."""
    try:
        return _open(store, name, ranks)
    except CheckpointError as error:
        intact, _ = newest_intact(store, ranks)
        remedy = "no checkpoint there is intact" if intact is None else f"the newest intact one is {intact.location}"
        raise CheckpointError(f"{error}; {remedy}") from error


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
