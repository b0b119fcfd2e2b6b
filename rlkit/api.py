"""The Python API: `fit(Recipe(...))`, with objects where a recipe in YAML has names.

    from rlkit import Recipe, fit

    def right(text, answer):
        return float(answer in text)

    result = fit(Recipe(model="tiny", task=[{"prompt": "2 + 2 = ?", "answer": "4"}], reward=right))

It works in a script, without `if __name__ == "__main__"`, and in a notebook.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from rlkit import recipe as sections
from rlkit.base.errors import RecipeError
from rlkit.cli.parsing.compose import Composer
from rlkit.cli.parsing.objects import as_data
from rlkit.cli.parsing.parser import build
from rlkit.cli.streams import unfailing
from rlkit.cli.views.display import Display
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool
from rlkit.recipe import Recipe as BuiltRecipe
from rlkit.registry import Registry, load_plugins
from rlkit.rewards.python import AsyncFunctionReward, FunctionReward
from rlkit.run.signals import raised
from rlkit.tasks.rows import Rows
from rlkit.tools import tool

Data = Mapping[str, Any]
"""A section's options, or a part's `class_path` and `init_args`, as in YAML."""
Named = str | Data
"""A part by its class's name, with options or without, as in YAML."""


class Unset:
    """The default of a section: the same as in a recipe that leaves it out."""

    def __repr__(self) -> str:
        return "unset"


UNSET = Unset()


@dataclass
class Recipe:
    """The sections of a recipe, as objects; defaults are those of a recipe in YAML.

    Each run builds its own parts from the options of those given here. Objects that no recipe can name, such as
    functions and classes of a script, are used as they are.

    Args:
        model: The policy; a string is its `path`.
        task: The source of prompts; a list of rows, or a `datasets.Dataset`, becomes `rlkit.tasks.rows.Rows`.
        reward: The reward; None if nothing reads rewards. A function has the arguments and results that `PythonReward`
            documents; it runs in worker processes, or in this process if it is `async`.
        advantage: The advantage estimator; None for a loss that reads no advantages.
        loss: The policy loss.
        rollout: How trajectories are sampled; the default engine is `TorchEngine`.
        train: The training loop.
        tools: Tools by name; a function becomes one by `rlkit.tool`.
        validation: Validation on held-out prompts; None for none, the default for a list of rows that holds none out.
        callbacks: Callbacks, in the order of their calls.
    """

    model: sections.Model | Named
    task: Task | Named | Sequence[Data]
    reward: RewardManager | Callable[..., Any] | Named | None
    advantage: AdvantageEstimator | Named | None = "GRPO"
    loss: PolicyLoss | Named = "ClipLoss"
    rollout: sections.Rollout | Data = field(default_factory=sections.Rollout)
    train: sections.Train | Data = field(default_factory=lambda: sections.Train(steps=100))
    curriculum: Curriculum | Named | None = None
    critic: sections.Critic | Data | None = None
    kl_loss: sections.KLLoss | Data | None = None
    kl_reward: sections.KLReward | Data | None = None
    reference: sections.ReferenceUpdates | Data | None = None
    teacher: sections.Teacher | Data | None = None
    mix: Mapping[str, sections.Mixture | Data] | None = None
    shaping: sections.Shaping | Data | None = None
    correction: sections.Correction | Data | None = None
    rejection: sections.Rejection | Data | None = None
    tools: Mapping[str, Tool | Callable[..., Any] | Named] | None = None
    parser: ToolParser | Named | None = None
    interaction: Interaction | Named | None = None
    environment: Environment | Named | None = None
    conversation: sections.ConversationLimits | Data | None = None
    validation: sections.Validation | Data | Unset | None = UNSET
    save: sections.Save | Data = field(default_factory=sections.Save)
    callbacks: Sequence[Callback | Named] = ()
    log: sections.Log | Data = field(default_factory=sections.Log)
    profile: sections.Profile | Data | None = None
    fabric: sections.Fabric | Data = field(default_factory=sections.Fabric)

    def yaml(self) -> str:
        """Return the recipe as YAML, every option filled in, as the run folder keeps it.

        Raises:
            RecipeError: An option is unknown, of the wrong type or out of its range, or options contradict each other.
        """
        return _build(self)[1]


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
        status: `ok`, or `interrupted` by a signal.
        folder: The run folder.
        steps: The number of steps, those before a resume included.
        seconds: The duration of the run.
        validation: Metrics `before` and `after` training; None for a validation that did not run.
        metrics: The metrics of each step, as in `metrics.jsonl`.
    """

    status: str
    folder: Path
    steps: int
    seconds: float
    validation: Mapping[str, Mapping[str, float] | None]
    metrics: list[dict[str, float]] = field(repr=False)

    @property
    def model(self) -> Path | None:
        """The folder of the trained model or adapter; None if no step completed."""
        final = self.folder / "final"
        return final if os.path.isdir(final) else None

    def columns(self) -> dict[str, list[float | None]]:
        """Return the metrics by name, None if a step lacks one: `pandas.DataFrame(result.columns())`."""
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return {name: [row.get(name) for row in self.metrics] for name in names}


def fit(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a policy; Ctrl-C ends the run after the step in progress and saves it.

    Args:
        recipe: The recipe.
        out: The run folder; None for the resumed run's, or a new one, `runs/python-<time>`.
        resume: The checkpoint to resume from: its path, a run folder, or `auto` for the newest in `out`, if any.
        force: Whether to resume although the recipe has changed what is learned.
        quiet: Whether to print nothing.

    Raises:
        RecipeError: The recipe, its data or the folder is wrong; nothing has been trained yet.
        RlkitError: The run failed; its checkpoints remain in its folder.
    """
    from rlkit.run.launch import Job, launch

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with unfailing(), raised():
        checked, yaml, registry = _build(recipe)
        job = Job(checked, yaml, registry, "python", _text(out), _text(resume), force)
        outcome, folder = launch(job, lambda first: Display(checked.train.steps, quiet=quiet or not first))
    path = folder / "metrics.jsonl"  # absent if the run was interrupted at its start
    lines = path.read_text(encoding="utf-8").splitlines() if os.path.exists(path) else []
    metrics = [json.loads(line) for line in lines]
    return Result(outcome.status, folder, outcome.steps, outcome.seconds, outcome.validation, metrics)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def _build(recipe: Recipe) -> tuple[BuiltRecipe, str, Registry]:
    """Return the built recipe, its YAML, and the registry."""
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe is of type {type(recipe).__name__}, expected an rlkit.Recipe")
    registry = load_plugins()
    registry.require_healthy()
    for note in registry.notes:
        warnings.warn(note, stacklevel=3)
    composer = Composer(registry)
    composer.add({name: as_data(section, registry) for name, section in _sections(recipe).items()})
    return *build(composer), registry


def _sections(recipe: Recipe) -> dict[str, object]:
    """Return the sections of a recipe, in a form that a recipe in YAML may have, or as parts."""
    by_name: dict[str, object] = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    task = _as_task(recipe.task)
    by_name["task"] = task
    by_name["reward"] = _as_reward(recipe.reward)
    if isinstance(recipe.model, str):
        by_name["model"] = sections.Model(recipe.model)
    if recipe.tools is not None:
        by_name["tools"] = {name: _as_tool(value) for name, value in recipe.tools.items()}
    if isinstance(recipe.validation, Unset):
        del by_name["validation"]
        if isinstance(task, Rows) and not task.holds_out:
            by_name["validation"] = None
    return by_name


def _as_task(task: Task | Named | Sequence[Data]) -> Task | Named:
    return task if isinstance(task, Task | str | Mapping) else Rows(task)


def _as_reward(reward: RewardManager | Callable[..., Any] | Named | None) -> RewardManager | Named | None:
    if isinstance(reward, RewardManager | str | Mapping) or not callable(reward):
        return reward
    return AsyncFunctionReward(reward) if iscoroutinefunction(reward) else FunctionReward(reward)


def _as_tool(value: Tool | Callable[..., Any] | Named) -> Tool | Named:
    if isinstance(value, type) and issubclass(value, Tool):
        return value()
    return value if isinstance(value, Tool | str | Mapping) or not callable(value) else tool(value)()
