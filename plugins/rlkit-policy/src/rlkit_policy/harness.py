"""EleutherAI's lm-evaluation-harness on a policy, as transformers loads it."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlkit.base.errors import RecipeError, RlkitError, explain
from rlkit.base.installed import extra_command
from rlkit.models.load import is_reward_model
from rlkit.models.source import locate
from rlkit.recipe import Model
from rlkit.records.folder import json_lines, write_atomically
from rlkit.types import JsonObject
from rlkit_policy.folder import export

CPU_BATCH_SIZE = 8
"""Requests at once on a CPU; on a GPU the harness determines how many fit."""

DETAILS = ("results", "groups", "versions", "n-shot", "n-samples", "config", "lm_eval_version")
"""Fields of the harness's results that are kept, besides the completions."""


@dataclass
class HarnessResult:
    """The harness's metrics, details and samples.

    Metrics are named `TASK/METRIC`, followed by `,FILTER` if they have a filter, and by `_stderr` for standard errors.
    """

    metrics: dict[str, float]
    details: JsonObject
    samples: list[JsonObject]

    def write(self, stem: Path) -> None:
        """Write a row for each completion to `<stem>.jsonl.gz`."""
        write_atomically(Path(f"{stem}.jsonl.gz"), json_lines(self.samples))


@dataclass(frozen=True)
class Harness:
    """A selection of the harness's tasks.

    Args:
        tasks: Names of tasks, groups or tags.
        folder: Folder of the tasks; None for the harness's own. Their YAML can run code (`!function`).
        limit: Documents of each task; None for all.
    """

    tasks: Sequence[str]
    folder: str | None = None
    limit: int | None = None

    def check(self) -> None:
        """Check the options before a model is loaded.

        Raises:
            RecipeError: The harness is not installed, or the folder does not exist.
        """
        if find_spec("lm_eval") is None:
            raise RecipeError(f"--harness needs lm_eval, which is not installed: {extra_command('harness')}")
        if self.folder is not None and not os.path.isdir(self.folder):
            raise RecipeError(f"--harness-path is {self.folder!r}, expected a folder with the YAML files of tasks")

    def run(self, model: Model, device: torch.device, dtype: str) -> HarnessResult:
        """Evaluate a model on the tasks; prompts are rendered by the model's chat template.

        Args:
            model: The policy; a checkpoint or an adapter is exported to a temporary folder first.
            device: Device of the model.
            dtype: Data type of the weights.

        Raises:
            RecipeError: A task is unknown.
            RlkitError: The harness raised.
        """
        with TemporaryDirectory(prefix="rlkit-harness-") as temporary, redirect_stdout(sys.stderr):
            folder = _as_folder(model, Path(temporary) / "model")
            try:
                results = self._evaluate(folder, model, str(device), dtype)
            except RlkitError:
                raise
            except Exception as error:  # the code of a task may raise anything
                raise RlkitError(f"the harness raised {explain(error)}; --debug shows the traceback") from error
        samples = [{"task": name, **row} for name, rows in results["samples"].items() for row in rows]
        details = {name: results[name] for name in DETAILS if name in results}
        return HarnessResult(dict(_metrics(results["results"])), json.loads(json.dumps(details, default=str)), samples)

    def _evaluate(self, folder: str, model: Model, device: str, dtype: str) -> Mapping[str, Any]:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=self.folder, include_defaults=self.folder is None)
        for task in self.tasks:
            if task not in manager.all_tasks:
                near = difflib.get_close_matches(task, manager.all_tasks, 3) or sorted(manager.all_tasks)[:10]
                raise RecipeError(f"--harness is {task!r}, expected a task: {', '.join(near) or 'there is none'}")
        results: Mapping[str, Any] = simple_evaluate(
            model="hf",
            model_args={
                "pretrained": folder,
                "dtype": dtype,
                "trust_remote_code": model.trust_remote_code,
                "chat_template_args": model.chat_template_kwargs or {},
            },
            tasks=list(self.tasks),
            task_manager=manager,
            device=device,
            batch_size="auto" if device.startswith("cuda") else CPU_BATCH_SIZE,
            limit=self.limit,
            apply_chat_template=True,
        )
        return results


def _as_folder(model: Model, into: Path) -> str:
    """Return a folder from which transformers loads the complete model."""
    if is_reward_model(model):
        raise RecipeError(f"--harness needs completions, but {model.path} is a reward model; choose a policy")
    source = locate(model.path)
    if source.base is None and not model.config:
        return source.location
    has_adapter = source.lora is not None
    export(model.path, into, has_adapter, trust_remote_code=model.trust_remote_code, config=model.config)
    return str(into)


def _metrics(results: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, float]]:
    """Yield each task's metrics; `exact_match_stderr,none` becomes `exact_match_stderr`."""
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, comma, filter_name = key.partition(",")
            if comma and isinstance(value, Real):
                stem = name.removesuffix("_stderr")
                ending = "_stderr" if name.endswith("_stderr") else ""
                yield f"{task}/{stem}{'' if filter_name == 'none' else f',{filter_name}'}{ending}", float(value)
