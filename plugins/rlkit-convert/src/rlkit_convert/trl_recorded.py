"""TRL's training on the completions in the rows (SFT, preferences, reward models): its options, and what they set."""

from __future__ import annotations

from rlkit.base.errors import RecipeError, show
from rlkit_convert.conversion import Conversion
from rlkit_convert.rules import ByHand, NoEquivalent, Rule, read_together, without_equivalent
from rlkit_convert.trl_trainer import TRAINER
from rlkit_convert.values import boolean, number, text

DEFAULTS: dict[str, dict[str, object]] = {
    "sft": {"learning_rate": 2e-5},
    "dpo": {"beta": 0.1},
    "kto": {"beta": 0.1, "loss_type": "kto"},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "reward": {"learning_rate": 1e-4},
}
KINDS: dict[str, dict[str, object]] = {
    "sigmoid": {}, "hinge": {"kind": "hinge"}, "ipo": {"kind": "ipo"}, "sigmoid_norm": {"length_normalized": True},
}  # fmt: skip
"""TRL's `loss_type` of DPO, and rlkit's options of the loss `DPO`."""
NO_KIND = (
    "loss DPO has the kinds sigmoid, hinge and ipo, and length_normalized (sigmoid_norm); rlkit docs algorithms lists "
    "other losses of pairs"
)
PACKED = (
    "a batch of TRL's then counts blocks of max_length tokens with several rows each; multiply train.prompts_per_step "
    "by the rows of a block"
)
DIFFERENCES = {
    "kto": "z is the mean of the step's own completions, at least 0; TRL's is that of a device's completions, each "
    "after the prompt of another row; a row with `chosen` and `rejected` is one of train.prompts_per_step, not two",
    "orpo": "the cross-entropy is the paper's, the mean over pairs of that of the chosen completion by token; TRL's is "
    "over all tokens of a batch, those of the prompts too",
    "reward": "the new head starts at 0, TRL's at random; a column `margin` of the rows is not read: scores in the "
    "columns score_chosen and score_rejected are, with loss.margin: 1",
    "online_dpo": "pairs of equal rewards are left out; TRL prefers the first completion of each",
}
"""How the training differs from TRL's, by the trainer."""

RULES: dict[str, Rule] = {
    **read_together({
        "": "label_smoothing label_smoothing_factor neftune_noise_alpha max_length max_seq_length truncation_mode "
        "assistant_only_loss load_best_model_at_end metric_for_best_model desirable_weight "
        "undesirable_weight cpo_alpha simpo_gamma center_rewards_coefficient",
    }),
    "packing": ByHand(PACKED),
    "completion_only_loss": ByHand("a column `text` with prompt and completion is trained on complete", (True,)),
    **dict.fromkeys(("max_prompt_length", "max_completion_length"), ByHand("shorten the rows in the data")),
    "dataset_text_field": ByHand("rename the column to `text`", ("text",)),
    "dataset_kwargs": ByHand("rows hold texts or messages, which rlkit renders: rlkit docs supervised"),
    "data_collator": ByHand("rlkit trains on completions and turns of the assistant: rlkit docs supervised"),
    "formatting_func": ByHand("save the rows that it makes, in columns of `rlkit docs supervised`, with `to_json`"),
    "compute_loss_func": ByHand("a loss of your own: rlkit plugins new NAME --kind loss"),
    "eos_token": ByHand("a turn ends as the chat template says; rlkit doctor --model NAME shows the token"),
    "f_divergence_type": ByHand("loss DPO has reverse_kl", ("reverse_kl",)),
    "ld_alpha": ByHand("loss DPO weighs all tokens alike", (1, 1.0)),
    "alpha": ByHand("AlphaPO's transformation of probabilities, which loss SimPO lacks"),
    "is_encoder_decoder": ByHand("rlkit trains decoders"),
    "use_weighting": ByHand("loss DPO weighs all pairs alike"),
    "loss_weights": ByHand("loss DPO is one loss; section `mix:` adds another, such as CrossEntropy, with a weight"),
    "discopop_tau": NoEquivalent("nothing to do: an option of loss_type discopop"),
    "f_alpha_divergence_coef": NoEquivalent("nothing to do: an option of f_divergence_type alpha_divergence"),
    **without_equivalent({
        "shuffle_dataset": "nothing to do: rows are shuffled",
        "packing_strategy eval_packing padding_free": "nothing to do: rows are packed complete, without padding",
        "dataset_num_proc pad_token per_device_eval_batch_size": "nothing to do: does not affect learning",
        "activation_offloading": "train.checkpoint_activations saves memory",
        "precompute_ref_*": "nothing to do: each step computes the reference's log-probs, which are the same",
        "greater_is_better": "nothing to do: save.keep_best takes the lowest loss",
        "train_sampling_strategy": "nothing to do: rows are shuffled",
        "padding_value": "nothing to do: rows are packed, without padding",
        "generate_during_eval": "with a `reward:` validation samples completions and scores them",
        "compute_metrics preprocess_logits_for_metrics": "validation measures the loss, and of pairs the margin",
    }),
}  # fmt: skip
"""The rules of options that other trainers of TRL lack, or have no equivalent of."""


def rollout(conversion: Conversion) -> None:
    """Set the engine, and what becomes of rows that are too long."""
    conversion.set("rollout.engine", "Recorded", TRAINER)
    key = "max_seq_length" if conversion.has("max_seq_length") else "max_length"
    if conversion.raw(TRAINER) == "reward":
        conversion.set("rollout.overlong", "drop", key)
        conversion.note(key, "the limit is the model's context; TRL leaves pairs above 1024 tokens out by default")
    else:
        conversion.set("rollout.overlong", "right", key)
        why = "rows are cut at the model's context alone, where TRL cuts them at 1024 tokens by default"
        conversion.note(key, f"{why}: shorten them in the data")
    if conversion.get("truncation_mode", text, "keep_start") != "keep_start":
        conversion.ask("truncation_mode", "rollout.overlong: right keeps the start of a row")


def validation(conversion: Conversion) -> None:
    """Set the metric to watch, and that of the checkpoint that is kept besides the last ones."""
    conversion.set("validation.watch", "loss")
    switch, metric = "load_best_model_at_end", "metric_for_best_model"
    if not conversion.get(switch, boolean, False):
        return
    if conversion.get(metric, text, "loss") in ("loss", "eval_loss"):
        conversion.set("save.keep_best", "validation/loss", switch, metric)
    else:
        conversion.ask(metric, "save.keep_best: a metric of metrics.jsonl, such as validation/margin")


def loss(conversion: Conversion) -> None:
    """Set the loss."""
    trainer = str(conversion.raw(TRAINER))
    {
        "sft": _fine_tuning, "dpo": _dpo, "kto": _kto, "orpo": _orpo, "cpo": _simpo, "reward": _reward_model,
        "online_dpo": _online_dpo,
    }[trainer](conversion)  # fmt: skip
    if trainer in DIFFERENCES:
        conversion.note(TRAINER, DIFFERENCES[trainer])


def _fine_tuning(conversion: Conversion) -> None:
    conversion.set("loss", "CrossEntropy", TRAINER)
    conversion.carry_given("loss.label_smoothing", "label_smoothing_factor", number, 0.0)
    conversion.carry_given("loss.neftune_alpha", "neftune_noise_alpha", number, 0.0)
    if conversion.get("loss_type", text, "nll") not in ("nll", "chunked_nll"):
        conversion.ask("loss_type", "loss CrossEntropy is nll; rlkit has no other for tokens of rows")
    if conversion.raw("assistant_only_loss") is not True:
        why = "of rows with `messages` TRL then trains on all tokens, rlkit on the turns of the assistant"
        conversion.note("assistant_only_loss", why)


def _dpo(conversion: Conversion) -> None:
    conversion.set("loss", "DPO", TRAINER)
    conversion.carry("loss.beta", "beta", number, 0.1)
    types = conversion.raw("loss_type", "sigmoid")
    kinds = [str(kind) for kind in types] if isinstance(types, list) else [str(types)]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        conversion.ask("loss_type", NO_KIND)
    else:
        for name, value in KINDS[kinds[0]].items():
            conversion.set(f"loss.{name}", value, "loss_type")
        if kinds[0] == "sigmoid" and conversion.get("label_smoothing", number, 0.0) > 0:
            conversion.carry("loss.label_smoothing", "label_smoothing", number, 0.0)
            why = "applied as by earlier versions of TRL (conservative DPO); TRL 1.16 ignores it with sigmoid"
            conversion.note("label_smoothing", why)
    _reference(conversion)


def _reference(conversion: Conversion) -> None:
    if conversion.has("ref_model") and conversion.raw("ref_model") != conversion.raw("model_name_or_path"):
        conversion.ask("ref_model", "the reference is the policy at the start of the run, and no other model")


def _kto(conversion: Conversion) -> None:
    conversion.set("loss", "KTO", TRAINER)
    conversion.carry("loss.beta", "beta", number, 0.1)
    for name in ("desirable_weight", "undesirable_weight"):
        conversion.carry_given(f"loss.{name}", name, number, 1.0)
    if conversion.get("loss_type", text, "kto") != "kto":
        conversion.ask("loss_type", "loss KTO is kto; it has no variant without z")
    _reference(conversion)


def _orpo(conversion: Conversion) -> None:
    conversion.set("loss", "ORPO", TRAINER)
    conversion.carry("loss.coef", "beta", number, 0.1)


def require_simpo(file: str, loss_type: object) -> None:
    """Refuse losses of CPO other than SimPO.

    Raises:
        RecipeError: The loss is another.
    """
    if loss_type != "simpo":
        kind = "loss_type by default, sigmoid" if loss_type is None else f"loss_type {show(loss_type, 60)}"
        raise RecipeError(
            f"{file} trains with TRL's CPOTrainer and its {kind}, which rlkit has no loss for, expected simpo; losses "
            "of pairs are DPO, SimPO and ORPO: rlkit docs algorithms"
        )


def _simpo(conversion: Conversion) -> None:
    conversion.set("loss", "SimPO", TRAINER, "loss_type")
    conversion.carry("loss.beta", "beta", number, 0.1)
    conversion.carry("loss.gamma", "simpo_gamma", number, 0.5)
    if conversion.get("cpo_alpha", number, 1.0):
        why = "adds so much of the chosen completions' cross-entropy (TRL's default is 1; SimPO has 0)"
        conversion.ask("cpo_alpha", f"{why}: section `mix:`, with rows whose `completion` is the chosen one")
    if conversion.get("label_smoothing", number, 0.0):
        conversion.ask("label_smoothing", "loss SimPO has none")


def _reward_model(conversion: Conversion) -> None:
    conversion.set("model.head", "score", TRAINER)
    conversion.set("loss", "BradleyTerry", TRAINER)
    conversion.carry_given("loss.centre", "center_rewards_coefficient", number, 0.0)


def _first_number(value: object) -> float:
    """Return a number, or the first one of a list.

    Raises:
        ValueError: There is none.
    """
    return number(value[0] if isinstance(value, list) and value else value)


def _online_dpo(conversion: Conversion) -> None:
    conversion.set("loss", "DPO", TRAINER)
    conversion.carry("loss.beta", "beta", _first_number, 0.1)
    betas = conversion.raw("beta")
    if isinstance(betas, list) and len(betas) > 1:
        conversion.ask("beta", "a value for each epoch; loss.beta is one for the run, here the first")
    if conversion.get("loss_type", text, "sigmoid") != "sigmoid":
        conversion.ask("loss_type", "loss DPO with kind: ipo has d by token, TRL's OnlineDPO the sum over tokens")
    _reference(conversion)
