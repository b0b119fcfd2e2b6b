"""TRL's training on the completions in the rows (SFT and DPO): its options, and the sections that they set."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.rules import ByHand, NoEquivalent, Rule, read_together, without_equivalent
from rlkit_convert.trl_trainer import TRAINER
from rlkit_convert.values import boolean, number, text

DEFAULTS: dict[str, dict[str, object]] = {"sft": {"learning_rate": 2e-5}, "dpo": {"beta": 0.1}}
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

RULES: dict[str, Rule] = {
    **read_together({
        "": "label_smoothing label_smoothing_factor neftune_noise_alpha max_length max_seq_length truncation_mode "
        "assistant_only_loss ref_model load_best_model_at_end metric_for_best_model",
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
        "compute_metrics preprocess_logits_for_metrics": "validation measures the loss, and of pairs the margin",
    }),
}  # fmt: skip
"""The rules of options that other trainers of TRL lack, or have no equivalent of."""


def rollout(conversion: Conversion) -> None:
    """Set the engine, and what becomes of rows that are too long."""
    conversion.set("rollout.engine", "Recorded", TRAINER)
    key = "max_seq_length" if conversion.has("max_seq_length") else "max_length"
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
    if conversion.raw(TRAINER) == "sft":
        _fine_tuning(conversion)
    else:
        _preferences(conversion)


def _fine_tuning(conversion: Conversion) -> None:
    conversion.set("loss", "CrossEntropy", TRAINER)
    conversion.carry_given("loss.label_smoothing", "label_smoothing_factor", number, 0.0)
    conversion.carry_given("loss.neftune_alpha", "neftune_noise_alpha", number, 0.0)
    if conversion.get("loss_type", text, "nll") not in ("nll", "chunked_nll"):
        conversion.ask("loss_type", "loss CrossEntropy is nll; rlkit has no other for tokens of rows")
    if conversion.raw("assistant_only_loss") is not True:
        why = "of rows with `messages` TRL then trains on all tokens, rlkit on the turns of the assistant"
        conversion.note("assistant_only_loss", why)


def _preferences(conversion: Conversion) -> None:
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
    if conversion.has("ref_model") and conversion.raw("ref_model") != conversion.raw("model_name_or_path"):
        conversion.ask("ref_model", "the reference is the policy at the start of the run, and no other model")
