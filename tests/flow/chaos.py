"""Kills, corrupts and fills: does a run that is resumed end as one that nothing happened to?

    python tests/flow/chaos.py [--seed N]       prints each trial, and survived/total
    python tests/flow/chaos.py --ahead          the same with rollouts that run ahead of the trainer

Runs are forked from this process once everything is imported, so that a trial costs a second. `kill -9` comes at a
random moment of a stage of a random step; the stages take turns, so that every one is hit.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

from rlkit.cli.main import main as run_rlkit

for used in ("pandas", "rlkit.registry.builtin", "rlkit.cli.fit", "rlkit.run.fit", "rlkit.run.launch"):
    importlib.import_module(used)  # before the forks

STEPS = 6
GRPO = (
    "fit", "--recipe", "quickstart", f"--train.steps={STEPS}", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--validation.limit=2", "--validation.samples=0", "--save.every=1", "--fabric.accelerator=cpu",
)  # fmt: skip
AHEAD = (
    "fit", "--recipe", "quick_tool", f"--train.steps={STEPS}", "--train.prompts_per_step=4", "--rollout.group_size=4",
    "--rollout.max_staleness=2", "--rollout.lead=1.5", "--correction.high=2.0", "--validation=null", "--save.every=1",
    "--log.rollouts.limit=null", "--fabric.accelerator=cpu",
)  # fmt: skip
PPO = (*GRPO[:2], "quick_ppo", *GRPO[3:], "--train.minibatches=2")

STAGES = {
    "rollout": "train.sampling._sample_prompts",
    "scoring": "train.rl.await_scores",
    "logps": "train.rl.compute_logps",
    "policy": "train.update.update_policy",
    "critic": "train.update.update_critic",
    "copy": "run.checkpoint.write.Writer.save",
    "write": "run.checkpoint.write.Writer._write",
    "rename": "run.checkpoint.write.Writer._prune",
    "sync": "rollout.service.RolloutService.sync_weights",
    "validate": "run.evaluate.Validator.validate",
    "step": "run.method.rl_step",
}
"""What is going on when the kill comes, and the function that does it."""


def forked(work: Callable[[], int], log: Path) -> int:
    """Run in a child process with its output in a file; give its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = 1
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def killed(args: tuple[str, ...], stage: str, entry: int, delay: float, hit: Path) -> int:
    """Run rlkit and, `delay` seconds after the stage began for the `entry`-th time, kill -9 this process."""
    place, _, name = f"rlkit.{STAGES[stage]}".rpartition(".")
    owner = pkgutil.resolve_name(place)
    original, calls = getattr(owner, name), [0]

    def die() -> None:
        time.sleep(delay)
        hit.write_text(stage)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == entry:
            threading.Thread(target=die, daemon=True).start()
            if delay == 0:
                time.sleep(1)  # the stage has begun and never gets anywhere
        return original(*given, **named)

    setattr(owner, name, wrapped)
    return run_rlkit(list(args))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "final" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kills(
    name: str, args: tuple[str, ...], stages: list[str], folder: Path, rng: random.Random, *, hits: list[str]
) -> None:
    """Kill one run again and again, resuming it each time, and note the stages; then compare the weights."""
    whole, out = folder / f"{name}-whole", folder / name
    assert forked(lambda: run_rlkit([*args, "--out", str(whole)]), folder / f"{name}-whole.log") == 0
    for trial, stage in enumerate(stages):
        hit = folder / f"{name}-{trial}.hit"
        resumed = (*args, "--out", str(out), "--resume", "auto")
        entry, delay = rng.choice((1, 1, 2)), rng.choice((0.0, rng.uniform(0, 0.05)))
        status = forked(lambda: killed(resumed, stage, entry, delay, hit), folder / f"{name}.log")  # noqa: B023
        if status == 0:  # the run was over before the stage came again: begin another
            out = folder / f"{name}-{trial}"
            resumed = (*args, "--out", str(out), "--resume", "auto")
            status = forked(lambda: killed(resumed, stage, 1, 0.0, hit), folder / f"{name}.log")  # noqa: B023
        assert status == -signal.SIGKILL, (stage, status, (folder / f"{name}.log").read_text()[-2000:])
        hits.append(hit.read_text())
        print(f"{name}: killed in {stage}, {delay * 1000:.0f} ms after it began", flush=True)
    status = forked(lambda: run_rlkit([*args, "--out", str(out), "--resume", "auto"]), folder / f"{name}.log")
    assert status == 0, (folder / f"{name}.log").read_text()[-2000:]
    assert same(weights(whole), weights(out)), f"{name}: the resumed run ended with other weights"
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), steps


def trained(out: Path) -> Counter[str]:
    """Return how many answers to each prompt were trained on, none of which has a token older than allowed."""
    found: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        text = gzip.decompress((out / "rollouts" / f"step-{step:05d}.jsonl.gz").read_bytes()).decode()
        for row in map(json.loads, text.splitlines()):
            assert min(v for v in row["versions"] if v >= 0) >= step - 1 - 2, row
            found[row["prompt"]] += "advantages" in row
    return found


def ahead(folder: Path, rng: random.Random, count: int) -> None:
    """Kill runs whose rollouts run ahead at random moments, resuming each until it ends: all prompts, each once."""
    whole, log = folder / "ahead-whole", folder / "ahead.log"
    assert forked(lambda: run_rlkit([*AHEAD, "--out", str(whole)]), log) == 0, log.read_text()[-2000:]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(row[f"time/{phase}"] for row in rows for phase in ("sample", "logps", "score", "update")) / STEPS
    expected, runs, kills = trained(whole), 0, 0
    assert set(expected.values()) == {4}
    while kills < count:
        out, status = folder / f"ahead-{runs}", -1
        while status != 0:
            args = (*AHEAD, "--out", str(out), "--resume", "auto")
            number, delay = rng.choice((1, 2)), rng.uniform(0, seconds)
            if kills == count:
                status = forked(lambda: run_rlkit(list(args)), log)  # noqa: B023
                assert status == 0, log.read_text()[-2000:]
                break
            hit = folder / f"ahead-{kills}.hit"
            status = forked(lambda: killed(args, "step", number, delay, hit), log)  # noqa: B023
            assert status in (0, -signal.SIGKILL), log.read_text()[-2000:]
            if status:
                kills += 1
                print(f"ahead: killed {delay:.2f} s after a step began", flush=True)
        assert trained(out) == expected, f"other prompts were trained on: {trained(out) - expected}"
        runs += 1
    print(f"{count} kills of {runs} runs: each prompt was trained on once", flush=True)


def damage(what: str, args: tuple[str, ...], whole: Path, folder: Path) -> None:
    """Truncate, corrupt or remove a file of the newest checkpoint; the one before must serve."""
    newest = f"step-{STEPS:06d}"
    out = folder / f"damaged-{what.replace(' ', '-')}"
    _copy(whole, out)
    DAMAGES[what](out / "checkpoints" / newest)
    status = forked(lambda: run_rlkit([*args, "--out", str(out), "--resume", "auto"]), folder / "damaged.log")
    assert status == 0, (what, (folder / "damaged.log").read_text()[-2000:])
    assert same(weights(whole), weights(out)), what
    print(f"checkpoint {what}: the one before was taken", flush=True)


def full(args: tuple[str, ...], whole: Path, folder: Path) -> None:
    """Let no file grow beyond what metrics need: checkpoints fail with an error, and what was written stays whole."""
    out, log = folder / "full", folder / "full.log"
    _copy(whole, out)
    for name in (f"step-{STEPS:06d}", f"step-{STEPS - 1:06d}"):
        (out / "checkpoints" / name).rename(folder / f"aside-{name}")
    (folder / f"aside-step-{STEPS - 1:06d}").rename(out / "checkpoints" / f"step-{STEPS - 1:06d}")
    before = sorted(p.name for p in (out / "checkpoints").iterdir())

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        return run_rlkit([*args, "--out", str(out), "--resume", "auto", f"--train.steps={STEPS + 3}", "--force"])

    status = forked(limited, log)
    assert status == 1, log.read_text()[-2000:]
    assert "cannot be written" in log.read_text(), log.read_text()[-2000:]
    assert f"the newest complete checkpoint is {out}/checkpoints/step-{STEPS - 1:06d}" in log.read_text()
    after = sorted(p.name for p in (out / "checkpoints").iterdir() if not p.name.endswith(".partial"))
    assert after == before, (before, after)
    more = (*args, "--out", str(out), "--resume", "auto")
    assert forked(lambda: run_rlkit(list(more)), log) == 0, log.read_text()[-2000:]
    assert same(weights(whole), weights(out))
    print("disk full: the run says so and goes on from the last whole checkpoint once there is room", flush=True)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda c: os.truncate(next(c.glob("*.safetensors")), 1000),
    "corrupted": lambda c: _flip(next(c.glob("*.safetensors"))),
    "without tensors": lambda c: next(c.glob("*.safetensors")).unlink(),
    "without manifest": lambda c: (c / "manifest.json").unlink(),
    "half renamed": lambda c: c.rename(c.with_name(f"{c.name}.partial")),
}


def passes(trial: Callable[[], object]) -> bool:
    """Make a trial; whether it did not fail, and if it did, show how."""
    try:
        trial()
    except AssertionError:
        traceback.print_exc(file=sys.stdout)
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for name in ("result.json", "final"):
        path = target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="Of the moments; default: another one each time.")
    parser.add_argument("--ahead", action="store_true", help="Runs whose rollouts run ahead.")
    given = parser.parse_args()
    seed = given.seed
    seed = random.randrange(10**6) if seed is None else seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    if given.ahead:
        with tempfile.TemporaryDirectory() as place:
            ahead(Path(place), rng, 20)
        return 0
    everything = [stage for stage in STAGES if stage not in ("critic", "step")]
    grpo, ppo = [*everything, "rollout"], [*everything, "critic"]
    rng.shuffle(grpo)
    rng.shuffle(ppo)
    with tempfile.TemporaryDirectory() as place:
        folder, hits = Path(place), list[str]()
        whole = folder / "grpo-whole"
        trials: list[tuple[int, Callable[[], object]]] = [
            (len(grpo), lambda: kills("grpo", GRPO, grpo, folder, rng, hits=hits)),
            (len(ppo), lambda: kills("ppo", PPO, ppo, folder, rng, hits=hits)),
            *((1, lambda what=what: damage(what, GRPO, whole, folder)) for what in DAMAGES),  # type: ignore[misc]
            (1, lambda: full(GRPO, whole, folder)),
        ]
        survived = sum(count for count, trial in trials if passes(trial))
    total, missed = sum(count for count, _ in trials), set(STAGES) - {"step"} - set(hits)
    print(f"survived {survived}/{total}: {len(hits)} kills in {len(set(hits))} stages")
    if missed:
        print(f"no kill hit: {', '.join(sorted(missed))}")
    return 0 if survived == total and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
