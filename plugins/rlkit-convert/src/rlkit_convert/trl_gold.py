"""TRL's distillation across tokenizers (GOLD): its options, and the sections that they set."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.rules import ByHand, Equivalent, NoEquivalent, Rule, read_together
from rlkit_convert.trl_trainer import TRAINER
from rlkit_convert.values import boolean, number, text

DEFAULTS: dict[str, object] = {
    "num_generations": 1, "max_completion_length": 128, "temperature": 0.9, "learning_rate": 1e-7, "beta": 0.5,
    "lmbda": 0.5,
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


def loss(conversion: Conversion) -> None:
    """Set the loss, how the teacher reads, and whether completions are sampled."""
    conversion.set("loss", "Distillation", TRAINER)
    conversion.carry("loss.beta", "beta", number, 0.5)
    if conversion.get("use_uld_loss", boolean, False):
        conversion.set("teacher.retokenize", True, "use_uld_loss")
        _unmatched(conversion)
    on_policy = conversion.get("lmbda", number, 0.5)
    if on_policy == 0:
        conversion.set("rollout.engine", "Recorded", "lmbda")
    elif on_policy == 1:
        conversion.set("rollout.engine", "TorchEngine", "lmbda")
    else:
        conversion.note("lmbda", "all completions are sampled, as with 1; rollout.engine: Recorded is 0")


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
