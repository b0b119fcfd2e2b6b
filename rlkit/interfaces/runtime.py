"""What a run offers its parts: the only access of a plugin to the trainer."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from rlkit.interfaces.fields import Field
from rlkit.types import JsonObject, Score, Trajectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlkit.interfaces.launcher import HostedServer, ServerCommand
    from rlkit.interfaces.model import CausalLM, Tokenizer
    from rlkit.interfaces.reward import RewardManager


R = TypeVar("R")
T = TypeVar("T")


class WeightStream(Protocol):
    """All named tensors of the policy: names and shapes at once, values bucket by bucket."""

    @property
    def specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every tensor's shape and type, by name."""

    @property
    def buffer_names(self) -> Collection[str]:
        """Names of the tensors that are not rounded to the engine's type, such as the biases of routers."""

    def buckets(self, merged: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
        """Return full tensors under their Hugging Face names, a bounded number of bytes at a time.

        Adapters are `merged` into them, or left out.
        """

    def adapter(self) -> tuple[JsonObject, list[tuple[str, Tensor]]] | None:
        """Return the adapters' configuration and full tensors, named as peft saves them; None if there are none."""


class Runtime(Protocol):
    """The argument of every part's `bind`, called once process group, device and models exist."""

    tensor_parallel: int
    """How many ranks share each of the policy's matrix products; 1 without tensor parallelism."""

    sequence_parallel: int
    """How many ranks share the tokens of each row in training; 1 without sequence parallelism."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer, with its chat template."""

    @property
    def policy(self) -> CausalLM:
        """The Hugging Face causal language model that is being trained."""

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""

    @property
    def context(self) -> int:
        """The policy's context in tokens."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token ids with which the policy ends a turn."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Gather the policy's full weights on this rank, so that its modules may be called; all ranks must enter."""

    def autocast(self) -> AbstractContextManager[None]:
        """Return the precision context under which the trainer runs the policy."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the policy's logits [B,T,V] of tokens [B,T], in the precision in which it is trained.

        All ranks must call this. A sharded policy is gathered layer by layer; ranks of one tensor-parallel group
        must have the same tokens. Ranks of a sequence-parallel group compute all tokens each.
        """

    def gather_world(self, value: T) -> list[T]:
        """Return every rank's value, those with the same rows included, in the order of ranks."""

    def broadcast_tp(self, value: T) -> T:
        """Return the value of the first of the ranks that have this rank's rows, by tensor or sequence parallelism."""

    def reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel group."""

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate a vector, whose length may differ, over the data-parallel group."""

    def host_server(self, command: ServerCommand) -> HostedServer | None:
        """Return the process of a server on a node that the run's launcher chooses; None for this machine."""

    def placed_classifier(self, path: str, dtype: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Load a sequence classifier with one label in the pool that the recipe places rewards in.

        Returns:
            The function from the classifier's inputs to its outputs [B] f32; None if the recipe places no rewards.
        """

    async def work(self, function: Callable[[T], R], argument: T, timeout: float) -> R:
        """Run a function in a worker process that is killed at the deadline; function and argument are pickled.

        It may return data only: None, numbers, strings, lists (tuples become lists) and dictionaries with string keys.

        Raises:
            Exception: The function raised, or its worker hung or died; the message names which.
        """

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score trajectories with a reward under its deadline; errors become scores with `error`."""


class OneProcess:
    """What a `Runtime` of one process, without other ranks, has in place of collectives."""

    tensor_parallel = 1
    sequence_parallel = 1

    def gather_world(self, value: T) -> list[T]:
        return [value]

    def broadcast_tp(self, value: T) -> T:
        return value

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def host_server(self, command: ServerCommand) -> HostedServer | None:
        return None

    def placed_classifier(self, path: str, dtype: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        return None


class RunPart(ABC):  # noqa: B024 (a part overrides what it needs)
    """A class that a recipe names. Its constructor stores options; files, servers and models are opened later."""

    may_fill: ClassVar[Sequence[str]] = ()
    """By what such a part may fill fields: token, turn, row."""
    fills: Sequence[Field] = ()
    """The fields that the part fills, for all who read them; a constructor may set them from its options."""
    reads_fields: Sequence[str] = ()
    """The names of the fields that the part reads; without another part that fills them, the run does not start."""

    def files(self) -> Iterable[tuple[str, str]]:
        """Return the local files and folders that a run reads, each with the option that names it."""
        return ()

    def close(self) -> None:
        """Free what the part holds: called at the end of a run, also after a failure and before `bind`."""


class BoundPart(RunPart):
    """A part that uses the run's tokenizer, policy, device or workers."""

    def bind(self, runtime: Runtime) -> None:
        """Store what needs the run: called once process group, device and models exist."""


class ReducingPart(BoundPart):
    """A part with a formula, which computes over the rows of all ranks; before `bind` there is one rank."""

    formula: ClassVar[str] = "see its documentation"
    """The objective as `rlkit explain` shows it, with the constructor's options as `{name}`."""
    _runtime: Runtime | OneProcess = OneProcess()

    def bind(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def explain(self) -> str:
        """Return the formula with the options filled in."""
        return self.formula.format(**vars(self))

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. The rows of a group are always on one rank."""
        return self._runtime.reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """Return the concatenation of a vector, whose length may differ, over all ranks."""
        return self._runtime.gather(x)
