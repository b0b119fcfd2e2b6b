"""Folders of checkpoints, read as untrusted data and verified by checksums."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import fsspec  # type: ignore[import-untyped]
import torch
from pydantic import AliasChoices, BaseModel, Field, StringConstraints, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlkit.distributed.ranks import Ranks
from rlkit.distributed.tensor_store import TensorFilesError, load_tensors
from rlkit.errors import CheckpointError
from rlkit.models.tensor_files import TensorReader, first_problem
from rlkit.ranges import FiniteFloat, NonNegativeFloat, NonNegativeInt
from rlkit.sections import Model
from rlkit.types import JsonObject

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2

JSON_LIMIT = 16 * 1024 * 1024
"""Maximum bytes of a checkpoint's JSON files."""

NAME = re.compile(r"step-([0-9]{6,12})")

FileName = Annotated[str, StringConstraints(pattern=r"^(state\.json|rank-[0-9]{5}\.safetensors)$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

Content = TypeVar("Content", bound=BaseModel)


class Numbers(BaseModel, strict=True, extra="forbid"):
    """The numbers that the next step depends on, besides tensors, seed and step."""

    version: NonNegativeInt
    kl_coef: FiniteFloat | None = None
    shaper: tuple[NonNegativeFloat, FiniteFloat, NonNegativeFloat] | None = None


class State(BaseModel, strict=True, extra="forbid"):
    """The state of a run in a checkpoint.

    Args:
        step: The last completed step.
        recipe: The run's recipe with all options.
        numbers: The run's numbers.
        before: The metrics of the validation before training.
        earlier: The accuracies of the first validation and the last one: of each prompt, by its place.
        waited: The best value of `validation.watch`, and the validations since.
        best: The best value of the metric among checkpoints, and its step.
        metric: That metric: the run's `save.keep_best`.
        stalled: Consecutive stalled steps, up to this one.
        callbacks: The state of callbacks, by the names of their classes.
        trained: Where rollouts run ahead, the groups that were trained on: all before the first number, and the others.
    """

    step: NonNegativeInt
    recipe: JsonObject
    numbers: Numbers
    before: dict[str, FiniteFloat] | None = None
    earlier: dict[str, dict[str, dict[int, FiniteFloat]]] = Field(default_factory=dict)
    waited: tuple[FiniteFloat, NonNegativeInt] | None = None
    best: tuple[FiniteFloat, NonNegativeInt] | None = None
    metric: str | None = Field(default=None, validation_alias=AliasChoices("metric", "figure"))
    stalled: NonNegativeInt = 0
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    trained: list[NonNegativeInt] | None = None


class Version(BaseModel, strict=True):
    """The format of a checkpoint."""

    format: int = 1


class Manifest(Version, extra="forbid"):
    """The files of a checkpoint with their checksums."""

    files: dict[FileName, Digest]

    @property
    def tensor_files(self) -> list[str]:
        return sorted(set(self.files) - {STATE})


class Store:
    """A folder of checkpoints in any file system of fsspec; each is `step-<number>`.

    A checkpoint is written under another name and then renamed; a folder without a manifest is not a checkpoint.

    Args:
        url: A path or an fsspec URL.

    Raises:
        CheckpointError: The URL cannot be understood, or its file system cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as error:  # whatever a file system's client raises when it cannot be set up
            why = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{url!r} cannot hold checkpoints: {why}. Use a folder, or a URL whose file system can be reached "
                "from here (packages for object stores: s3fs, gcsfs, adlfs; for hdfs:// pyarrow and Hadoop's libraries)"
            ) from error

    def path(self, name: str, file: str | None = None) -> str:
        return f"{self.root}/{name}" + ("" if file is None else f"/{file}")

    def names(self) -> list[str]:
        """Return the checkpoints, the newest first."""
        return [name for name in self.entries() if self.fs.exists(self.path(name, MANIFEST))]

    def entries(self, suffix: str = "") -> list[str]:
        """Return all folders named as checkpoints with a suffix, complete or not; the latest step first."""
        self.fs.invalidate_cache()
        try:
            listed = self.fs.ls(self.root, detail=False) if self.fs.isdir(self.root) else []
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be listed: {error}") from error
        found = [str(path).rstrip("/").rpartition("/")[2] for path in listed]
        bare = [name.removesuffix(suffix) for name in found if name.endswith(suffix)]
        return [f"{name}{suffix}" for name in sorted(filter(NAME.fullmatch, bare), key=step_of, reverse=True)]

    def manifest(self, name: str) -> Manifest:
        """Read a checkpoint's manifest.

        Raises:
            CheckpointError: There is no manifest, it is malformed, of another format, or lists no state or no tensors.
        """
        version = self._read(name, MANIFEST, Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{self.url}/{name} has format {version}, expected {FORMAT}: another version of rlkit wrote it"
            )
        found = self._read(name, MANIFEST, Manifest)
        if STATE not in found.files or not found.tensor_files:
            raise CheckpointError(f"{self.url}/{name} is damaged: {MANIFEST} lists no {STATE} or no tensors")
        return found

    def state(self, name: str) -> State:
        """Read the state of the run in a checkpoint.

        Raises:
            CheckpointError: It is missing, malformed, or of another step than its name.
        """
        found = self._read(name, STATE, State)
        if found.step != step_of(name):
            raise CheckpointError(f"{self.url}/{name} is damaged: {STATE} is of step {found.step}")
        return found

    def verify(self, name: str, ranks: Ranks | None = None) -> None:
        """Verify every file against the manifest, and read all but the tensors; `ranks` share the work.

        Raises:
            CheckpointError: A file is missing, cut short, changed or malformed; the message names it.
        """
        wrong = []
        first, every = (0, 1) if ranks is None else (ranks.fabric.global_rank, ranks.fabric.world_size)
        try:
            listed = self.manifest(name).files
            for file in sorted(listed)[first::every]:
                if self.digest(name, file) != listed[file]:
                    wrong.append(f"{self.url}/{name} is damaged: {file} does not match its checksum")
            if not wrong:
                self.state(name)
                self._tensors(name)
        except CheckpointError as error:
            wrong.append(str(error))
        everyone = [wrong] if ranks is None else ranks.gather_world(wrong)
        found = dict.fromkeys(problem for problems in everyone for problem in problems)
        if found:
            raise CheckpointError("; ".join(found))

    def digest(self, name: str, file: str) -> str:
        """Return a file's checksum (BLAKE2b, 128 bits)."""
        found = hashlib.blake2b(digest_size=16)
        with self._open(name, file) as data:
            while block := data.read(1 << 22):
                found.update(block)
        return found.hexdigest()

    def load(self, name: str, into: dict[str, Tensor], alone: bool = False) -> None:
        """Load tensors in place, resharded if the ranks have changed; all must call this, unless one is `alone`.

        Raises:
            CheckpointError: The checkpoint is of another model, or damaged.
        """
        reader, tensors = self._tensors(name)
        for tensor in sorted(into):
            there, here = tensors.get(tensor), into[tensor]
            if there is None or (there.size, there.properties.dtype) != (here.shape, here.dtype):
                what = "none" if there is None else f"{_kind(there.properties.dtype)}{[*there.size]}"
                raise CheckpointError(
                    f"checkpoint {self.url}/{name} is of another model: {tensor} is "
                    f"{_kind(here.dtype)}{[*here.shape]} here, and there {what}"
                )
        try:
            load_tensors(into, reader, alone)
        except TensorFilesError as error:
            raise CheckpointError(f"checkpoint {self.url}/{name} cannot be loaded: {error}") from error

    def read(self, name: str, tensors: Sequence[str]) -> dict[str, Tensor]:
        """Return some tensors of a checkpoint, whole, by their names in it.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        known = self._tensors(name)[1]
        found = {tensor: torch.empty(known[tensor].size, dtype=known[tensor].properties.dtype) for tensor in tensors}
        self.load(name, found, alone=True)
        return found

    def write(self, name: str, file: str, content: BaseModel) -> None:
        """Write a JSON file of a checkpoint."""
        with self.fs.open(self.path(name, file), "w", encoding="utf-8") as lines:
            lines.write(content.model_dump_json())

    def finalize(self, partial: str, name: str) -> None:
        """Rename a partial checkpoint to its final name, replacing one of that name."""
        self.remove(name)
        self.fs.mv(self.path(partial), self.path(name), recursive=True)

    def withdraw(self, name: str) -> None:
        """Remove a checkpoint's manifest, so that it is no longer a checkpoint; of a link, remove only the link."""
        if self.fs.exists(self.path(name, MANIFEST)):
            linked = self.fs.info(self.path(name)).get("islink")
            self.fs.rm_file(self.path(name) if linked else self.path(name, MANIFEST))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or its remains."""
        self.withdraw(name)
        if self.fs.exists(self.path(name)):
            self.fs.rm(self.path(name), recursive=True)

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the names of a checkpoint's tensors with their shapes.

        Raises:
            CheckpointError: It is damaged.
        """
        return {tensor: tuple(there.size) for tensor, there in self._tensors(name)[1].items()}

    def _tensors(self, name: str) -> tuple[TensorReader, dict[str, TensorStorageMetadata]]:
        files = self.manifest(name).tensor_files
        for file in files:
            with self._open(name, file):
                pass
        reader = TensorReader(self.fs, self.path(name), files)
        found = reader.read_metadata().state_dict_metadata
        return reader, {tensor: there for tensor, there in found.items() if isinstance(there, TensorStorageMetadata)}

    def _read(self, name: str, file: str, kind: type[Content]) -> Content:
        with self._open(name, file) as stream:
            text = stream.read(JSON_LIMIT + 1)
        if len(text) > JSON_LIMIT:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file} has more than {JSON_LIMIT} bytes")
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file}: {first_problem(error)}") from error

    @contextmanager
    def _open(self, name: str, file: str) -> Iterator[Any]:
        """Open a file of a checkpoint, which must be a regular file: no link, no device."""
        path = self.path(name, file)
        try:
            about = self.fs.info(path)
            if about["type"] != "file" or about.get("islink"):
                raise CheckpointError(
                    f"{self.url}/{name} is damaged: {file} is not a regular file, but a link or a device"
                )
            with self.fs.open(path, "rb") as stream:
                yield stream
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file} cannot be read: {error}") from error


@dataclass
class CheckpointRef:
    """A verified checkpoint."""

    store: Store
    name: str
    state: State

    @property
    def place(self) -> str:
        return f"{self.store.url}/{self.name}"

    def model(self) -> Model:
        """Return the recipe's `model:`; `trust_remote_code` in a checkpoint is ignored.

        Raises:
            CheckpointError: The recipe has no such section, or one that does not fit the tensors.
        """
        try:
            model = TypeAdapter(Model).validate_python(self.state.recipe.get("model"))
        except ValidationError as error:
            raise CheckpointError(
                f"{self.place} is damaged: its recipe has no valid model: {first_problem(error)}"
            ) from error
        model.trust_remote_code = False
        extents = {extent for shape in self.store.shapes(self.name).values() for extent in shape}
        if model.lora is not None and model.lora.rank not in extents:
            raise CheckpointError(f"{self.place} is damaged: it has no tensors of model.lora.rank {model.lora.rank}")
        return model


def open_checkpoint(place: str, ranks: Ranks | None = None) -> CheckpointRef:
    """Open a checkpoint by its own path, or the newest one of a run folder or a folder of checkpoints.

    Its files are compared with their checksums, and its state is read as data of known types. `ranks` share the work;
    all must call this.

    Raises:
        CheckpointError: There is none, or it is damaged; the message names another one that is whole.
    """
    place = place.rstrip("/")
    for url in (f"{place}/checkpoints", place):
        store = Store(url)
        if names := _names(store, ranks):
            return _whole(store, names[0], ranks)
    parent, _, name = place.rpartition("/")
    store = Store(parent or ".")
    if name in _names(store, ranks):
        return _whole(store, name, ranks)
    raise CheckpointError(
        f"there is no whole checkpoint at {place!r}; expected a run folder, or one of its checkpoints"
    )


def newest_whole(store: Store, ranks: Ranks | None = None) -> tuple[CheckpointRef | None, list[str]]:
    """Return the newest intact checkpoint, and the problems of newer ones."""
    damaged: list[str] = []
    for name in _names(store, ranks):
        try:
            return _open(store, name, ranks), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    return int(name.removeprefix("step-"))


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:06d}"


def _names(store: Store, ranks: Ranks | None) -> list[str]:
    """Return the first rank's list of a store's checkpoints: others may see an older state of the folder."""
    return store.names() if ranks is None else ranks.from_first(store.names)


def _open(store: Store, name: str, ranks: Ranks | None) -> CheckpointRef:
    store.verify(name, ranks)
    state = store.state(name) if ranks is None else ranks.from_first(lambda: store.state(name))
    return CheckpointRef(store, name, state)


def _whole(store: Store, name: str, ranks: Ranks | None) -> CheckpointRef:
    try:
        return _open(store, name, ranks)
    except CheckpointError as error:
        other, _ = newest_whole(store, ranks)
        raise CheckpointError(f"{error}; {other.place if other else 'none'} is whole") from error


def _kind(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
