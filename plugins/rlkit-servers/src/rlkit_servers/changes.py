"""Weights as changes of those that were sent before: what a trainer sends, and how a server applies it.

An update is a series of buckets, and each bucket is a dictionary of tensors with a few words of metadata: the `base`
version that it changes, the `version` that it leads to, and a checksum of each tensor after the change. A tensor is
in it under its name, or, if few of its elements differ, as `NAME:index` and `NAME:value` with the flat indices and new
values of those elements, or not at all if none differs. A base of "" stands for a full update, which any server takes.

Elements are compared by their bits, so NaN, -0.0 and subnormal numbers arrive as they are. Nothing here belongs to a
product: `SentWeights` is the trainer's side, `WeightReceiver` the server's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
Metadata = dict[str, str]

WORD = 8
"""Bytes that are compared and summed at once."""

CHUNK = 1 << 16
"""Words that are summed at once, so that temporary tensors stay in the processor's cache."""

BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""The integer type for elements of so many bytes."""

SPARSE = 0.5
"""A tensor's changes are sent if they take at most this share of its bytes; otherwise the full tensor is."""

METADATA = "rlkit:metadata"
"""A tensor with a bucket's metadata, as JSON in UTF-8, for products that pass on tensors alone."""

MAX_PAUSE = 64
"""Dense updates are followed by at most this many full ones that are not compared."""


class RefusedWeights(ValueError):
    """A bucket is not for the weights that a server has, or does not fit them."""


@dataclass
class _Sent:
    """A tensor as it was last sent, and its checksum."""

    words: NDArray[np.int64]
    shape: torch.Size
    dtype: torch.dtype
    checksum: list[int]

    def replace(self, places: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Replace the words at some places."""
        difference = new - self.words[places]
        total = self.checksum[0] + int(difference.sum())
        weighted = self.checksum[1] + int((difference * (places + 1)).sum())
        self.checksum = [total % 2**64, weighted % 2**64]
        self.words[places] = new


class SentWeights:
    """Finds what differs from the weights that were last sent, of which it holds a copy on the CPU.

    Comparing costs a pass over the weights, and the copy their size. If an update is dense, as in float32 or at a high
    learning rate, the copy is dropped, and the next 1, 2, 4, … and at most 64 updates are full ones.
    """

    def __init__(self) -> None:
        self.label = ""
        """The version of which there is a copy; "" without one."""
        self.bytes = 0
        """Bytes of the last update."""
        self.full_updates = 0
        self._sent: dict[str, _Sent] = {}
        self._update: Metadata | None = None
        self._copies = True
        self._full_bytes = self._elements = self._changed = 0
        self._pause = self._skip = 0

    @property
    def changed_share(self) -> float:
        """Return the share of elements that differed from those sent before; 1 if they were not compared."""
        return self._changed / self._elements if self._elements else 1.0

    def begin(self, label: str, shared: bool) -> None:
        """Begin an update to a version; `shared` says whether all servers that take it have the copied version."""
        self._update = {"base": self.label if shared else "", "version": label}
        self._copies = self._skip == 0
        self._skip = max(0, self._skip - 1)
        self.label = ""
        self.bytes = self._full_bytes = self._elements = self._changed = 0
        if not self._update["base"]:
            self._sent = {}

    def encode(self, bucket: NamedTensors) -> tuple[NamedTensors, Metadata]:
        """Return the changes to send instead of a bucket; outside of an update, its tensors."""
        if self._update is None:
            return bucket, {}
        tensors: NamedTensors = []
        checksums: dict[str, list[int]] = {}
        for name, tensor in bucket:
            encoded = self._encode(name, tensor.cpu())
            tensors += encoded.items()
            self.bytes += sum(x.numel() * x.element_size() for x in encoded.values())
            self._full_bytes += tensor.numel() * tensor.element_size()
            self._elements += tensor.numel()
            if self._copies:
                checksums[name] = self._sent[name].checksum
        return tensors, {**self._update, "checksums": json.dumps(checksums)}

    def _encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor or its changes; keep a copy of it."""
        sent = self._sent.get(name)
        if sent is None or (sent.shape, sent.dtype) != (tensor.shape, tensor.dtype):
            self._changed += tensor.numel()
            if self._copies:
                words = words_of(tensor)
                self._sent[name] = _Sent(words.numpy().copy(), tensor.shape, tensor.dtype, checksum_of(words))
            return {name: tensor}
        words = words_of(tensor)
        places = np.flatnonzero(words.numpy() != sent.words)
        new, old = words.numpy()[places], sent.words[places]
        index_type = np.int32 if tensor.numel() < 2**31 else np.int64
        bits, per_word = BITS[tensor.dtype.itemsize], WORD // tensor.dtype.itemsize
        changed = np.flatnonzero(new.view(bits) != old.view(bits))
        self._changed += len(changed)
        if len(places) > len(sent.words) / 2:
            sent.words, sent.checksum = words.numpy().copy(), checksum_of(words)
        else:
            sent.replace(places, new)
        if len(changed) * (np.dtype(index_type).itemsize + tensor.dtype.itemsize) > SPARSE * tensor.nbytes:
            return {name: tensor}
        if not len(changed):
            return {}
        index = places[changed // per_word] * per_word + changed % per_word
        value = torch.from_numpy(new.view(bits)[changed]).view(tensor.dtype)
        return {f"{name}:index": torch.from_numpy(index.astype(index_type)), f"{name}:value": value}

    def end(self) -> None:
        """End an update whose last bucket was encoded."""
        assert self._update is not None
        compared = bool(self._update["base"])
        self.full_updates += not compared
        self.label = self._update["version"] if self._copies else ""
        self._update = None
        if compared and self.bytes > self._full_bytes / 2:
            self._pause = self._skip = min(MAX_PAUSE, max(1, 2 * self._pause))
            self.label = ""
        elif compared:
            self._pause = 0
        if not self.label:
            self._sent = {}

    def abandon(self) -> None:
        """Abandon an update in progress, and with it the copy."""
        if self._update is not None:
            self._update = None
            self._sent = {}


class WeightReceiver:
    """A server's weights, and which version they are.

    A bucket is applied only if its base is the version that is here. If it cannot be applied completely, or its
    checksums are not those of the result, there is no version any more, and only a full update is accepted.

    Args:
        tensors: The weights by name; they are changed in place.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.version = ""
        """The version of the weights; "" if it is unknown."""
        self._tensors = tensors
        self._update: tuple[str, str] | None = None
        self._updated: set[str] = set()
        self._names: set[str] = set()
        """Names of all tensors that have come."""
        self._dtypes: dict[str, torch.dtype] = {}
        """The type in which each tensor last came, which may be narrower than the server's own."""

    def begin(self) -> None:
        """Expect the first bucket of an update; one in progress is abandoned, and with it the version."""
        if self._update is not None:
            self.version = ""
        self._update = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Apply a bucket.

        Raises:
            RefusedWeights: It changes another version, names a tensor twice, or does not fit the weights.
        """
        update = metadata.get("base", ""), metadata.get("version", "")
        if self._update is None and update[0] not in ("", self.version):
            raise RefusedWeights(f"these are changes of {update[0]}, but the weights are {self.version or 'unknown'}")
        if self._update not in (None, update):
            raise RefusedWeights(f"a bucket from {update} came in the middle of an update from {self._update}")
        if self._update is None:
            self._updated = set()
        self._update = update
        self.version, version = "", self.version
        try:
            self._load(tensors, json.loads(metadata.get("checksums", "{}")), full=not update[0])
        except BaseException:
            self._update = None
            raise
        self.version = version

    def _load(self, tensors: Mapping[str, Tensor], checksums: Mapping[str, list[int]], full: bool) -> None:
        names = set(map(without_suffix, tensors)) | set(checksums)
        repeated = set() if full else names & self._updated
        if repeated or (not full and names != set(checksums)):
            raise RefusedWeights(f"{sorted(repeated or names - set(checksums))} came twice or without a checksum")
        for name in names:
            own = self._tensors.get(name)
            if own is None:
                raise RefusedWeights(f"{name} has the shape {_shape(tensors, name)}, expected none")
            dtype = self._dtypes[name] = _apply(own, name, tensors) or self._dtypes.get(name, own.dtype)
            if name in checksums and checksum_of(words_of(own.to(dtype))) != checksums[name]:
                raise RefusedWeights(f"{name} has another checksum than the trainer's after the update")
        self._updated |= names

    def finish(self, label: str) -> None:
        """End an update, if there is one; its weights are of the version `label`.

        Raises:
            RefusedWeights: The update was to another version, or some of its tensors never came.
        """
        if self._update is None:
            return
        (base, version), missing = self._update, self._names - self._updated
        self._update = None
        self.version = ""
        if base and (missing or version != label):
            raise RefusedWeights(f"changes to {version} ended as {label} without {sorted(missing)}")
        self._names |= self._updated
        self.version = "" if missing else label


class CheckpointReceiver(WeightReceiver):
    """A copy of a checkpoint in a server's memory, for products whose layers fuse several of its tensors."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        """The checkpoint's tensors by name, on the CPU."""
        super().__init__(self.copies)

    def receive(self, bucket: Mapping[str, Tensor]) -> list[str] | None:
        """Apply a bucket that holds its metadata; return the names of tensors that came, or None after the last bucket.

        Raises:
            RefusedWeights: The bucket is not for the copied weights, or does not fit them.
        """
        tensors = dict(bucket)
        metadata = json.loads(bytes(tensors.pop(METADATA).tolist()))
        if "finish" in metadata:
            self.finish(metadata["finish"])
            return None
        if not metadata.get("base"):
            for name, tensor in tensors.items():
                own = self.copies.get(name)
                if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                    self.copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.load(tensors, metadata)
        return list(dict.fromkeys(map(without_suffix, tensors)))


def metadata_tensor(metadata: Metadata) -> tuple[str, Tensor]:
    """Return metadata as a named tensor."""
    return METADATA, torch.tensor(list(json.dumps(metadata).encode()), dtype=torch.uint8)


def without_suffix(name: str) -> str:
    """Return the name of the tensor that a name in a bucket belongs to."""
    return name.removesuffix(":index").removesuffix(":value")


def _apply(own: Tensor, name: str, tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """Copy a tensor, or its changed elements, to the server's own; return the type of what came, if anything did."""
    tensor, index, value = (tensors.get(key) for key in (name, f"{name}:index", f"{name}:value"))
    if tensor is not None:
        if tensor.shape != own.shape:
            raise RefusedWeights(f"{name} has the shape {list(tensor.shape)}, expected {list(own.shape)}")
        own.copy_(tensor)
        return tensor.dtype
    if index is None and value is None:
        return None
    if index is None or value is None or index.shape != value.shape or index.dim() != 1:
        raise RefusedWeights(f"the changes of {name} lack indices or values")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < own.numel():
        raise RefusedWeights(f"the changes of {name} have indices outside of its {own.numel()} elements")
    own.view(-1).index_copy_(0, index.long().to(own.device), value.to(own.device, own.dtype))
    return value.dtype


def _shape(tensors: Mapping[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int64 [ceil(bytes / 8)], padded with zeros; a view of them where possible."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    padding = -len(raw) % WORD
    if padding:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    return raw.view(torch.int64)


def checksum_of(words: Tensor) -> list[int]:
    """Return the sum of 64-bit words, and the sum weighted by their positions, both modulo 2**64.

    As Fletcher's checksum, it notices each wrong word and words in another order. It is linear, so that a change of a
    few words is a change of both sums.
    """
    positions = _positions(words.device)
    total = weighted = 0
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        part = int(chunk.sum())
        total += part
        if chunk.device.type == "cpu":
            weighted += int(chunk.numpy() @ positions.numpy()[: len(chunk)]) + start * part
        else:
            weighted += int((chunk * positions[: len(chunk)]).sum()) + start * part
    return [total % 2**64, weighted % 2**64]


@cache
def _positions(device: torch.device) -> Tensor:
    """Return the numbers from 1 to `CHUNK`."""
    return torch.arange(1, CHUNK + 1, device=device)
