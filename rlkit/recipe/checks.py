"""Checks of the relations between a recipe's options, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlkit.base.errors import RecipeError, show
from rlkit.base.text import part_name
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.fields import declaration_problem
from rlkit.interfaces.loss import Inputs, SequenceLoss
from rlkit.interfaces.placement import Pools
from rlkit.recipe.check_model import check_model
from rlkit.recipe.check_sources import check_inputs, check_mixtures, check_staleness, check_teacher
from rlkit.recipe.check_validation import check_best, check_validation
from rlkit.recipe.recipe import Recipe, option
from rlkit.registry.checks import method_problems
from rlkit.registry.shelf import provider

MOST_CANDIDATES = 1024
"""The largest `top_k` in training: each token of a batch has so many ids."""

COLDEST = 0.01
"""The lowest temperature above 0: below it samples are greedy, and logits may overflow."""


def check(recipe: Recipe) -> None:
    """Check the recipe without reading data or loading a model.

    Raises:
        RecipeError: Options contradict each other; the message has a line for each problem, with the remedy.
    """
    checks = (
        _check_methods,
        recipe.method.problems,
        check_inputs,
        check_teacher,
        _check_needs,
        _check_fields,
        _check_numbers,
        check_validation,
        check_best,
        _check_length,
        check_profile,
        _check_loggers,
        check_staleness,
        check_model,
        check_mixtures,
        _check_placement,
    )
    problems = [problem for find_problems in checks for problem in find_problems(recipe)]
    if problems:
        raise RecipeError("\n".join(problems))


def _check_placement(recipe: Recipe) -> Iterator[str]:
    if recipe.placement is not None:
        yield from provider(Pools).problems(recipe)  # type: ignore[type-abstract]


def _check_methods(recipe: Recipe) -> Iterator[str]:
    for part in recipe.parts():
        for problem in method_problems(type(part)):
            yield f"{part_name(part)}: {problem}"


def _check_needs(recipe: Recipe) -> Iterator[str]:
    advantage, needs = type(recipe.advantage).__name__, recipe.needs
    if Needs.VALUES in needs and recipe.critic is None:
        yield (
            f"advantage {advantage} needs values, but the recipe has no `critic:` section; add one, or choose "
            "GRPO, RLOO"
        )
    if Needs.ROLES in needs and recipe.agent is None:
        yield f"advantage {advantage} needs roles, but the recipe has no `agent:`; add one, or choose GRPO"
    if recipe.advantage is not None and Needs.VALUES not in needs and recipe.critic is not None:
        yield f"the recipe has a `critic:` section, but advantage {advantage} reads no values; remove it, or choose GAE"
    if Needs.COMPONENTS in needs:
        weights = getattr(recipe.advantage, "weights", {})
        yield from _check_components(recipe, f"advantage {advantage} weighs the component", weights, "weigh")
    component = getattr(recipe.rollout.filter, "component", None)
    if component is not None:
        name = type(recipe.rollout.filter).__name__
        yield from _check_components(recipe, f"rollout.filter {name} compares the component", [component], "compare")
    unshaped = {Needs.COMPONENTS: "the components of the reward", Needs.REFERENCE_REWARDS: "rewards of the reference"}
    for section in ("shaping", "kl_reward"):
        for need, rewards in unshaped.items():
            if need in needs and getattr(recipe, section) is not None:
                yield (
                    f"advantage {advantage} reads {rewards}, which `{section}:` leaves as they are; "
                    "remove it" + (", or use `kl_loss:`" if section == "kl_reward" else "")
                )
    yield from _check_loss(recipe)
    yield from _check_partners(recipe)
    yield from _check_reference(recipe)
    yield from _check_sampling(recipe)


def _check_fields(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each field that cannot be filled as declared, and for each that is read and never filled."""
    declared: dict[str, tuple[str, str]] = {}
    for part in recipe.parts():
        for field in part.fills:
            name, problem = part_name(part), declaration_problem(part, field)
            if problem is not None:
                yield f"{name} {problem}"
                continue
            part_before, declaration = declared.setdefault(field.name, (name, str(field)))
            if declaration != str(field):
                yield f"{part_before} declares {declaration}, but {name} {field}; rename one of the fields"
    for part in recipe.parts():
        for missing in [name for name in part.reads_fields if name not in declared]:
            filled = ", ".join(declared) or "none"
            yield f"{part_name(part)} reads the field {missing!r}, which no part of the recipe fills; filled: {filled}"


def _check_components(recipe: Recipe, subject: str, names: Iterable[str], verb: str) -> Iterator[str]:
    """Yield a problem if a name is no component of the reward, as far as the reward declares its components."""
    if recipe.reward is None or recipe.reward.components is None:
        return
    missing = sorted(set(names) - set(recipe.reward.components))
    if missing:
        yield (
            f"{subject} {show(missing[0])}, but reward {type(recipe.reward).__name__} has only: "
            f"{', '.join(recipe.reward.components) or 'none'}; {verb} one of these, or choose reward Composite"
        )


def _check_loss(recipe: Recipe) -> Iterator[str]:
    loss, name = recipe.loss, type(recipe.loss).__name__
    for key in ("train.aggregation", "train.off_policy_mask_threshold", "correction", "rejection"):
        if isinstance(loss, SequenceLoss) and option(recipe, key) is not None:
            yield f"loss {name} is per sequence, but `{key}` is per token; remove it"
    if isinstance(loss, SequenceLoss) and recipe.train.mask_truncated:
        yield f"loss {name} is per sequence, but train.mask_truncated excludes tokens; use a rollout.filter"


def _check_partners(recipe: Recipe) -> Iterator[str]:
    if recipe.interaction is not None and recipe.environment is not None:
        yield "the recipe has both `interaction:` and `environment:`, but only one can reply to the policy; remove one"
    others = [key for key in ("tools", "interaction", "environment") if option(recipe, key)]
    if recipe.conversation is not None and not (others or recipe.agent):
        yield (
            "the recipe has a `conversation:` section, but all its conversations have a single turn; remove it, or add "
            "`tools:`, `interaction:`, `environment:` or `agent:`"
        )
    user_turns = option(recipe, "conversation.user_turns")
    if user_turns is not None and not (recipe.interaction or recipe.environment):
        yield (
            f"conversation.user_turns is {user_turns}, but the recipe has no user to reply: add "
            "`interaction:` or `environment:`, or set conversation.turns, or conversation.tool_calls"
        )
    yield from _check_agent(recipe, others)
    if recipe.parser is not None and not (recipe.tools or recipe.agent):
        yield "the recipe has a `parser:` of tool calls, but no `tools:`; remove it, or add tools"


def _check_agent(recipe: Recipe, others: Sequence[str]) -> Iterator[str]:
    if recipe.agent is None:
        return
    for key in others:
        yield f"the recipe has both `agent:` and `{key}:`, but an agent has its own loop and tools; remove one"
    for key in ("critic", "shaping", "kl_reward"):
        if option(recipe, key) is not None:
            yield f"the recipe has both `agent:` and `{key}:`, which counts samples, not rollouts; remove `{key}:`"
    if Inputs.GROUPS in recipe.loss.inputs:
        yield f"loss {type(recipe.loss).__name__} compares samples, but agents' rollouts have several; choose ClipLoss"


def _check_reference(recipe: Recipe) -> Iterator[str]:
    kl = recipe.kl_loss
    if kl is not None and kl.importance_weighted and kl.estimator.endswith("+"):
        yield (
            f"kl_loss.estimator {kl.estimator} has the gradient of k2, but importance_weighted adds that of the "
            "weights; choose k3, or set kl_loss.importance_weighted: false"
        )
    if recipe.reference is not None and not recipe.needs_reference:
        yield (
            "the recipe has a `reference:` section, but nothing measures KL; remove it, or add `kl_loss:` or "
            "`kl_reward:`, or choose a loss that reads the reference, such as DPO"
        )
    if recipe.reference is not None and recipe.model.dtype != "float32":
        yield f"`reference:` follows the policy, but in model.dtype {recipe.model.dtype} updates round to 0; remove one"
    if recipe.reference is not None and recipe.model.lora is not None:
        yield "`reference:` cannot follow the policy under `model.lora`, whose reference is the base model; remove one"


def _check_truncation(recipe: Recipe) -> Iterator[str]:
    """The trainer renormalises over the candidates of each token, which the engine must return."""
    sampling, engine = recipe.rollout.sampling, recipe.rollout.engine
    name = type(engine).__name__
    limits = f"rollout.sampling has top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}"
    if sampling.structure is not None:
        limits += " and a structure"
    advice = "set top_p: 1, top_k: 0 and min_p: 0, and truncate in validation.sampling only"
    if not 1 <= sampling.top_k <= MOST_CANDIDATES:
        yield (
            f"{limits}, but the trainer keeps the ids from which each token is sampled; set top_k as well, from 1 to "
            f"{MOST_CANDIDATES}, such as 100"
        )
    if Capability.CANDIDATES not in engine.capabilities:
        yield f"{limits}, but {name} does not return the ids from which each token is sampled; {advice}"
    if recipe.teacher is not None or recipe.loss.forward.teacher_top or recipe.loss.forward.statistics.mean:
        yield f"{limits}, but a teacher and the loss read log-probs over the whole vocabulary; {advice}"


def _check_sampling(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.rollout.sampling
    if recipe.rollout.oversample > 1 and Needs.GREEDY in recipe.needs:
        yield (
            f"rollout.oversample is {recipe.rollout.oversample}, but advantage {type(recipe.advantage).__name__} needs "
            "a greedy completion of each prompt; set rollout.oversample to 1"
        )
    if sampling.truncates:
        yield from _check_truncation(recipe)
    validation_sampling = None if recipe.validation is None else recipe.validation.sampling
    sections = (("rollout", sampling), ("validation", validation_sampling))
    for key, section in [(key, section) for key, section in sections if section is not None]:
        if section.structure is not None:
            try:
                recipe.rollout.engine.check_structure(section.structure)
            except RecipeError as error:
                yield f"{key}.sampling.structure: {error}"
            if section.stop and Capability.RESUMES_STRUCTURES not in recipe.rollout.engine.capabilities:
                engine = type(recipe.rollout.engine).__name__
                yield (
                    f"{key}.sampling has stop texts and a structure, which {engine} begins anew in each request; "
                    "remove one of them, or choose rollout.engine: TorchEngine"
                )
        if 0 < section.temperature < COLDEST:
            yield (
                f"{key}.sampling.temperature is {section.temperature}, by which logits are divided; set it to "
                f"{COLDEST} or more" + (", or to 0 for the most likely tokens" if key == "validation" else "")
            )
    if sampling.temperature == 0:
        yield "rollout.sampling.temperature is 0, so all samples of a prompt are equal; set it above 0 (usual: 1)"
    if recipe.trains_bfloat16:
        yield from _check_bfloat16(recipe)


def _check_bfloat16(recipe: Recipe) -> Iterator[str]:
    """Yield what loses small updates of weights that are trained in bfloat16."""
    for name, section in (("train", recipe.train), ("critic", recipe.critic)):
        if section is not None and not section.optimizer.trains_bfloat16:
            remedy = "set " if recipe.fabric.shards else f"set {name}.optimizer: AdamW8bit, or "
            yield (
                f"fabric.precision is 'bf16-true', in which most small updates of {type(section.optimizer).__name__} "
                f"round to zero; {remedy}fabric.precision: bf16-mixed"
            )
    averages = {"train.ema": recipe.train.ema, "reference.mix": recipe.reference and recipe.reference.mix}
    for name, value in averages.items():
        if value is not None and value != 1:
            yield (
                f"{name} is {value}, but with fabric.precision 'bf16-true' the average is in bfloat16, and small "
                "changes of it round to zero; remove it, or set fabric.precision: bf16-mixed"
            )


def _check_length(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.steps is None and train.data_epochs is None:
        yield (
            "train needs 'steps', which is not given; expected --train.steps with a whole number of 1 or more, or "
            "--train.data_epochs with passes over the data"
        )
    if train.steps is not None and train.data_epochs is not None:
        yield (
            f"train.steps is {train.steps} and train.data_epochs {train.data_epochs:g}, expected one of them; set the "
            "other to null"
        )


def check_profile(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `profile`; once the data are loaded, the last step is always known."""
    if recipe.profile is None:
        return
    steps = recipe.profile.steps
    if not steps or len(set(steps)) < len(steps):
        yield f"profile.steps is {steps}, expected at least one step, and each step once; or set profile: null"
    last = recipe.train.steps
    late_steps = [step for step in steps if last is not None and step > last]
    if late_steps:
        yield f"profile.steps has {late_steps[0]}, expected steps up to train.steps, which is {last}"


def _check_loggers(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each logger that writes to the same file as another."""
    options = [(type(logger).__name__, vars(logger)) for logger in recipe.log.loggers]
    for index, (name, own_options) in enumerate(options):
        files_before = [logger_options.get("file") for _, logger_options in options[:index]]
        if (name, own_options) in options[:index]:
            yield f"log.loggers has {name} twice with the same options; remove one, or let it write elsewhere"
        elif "file" in own_options and own_options["file"] in files_before:
            file = own_options["file"]
            yield f"log.loggers.{index}.file is {file!r}, which another logger writes; choose another name"


def _check_numbers(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if recipe.fabric.devices == []:
        yield "fabric.devices is [], expected a count, the indices of at least one device, or auto"
    if train.old_logps == "rollout" and recipe.correction is not None:
        yield (
            "train.old_logps is 'rollout', so ratios already compare with the engine, and `correction:` would weigh by "
            "trainer / engine a second time; remove `correction:`, or set train.old_logps: recompute"
        )
    if train.minibatches > train.prompts_per_step:
        yield (
            f"train.minibatches is {train.minibatches}, but a step has only train.prompts_per_step = "
            f"{train.prompts_per_step} prompts and groups are never divided; set it to {train.prompts_per_step} or less"
        )
    for name, section in (("train", train), ("critic", recipe.critic)):
        if section is not None and section.warmup_ratio is not None and section.warmup_steps:
            yield (
                f"{name}.warmup_steps is {section.warmup_steps} and {name}.warmup_ratio is {section.warmup_ratio}, but "
                "a warm-up has one length; remove one of them"
            )
        if section is not None and not section.optimizer.takes_shards and recipe.fabric.shards:
            yield (
                f"{name}.optimizer {section.optimizer.explain()} needs full weights, but fabric.strategy fsdp2 shards "
                "them; choose AdamW or Muon, or set fabric.strategy: ddp"
            )
    yield from _check_bounds(recipe)


def _check_bounds(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of bounds of the ratio trainer / engine, which is 1 if the two agree."""
    correction, rejection = recipe.correction, recipe.rejection
    if correction is not None and not (correction.low or 0) <= 1 <= correction.high:
        yield (
            f"correction has low: {correction.low} and high: {correction.high}, which exclude 1, the weight if "
            "engine and trainer agree; set low to at most 1 and high to at least 1"
        )
    if rejection is None:
        return
    if rejection.statistic != "k1":
        if rejection.low is not None:
            yield f"rejection.low is {rejection.low}, but {rejection.statistic} has no lower bound; remove it"
    elif (rejection.low or 0) >= 1 or rejection.highest <= 1:
        yield (
            f"rejection has low: {rejection.low} and high: {rejection.high}, which leave no room around 1, the ratio "
            "if engine and trainer agree; set low below 1 and high above 1"
        )
