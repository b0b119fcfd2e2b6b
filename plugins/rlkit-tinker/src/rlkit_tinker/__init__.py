"""Trains and samples many LoRA adapters over one base, through the calls of the Tinker API.

What belongs here: the adapters of several tenants, their passes, losses, optimizers and samples. What does not: what a
run of rlkit does with its own policy.
"""

from rlkit_tinker.clients import SamplingClient, TrainingClient
from rlkit_tinker.commands import APIFuture
from rlkit_tinker.service import Service
from rlkit_tinker.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    RequestFailedError,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "ForwardBackwardOutput",
    "ModelInput",
    "OptimStepResponse",
    "RequestFailedError",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "Service",
    "TensorData",
    "TrainingClient",
]
