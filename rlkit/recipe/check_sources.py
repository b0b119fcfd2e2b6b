"""Checks of where completions, rewards and advantages come from, and of rollouts that run ahead of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.base.errors import show
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.loss import Inputs, SequenceLoss
from rlkit.recipe.model import Attempts, Teacher
from rlkit.recipe.recipe import Recipe
from rlkit.recipe.train import Mixture


def check_inputs(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each section that the loss lacks, and each that the loss does not read."""
    loss, name = recipe.loss, type(recipe.loss).__name__
    if Inputs.ADVANTAGES in loss.inputs and recipe.advantage is None and recipe.teacher is None:
        yield f"loss {name} reads advantages, but the recipe has no `advantage:`; add one, such as advantage: GRPO"
    if Inputs.ADVANTAGES not in loss.inputs:
        for section in ("advantage", "critic", "teacher"):
            if getattr(recipe, section) is not None and not (section == "teacher" and loss.forward.teacher_top):
                yield f"loss {name} reads no advantages, but the recipe has a section `{section}:`; remove it"


def check_teacher(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `teacher`."""
    teacher, temperature = recipe.teacher, recipe.rollout.sampling.temperature
    name, reads_teacher = type(recipe.loss).__name__, bool(recipe.loss.forward.teacher_top)
    if teacher is None:
        if reads_teacher:
            yield f"loss {name} reads a teacher, but the recipe has no `teacher:`; add one with the path of a model"
        return
    if reads_teacher and teacher.coef != 1:
        yield f"teacher.coef is {teacher.coef:g}, the weight of an advantage, but loss {name} reads none; remove it"
    if teacher.template is None and not teacher.paths():
        yield (
            "teacher.path is null: the policy itself, which without teacher.context has nothing to teach; set "
            'teacher.context, such as "{prompt}\\nThe answer is {answer}.", or the path of another model'
        )
    yield from _check_attempts(recipe, teacher.attempts)
    yield from _check_retokenize(recipe, teacher)
    if teacher.urls is None:
        if teacher.engine is not None:
            yield "teacher.engine says which product serves teacher.urls, but there are none; add them, or remove it"
        return
    if teacher.engine is not None and Capability.TEACHER not in teacher.engine.capabilities:
        name = type(teacher.engine).__name__
        yield f"teacher.engine is {name}, whose servers do not score tokens; `rlkit docs servers` names those that do"
    if not teacher.urls:
        yield "teacher.urls names no server; add one, or set it to null to load the teacher here"
    for url in teacher.urls:
        if not url.startswith(("http://", "https://")):
            yield f"teacher.urls has {url!r}, expected http://… or https://…"
    if teacher.path is None:
        yield "teacher.urls are servers of a teacher, but teacher.path does not name their model; set it"
    if temperature != 1:
        yield (
            f"rollout.sampling.temperature is {temperature}, but the servers at teacher.urls return log-probs of "
            "temperature 1; set it to 1, or teacher.urls to null"
        )


def _check_attempts(recipe: Recipe, attempts: Attempts | None) -> Iterator[str]:
    rollout = recipe.rollout
    if attempts is None:
        return
    if recipe.method.training_reward(recipe) is None:
        yield "teacher.attempts are sampled completions with their rewards; add a `reward:` and a sampling engine"
    if attempts.feedback is None and (attempts.solution is None or rollout.group_size == 1):
        yield (
            f"teacher.attempts has feedback: null and solution: {show(attempts.solution)} with rollout.group_size "
            f"{rollout.group_size}, so the teacher reads nothing; set feedback, or solution and a larger group"
        )


def _check_retokenize(recipe: Recipe, teacher: Teacher) -> Iterator[str]:
    if not teacher.retokenize:
        return
    problem = "teacher.retokenize is true, but"
    if teacher.path is None or teacher.sources:
        yield f"{problem} only the model at teacher.path can have another tokenizer; set it, and remove teacher.sources"
    if recipe.loss.forward.teacher_top and teacher.urls:
        name = type(recipe.loss).__name__
        yield f"{problem} loss {name} needs one that is loaded here; remove teacher.urls, or choose PolicyGradient"
    for section in ("tools", "interaction", "environment", "agent"):
        if getattr(recipe, section):
            yield f"{problem} the teacher reads one turn of the policy; remove the section `{section}:`"


def check_staleness(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each option that does not fit `rollout.max_staleness`."""
    rollout, name = recipe.rollout, "rollout.max_staleness"
    if not rollout.max_staleness:
        if rollout.lead:
            yield f"rollout.lead is {rollout.lead:g}, but {name} is 0; set {name} to 1 or more, or remove rollout.lead"
        if rollout.replay is not None:
            yield f"rollout.replay trains on groups of earlier steps, but {name} is 0; set {name} to 1 or more"
        return
    stale = f"{name} is {rollout.max_staleness}, but"
    if rollout.lead is not None and rollout.lead > rollout.max_staleness:
        yield f"rollout.lead is {rollout.lead:g}, expected at most {name}, which is {rollout.max_staleness}"
    ratio = recipe.train.old_logps != "recompute" and Inputs.OLD_LOGPS in recipe.loss.inputs
    any_samples = (
        isinstance(recipe.loss, SequenceLoss) or recipe.loss.forward.teacher_top
    )  # losses per sequence, and of distributions
    if recipe.correction is None and recipe.rejection is None and not ratio and not any_samples:
        yield (
            f"{stale} nothing corrects for tokens of older weights: set train.old_logps: rollout (the loss clips the "
            "ratio of the current weights to those that sampled; only for losses with ratios) or loglinear (A-3PO), "
            "or add correction: {high: 2.0} (weighs each token by that ratio) or rejection: {high: 2.0} (leaves out "
            "the tokens with the largest ratios)"
        )
    if not rollout.engine.capabilities & (Capability.INTERRUPT | Capability.BESIDE):
        yield (
            f"{stale} rollout.engine {type(rollout.engine).__name__} cannot be interrupted, and does not sample "
            "during training; choose TorchEngine"
        )
    if rollout.max_conversations is not None and Capability.BESIDE not in rollout.engine.capabilities:
        yield f"{stale} rollout.max_conversations does not limit interrupted conversations; set rollout.lead instead"
    if rollout.oversample > 1:
        yield (
            f"{stale} rollout.oversample is {rollout.oversample}, although no step waits for its slowest groups: they "
            "continue in the next one; set rollout.oversample to 1"
        )
    if recipe.curriculum is not None:
        yield (
            f"{stale} curriculum {type(recipe.curriculum).__name__} orders prompts by the outcomes of all "
            f"previous steps, which are unknown when prompts start ahead; remove it, or set {name} to 0"
        )


def check_mixtures(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `mix`."""
    for name, mixture in (recipe.mix or {}).items():
        yield from _check_loss(recipe, f"mix.{name}", mixture)
        yield from _check_stream(recipe, f"mix.{name}", mixture)


def _check_loss(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    loss = mixture.loss
    if loss is None:
        if recipe.model.scores:
            yield f"{key}.loss is CrossEntropy, which does not fit model.head: score; set it to BradleyTerry"
        return
    name = type(loss).__name__
    if Inputs.ADVANTAGES in loss.inputs or Inputs.OLD_LOGPS in loss.inputs:
        yield f"{key}.loss {name} reads advantages or old log-probs, but a mixture has none; choose CrossEntropy"
    elif loss.forward.teacher_top:
        yield f"{key}.loss {name} reads a teacher, but a mixture has none; choose CrossEntropy"
    elif loss.reads_fields:
        yield f"{key}.loss {name} reads the field {loss.reads_fields[0]!r}, but a mixture has none; choose another loss"
    elif (Inputs.SCORES in loss.inputs) != recipe.model.scores:
        yield f"{key}.loss {name} does not fit model.head: {recipe.model.head}; choose another loss"
    elif Inputs.REWARDS in loss.inputs and mixture.task is None:
        yield f"{key}.loss {name} compares completions by their rewards, but {key} has no task; add one, with rewards"


def _check_stream(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    train, prompts = recipe.train, mixture.prompts_per_step
    if mixture.task is None and prompts is not None:
        yield f"{key}.prompts_per_step is {prompts}, but {key} has no task to draw them from; add one, or remove it"
    if prompts is not None and prompts < train.minibatches:
        yield (
            f"{key}.prompts_per_step is {prompts}, but train.minibatches is {train.minibatches}, and a group is never "
            f"divided; set it to {train.minibatches} or more"
        )
