"""Resuming: checks that the recipe still fits a checkpoint, and loads it into the run."""

from __future__ import annotations

from collections.abc import Mapping

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.placement import PlacedModel
from rlkit.models.checkpoints import CheckpointRef, load_checkpoint, tensor_shapes
from rlkit.recipe import Rollout
from rlkit.records.folder import flat, recipe_data
from rlkit.run.checkpoint.state import restore, tensors
from rlkit.train.setup import TrainContext
from rlkit.types import JsonObject

FIXED = (
    "model.path", "model.head", "model.lora", "model.quantization", "train.optimizer.class_path",
    "train.optimizer.init_args.name", "critic.path", "critic.lora", "critic.optimizer.class_path",
    "critic.optimizer.init_args.name",
)  # fmt: skip
"""Options that determine a checkpoint's tensors: they cannot change on resume."""

PRESENT = ("critic", "curriculum", "reference", "shaping", "kl_reward", "train.ema")
"""Sections with state: they cannot be added or removed on resume."""

FREE = (
    "callbacks", "fabric", "launcher", "log", "model.attention", "placement", "profile", "save", "validation",
    "train.max_tokens_per_micro_batch", "train.checkpoint_activations", "train.offload_activations",
    "train.offload_during_rollout", "train.deadline", "train.require_reward", "train.max_steps_without_signal",
)  # fmt: skip
"""Options that may change without affecting training."""

RATES = ("train.lr", "train.schedule", "train.steps", "train.data_epochs", "critic.lr", "critic.schedule")
"""Options of the learning rate and of the run's length, which may change: they hold from the next step on."""


def compare(checkpoint: CheckpointRef, recipe_yaml: str, force: bool) -> list[str]:
    """Return a line for each difference between the checkpoint's recipe and the current one.

    Raises:
        RecipeError: A difference does not fit the checkpoint's state, or changes the training without `force`.
    """
    old = flat(checkpoint.state.recipe)
    new = flat(recipe_data(recipe_yaml))
    if len(checkpoint.state.trained or ()) > 1 and not new.get("rollout.max_staleness"):
        raise RecipeError(
            f"rollout.max_staleness is 0, but {checkpoint.location} was trained on some prompts of later steps, on "
            "which the run would train twice; keep it, and set rollout.lead to 0 to sample for one step at a time"
        )
    off = {key: False for key, value in new.items() if value is False}  # as what an older recipe does not have was
    changed = [key for key in sorted(old | new) if (off | old).get(key) != new.get(key)]
    lines = {
        key: f"{key}: {show(old.get(key))} in the checkpoint, {show(new.get(key))} now{_effect(key, new)}"
        for key in changed
    }
    moved = [part for part in PRESENT if any(_under(k, part) for k in old) != any(_under(k, part) for k in new)]
    broken = [line for key, line in lines.items() if any(_under(key, part) for part in (*FIXED, *moved))]
    if broken:
        raise RecipeError(f"the recipe does not fit {checkpoint.location}:\n" + "\n".join(broken))
    changes = [line for key, line in lines.items() if not any(_under(key, part) for part in (*FREE, *RATES))]
    if changes and not force:
        raise RecipeError(
            f"the recipe differs from that of {checkpoint.location}:\n"
            + "\n".join(changes)
            + "\nsuch a change alters the training, so the steps before and after it would belong to two different "
            "runs; restore the recipe, or add --force to continue with the changed one"
        )
    return list(lines.values())


def _effect(key: str, recipe: Mapping[str, object]) -> str:
    """Describe the effect of a changed learning rate or number of steps on the next steps."""
    if key in ("train.steps", "train.data_epochs"):
        unit = "steps" if key == "train.steps" else "passes over the data"
        schedules = {recipe.get(f"{section}.schedule.class_path") for section in ("train", "critic")} - {None}
        ratios = {recipe.get(f"{section}.warmup_ratio") for section in ("train", "critic")} - {None}
        decays = bool(ratios or schedules - {"rlkit.schedules.Constant"})
        changes = decays and recipe.get(key) is not None
        return f"; the next step has the learning rate of a run of {recipe[key]} {unit}" if changes else ""
    return "; it holds from the next step on" if any(_under(key, part) for part in RATES) else ""


def validation_options(recipe: JsonObject) -> list[object]:
    """Return a recipe's options that determine the validation prompts; if equal, validations can be compared."""
    validation = recipe.get("validation") or {}
    tasks = validation.get("tasks")
    # with one task, a limit drops only the last prompts
    return [recipe.get("task"), tasks, None if tasks is None else validation.get("limit")]


def watched(recipe: JsonObject) -> object:
    """Return the metric that the validations of a recipe watch; None without validations."""
    return (recipe.get("validation") or {}).get("watch")


def load(context: TrainContext, checkpoint: CheckpointRef) -> None:
    """Load a checkpoint into a run.

    Raises:
        CheckpointError: The checkpoint is of another model, or lacks state that the run needs.
    """
    restore(context.transforms, checkpoint)
    context.service.version = checkpoint.state.numbers.version
    if context.recipe.advantage is not None:
        context.recipe.advantage.load_state_dict(checkpoint.state.numbers.advantage)
    store = checkpoint.store
    load_checkpoint(store, checkpoint.name, tensors(context, tensor_shapes(store, checkpoint.name)))
    if isinstance(context.models.critic, PlacedModel):
        context.models.critic.ask("load", location=store.url, name=checkpoint.name)()


def lacks_optimizer(checkpoint: CheckpointRef) -> bool:
    """Check whether a checkpoint was saved without the state of optimizers."""
    return flat(checkpoint.state.recipe).get("save.optimizer") is False


def rollout_differences(rollout: Rollout) -> list[str]:
    """Explain why a resumed run differs from an uninterrupted one: checkpoints do not hold rollouts ahead of a step."""
    if not rollout.max_staleness:
        return []
    reasons = []
    if rollout.lead != 0:
        reasons.append("groups that were sampled ahead are sampled again, with the checkpoint's weights")
    if rollout.replay is not None:
        reasons.append("rollout.replay starts empty")
    return reasons


def _under(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
