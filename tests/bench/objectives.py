"""Whether every loss and every estimator learns: `python -m tests.bench.objectives [NAME ...]`.

Each one is the quickstart for forty steps with that part in the place of GRPO or of the clipped loss, its options at
their defaults, for two seeds; `top_p=0.9` is GRPO with truncated sampling. What is printed are accuracies of greedy and
of sampled answers to held-out additions, before and after, and how likely a difference as large is where nothing was
learned.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.bench.self_distill import fit

SEEDS = (0, 1)
OFF_POLICY = ("--train.minibatches=2", "--train.epochs=2")
"""Several updates from a rollout, without which most losses are the same."""

LOSSES = (
    "ClipLoss", "GSPO", "CISPO", "SAPO", "GMPO", "DPPO", "ClipCov", "KLCov", "M2PO", "VESPO", "TOPR", "DRO",
)  # fmt: skip
ADVANTAGES = (
    "GRPO", "RLOO", "ReMax", "OPO", "GPG", "MaxRL", "PassK", "ReinforcePP", "ReinforcePPBaseline",
    "OptimalTokenBaseline",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    **{name: (f"--loss={name}", *OFF_POLICY) for name in LOSSES},
    "LUSPO": ("--loss=GSPO", "--train.aggregation=seq_mean_token_sum", *OFF_POLICY),
    "PolicyGradient": ("--loss=PolicyGradient",),
    "top_p=0.9": ("--rollout.sampling.top_p=0.9", "--rollout.sampling.top_k=1024"),
    **{name: (f"--advantage={name}",) for name in ADVANTAGES},
}


def main() -> None:
    print("| part | seed | greedy | sampled | p |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or VARIANTS:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                words = ("--train.steps=40", f"--train.seed={seed}", *VARIANTS[name])
                validation = fit("quickstart", Path(folder) / "run", *words)
            before, after = validation["before"], validation["after"]
            greedy, sampled = (f"{before[key]:.3f} -> {after[key]:.3f}" for key in ("accuracy", "sampled_accuracy"))
            print(f"| {name} | {seed} | {greedy} | {sampled} | {after['sampled_accuracy_p_start']:.2g} |", flush=True)


if __name__ == "__main__":
    main()
