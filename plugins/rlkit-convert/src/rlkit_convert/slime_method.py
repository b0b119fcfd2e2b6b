"""slime's options of the method: the estimator, the loss, KL, the correction and the teacher."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.values import boolean, integer, number, text

GROUPED = ("grpo", "gspo", "cispo")
"""Estimators that divide by the standard deviation of a group, and read no KL."""
RETURNS = ("ppo", "reinforce_plus_plus")
"""Estimators of returns, which read KL and take off no mean of a group."""
ADVANTAGES = {
    **dict.fromkeys(GROUPED, "GRPO"), "ppo": "GAE", "reinforce_plus_plus": "ReinforcePP",
    "reinforce_plus_plus_baseline": "ReinforcePPBaseline",
}  # fmt: skip
LOSSES = {"gspo": "GSPO", "cispo": "CISPO"}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
TEACHER_REWARD = "slime.rollout.on_policy_distillation.reward_func"
RAW_REWARDS = (
    "no advantage of rlkit is the reward itself: GRPO takes off the mean of the group, RLOO that of the others"
)
WHITENED = "rlkit does not whiten GRPO's advantages; without their standard deviation they are ReinforcePPBaseline"
NOT_WHITENED = "rlkit's GAE whitens advantages, slime only with --normalize-advantages"
OWN_KL = "slime takes a token's KL off its advantage: see `kl_loss:`, or `kl_reward:`, which takes it off the reward"
NO_KL = "nothing to do: slime's {} reads no KL in its rewards"
OTHER_OLD_LOGPS = "rlkit compares with the engine's log-probs, slime with the trainer's before the update"
CORRECTION = "see the sections `correction:` and `rejection:`"


def estimator(conversion: Conversion) -> str:
    """Return slime's name of the estimator."""
    return conversion.get("advantage_estimator", text, "grpo")


def advantage(conversion: Conversion, distilled: bool) -> None:
    """Set the estimator and the critic.

    Args:
        conversion: The conversion to add to.
        distilled: Whether the teacher alone gives advantages: slime's rewards are then 0.
    """
    key, whiten = "advantage_estimator", "normalize_advantages"
    raw, unscaled = "disable_rewards_normalization", "disable_grpo_std_normalization"
    name = estimator(conversion)
    if distilled:
        conversion.note(key, "nothing to do: all rewards are 0, and the teacher gives the advantages")
        return
    if name not in ADVANTAGES:
        conversion.ask(key, f"expected one of {', '.join(ADVANTAGES)}; set `advantage:`")
        return
    is_whitened = conversion.get(whiten, boolean, False)
    is_raw = name not in RETURNS and conversion.get(raw, boolean, False)
    is_centred = name in GROUPED and conversion.get(unscaled, boolean, False)
    part = ADVANTAGES[name]
    if is_whitened and is_raw:
        part = "ReinforcePP"
    elif is_whitened and is_centred:
        part = "ReinforcePPBaseline"
    conversion.set("advantage", part, *((key,) if part == ADVANTAGES[name] else (key, whiten, raw, unscaled)))
    if part == "GRPO":
        conversion.set("advantage.scale_by_std", not is_centred, unscaled)
    if is_raw and not is_whitened:
        conversion.ask(raw, RAW_REWARDS)
    if is_whitened and part == "GRPO":
        conversion.ask(whiten, WHITENED)
    elif is_whitened:
        conversion.note(whiten, f"nothing to do: {part} whitens its advantages")
    if name in RETURNS:
        conversion.carry("advantage.gamma", "gamma", number, 1.0)
    if name == "ppo":
        _critic(conversion, is_whitened)


def _critic(conversion: Conversion, is_whitened: bool) -> None:
    """Set the critic, which has the policy's model, rate and schedule unless a file of Megatron's says otherwise."""
    conversion.carry("advantage.lam", "lambd", number, 1.0)
    if not is_whitened:
        conversion.ask("advantage_estimator", NOT_WHITENED)
    conversion.carry("critic.lr", "lr", number, 1e-6)
    conversion.carry("critic.clip", "value_clip", number, 0.2)
    conversion.carry("critic.weight_decay", "weight_decay", number, 0.01)
    for ours in ("schedule", "warmup_ratio", "warmup_steps", "max_grad_norm", "optimizer.betas", "optimizer.eps"):
        if f"train.{ours}" in conversion.recipe:
            value, sources = conversion.recipe[f"train.{ours}"]
            conversion.set(f"critic.{ours}", value, *filter(conversion.has, sources.split(", ")))
    if "train.schedule.min_lr_ratio" in conversion.recipe:
        conversion.set("critic.schedule.min_lr_ratio", conversion.recipe["train.schedule.min_lr_ratio"][0], "min_lr")
    if conversion.get("num_critic_only_steps", integer, 0) > 0:
        conversion.carry("critic.policy_delay_steps", "num_critic_only_steps", integer, 0)
    if not conversion.get("calculate_per_token_loss", boolean, False):
        conversion.note("value_clip", "rlkit's critic averages over tokens, slime's over completions first")


def loss(conversion: Conversion) -> None:
    """Set the loss and its bounds."""
    kind = conversion.get("loss_type", text, "policy_loss")
    if kind != "policy_loss":
        conversion.ask("loss_type", "a loss of your own: rlkit plugins new NAME --kind loss")
    name = LOSSES.get(estimator(conversion), "ClipLoss")
    conversion.set("loss", name, "advantage_estimator")
    low = conversion.get("eps_clip", number, 0.2)
    high = conversion.get("eps_clip_high", number, low)
    conversion.set("loss.clip_low", min(low, 1.0), "eps_clip")  # ratios are above 0
    conversion.set("loss.clip_high", high, "eps_clip_high" if conversion.has("eps_clip_high") else "eps_clip")
    if conversion.has("eps_clip_c") and name == "ClipLoss":
        conversion.carry("loss.clip_dual", "eps_clip_c", number, 3.0)
    elif conversion.has("eps_clip_c") and name == "GSPO":
        conversion.ask("eps_clip_c", "an option of loss ClipLoss; GSPO has no second bound")
    if conversion.get("use_opsm", boolean, False):
        conversion.carry("train.off_policy_mask_threshold", "opsm_delta", number, 1e-4, "use_opsm")
        if not conversion.get("use_rollout_logprobs", boolean, False):
            conversion.note("use_opsm", OTHER_OLD_LOGPS)


def divergence(conversion: Conversion) -> None:
    """Set KL in the loss and in the reward; slime has one type of estimate for both."""
    kind = ESTIMATORS.get(conversion.get("kl_loss_type", text, "k1"))
    if kind is None:
        conversion.ask("kl_loss_type", f"expected one of {', '.join(ESTIMATORS)}")
        kind = "k1"
    weight = conversion.get("kl_loss_coef", number, 0.0)
    if conversion.get("use_kl_loss", boolean, False) and weight > 0:
        conversion.set("kl_loss.coef", weight, "kl_loss_coef", "use_kl_loss")
        conversion.set("kl_loss.estimator", kind, "kl_loss_type")
        if conversion.get("use_unbiased_kl", boolean, False):
            conversion.set("kl_loss.importance_weighted", True, "use_unbiased_kl")
            if conversion.get("use_tis", boolean, False):
                conversion.note("use_unbiased_kl", "rlkit also multiplies the estimate by the weight of `correction:`")
    elif conversion.has("use_kl_loss"):
        conversion.note("use_kl_loss", "nothing to do: with a weight of 0 slime only measures KL")
    name, penalty = estimator(conversion), conversion.get("kl_coef", number, 0.0)
    if penalty > 0 and name in RETURNS:
        conversion.set("kl_reward.coef", penalty, "kl_coef")
        conversion.set("kl_reward.estimator", kind, "kl_loss_type")
    elif penalty > 0 and name == "reinforce_plus_plus_baseline":
        conversion.ask("kl_coef", OWN_KL)
    elif penalty > 0:
        conversion.note("kl_coef", NO_KL.format(name))
    if conversion.has("ref_update_interval") and {"kl_loss.coef", "kl_reward.coef"} & conversion.recipe.keys():
        conversion.carry("reference.refresh_every", "ref_update_interval", integer, 1)


def correction(conversion: Conversion) -> None:
    """Set the weights between engine and trainer."""
    if not conversion.get("use_tis", boolean, False):
        return
    key = "custom_tis_function_path"
    function = conversion.get(key, text, "")
    low = conversion.get("tis_clip_low", number, 0.0)
    if function not in ("", ICEPOP):
        conversion.ask(key, CORRECTION)
        conversion.note("use_tis", f"see {key}")
        return
    conversion.carry("correction.high", "tis_clip", number, 2.0, "use_tis", key)
    if low > 0 and function:
        conversion.set("correction.low", low, "tis_clip_low", key)
    elif low > 0:
        conversion.ask("tis_clip_low", "correction caps weights from above, and raises none to a lower bound")


def distillation(conversion: Conversion) -> bool:
    """Set the teacher; return whether it alone gives advantages, since slime's rewards are 0."""
    switch, kind = "use_opd", "opd_type"
    if not conversion.get(switch, boolean, False):
        return False
    conversion.carry("teacher.coef", "opd_kl_coef", number, 1.0, switch)
    if conversion.get(kind, text, "") == "megatron":
        conversion.carry("teacher.path", "opd_teacher_load", text, "", kind)
        conversion.ask("opd_teacher_load", "teacher.path is a Hugging Face folder; this is a checkpoint of Megatron")
    else:
        address = conversion.get("rm_url", text, "").removesuffix("/generate")
        conversion.set("teacher.urls", [address], "rm_url", kind)
        conversion.ask(kind, "set teacher.path to the model that the servers have")
    if conversion.get("normalize_advantages", boolean, False):
        conversion.ask(switch, "slime whitens advantages with the teacher's part, rlkit adds it afterwards")
    name = conversion.get("custom_rm_path", text, "")
    if name != TEACHER_REWARD:
        return False
    for key in filter(conversion.has, ("custom_rm_path", "custom_reward_post_process_path")):
        conversion.notes[key] = "nothing to do: it asks the teacher's servers, which `teacher:` does"
        conversion.by_hand.discard(key)
    return True
