"""The Python API: `fit(Recipe(...))`, with objects where a recipe in YAML has names.

    from rlkit import Recipe, fit

    def right(text, answer):
        return float(answer in text)

    result = fit(model="tiny", task=[{"prompt": "2 + 2 = ?", "answer": "4"}], reward=right)
    result = fit("quickstart", train={"steps": 20})

It works in a script, without `if __name__ == "__main__"`, and in a notebook.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import recipe as sections
from rlkit.api.result import Result
from rlkit.base.errors import RecipeError
from rlkit.base.files import check_run_folder
from rlkit.base.signals import raised
from rlkit.cli.display import Display
from rlkit.cli.streams import unfailing
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.agent import Agent
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.task import Curriculum, RowReader, Task
from rlkit.interfaces.tool import Tool
from rlkit.recipe import Recipe as BuiltRecipe
from rlkit.recipe.parsing.compose import Composer
from rlkit.recipe.parsing.reader import find_recipe
from rlkit.recipe.parsing.suggest import known_keys, near_keys, nearest
from rlkit.recipe.schema import as_data
from rlkit.registry import Registry, load_plugins
from rlkit.registry.shelf import provider
from rlkit.rewards.python import AsyncFunctionReward, FunctionReward
from rlkit.run.build import build
from rlkit.tools import tool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlkit.interfaces.model import Tokenizer

Data = Mapping[str, Any]
"""A section's options, or a part's `class_path` and `init_args`, as in YAML."""
Named = str | Data
"""A part by its class's name, with options or without, as in YAML."""


Reward = RewardManager | Callable[..., Any] | Named
"""A reward as an object, a function, or by name."""


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
        model: The policy; a string is its `path`. A model of transformers is saved as `base/` in the run folder, from
            which the run loads it: the object itself is not changed.
        task: The source of prompts; a list of rows, or a `datasets.Dataset`, becomes `rlkit_tasks.Rows`.
        reward: The reward; None if nothing reads rewards. A function has the arguments and results that `PythonReward`
            documents; it runs in worker processes, or in this process if it is `async`. A list is summed; each of its
            rewards is a component by the name of its function or class.
        advantage: The advantage estimator; None for a loss that reads no advantages.
        loss: The policy loss.
        rollout: How trajectories are sampled; the default engine is `TorchEngine`, or on
            GPUs the fastest that is installed and fits.
        train: The training loop.
        tools: Tools by name; a function becomes one by `rlkit.tool`.
        validation: Validation on held-out prompts; None for none, the default for a list of rows that holds none out.
        callbacks: Callbacks, in the order of their calls.
    """

    model: sections.Model | Named | PreTrainedModel
    task: Task | Named | Sequence[Data]
    reward: Reward | Sequence[Reward] | None
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
    agent: Agent | Named | None = None
    conversation: sections.ConversationLimits | Data | None = None
    validation: sections.Validation | Data | Unset | None = UNSET
    save: sections.Save | Data = field(default_factory=sections.Save)
    callbacks: Sequence[Callback | Named] = ()
    log: sections.Log | Data = field(default_factory=sections.Log)
    profile: sections.Profile | Data | None = None
    fabric: sections.Fabric | Data = field(default_factory=sections.Fabric)
    placement: sections.Placement | Data | None = None

    def yaml(self) -> str:
        """Return the recipe as YAML, every option filled in, as the run folder keeps it.

        Raises:
            RecipeError: An option is unknown, of the wrong type or out of its range, or options contradict each other.
        """
        return _build(self)[1]


def fit(
    recipe: Recipe | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
    tokenizer: Tokenizer | None = None,
    **sections: object,
) -> Result:
    """Train a policy; Ctrl-C ends the run after the step in progress and saves it.

    Args:
        recipe: The recipe: an object, a file or the name of a shipped recipe; None for the sections alone.
        out: The run folder; None for the resumed run's, or a new one, `runs/python-<time>`.
        resume: The checkpoint to resume from: its path, a run folder, or `auto` for the newest in `out`, if any.
        force: Whether to resume although the recipe has changed what is learned.
        quiet: Whether to print nothing.
        tokenizer: That of a model which is an object; None for the one that belongs to the model's `name_or_path`.
        sections: Sections and parts by the names of `Recipe`'s fields, which override those of the recipe.

    Raises:
        RecipeError: The recipe, its data or the folder is wrong; nothing has been trained yet.
        RlkitError: The run failed; its checkpoints remain in its folder.
    """
    from rlkit.models.save import save_object
    from rlkit.records.lines import json_rows
    from rlkit.run.folder import RunFolder
    from rlkit.run.launch import Job, launch

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with unfailing(), raised():
        model = sections.get("model", getattr(recipe, "model", None))
        if hasattr(model, "save_pretrained"):
            out = _folder_for_model(out, resume)
            # a run that goes on has its base; several processes share the one that the first of them writes
            if not os.path.isdir(out / "base") or not (_has_peers() or RunFolder(out, "").has_steps()):
                save_object(model, tokenizer, out / "base")
            sections["model"] = str(out / "base")
            recipe = replace(recipe, model=sections["model"]) if isinstance(recipe, Recipe) else recipe
        elif tokenizer is not None:
            raise RecipeError("fit has a tokenizer, but its model is no object, which would need one; remove it")
        checked, yaml, registry = _build(recipe, sections)
        job = Job(checked, yaml, registry, "python", _text(out), _text(resume), force)
        train, samples = checked.train, checked.log.samples
        outcome, folder = launch(job, lambda first: Display(train.total_steps, samples, quiet=quiet or not first))
    metrics = list(json_rows(folder / "metrics.jsonl"))  # none if the run was interrupted at its start
    return Result(outcome.status, folder, outcome.steps, outcome.seconds, outcome.validation, metrics, outcome.verdict)


def _has_peers() -> bool:
    """Check whether other processes make the same run."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _folder_for_model(out: str | Path | None, resume: str | Path | None) -> Path:
    """Return the run folder of a run whose model is an object."""
    from rlkit.records.folder import default_folder, home_of, output_path

    if out is not None:
        folder = output_path(str(out))
        if os.path.isdir(folder):
            check_run_folder(folder)
        return folder
    home = None if resume in (None, "auto") else home_of(str(resume))
    if home is None and _has_peers():
        raise RecipeError("fit has a model object and several processes, which must agree on its folder; set out")
    return home or default_folder("python")


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def _nearest_argument(name: str, section_names: Sequence[str]) -> str:
    """Return a hint with the argument of `fit` that has an option, such as `train={"lr": ...}`."""
    if get_close_matches(name, section_names, 1, 0.7):
        return nearest(name, section_names)
    presence = known_keys(load_plugins(), {})
    near = near_keys(name, list(presence), [key for key in presence if presence[key]])
    section, _, option = near[0].partition(".") if near else ("", "", "")
    if not option:
        return nearest(name, section_names)
    value = "..."
    for part in reversed(option.split(".")):
        value = f'{{"{part}": {value}}}'
    return f"did you mean {section}={value}?"


def _build(
    recipe: Recipe | str | Path | None, changes: Mapping[str, object] | None = None
) -> tuple[BuiltRecipe, str, Registry]:
    """Return the built recipe, its YAML, and the registry."""
    if not isinstance(recipe, Recipe | str | Path | None):
        raise RecipeError(
            f"recipe is of type {type(recipe).__name__}, expected an rlkit.Recipe, a file or the name of a recipe"
        )
    changes = changes or {}
    section_names = [f.name for f in fields(Recipe)]
    unknown = [name for name in changes if name not in section_names]
    if unknown:
        raise RecipeError(f"fit has no argument {unknown[0]!r}; {_nearest_argument(unknown[0], section_names)}")
    required = [name for name in ("model", "task", "reward") if recipe is None and name not in changes]
    if required:
        raise RecipeError(f'fit needs {", ".join(required)}, or a recipe, such as fit("quickstart")')
    registry = load_plugins()
    registry.require_healthy()
    for note in registry.notes:
        warnings.warn(note, stacklevel=3)
    composer = Composer(registry)
    if isinstance(recipe, str | Path):
        composer.add_file(find_recipe(str(recipe), registry.recipes), by_user=False)
    base = Recipe(**changes) if recipe is None else recipe  # type: ignore[arg-type]
    if isinstance(base, Recipe):
        values = {option.name: getattr(base, option.name) for option in fields(base)}
        composer.add({name: as_data(section, registry) for name, section in _sections(values).items()})
    if recipe is not None:
        composer.add({name: as_data(section, registry) for name, section in _sections(changes).items()})
    return *build(composer), registry


def _sections(values: Mapping[str, Any]) -> dict[str, object]:
    """Return sections of a recipe, in a form that a recipe in YAML may have, or as parts."""
    by_name: dict[str, object] = dict(values)
    if "task" in values:
        task = values["task"]
        rows = not isinstance(task, Task | str | Mapping)
        by_name["task"] = provider(RowReader)().task_of(task) if rows else task  # type: ignore[type-abstract]
    if "reward" in values:
        by_name["reward"] = _as_reward(values["reward"])
    if isinstance(values.get("model"), str):
        by_name["model"] = sections.Model(values["model"])
    if values.get("tools") is not None:
        by_name["tools"] = {name: _as_tool(value) for name, value in values["tools"].items()}
    if isinstance(values.get("validation", UNSET), Unset):
        by_name.pop("validation", None)
        task = by_name.get("task")
        if isinstance(task, Task) and not task.holds_out:
            by_name["validation"] = None
    return by_name


def _as_reward(reward: Reward | Sequence[Reward] | None) -> RewardManager | Named | None:
    if isinstance(reward, list | tuple):
        named = {_name_of(part, number): _as_reward(part) for number, part in enumerate(reward, 1)}
        if len(named) < len(reward):
            raise RecipeError(f"reward lists two rewards of the same name, expected different ones: {', '.join(named)}")
        return {"class_path": "Composite", "init_args": {"rewards": named}}
    assert not isinstance(reward, Sequence) or isinstance(reward, str)
    if isinstance(reward, RewardManager | str | Mapping) or not callable(reward):
        return reward
    return AsyncFunctionReward(reward) if iscoroutinefunction(reward) else FunctionReward(reward)


def _name_of(reward: Reward, number: int) -> str:
    """Return the name of a reward in a list: that of its function or class, or else its number."""
    if isinstance(reward, str | Mapping):
        reward_class = reward if isinstance(reward, str) else str(reward.get("class_path"))
        return reward_class.rpartition(".")[2]
    name = str(getattr(reward, "__name__", type(reward).__name__))
    return name if name.isidentifier() else f"reward_{number}"


def _as_tool(value: Tool | Callable[..., Any] | Named) -> Tool | Named:
    if isinstance(value, type) and issubclass(value, Tool):
        return value()
    return value if isinstance(value, Tool | str | Mapping) or not callable(value) else tool(value)()
