"""The data that flows through a step, in its order: read this room first.

    Prompt -> Request -> Completion -> Trajectory -> Score -> RolloutBatch -> Batch -> TrainBatch -> LossOutput

A task makes prompts (`prompt.py`). The engine answers requests with completions: turns of the policy (`sampling.py`).
A trajectory is a complete conversation, scored by the reward (`trajectory.py`). Batches hold the trajectories of a step
as tensors (`batch.py`). Pictures of a conversation are in `media.py`.

Legend: P prompts, G samples of a prompt, B = P*G trajectories on this rank, T tokens, V vocabulary. Before `collate`,
data are ragged Python objects. After it, a tensor `x[b,t]` describes `tokens[b,t]`: nothing is shifted, and
`logps[b,t] = log p(tokens[b,t] | tokens[b,:t])`.
"""

from rlkit.types.batch import Batch, LossOutput, PolicyOutput, Reads, RolloutBatch, TrainBatch
from rlkit.types.media import Media, MediaSegment, Rendered
from rlkit.types.prompt import JsonObject, Message, Prompt, RecordedAnswer, Row, Tools
from rlkit.types.sampling import Completion, Request, SampleKey, Sampling, StopReason, Structure
from rlkit.types.trajectory import AgentSpan, Fork, Score, Trajectory, Turn

__all__ = [
    "AgentSpan", "Batch", "Completion", "Fork", "JsonObject", "LossOutput", "Media", "MediaSegment", "Message",
    "PolicyOutput", "Prompt", "Reads", "RecordedAnswer", "Rendered", "Request", "RolloutBatch", "Row", "SampleKey",
    "Sampling", "Score", "StopReason", "Structure", "Tools", "TrainBatch", "Trajectory", "Turn",
]  # fmt: skip
