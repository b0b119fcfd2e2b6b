"""The fields of bodies that the server reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit.types import JsonObject
from rlkit_tinker.server.requests import Body, ExactBody
from rlkit_tinker.types import AdamParams, ModelInput, SamplingParams

Name = Annotated[str, Field(max_length=200)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]


class LoraBody(ExactBody):
    """The adapter of a new model."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(ExactBody):
    """The optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class SessionBody(Body):
    """A new session."""

    sdk_version: str = ""
    user_metadata: JsonObject | None = None


class SessionRefBody(Body):
    """A heartbeat."""

    session_id: str


class ModelRefBody(Body):
    """A question about a model."""

    model_id: str


class CreateModelBody(Body):
    """A new model."""

    base_model: str
    lora_config: LoraBody
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: JsonObject | None = None


class LoadBody(Body):
    """A state to load, into a model or as a new one."""

    path: str
    optimizer: bool
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: JsonObject | None = None
    weights_access_token: None = None


class AdamBody(ExactBody):
    """The options of a step."""

    learning_rate: float = AdamParams.learning_rate
    beta1: float = AdamParams.beta1
    beta2: float = AdamParams.beta2
    eps: float = AdamParams.eps
    weight_decay: float = AdamParams.weight_decay
    grad_clip_norm: float = AdamParams.grad_clip_norm


class StepBody(Body):
    """A step of the optimizer."""

    adam_params: AdamBody

    @property
    def params(self) -> AdamParams:
        """The options, checked."""
        return AdamParams(**self.adam_params.model_dump())


class SaveBody(Body):
    """A state to save."""

    path: Name
    ttl_seconds: Ttl | None = None
    overwrite: bool = False


class SaveSamplerBody(Body):
    """Weights to save for sampling: under a name, or for a new sampling session."""

    path: Name | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None


class SamplerBody(Body):
    """A new sampling session, of a saved state or of the base."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class TokensBody(ExactBody):
    """A chunk of a prompt."""

    type: Literal["encoded_text"]
    tokens: list[int]


class PromptBody(ExactBody):
    """A prompt."""

    chunks: list[TokensBody]


class SamplingBody(ExactBody):
    """How tokens are sampled."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(ExactBody):
    """A request for samples; fields of the type None are not served."""

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    sampling_session_id: str
    seq_id: int
    type: str = "sample"
    base_model: None = None
    model_path: None = None
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    @property
    def model_input(self) -> ModelInput:
        """The prompt's tokens."""
        return ModelInput.from_ints([token for chunk in self.prompt.chunks for token in chunk.tokens])

    def params(self, seed: int) -> SamplingParams:
        """Return the options of sampling, with a seed unless the request has its own."""
        options = self.sampling_params.model_dump()
        return SamplingParams(**{**options, "seed": seed if options["seed"] is None else options["seed"]})


class FutureBody(Body):
    """A question for a future's result."""

    request_id: str


class PathBody(Body):
    """A question about a saved state."""

    tinker_path: str
