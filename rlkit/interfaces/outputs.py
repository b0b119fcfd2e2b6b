"""Checks of what parts return, shared by a run and by the contracts for plugins' tests.

Each function returns what is wrong, phrased to follow the part's name in a message, or None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import torch

from rlkit.base.errors import show
from rlkit.base.ranges import LARGEST_FLOAT
from rlkit.interfaces.content import are_tools
from rlkit.interfaces.reward import as_number
from rlkit.types import Batch, Completion, LossOutput, Prompt, RecordedAnswer, Request, StopReason

LONGEST_WAIT = 1000
"""Epochs until a prompt is due again."""

ROUNDING = 1e-3
"""In half precision, a log-prob of about 0 may exceed 0 by this much."""


METRIC_NAME = re.compile(r"[A-Za-z0-9_.@/-]{1,64}")


def of_metrics(metrics: object, reserved: Collection[str] = ()) -> str | None:
    """Check metrics that a plugin adds: finite numbers by plain names that are not `taken`."""
    if not isinstance(metrics, Mapping):
        return f"added the metrics {show(metrics)}, expected numbers by name"
    for name, value in metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            return f"added a metric named {show(name)}, expected up to 64 characters of A-Z a-z 0-9 _ . @ / -"
        if name in reserved:
            return f"added the metric {name!r}, which the step has already; choose another name"
        try:
            as_number(value)
        except Exception:  # foreign objects may raise anything
            return f"added the metric {name!r} as {show(value)}, expected a finite number up to {LARGEST_FLOAT:g}"
    return None


def of_unscorable(reason: object) -> str | None:
    """Check the reason why a reward cannot score a prompt: text, or None."""
    return None if reason is None or isinstance(reason, str) else f"returned {show(reason)}, expected text or None"


def of_estimator(batch: Batch) -> str | None:
    """Check `batch.advantages` (and `returns`): set, [B,T] f32, finite, and 0 outside the mask."""
    if batch.advantages is None:
        return "left batch.advantages unset, expected [B,T] f32"
    for name in ("advantages", "returns"):
        value = getattr(batch, name)
        if value is None:
            continue
        expected = tuple(batch.mask.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
            tensor = isinstance(value, torch.Tensor)
            actual = f"shape {tuple(value.shape)}" if tensor else f"type {type(value).__name__}"
            return f"wrote batch.{name} of {actual}, expected a tensor of shape {expected}"
        if value.dtype != torch.float32 or not bool(value[batch.mask].isfinite().all()):
            rewards = [round(reward, 4) for reward in batch.rewards[:8].tolist()]
            odd = value[batch.mask & ~value.isfinite()]
            broken = "" if value.dtype != torch.float32 else f" that are not finite ({float(odd[0])})"
            return f"wrote {name} of {value.dtype}{broken} for rewards {rewards}, expected finite float32"
    if not bool((batch.advantages[~batch.mask] == 0).all()):
        return "wrote advantages outside the mask, expected 0 there"
    return None


def of_loss(out: object, mask: torch.Tensor) -> str | None:
    """Check a loss's output: a `LossOutput` with a floating-point loss [B,T], and detached metrics of one number."""
    if not isinstance(out, LossOutput) or not isinstance(out.per_token, torch.Tensor):
        actual = f"a {type(out).__name__}" if isinstance(out, torch.Tensor) else show(out)
        return f"returned {actual}, expected a LossOutput of shape {tuple(mask.shape)}"
    if out.per_token.shape != mask.shape:
        return (
            f"returned a loss of shape {tuple(out.per_token.shape)}, "
            f"expected a LossOutput of shape {tuple(mask.shape)}, one for every token"
        )
    if not out.per_token.is_floating_point():
        return f"returned a loss of {out.per_token.dtype}, expected float32"
    if not isinstance(out.metrics, Mapping):
        return f"returned metrics {show(out.metrics)}, expected tensors by name"
    for name, value in out.metrics.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            actual = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else show(value)
            return f"returned the metric {name!r} as {actual}, expected a tensor of one number"
        if value.requires_grad:
            return f"returned the metric {name!r} with a gradient, expected a detached tensor: write {name}.detach()"
    return None


def of_selection(selected: object, mask: torch.Tensor) -> str | None:
    """Check the tokens that a loss selects: [B,T] bool."""
    if not isinstance(selected, torch.Tensor) or selected.shape != mask.shape or selected.dtype != torch.bool:
        actual = f"{selected.dtype} {tuple(selected.shape)}" if isinstance(selected, torch.Tensor) else show(selected)
        return f"selected {actual}, expected bool {tuple(mask.shape)}"
    return None


def of_filter(verdict: object) -> str | None:
    """Check the result of a filter: True or False."""
    return None if isinstance(verdict, bool) else f"returned {show(verdict)} for a group, expected True or False"


def of_tool(parameters: object) -> str | None:
    """Check the schema of a tool's arguments."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(parameters, Mapping):
        return f"is {show(parameters)}, expected a JSON schema of the arguments, an object"
    try:
        validator_for(parameters).check_schema(parameters)
    except SchemaError as error:
        return f"is {show(parameters)}, expected a JSON schema of the arguments: {error.message}"
    return None


def of_launcher(status: object) -> str | None:
    """Check what a launcher returned: an exit status."""
    fine = isinstance(status, int) and not isinstance(status, bool)
    return None if fine else f"returned {show(status)}, expected the exit status of the command, 0 for success"


def of_schedule(factor: object) -> str | None:
    """Check a share of the learning rate: finite and not negative."""
    return None if _is_factor(factor) else f"returned {show(factor)}, expected a finite number of 0 or more"


def of_lr_factor(factor: object) -> str | None:
    """Check what a callback multiplies the learning rate by."""
    return None if _is_factor(factor) else f"is {show(factor)}, expected a finite number of 0 or more"


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def of_rows(rows: object) -> str | None:
    """Check a task's rows: a sequence, such as a list or a `datasets.Dataset`."""
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        return None
    return f"returned {show(rows)}, expected a sequence, with len(rows) and rows[index], such as a list"


def of_task(prompt: object) -> str | None:
    """Check a prompt: an id, and messages with role and content."""
    if not isinstance(prompt, Prompt) or not isinstance(prompt.id, str):
        return f"returned {show(prompt)}, expected a Prompt with an id"
    if not _messages(prompt.messages) or not (prompt.messages or prompt.recorded):
        return f"returned the messages {show(prompt.messages)}, expected messages with role and content"
    if not isinstance(prompt.answer, str | None):
        return f"returned the answer {show(prompt.answer)}, expected text or None: write str(...) or put it into meta"
    if not isinstance(prompt.meta, Mapping):
        return f"returned the meta {show(prompt.meta)}, expected values by name"
    if prompt.tools is not None and not are_tools(prompt.tools):
        return f"returned the tools {show(prompt.tools)}, expected names or schemas, or None for all"
    if not isinstance(prompt.recorded, list):
        return f"returned the recorded answers {show(prompt.recorded)}, expected a list"
    problems = map(_of_recorded, prompt.recorded)
    return next((problem for problem in problems if problem), None)


def _of_recorded(answer: object) -> str | None:
    """Check a recorded answer: messages with role and content, and finite rewards, one or none for each turn."""
    if not isinstance(answer, RecordedAnswer) or not _messages(answer.messages):
        return f"recorded {show(answer)}, expected a RecordedAnswer of messages with role and content"
    turns = sum(message["role"] == "assistant" for message in answer.messages)
    if not isinstance(answer.turn_rewards, list) or len(answer.turn_rewards) not in {0, turns}:
        return f"recorded the turn_rewards {show(answer.turn_rewards)} of {turns} turns, expected one of each, or none"
    for reward in (answer.reward, *answer.turn_rewards):
        if not isinstance(reward, int | float) or not abs(reward) <= LARGEST_FLOAT:  # as NaN is not
            return f"recorded the reward {show(reward)}, expected a finite number up to {LARGEST_FLOAT:g}"
    return None


def _messages(messages: object) -> bool:
    """Whether they are chat messages; one with calls of tools needs no content."""
    return isinstance(messages, list) and all(
        isinstance(m, Mapping) and "role" in m and ("content" in m or "tool_calls" in m) for m in messages
    )


def of_wait(epochs: object) -> str | None:
    """Check the number of epochs after which a curriculum reschedules a prompt."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or not 1 <= epochs <= LONGEST_WAIT:
        return f"returned {show(epochs)}, expected a whole number of epochs from 1 to {LONGEST_WAIT}"
    return None


def of_difficulty(difficulty: object) -> str | None:
    """Check the difficulty of a prompt."""
    if isinstance(difficulty, bool) or not isinstance(difficulty, int | float) or not math.isfinite(difficulty):
        return f"returned {show(difficulty)}, expected a finite number"
    return None


def of_engine(answer: object, request: Request, version: int, stop_ids: Collection[int]) -> str | None:
    """Check a completion: tokens within the budget, each with a log-prob and the version of the last sync."""
    if not isinstance(answer, Completion):
        return f"returned {show(answer)}, expected a Completion"
    count = len(answer.tokens)
    if not 1 <= count <= request.sampling.max_tokens:
        expected = f"1 to max_tokens = {request.sampling.max_tokens} tokens"
    elif not count == len(answer.logps) == len(answer.versions):
        expected = "a log-prob and a version for each token"
    elif answer.candidates and len(answer.candidates) != count:
        expected = "candidates for each token"
    elif not all(token in ids for token, ids in zip(answer.tokens, answer.candidates, strict=False)):
        expected = "each token among its candidates"
    elif not all(isinstance(x, int | float) and math.isfinite(x) and x <= ROUNDING for x in answer.logps):
        expected = "finite log-probs of at most 0"
    elif set(answer.versions) != {version}:
        expected = f"the version of the last sync, {version}"
    elif answer.stop == StopReason.STOP and answer.tokens[-1] not in stop_ids:
        expected = "the stop id among the tokens, as the last"
    else:
        return None
    return f"returned {show(answer)}, expected {expected}"
