"""Checkpoints: written beside the run by a thread, whole or not there, and proved by checksums when read."""

from __future__ import annotations

import hashlib
import json
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlkit.errors import CheckpointError
from rlkit.models.ranks import Ranks
from rlkit.sections import Save

# one process needs no process group, and nobody needs to be told
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


class Store:
    """A folder of checkpoints, here or anywhere that fsspec reaches; each is `step-<number>`.

    A checkpoint is written under another name and then renamed; one that holds no manifest is not one.

    Args:
        url: A path or an fsspec URL.

    Raises:
        CheckpointError: The URL cannot be understood.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url!r} is no place for checkpoints: {error}") from error

    def path(self, name: str, file: str | None = None) -> str:
        return f"{self.root}/{name}" + ("" if file is None else f"/{file}")

    def names(self) -> list[str]:
        """Give the checkpoints, the newest first."""
        self.fs.invalidate_cache()
        if not self.fs.isdir(self.root):
            return []
        entries = [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
        named = [name for name in entries if name.startswith("step-") and name[5:].isdigit()]
        whole = [name for name in named if self.fs.exists(self.path(name, MANIFEST))]
        return sorted(whole, key=lambda name: -int(name[5:]))

    def read(self, name: str, file: str) -> dict[str, Any]:
        """Read a JSON file of a checkpoint.

        Raises:
            CheckpointError: It is missing or no JSON.
        """
        try:
            with self.fs.open(self.path(name, file), "r", encoding="utf-8") as lines:
                content: dict[str, Any] = json.load(lines)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.url}/{name} is damaged: {file} cannot be read: {error}") from error
        return content

    def write(self, name: str, file: str, content: dict[str, Any]) -> None:
        with self.fs.open(self.path(name, file), "w", encoding="utf-8") as lines:
            json.dump(content, lines)

    def digest(self, name: str, file: str) -> str:
        """Give a file's checksum (BLAKE2b, 128 bits)."""
        found = hashlib.blake2b(digest_size=16)
        with self.fs.open(self.path(name, file), "rb") as data:
            while block := data.read(1 << 22):
                found.update(block)
        return found.hexdigest()

    def files(self, name: str) -> list[str]:
        return sorted(str(path).rpartition("/")[2] for path in self.fs.ls(self.path(name), detail=False))

    def remove(self, name: str) -> None:
        if self.fs.exists(self.path(name)):
            self.fs.rm(self.path(name), recursive=True)

    def verify(self, name: str, ranks: Ranks | None = None) -> None:
        """Compare every file with the manifest; where ranks are given, they share the work.

        Raises:
            CheckpointError: A file is missing, cut short or changed; the message names it.
        """
        listed = self.read(name, MANIFEST)["files"]
        wrong = []
        first, every = (0, 1) if ranks is None else (ranks.fabric.global_rank, ranks.fabric.world_size)
        for file in sorted(listed)[first::every]:
            try:
                if self.digest(name, file) != listed[file]:
                    wrong.append(f"{file} is not what was written")
            except OSError as error:
                wrong.append(f"{file} cannot be read: {error}")
        everyone = [wrong] if ranks is None else ranks.everyone(wrong)
        found = [problem for problems in everyone for problem in problems]
        if found:
            raise CheckpointError(f"checkpoint {self.url}/{name} is damaged: {'; '.join(found)}")

    def load(self, name: str, into: dict[str, Tensor]) -> None:
        """Load tensors in place, resharded where the ranks have changed.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        reader = FsspecReader(f"{self.url}/{name}")
        metadata = reader.read_metadata().state_dict_metadata
        shapes = {n: tuple(m.size) for n, m in metadata.items() if isinstance(m, TensorStorageMetadata)}
        for tensor in sorted(into):
            if shapes.get(tensor) != tuple(into[tensor].shape):
                raise CheckpointError(
                    f"checkpoint {self.url}/{name} is of another model: {tensor} has the shape "
                    f"{list(into[tensor].shape)} here, and there {list(shapes[tensor]) if tensor in shapes else 'none'}"
                )
        try:
            load_tensors(into, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            cause = next(cause for cause, _ in error.failures.values())
            raise CheckpointError(f"checkpoint {self.url}/{name} cannot be loaded: {cause}") from error

    def tensor_names(self, name: str) -> list[str]:
        """Give the names of a checkpoint's tensors."""
        return list(FsspecReader(f"{self.url}/{name}").read_metadata().state_dict_metadata)


class Writer:
    """Writes checkpoints into a store while the run goes on; a step waits for no more than a copy to host memory.

    Args:
        store: Where to.
        section: The recipe's.
        ranks: All take part.
    """

    def __init__(self, store: Store, section: Save, ranks: Ranks) -> None:
        self.store = store
        self.section = section
        self.ranks = ranks
        self.best: tuple[float, str] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlkit-checkpoint")
        self._writing: Future[None] | None = None
        self._group = dist.new_group(backend="gloo") if ranks.fabric.world_size > 1 else None

    @property
    def busy(self) -> bool:
        """Whether some rank is still writing; all ranks must ask."""
        return bool(self.ranks.largest(self._writing is not None and not self._writing.done()))

    def save(self, number: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Copy the tensors and start writing; `finish` or the next `save` raises what goes wrong.

        Raises:
            CheckpointError: The one before could not be written.
        """
        self.finish()
        name = f"step-{number:06d}"
        try:
            if self.ranks.fabric.is_global_zero:
                self.store.remove(f"{name}.partial")
                self.store.fs.makedirs(self.store.path(f"{name}.partial"), exist_ok=True)
        except OSError as error:
            raise self._failure(name, error) from error
        writer = FsspecWriter(f"{self.store.url}/{name}.partial", single_file_per_rank=True)
        copied = async_save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        assert isinstance(copied, Future)
        self._writing = self._thread.submit(self._complete, copied, name, state | {"format": FORMAT})

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: It could not be; the message names the newest whole checkpoint.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _complete(self, copied: Future[Any], name: str, state: dict[str, Any]) -> None:
        """Wait for the tensors, add the checksums, and give the checkpoint its name."""
        partial, rank = f"{name}.partial", self.ranks.fabric.global_rank
        problem: BaseException | None = None
        digests: dict[str, str] = {}
        try:
            copied.result()
            if rank == 0:
                self.store.write(partial, STATE, state)
            own = [f for f in self.store.files(partial) if f.startswith(f"__{rank}_") or (rank == 0 and f[:2] != "__")]
            digests = {file: self.store.digest(partial, file) for file in own}
        except CheckpointException as error:  # no Exception, as torch has it
            problem = next(cause for cause, _ in error.failures.values())
        except Exception as error:  # the other ranks must hear of whatever it was
            problem = error
        everyone = self._gather((problem is None, digests))
        if rank == 0 and all(fine for fine, _ in everyone):
            try:
                self.store.write(partial, MANIFEST, {"files": {k: v for _, part in everyone for k, v in part.items()}})
                self.store.remove(name)
                self.store.fs.mv(self.store.path(partial), self.store.path(name), recursive=True)
                self._prune()
            except OSError as error:
                problem = error
        problems = [p for p in self._gather(None if problem is None else str(problem)) if p is not None]
        if problems:
            raise self._failure(name, problems[0])

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def _prune(self) -> None:
        keep = set(self.store.names()[: self.section.keep_last])
        if self.best is not None:
            keep.add(self.best[1])
        for name in self.store.names():
            if name not in keep:
                self.store.remove(name)

    def _failure(self, name: str, error: object) -> CheckpointError:
        names = self.store.names()
        last = f"the last whole one is {self.store.url}/{names[0]}" if names else "there is none before it"
        return CheckpointError(f"checkpoint {self.store.url}/{name} cannot be written: {error}; {last}")
