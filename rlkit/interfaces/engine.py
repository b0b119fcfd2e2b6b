"""The interface of rollout engines: token ids in, token ids with log-probs out."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Flag, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from rlkit.base.errors import EngineError, RecipeError
from rlkit.base.installed import extra_command
from rlkit.interfaces.fields import Field
from rlkit.interfaces.runtime import BoundPart
from rlkit.ops.routes import ROUTES
from rlkit.types import Completion, Request, Sampling, Structure

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream
    from rlkit.interfaces.teacher import ServedTeacher
    from rlkit.ops.routes import Routers


COPIES_SHARE = 0.25
"""The largest share of a GPU's memory that TorchEngine fills with copies of the weights, to sample faster."""


class Capability(Flag):
    """What an engine does besides continuing token ids with weights of its own. The recipe may require it."""

    NOTHING = 0
    READS_POLICY = auto()
    """It samples from the trainer's own weights, which then stay on the device."""
    INTERRUPT = auto()
    """It implements `interrupt`, so that rollouts can run ahead of the trainer."""
    BESIDE = auto()
    """It samples on devices of its own and takes weights in the middle of requests. It then continues while the trainer
    learns, and rollouts can run ahead without `interrupt`."""
    CANDIDATES = auto()
    """Completions have `candidates` where `sampling.top_k` is set, so that training may truncate."""
    RESUMES_STRUCTURES = auto()
    """A request continues a text in the middle of its structure, as turns with stop texts need."""
    TEACHER = auto()
    """It implements `teacher`."""
    VALIDATION_ONLY = auto()
    """It samples in validation alone: the run trains on recorded completions."""


FORMER = (
    "reads_policy", "interruptible", "beside", "returns_candidates", "resumes_structures", "scores", "recorded",
)  # fmt: skip
"""Booleans that engines had before `Capability`."""


class RolloutEngine(BoundPart):
    """Continues token ids. A caller sends one request at a time; the engine batches them.

    Constructors store options only; models and servers are opened in `bind` and later.
    """

    may_fill: ClassVar[Sequence[str]] = ("token",)
    capabilities: Capability = Capability.NOTHING

    routers: Routers | None = None
    """Whose choices completions hold; set by `return_routes`."""

    requires_routes: bool = False
    """Whether an engine that finds in `bind` that it cannot return them must refuse the run."""

    chosen: str = ""
    """Why the engine was chosen on GPUs for a recipe that names none; empty if it names this engine."""

    reserved: int = 0
    """Tokens of the model's context that the engine cannot use; subtracted from the run's context and its limits."""

    preference: ClassVar[int] = 0
    """The order in which engines are tried on GPUs where a recipe names none: the highest first, those of 0 never."""

    default_options: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """The options of an engine that was chosen so."""

    picture_models: ClassVar[Sequence[str]] = ()
    """The `model_type` of models whose pictures the product reads."""

    packages: ClassVar[Mapping[str, Callable[[str], str]]] = MappingProxyType({})
    """Distributions that the engine needs, each with a description of its version, "" for none, for `rlkit doctor`."""

    def __init_subclass__(cls) -> None:
        """Refuse a boolean of before `Capability`, which would be ignored.

        Raises:
            TypeError: The class has one.
        """
        super().__init_subclass__()
        former = [name for name in FORMER if isinstance(vars(cls).get(name), bool)]
        if former:
            raise TypeError(f"{cls.__name__} has {', '.join(former)}, expected flags of Capability in `capabilities`")

    @classmethod
    def missing(cls) -> str | None:
        """Return the missing package of an engine with `default_options` on a GPU; None if nothing is missing."""
        return None

    @classmethod
    def implements(cls, architecture: str) -> bool:  # noqa: ARG003 - for overrides
        """Whether the installed product has a model's class, by its name in transformers."""
        return True

    @property
    def capacity(self) -> int | None:
        """Number of conversations that the engine can hold at once on this rank; None for any number."""
        return None

    @property
    def server_gpus(self) -> tuple[int, ...]:
        """The GPUs of each server that the engine starts by `Runtime.host_server`; 0 for a server on CPUs."""
        return ()

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables to set before the first collective, unless they are set already."""
        return {}

    def routes_problem(self, sampling: Sampling, on_gpu: bool, asked: bool) -> str | None:
        """Explain why completions cannot hold the experts that computed each token; None if they can.

        Args:
            sampling: Of the completions.
            on_gpu: Whether this machine has a GPU that the run uses.
            asked: Whether the recipe asks for them, rather than to take them where they are sure to come.
        """
        return f"{type(self).__name__} does not return them"

    def return_routes(self, routers: Routers, required: bool = False) -> None:
        """Fill the field `ROUTES` where a request has `routes_from`; called before `bind` if nothing prevents it.

        Args:
            routers: Of the policy.
            required: Whether the recipe asks for them, so that the run cannot go on without.
        """
        shape = (len(routers.layers), routers.top_k)
        self.routers, self.requires_routes = routers, required
        self.fills = (*self.fills, Field(ROUTES, dtype=str(routers.dtype).removeprefix("torch."), shape=shape))

    def check_structure(self, structure: Structure) -> None:
        """Check, before the run, that completions will have this structure.

        Raises:
            RecipeError: The engine samples any text, or cannot follow this structure.
        """
        raise RecipeError(f"{type(self).__name__} samples any text; remove it, or choose rollout.engine: TorchEngine")

    @abstractmethod
    def bind(self, runtime: Runtime) -> None:
        """Connect to the run: tokenizer, policy, device.

        Raises:
            EngineError: The engine cannot serve this run; the message names the alternative.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Continue the request's tokens until a stop id, `max_tokens` or the end of the context.

        `Completion.logps` are those of `log_softmax(logits / temperature)`, and a stop id is part of the tokens. If the
        engine returns CANDIDATES and the request has `top_k`, log-probs are those of the softmax over the candidates.

        Raises:
            RolloutError: This request failed; others are not affected.
            TimeoutError: The request's deadline passed.
            EngineError: The engine failed and the run cannot continue.
        """

    @abstractmethod
    async def sync(self, stream: WeightStream, version: int) -> None:
        """Load the policy's weights; completions sampled afterwards carry this version."""

    @property
    def needs_weights(self) -> bool:
        """Whether weights must be synced before the next request: they were released or lost.

        Checked before and during rollouts; the engines of all ranks are synced together if any needs it.
        """
        return False

    def teacher(self, urls: Sequence[str]) -> ServedTeacher:
        """Return the teacher on servers of this engine's product, which need not be bound.

        Raises:
            EngineError: Servers of this engine do not score tokens.
        """
        raise EngineError(f"servers of {type(self).__name__} do not score tokens for a teacher")

    def interrupt(self) -> None:
        """Answer all requests soon with the tokens sampled so far, under `StopReason.INTERRUPTED`.

        Called on the event loop of `generate`, if rollouts run ahead of the trainer on its own device.

        Raises:
            EngineError: The engine cannot interrupt requests.
        """
        raise EngineError(f"{type(self).__name__} cannot interrupt requests; set rollout.max_staleness: 0")

    def follow(self, calm: Callable[[], Awaitable[None]]) -> None:
        """Set the all-idle callback: an engine that decodes only while all conversations wait is repeatable.

        Called before the first request, if rollouts run ahead of the trainer; other engines ignore it.
        """

    def on_device(self) -> AbstractContextManager[None]:
        """Return a context in which the engine samples; outside it, an engine on a shared device may release memory.

        All ranks enter it together and leave it once no rank samples.
        """
        return nullcontext()

    def health(self) -> dict[str, float]:
        """Return gauges to log with the step; the maximum over all ranks is logged, so larger should mean worse."""
        return {}


def grammar_of(structure: Structure) -> str:
    """Return a structure as llguidance's grammar."""
    from llguidance import LLMatcher

    if structure.regex is not None:
        return str(LLMatcher.grammar_from_regex(structure.regex))
    return str(LLMatcher.grammar_from_json_schema(schema_of(structure)))


def schema_of(structure: Structure) -> str:
    """Return a structure's JSON schema for llguidance, here or in a server: texts are those of `json.dumps`."""
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"x-guidance": form, **(structure.json_schema or {})})


def check_followed(structure: Structure) -> None:
    """Check a structure without a tokenizer.

    Raises:
        RecipeError: llguidance is not installed, or cannot follow the structure.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RecipeError(f"llguidance, which follows it, is not installed: {extra_command('structure')}") from error
    try:
        problem = LLMatcher.validate_grammar(grammar_of(structure))
    except ValueError as error:  # such as NaN in a schema
        problem = str(error)
    if problem:
        raise RecipeError(f"llguidance cannot follow it: {one_line(problem)}")


def one_line(text: str) -> str:
    """Return a text of several lines on one."""
    return " ".join(text.split())
