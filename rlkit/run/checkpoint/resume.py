"""Resuming: which checkpoint, whether the recipe still fits it, and loading it into the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlkit.errors import RecipeError, show
from rlkit.models.checkpoints import CheckpointRef, load_checkpoint, tensor_shapes
from rlkit.run.checkpoint.state import as_data, flat, restore, tensors
from rlkit.sections import Rollout
from rlkit.train.setup import TrainContext
from rlkit.types import JsonObject

FIXED = (
    "model.path",
    "model.head",
    "model.lora",
    "train.optimizer.class_path",
    "train.optimizer.init_args.name",
    "critic.path",
    "critic.lora",
    "critic.optimizer.class_path",
    "critic.optimizer.init_args.name",
)
"""Options that decide what a checkpoint's tensors are: none can change on resume."""

PRESENT = ("critic", "curriculum", "reference", "shaping", "kl_reward", "train.ema")
"""Sections with state, which can neither be added nor removed on resume."""

FREE = (
    "callbacks",
    "fabric",
    "log",
    "model.attention",
    "profile",
    "save",
    "validation",
    "train.max_tokens_per_micro_batch",
    "train.checkpoint_activations",
    "train.offload_during_rollout",
    "train.deadline",
    "train.require_reward",
    "train.max_steps_without_signal",
)
"""Options that may change without affecting training. `train.steps` too, where no learning rate decays by it."""


def compare(found: CheckpointRef, recipe_yaml: str, force: bool) -> list[str]:
    """Return a line for each difference between the checkpoint's recipe and the current one.

    Raises:
        RecipeError: A difference breaks the state, or changes the training without `force`.
    """
    old, new = flat(found.state.recipe), flat(as_data(recipe_yaml))
    if len(found.state.trained or ()) > 1 and not new.get("rollout.max_staleness"):
        raise RecipeError(
            f"rollout.max_staleness is 0, but {found.location} was trained on some prompts of later steps, which would "
            "be trained on twice; keep it, and set rollout.lead to 0 to sample for one step at a time"
        )
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    lines = {key: f"{key}: {show(old.get(key))} in the checkpoint, {show(new.get(key))} now" for key in changed}
    moved = [part for part in PRESENT if any(_under(k, part) for k in old) != any(_under(k, part) for k in new)]
    broken = [line for key, line in lines.items() if any(_under(key, part) for part in (*FIXED, *moved))]
    if broken:
        raise RecipeError(f"the recipe does not fit {found.location}:\n" + "\n".join(broken))
    free = FREE if _decays(new) else (*FREE, "train.steps")
    changes = [line for key, line in lines.items() if not any(_under(key, part) for part in free)]
    if changes and not force:
        raise RecipeError(
            f"the recipe is not that of {found.location}:\n"
            + "\n".join(changes)
            + f"\n{_why(changes)}; leave it as it was, or add --force to go on with the recipe as it is now"
        )
    return list(lines.values())


def _why(changes: Sequence[str]) -> str:
    """Return why changes on resume need consent."""
    if all(line.startswith("train.steps:") for line in changes):
        return "the learning rate depends on train.steps, so that another number changes every step that is left"
    return "such a change alters what is learned, so that the steps before and after it are of two different runs"


def held_out(recipe: JsonObject) -> list[object]:
    """Return what of a recipe determines which prompts are validated, so that they can be paired with earlier ones."""
    validation = recipe.get("validation") or {}
    tasks = validation.get("tasks")
    # of one task a limit leaves out the last prompts only
    return [recipe.get("task"), tasks, None if tasks is None else validation.get("limit")]


def load(context: TrainContext, found: CheckpointRef) -> None:
    """Load a checkpoint into a run.

    Raises:
        CheckpointError: It is of another model, or has not all that the run needs.
    """
    restore(context.transforms, found)
    context.rollouts.version = found.state.numbers.version
    shapes = tensor_shapes(found.store, found.name)
    load_checkpoint(found.store, found.name, tensors(context, shapes))


def not_repeated(rollout: Rollout) -> list[str]:
    """Return why a resumed run differs from an uninterrupted one: what no checkpoint holds of rollouts ahead of it."""
    if not rollout.max_staleness:
        return []
    reasons = []
    if rollout.lead != 0:
        reasons.append("groups that were sampled ahead are sampled again, with the weights of the checkpoint")
    if rollout.replay is not None:
        reasons.append("rollout.replay starts without groups")
    return reasons


def _decays(recipe: Mapping[str, object]) -> bool:
    """Whether a learning rate depends on `train.steps`."""
    schedules = {recipe.get(f"{section}.schedule.class_path") for section in ("train", "critic")} - {None}
    ratios = {recipe.get(f"{section}.warmup_ratio") for section in ("train", "critic")} - {None}
    return bool(ratios or schedules - {"rlkit.schedules.Constant"})


def _under(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
