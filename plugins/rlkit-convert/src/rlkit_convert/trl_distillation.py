"""TRL's distillation (GOLD, GKD and Distillation): its options, and the sections that they set."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.rules import ByHand, Equivalent, NoEquivalent, Rule, read_together, without_equivalent
from rlkit_convert.trl_trainer import TRAINER
from rlkit_convert.values import boolean, number, text

DEFAULTS: dict[str, dict[str, object]] = {
    "gold": {
        "num_generations": 1, "max_completion_length": 128, "temperature": 0.9, "learning_rate": 1e-7, "beta": 0.5,
        "lmbda": 0.5, "top_p": 0.95,
    },
    "gkd": {"max_new_tokens": 128, "temperature": 0.9, "learning_rate": 2e-5, "beta": 0.5, "lmbda": 0.5},
    "distillation": {"beta": 1.0},
}  # fmt: skip
WEIGHTS = ("uld_hybrid_unmatched_weight", "uld_hybrid_matched_weight")

RULES: dict[str, Rule] = {
    "teacher_model_name_or_path": Equivalent("teacher.path", text),
    "teacher_tokenizer_name_or_path": NoEquivalent("nothing to do: the tokenizer is that of teacher.path"),
    "teacher_model_revision": ByHand("download that revision and set teacher.path to its folder"),
    "teacher_model_init_kwargs": NoEquivalent("teacher.dtype"),
    **read_together({"": "use_uld_loss uld_use_hybrid_loss uld_hybrid_* lmbda"}),
    "seq_kd": ByHand("loss CrossEntropy, on the teacher's completions as recorded ones"),
    "use_extended_uld": NoEquivalent("spans of text are always aligned"),
    "uld_token_merge_strategy": NoEquivalent("a span of several tokens has two outcomes, its text and all others"),
    "uld_crossentropy_weight": ByHand("section `mix:` with loss CrossEntropy"),
    "uld_distillation_weight": NoEquivalent("nothing to do: the loss has weight 1"),
    "uld_student_temperature": ByHand("rollout.sampling.temperature, for both models", (1.0,)),
    "uld_teacher_temperature": ByHand("rollout.sampling.temperature, for both models", (1.0,)),
    "uld_skip_*": NoEquivalent("the end of a turn is a span"),
}
DATA_RULES: dict[str, Rule] = {
    **without_equivalent({
        "assistant_only_loss completion_only_loss dataset_text_field eos_token": "nothing to do: completions are "
        "trained up to the end token of the chat template",
        "activation_offloading dataset_num_proc eval_packing loss_type packing packing_strategy pad_token padding_free "
        "truncation_mode vllm_sync_frequency wandb_log_unique_prompts": "nothing to do: does not affect learning",
    }),
    "dataset_kwargs": ByHand("rows hold prompts or messages: rlkit docs supervised"),
    "formatting_func": ByHand("save the rows that it makes with `to_json`"),
    "data_collator": ByHand("rlkit reads prompts or messages: rlkit docs supervised"),
}  # fmt: skip
"""The rules of options that the trainers have of SFT."""
ALL_TOKENS = (
    "TRL compares the complete vocabulary, the loss the teacher's `top_k` likeliest tokens (default: 64) and all "
    "others as one; of rows with several turns TRL samples the last one, rlkit the first"
)


def loss(conversion: Conversion) -> None:
    """Set the loss, how the teacher reads, and whether completions are sampled."""
    conversion.set("loss", "Distillation", TRAINER)
    conversion.carry("loss.beta", "beta", number, 0.5)
    conversion.note(TRAINER, ALL_TOKENS)
    if conversion.get("use_uld_loss", boolean, False):
        conversion.set("teacher.retokenize", True, "use_uld_loss")
        _unmatched(conversion)
    on_policy = 1.0 if conversion.raw(TRAINER) == "distillation" else conversion.get("lmbda", number, 0.5)
    _temperature(conversion, is_sampled=on_policy != 0)
    if on_policy == 0:
        conversion.set("rollout.engine", "Recorded", "lmbda")
    elif on_policy == 1 and conversion.has("lmbda"):
        conversion.set("rollout.engine", "TorchEngine", "lmbda")
    elif on_policy != 1:
        why = "the share of sampled batches; here all completions are sampled, as with 1; rollout.engine: Recorded is 0"
        conversion.ask("lmbda", why)


def truncation(conversion: Conversion) -> None:
    """List what truncates the distribution of samples."""
    for name, off in (("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0)):
        if conversion.get(name, number, off) > 0 and conversion.get(name, number, off) != off:
            conversion.ask(name, "the loss compares the complete distributions, from which rlkit then also samples")


def _temperature(conversion: Conversion, *, is_sampled: bool) -> None:
    """Leave the temperature of recorded completions out, which is 1, and list where TRL compares at another one."""
    is_gkd = conversion.raw(TRAINER) == "gkd"  # it samples with the temperature, and compares at 1
    if not is_sampled:
        conversion.recipe.pop("rollout.sampling.temperature", None)
    if not is_sampled and is_gkd:
        conversion.note("temperature", "nothing to do: that of samples, and there are none")
    elif is_sampled == is_gkd and conversion.get("temperature", number, 1.0) != 1:
        why = "TRL's GKD compares distributions at 1" if is_gkd else "recorded completions are compared at 1"
        conversion.ask("temperature", f"{why}; rlkit has one temperature for samples and distributions, so set it to 1")


def _unmatched(conversion: Conversion) -> None:
    """Set the weight of ULD's loss beside the divergence, which has weight 1."""
    if not conversion.get("uld_use_hybrid_loss", boolean, False):
        conversion.note("uld_use_hybrid_loss", "tokens of the same name are always compared with each other")
        return
    unmatched, matched = (conversion.get(key, number, 0.0) for key in WEIGHTS)
    if matched > 0:
        conversion.set("loss.unmatched", round(unmatched / matched, 9), *WEIGHTS, "uld_use_hybrid_loss")
    else:
        conversion.note(WEIGHTS[1], "loss.unmatched is the other weight divided by it; TRL's default is their overlap")
