"""What a recipe means that leaves an option out: another default would change runs whose recipes stay the same."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from rlkit import recipe as sections
from rlkit.optimizers import AdamW
from rlkit.recipe import Log, Recipe, RolloutLog
from rlkit.schedules import Constant
from rlkit.types import Sampling

TRAINED = {
    "optimizer": AdamW, "schedule": Constant, "weight_decay": 0.0, "warmup_steps": 0, "warmup_ratio": None,
    "max_grad_norm": 1.0,
}  # fmt: skip
DEFAULTS: dict[type, dict[str, Any]] = {
    sections.Lora: {"rank": 16, "alpha": 32.0, "targets": "all-linear", "use_rslora": False, "use_dora": False},
    sections.Model: {"head": "lm", "attention": "auto", "lora": None, "dtype": "float32", "chat_template": None,
        "quantization": None,
        "chat_template_kwargs": None, "config": dict, "trust_remote_code": False, "vision": sections.Vision,
    },
    sections.Vision: {"min_pixels": None, "max_pixels": 1_003_520, "train": False, "sources": ()},
    sections.Rollout: {
        "engine": None, "group_size": 8, "sampling": Sampling, "filter": None, "max_gap": None,
        "max_prompt_tokens": None, "overlong": "error", "unscorable": "error", "oversample": 1.0,
        "max_conversations": None, "sampling_column": None,
        "max_staleness": 0, "lead": None, "replay": None,
    },
    sections.Train: {
        **TRAINED, "steps": None, "data_epochs": None, "max_rows": None,
        "lr": 1e-6, "prompts_per_step": 32, "minibatches": 1, "epochs": 1,
        "max_tokens_per_micro_batch": "auto", "entropy_coef": 0.0, "router_aux_loss_coef": 0.0,
        "router_replay": "auto", "checkpoint_activations": False, "offload_activations": False,
        "offload_during_rollout": False, "deadline": 1800.0, "aggregation": None, "old_logps": "recompute",
        "off_policy_mask_threshold": None,
        "mask_truncated": False,
        "ema": None, "seed": 0, "shuffle": True, "require_reward": True, "max_steps_without_signal": None,
    },
    sections.Critic: {**TRAINED, "lr": 1e-5, "path": None, "lora": None, "clip": 0.5, "policy_delay_steps": 0},
    sections.FSDP2: {
        "tensor_parallel": 1, "sequence_parallel": 1, "offload": False, "replicate": 1, "expert_parallel": 1,
    },
    sections.Fabric: {
        "accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto", "precision": "32-true",
        "plugins": None,
    },
    sections.Save: {"every": 100, "keep_last": 2, "keep_best": None, "optimizer": True, "folder": None},
    sections.Validation: {
        "before": True, "every": 0, "after": True, "tasks": None, "limit": None, "samples": 1, "sampling": None,
        "patience": None, "watch": "accuracy",
    },
    sections.ConversationLimits: {
        "turns": 8, "user_turns": None, "tokens": None, "tool_calls": 16, "seconds": 600.0, "check": "warn",
        "max_reply_tokens": "auto",
    },
    sections.KLLoss: {"coef": 0.001, "estimator": "k3", "importance_weighted": False},
    sections.KLReward: {"coef": 0.001, "estimator": "k1", "target": None, "horizon": 10000},
    sections.ReferenceUpdates: {"mix": 1.0},
    sections.Mixture: {"task": None, "loss": None, "prompts_per_step": None},
    sections.Teacher: {
        "path": None, "urls": None, "engine": None, "context": None, "sources": None, "coef": 1.0, "dtype": "float32",
        "attempts": None, "retokenize": False,
    },
    sections.Attempts: {
        "success": 1.0, "solution": "\n\nCorrect solution:\n\n{text}",
        "feedback": "\n\nFeedback on an earlier attempt:\n\n{text}",
    },
    sections.GroupReplay: {"reuse": 1},
    sections.Shaping: {"clip": None, "normalize": False},
    sections.Correction: {"level": "token", "low": None, "high": 2.0},
    sections.Rejection: {
        "statistic": "k1", "level": "token", "low": None, "high": None, "keep_in_denominator": False,
    },
    sections.Profile: {"tool": "torch"},
    sections.Placement: {},
    RolloutLog: {"every": 1, "limit": 64},
    Log: {"loggers": list, "rollouts": RolloutLog, "samples": None},
    Recipe: {
        "validation": sections.Validation, "save": sections.Save, "callbacks": list, "log": Log,
        "fabric": sections.Fabric,
        **dict.fromkeys((
            "critic", "curriculum", "kl_loss", "kl_reward", "reference", "shaping", "correction", "rejection", "tools",
            "parser", "interaction", "environment", "agent", "conversation", "profile", "reward", "advantage",
            "teacher", "mix", "launcher", "placement",
        )),
    },
}  # fmt: skip


def test_an_option_that_is_left_out_means_what_it_always_meant() -> None:
    """A class stands for what it makes without arguments."""
    for section, expected in DEFAULTS.items():
        made = {f.name: f.default if f.default_factory is MISSING else f.default_factory for f in fields(section)}
        assert {name: value for name, value in made.items() if value is not MISSING} == expected, section
    assert sections.Train(steps=1).on_policy  # one update of each rollout


def test_the_defaults_of_every_section_are_listed() -> None:
    made = {cls for name in sections.__all__ if isinstance(cls := getattr(sections, name), type)}
    assert len(made) > 10
    assert made - DEFAULTS.keys() == set()
