"""The trainer of TRL's that options belong to: a command or a class names it, or else they imply it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import NoReturn

from rlkit.base.errors import RecipeError

TRAINER = "the trainer"
"""The key under which the trainer of the options is kept: one of `TRAINERS`."""
SAMPLING = {
    "grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "gold": "GOLD", "online_dpo": "OnlineDPO", "gkd": "GKD",
    "distillation": "Distillation",
}  # fmt: skip
RECORDED = {"kto": "KTO", "orpo": "ORPO", "cpo": "CPO", "dpo": "DPO", "sft": "SFT", "reward": "Reward"}
"""Trainers that learn from the completions in the rows."""
TRAINERS = {**SAMPLING, **RECORDED}
"""The beginnings of the trainers' classes, by the names of their commands and files."""
DISTILLED = ("gold", "gkd", "distillation")
"""Trainers that learn from a teacher."""
ALIASES = {"dpo_online": "online_dpo"}
OTHERS = {
    "bco": "BCO", "prm": "PRM", "xpo": "XPO", "tpo": "TPO", "nash_md": "NashMD", "sdft": "SDFT", "sdpo": "SDPO",
    "a2po": "A2PO", "gmpo": "GMPO",
}  # fmt: skip
"""Trainers that are not converted."""
AGGREGATION = {
    "grpo": "seq_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm", "sapo": "seq_mean_token_mean",
    "luspo": "seq_mean_token_sum", "vespo": "token_mean",
}  # fmt: skip
"""The `loss_type` of GRPO, and rlkit's `train.aggregation`."""
HINTS = {
    "rloo": {"normalize_advantages", "rloo_k", "reward_clip_range"},
    "online_dpo": {"max_new_tokens"},
    "gold": {"use_uld_loss", "uld_use_hybrid_loss", "teacher_tokenizer_name_or_path", "lmbda", "seq_kd"},
    "ppo": {"kl_coef", "vf_coef", "cliprange", "cliprange_value", "num_ppo_epochs", "reward_model_path"},
    "distillation": {"teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs"},
    "grpo": {
        "num_generations", "reward_funcs", "reward_weights", "num_iterations", "steps_per_generation", "epsilon",
        "generation_batch_size", "epsilon_high", "scale_rewards", "mask_truncated_completions",
        "importance_sampling_level",
    },
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "dpo": {
        "precompute_ref_log_probs", "precompute_ref_batch_size", "f_divergence_type", "ld_alpha",
        "discopop_tau", "use_weighting", "loss_weights", "label_smoothing",
    },
    "sft": {
        "packing", "packing_strategy", "eval_packing", "assistant_only_loss", "completion_only_loss",
        "dataset_text_field", "max_seq_length", "eos_token", "neftune_noise_alpha",
    },
}  # fmt: skip
"""Options that only one trainer has, or none of those after it."""
LOSS_TYPES = {
    "grpo": AGGREGATION.keys(),
    "kto": {"kto", "apo_zero_unpaired"},
    "cpo": {"simpo"},
    "dpo": {
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sigmoid_norm",
    },
    "sft": {"nll", "dft", "chunked_nll"},
}  # fmt: skip


def find_trainer(values: Mapping[str, object], words: Sequence[str], file: str) -> str:
    """Return the trainer that a command, its script, the options or the file's name stand for; empty if none does.

    Args:
        values: The options.
        words: The command.
        file: The name of the file.
    """
    for word, verb in pairwise(words):
        if PurePath(word).name == "trl" and verb in (*TRAINERS, *OTHERS):
            return verb
    scripts = [word for word in words if word.endswith(".py")]
    named = _named([*(PurePath(script).stem for script in scripts), *scripts])
    if named in TRAINERS:
        return named
    implied, named = _implied(values), named or _named([PurePath(file).stem])
    if implied in RECORDED and named in RECORDED:  # which share many options
        return named
    return implied or named or _of_rows(values)


def _named(texts: Sequence[str]) -> str:
    """Return the trainer in the first text that has one; those with samples may be a part of a word."""
    for text in texts:
        for name in (*SAMPLING, *ALIASES, *OTHERS, *RECORDED):
            if re.search(name if name in SAMPLING else rf"(?<![a-z]){name}(?![a-z])", text.lower()):
                return ALIASES.get(name, name)
    return ""


def _implied(values: Mapping[str, object]) -> str:
    """Return the trainer that options imply; empty if any may have them."""
    if "max_new_tokens" in values and values.keys() & (HINTS["gold"] | HINTS["distillation"]):
        return "gkd"
    implied = next((trainer for trainer, names in HINTS.items() if names & values.keys()), "")
    types = values.get("loss_type")
    first = str(types[0] if isinstance(types, list) and types else types)
    return implied or next((trainer for trainer, names in LOSS_TYPES.items() if first in names), "")


def _of_rows(values: Mapping[str, object]) -> str:
    """Return the likeliest trainer of options that those of recorded completions have in common; empty if none is."""
    if "max_length" not in values:
        return ""
    return "dpo" if "beta" in values else "sft"


def refuse(file: str, trainer: str) -> NoReturn:
    """Refuse a trainer that is not converted.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        f"{file} trains with TRL's {OTHERS[trainer]}Trainer, which rlkit convert does not read, expected one of "
        f"{', '.join(TRAINERS.values())}; `rlkit recipe new FILE --task ROWS` writes a recipe from the columns of your "
        "rows: rlkit docs supervised"
    )
