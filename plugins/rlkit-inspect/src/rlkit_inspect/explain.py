"""`rlkit explain`: the objective in force, as formulae with the numbers filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlkit_placement.checks import number_of

from rlkit.base.terminal import echo
from rlkit.base.text import counted
from rlkit.commands import parse
from rlkit.interfaces.loss import Inputs
from rlkit.recipe import Critic, Recipe, Teacher, Train

NORMALISERS = {
    "token_mean": "sum over all tokens / N_tokens",
    "token_sum": "sum over all tokens",
    "seq_mean_token_mean": "mean over each sequence's tokens, sum over sequences / N_sequences",
    "seq_mean_token_sum": "sum over all tokens / N_sequences",
    "seq_mean_token_sum_norm": "sum over all tokens / N_sequences / {budget} (the response budget)",
    "prompt_mean_token_mean": "mean over the tokens of each prompt's samples, sum over prompts / N_prompts",
}


def run(argv: Sequence[str]) -> int:
    """Explain; return the exit status."""
    recipe = parse("explain", argv).recipe
    rows = list(explain(recipe))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        echo(f"{label:<{width}}  {text}")
    return 0


def explain(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Describe the run's objective, line by line: (term, formula)."""
    yield from _data(recipe)
    yield from _reward(recipe)
    if recipe.advantage is not None:
        yield _name("advantage", recipe.advantage), recipe.advantage.explain()
    teacher = recipe.teacher
    if teacher is not None:
        plus = "A =" if recipe.advantage is None else "A +"
        unit = "span" if teacher.retokenize else "token"
        credit = f"{plus} {teacher.coef:g} (log pi_teacher - log pi_old), {unit} by {unit}; "
        yield (
            "teacher",
            f"{'' if recipe.loss.forward.teacher_top else credit}{_teacher(teacher, recipe)}",
        )
    yield from _loss(recipe)
    yield from _mixtures(recipe)
    yield from _training(recipe)
    yield from _placement(recipe)


def _name(what: str, part: object) -> str:
    return f"{what} {type(part).__name__}"


def _data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    train, rollout = recipe.train, recipe.rollout
    length = f"{train.data_epochs:g} passes over the data" if train.steps is None else counted(train.steps, "step")
    limits = f" at temperature {rollout.sampling.temperature}, up to {rollout.sampling.max_tokens} tokens each"
    yield (
        "a step",
        f"{train.prompts_per_step} prompts {recipe.method.completions.format(rollout=rollout, details=limits)}; "
        f"{train.epochs} epochs x {train.minibatches} mini-batches = "
        f"{train.epochs * train.minibatches} optimizer steps; {length} in all",
    )
    replay = rollout.replay
    if replay is not None:
        yield "replay", f"and up to {replay.size} groups of earlier steps, each {replay.reuse} times more at most"
    if rollout.filter is not None:
        yield "filter", f"{type(rollout.filter).__name__}, dropped places are filled {rollout.filter.max_refills} times"


def _reward(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.reward is None or Inputs.REWARDS not in recipe.loss.inputs:
        return
    text = f"R = {type(recipe.reward).__name__}"
    if recipe.shaping is not None:
        text += ", divided by its running standard deviation" if recipe.shaping.normalize else ""
        text += f", clipped to +-{recipe.shaping.clip}" if recipe.shaping.clip else ""
    yield "reward", f"{text}; on the last token that the policy chose"
    section = recipe.kl_reward
    if section is not None:
        adapts = "" if section.target is None else f", beta adapts to KL {section.target} (horizon {section.horizon})"
        yield "KL in the reward", f"r_t - {section.coef} {section.estimator}(old policy, reference){adapts}"


def _loss(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield _name("loss", recipe.loss), recipe.loss.explain()
    if Inputs.OLD_LOGPS in recipe.loss.inputs:
        yield "old policy", _old_policy(recipe)
    weigh = recipe.correction
    if weigh is not None:
        how = f"capped at {weigh.high}" if weigh.low is None else f"0 outside [{weigh.low}, {weigh.high}]"
        yield "correction", f"each token's loss times pi_trainer / pi_engine ({weigh.level}), {how}"
    reject = recipe.rejection
    if reject is not None:
        low = f"{1 / reject.highest if reject.low is None else reject.low:g} <= " if reject.statistic == "k1" else ""
        side = "in" if reject.keep_in_denominator else "out of"
        bounds = f"{low}{reject.statistic}({reject.level}) <= {reject.highest}"
        yield "rejection", f"keep {bounds}; the rest is {side} the denominator"
    threshold = recipe.train.off_policy_mask_threshold
    if threshold is not None:
        yield "off-policy mask", f"0 where A < 0 and the sequence's mean of log pi_engine - log pi > {threshold}"
    if recipe.train.mask_truncated:
        yield "truncated completions", "0, and out of the denominator; they count in the advantages of their group"
    mode = recipe.train.aggregation or recipe.loss.aggregation
    yield (
        f"aggregation {mode}",
        f"{_normaliser(recipe)}; counts are of the whole mini-batch, over all ranks and micro-batches",
    )
    if recipe.train.entropy_coef:
        yield "entropy", f"- {recipe.train.entropy_coef} H(policy)"
    if recipe.train.router_aux_loss_coef:
        yield "router", f"+ {recipe.train.router_aux_loss_coef} load-balancing loss of each micro-batch, by its tokens"
    if recipe.kl_loss is not None:
        yield "KL in the loss", f"+ {recipe.kl_loss.coef} {recipe.kl_loss.estimator}(policy, reference)"
    if recipe.needs_reference:
        yield "reference", _reference(recipe)


def _mixtures(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.mix:
        return
    from rlkit.api.prompts import mixture_recipe  # which loads what trains

    for name, mixture in recipe.mix.items():
        alone = mixture_recipe(mixture, recipe)
        loss = alone.loss
        rows = (
            "what tools, users and environments wrote in the step's own conversations"
            if mixture.task is None
            else f"{alone.train.prompts_per_step} prompts of {type(alone.task).__name__} with their recorded answers"
        )
        yield (
            f"mix {name}",
            f"+ {mixture.weight:g} x {type(loss).__name__}: {loss.explain()}, {_normaliser(alone)}, over {rows}"
            + ("" if mixture.weight else "; measured, and not learned"),
        )


def _normaliser(recipe: Recipe) -> str:
    """Return the divisor of a mini-batch's loss."""
    if Inputs.GROUPS in recipe.loss.inputs:
        return "mean over the pairs of each group, mean over the groups that have some"
    mode = recipe.train.aggregation or recipe.loss.aggregation
    return NORMALISERS[mode].format(budget=recipe.rollout.sampling.max_tokens)


def _old_policy(recipe: Recipe) -> str:
    if recipe.train.old_logps == "rollout":
        return "the engine's log-probs, as sampled"
    if recipe.train.old_logps == "loglinear":
        return "log pi_engine / d + (1 - 1 / d) log pi, d = 1 + age of the token in weight updates (log-linear)"
    if recipe.needs_old_logps:
        return "the trainer's log-probs, recomputed before the update"
    return "the trainer's log-probs of the one pass itself, so that the ratio is 1 (on-policy)"


def _reference(recipe: Recipe) -> str:
    if recipe.model.lora is not None:
        return "the policy without its adapters"
    if recipe.reference is None:
        return "the initial policy, frozen"
    refresh_steps = recipe.reference.refresh_every
    mix = recipe.reference.mix
    return f"follows the policy every {refresh_steps} steps: {mix} policy + {1 - mix:g} reference"


def _teacher(teacher: Teacher, recipe: Recipe) -> str:
    initial = "the policy as the run began" if recipe.model.lora is None else "the policy without its adapters"
    itself = initial if recipe.train.ema is None else "the policy's averaged weights"
    served = "" if teacher.urls is None else f" on {len(teacher.urls)} servers"
    default_teacher = f"{teacher.path or (itself if teacher.template is not None else 'none')}{served}"
    by_source = [f"{path} for {source}" for source, path in (teacher.sources or {}).items()]
    reads = "" if teacher.template is None else f", which reads {teacher.template!r}"
    reads += ", with its own tokenizer" if teacher.retokenize else ""
    return "; ".join([*by_source, f"{default_teacher} for others" if by_source else default_teacher]) + reads


def _training(recipe: Recipe) -> Iterator[tuple[str, str]]:
    train, lora = recipe.train, recipe.model.lora
    weights = "all weights" if lora is None else f"{lora} on {lora.targets}, the rest is frozen"
    weights += f" in {recipe.model.quantization}" if recipe.model.quantization else ""
    yield recipe.method.trained, f"{recipe.model.path}: {weights}; {_optimizer(train)}"
    critic = recipe.critic
    if critic is not None:
        bound = "" if critic.clip is None else f", values clipped to the old ones +-{critic.clip}"
        alone = f"; learns alone for {critic.policy_delay_steps} steps" if critic.policy_delay_steps else ""
        yield "critic", f"0.5 mean_tokens (V - returns)^2{bound}; {_optimizer(critic)}{alone}"
    if train.ema is not None:
        yield "average", f"EMA of the weights with decay {train.ema}, saved beside them"


def _placement(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.placement is None:
        return
    for name, pool in recipe.placement.pools.items():
        roles, devices = " and ".join(recipe.placement.roles_of(name)), counted(number_of(pool.devices), "device")
        yield f"pool {name}", f"{roles}, on {devices} in {pool.precision}{', sharded' if pool.shards else ''}"


def _optimizer(section: Train | Critic) -> str:
    ratio = section.warmup_ratio
    warmup = f"{section.warmup_steps} steps" if ratio is None else f"{ratio:.0%} of the steps"
    return (
        f"{section.optimizer.explain()}, lr {section.lr} ({section.schedule.explain()}, {warmup} of warm-up), "
        f"weight decay {section.weight_decay}, gradient norm <= {section.max_grad_norm}"
    )
