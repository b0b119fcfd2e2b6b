"""A short run of `fit` on a random model of Qwen2.5-0.5B's shape, and what its metrics must be.

`python -m tests.gpu.trial --make MODEL` writes the model, `python -m tests.gpu.trial MODEL OUT [--torchrun] OPTIONS…`
trains it; the last line sums up the run, or says what is wrong with it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlkit.testing import save_random_model

SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.02,
    "tie_word_embeddings": True,
}  # fmt: skip
KEY_BIAS = 100.0
STEPS = 3
FIT = (
    "fit", "--recipe=quickstart", f"--train.steps={STEPS}", "--train.prompts_per_step=8", "--rollout.group_size=8",
    "--rollout.sampling.max_tokens=128", "--train.lr=1e-6", "--train.warmup_steps=0", "--validation=null",
    "--save.every=0", "--fabric.accelerator=gpu", "--fabric.precision=bf16-mixed", "--reward=PythonReward",
    f"--reward.function={Path(__file__).with_name('reward.py')}:even_tokens", "--reward.allow_code=true",
)  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


def wrong(rows: list[dict[str, float]], half: bool) -> list[str]:
    """Return what is wrong with a run's metrics, by name and value: it must train, and take no slower path."""
    most = {
        "mismatch/mean": 0.05 if half else 1e-3,
        "rollout/failed": 0.0,
        "engine/slow_path": 0.0,
        "engine/restarts": 0.0,
        "engine/retried": 0.0,
        "memory/share": 0.95,
    }
    least = {"update/packed": 1.0, "update/steps": 1.0}
    if any("engine/fused" in row for row in rows):
        least["engine/fused"] = 1.0
    problems = [] if len(rows) == STEPS else [f"{len(rows)} steps, expected {STEPS}"]
    for number, row in enumerate(rows, start=1):
        bad = {name: value for name, value in row.items() if not math.isfinite(value)}
        bad |= {name: row[name] for name, limit in most.items() if row.get(name, 0) > limit}
        bad |= {name: row.get(name, math.nan) for name, limit in least.items() if not row.get(name, 0) >= limit}
        bad |= {} if row.get("grad_norm", 0) > 0 else {"grad_norm": row.get("grad_norm", math.nan)}
        signal = row.get("groups/no_signal", 1) < 1
        bad |= {} if signal else {"groups/no_signal": row.get("groups/no_signal", math.nan)}
        problems += [f"step {number}: {name} is {value:g}" for name, value in bad.items()]
    return problems


def summary(rows: list[dict[str, float]]) -> str:
    """Return a run's metrics in a line, with the seconds of each step; the first ones compile."""
    last = rows[-1]
    seconds = {name: ", ".join(f"{row[f'time/{name}']:.1f}" for row in rows) for name in ("sample", "update")}
    return (
        f"sample {seconds['sample']}, update {seconds['update']} s, "
        f"peak {max(row.get('memory/peak_device_mb', 0.0) for row in rows) / 1024:.1f} GiB, "
        f"MFU {last.get('time/mfu', math.nan):.2f}, mismatch {last['mismatch/mean']:.1e}, "
        f"gradient {last['grad_norm']:.1e}, rows {last.get('engine/rows_peak', 0):g}, "
        f"replayed {last.get('engine/recorded', math.nan):.2f}"
    )


def main(argv: list[str]) -> int:
    """Make the model, or train it and judge the run; give the exit status."""
    if argv[0] == "--make":
        print(f"made {save_random_model(Path(argv[1]), key_bias=KEY_BIAS, **SHAPE)}")
        return 0
    model, out, *options = argv
    launcher = TORCHRUN if "--torchrun" in options else ()
    options = [option for option in options if option != "--torchrun"]
    words = (sys.executable, *launcher, "-m", "rlkit", *FIT, f"--model.path={model}", f"--out={out}", *options)
    done = subprocess.run(words, stderr=subprocess.STDOUT, check=False)
    sys.stdout.flush()
    if done.returncode:
        print(f"fit ended with exit status {done.returncode}; its error stands above")
        return 1
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    problems = wrong(rows, half="--fabric.precision=32-true" not in options)
    print("; ".join(problems) or summary(rows))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
